"""How an agent tells its workers where they are: environment variables, written and read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_elas.spec.errors import BadUsage

TOKEN_VARIABLE = "ELAS_TOKEN"
"""The shared secret of a job; of the launcher too, when the job has several nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """What a worker needs to reach the control plane."""

    controller: str
    """``ws://host:port``."""
    token: str
    worker: int
    domain: str
    """Failure domain."""
    run_dir: str
    """Private folder of the job on this node, removed at its end. Short enough for unix sockets."""
    heartbeat_s: float
    """Interval."""
    progress_s: float
    """Least limit for a main thread without progress."""
    log_dir: str | None = None
    """Folder of the job's logs on this node; None: nothing is written down."""

    def to_environ(self) -> dict[str, str]:
        """The variables."""
        return {
            "ELAS_CONTROLLER": self.controller,
            TOKEN_VARIABLE: self.token,
            "ELAS_WORKER": str(self.worker),
            "ELAS_DOMAIN": self.domain,
            "ELAS_RUN_DIR": self.run_dir,
            "ELAS_HEARTBEAT_S": str(self.heartbeat_s),
            "ELAS_PROGRESS_S": str(self.progress_s),
            "ELAS_LOG_DIR": self.log_dir or "",
        }

    @staticmethod
    def from_environ(environ: Mapping[str, str]) -> WorkerEnvironment:
        """Read them back.

        Raises:
            BadUsage: One is missing, so this process was not started by ``elasrun``.
        """
        try:
            return WorkerEnvironment(
                controller=environ["ELAS_CONTROLLER"],
                token=environ[TOKEN_VARIABLE],
                worker=int(environ["ELAS_WORKER"]),
                domain=environ["ELAS_DOMAIN"],
                run_dir=environ["ELAS_RUN_DIR"],
                heartbeat_s=float(environ["ELAS_HEARTBEAT_S"]),
                progress_s=float(environ["ELAS_PROGRESS_S"]),
                log_dir=environ.get("ELAS_LOG_DIR") or None,
            )
        except KeyError as error:
            raise BadUsage(
                f"environment variable {error.args[0]} is not set: start an elastic job with elasrun, not with "
                f"torchrun or python"
            ) from None
        except ValueError as error:
            raise BadUsage(f"an ELAS_ variable is not a number ({error}): start the job with elasrun") from None
