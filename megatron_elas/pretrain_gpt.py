"""Entry for GPT pretraining: ``python -m megatron_elas.pretrain_gpt``, started once per worker by a launcher.

Takes all arguments of Megatron 0.19's pretrain_gpt.py, the group "elastic", and ``@file`` words.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

# What is imported here is imported before the Python's version is checked, so any Python must be able to read it.
from megatron_elas.prerequisites import check_prerequisites
from megatron_elas.refusal import Refusal, refuse
from megatron_elas.spec.errors import ElasticError, ExitCode

if TYPE_CHECKING:
    from megatron_elas.platform.detect import PlatformName


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and give the process's exit status (spec.errors.ExitCode, or Megatron's own).

    Our own errors are told in one sentence on the first rank's standard error; others end in a traceback.

    Args:
        argv: Without the program's name; ``sys.argv`` when None.
    """
    started_s = time.time()
    argv = sys.argv[1:] if argv is None else argv
    try:
        with errors_told():
            _quiet_other_ranks()
            platform = preload()
            from megatron_elas.host import gpt_run

            gpt_run.run(argv, platform, load_worker=load_worker, started_s=started_s)
    except SystemExit as stop:
        return _status(stop)
    return int(ExitCode.FINISHED)


@contextlib.contextmanager
def errors_told() -> Iterator[None]:
    """Inside, an error of our own ends the process with one sentence and its exit code, by SystemExit."""
    try:
        yield
    except ElasticError as error:
        if error.exit_code is ExitCode.CRASHED:
            raise
        _tell_once(error)
        raise SystemExit(int(error.exit_code)) from error


def preload() -> PlatformName:
    """Import torch and Megatron and prepare the platform, so that workers can be forked from this process.

    Starts no thread and makes no process group. A second call does nothing.

    Raises:
        WrongVersion: A package is missing or outside its range.
    """
    check_prerequisites(("torch", "megatron", "numpy"))
    from megatron_elas.platform.detect import detect

    platform = detect()
    if platform == "cpu":
        from megatron_elas.host.cpu_noise import silence_cpu_noise
        from megatron_elas.platform import cpu

        silence_cpu_noise()
        cpu.install()
    from megatron_elas.host.versions import require_versions

    require_versions()
    from megatron_elas.host import gpt_run

    gpt_run.attach(platform)
    return platform


def _tell_once(error: ElasticError) -> None:
    """Say what is wrong with the job, once; all workers find the same.

    Under elasrun the first worker of a node to come here speaks. Under other launchers the first rank does.
    """

    def say() -> None:
        print(f"megatron_elas: {error}", file=sys.stderr, flush=True)

    run_dir, rank = os.environ.get("ELAS_RUN_DIR"), int(os.environ.get("RANK", "0"))
    if run_dir is not None:
        refuse(run_dir, Refusal(worker=rank, exit_code=int(error.exit_code), sentence=str(error)), say)
    elif rank == 0:
        say()


def load_worker() -> Any:
    """The elastic worker; its module is only imported for elastic runs."""
    from megatron_elas import worker

    return worker


def _quiet_other_ranks() -> None:
    """Let only the first rank show warnings, as Megatron's own entry does."""
    if os.environ.get("RANK", "0") != "0":
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category)


def _status(stop: SystemExit) -> int:
    """The number that a SystemExit stands for. A text is printed, as Python would."""
    if stop.code is None:
        return int(ExitCode.FINISHED)
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr, flush=True)
    return int(ExitCode.CRASHED)


if __name__ == "__main__":
    sys.exit(main())
