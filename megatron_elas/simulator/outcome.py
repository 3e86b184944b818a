"""What became of a job in a simulated stretch of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CAUSES = (
    "training",
    "redone",
    "detecting",
    "recovering",
    "restarting",
    "joining",
    "checkpointing",
    "stopped",
)
"""What time goes to.

* ``training``: steps whose samples count in the end;
* ``redone``: steps, and parts of steps, whose result was thrown away by a failure or by going back to a checkpoint;
* ``detecting``: from a failure until it is acted on;
* ``recovering``: of the policy's own recovery, without detecting;
* ``restarting``: of a restart from a checkpoint, without detecting, where a policy cannot go on otherwise;
* ``joining``: to take devices in again, or to leave slow ones out;
* ``checkpointing``: that training waits for a checkpoint;
* ``stopped``: too few devices are left to go on.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of simulated time that went to one thing. Segments follow each other without gaps."""

    begin_s: float
    end_s: float
    cause: str
    """One of CAUSES."""
    phase: str = ""
    """Of a recovery, in the words of its policy."""
    samples_per_s: float = 0.0
    """That are computed, whether they count in the end (training) or not (redone)."""
    cells: int = 0
    """That compute."""
    devices: int = 0
    """That work, whether the job can use them or not."""

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One policy under one trace."""

    policy: str
    job: str
    cluster: str
    trace: str
    seconds: float
    """Simulated."""
    stock_samples_per_s: float
    """Of stock 1F1B on the whole grid that nothing disturbs."""
    own_samples_per_s: float
    """Of this policy on the whole grid that nothing disturbs."""
    trained: float
    """Samples that count in the end."""
    dropped: float
    """Samples of the data that were passed over and never trained."""
    redone: float
    """Samples whose computation was thrown away, of partial steps in proportion; trained again unless dropped."""
    seconds_by_cause: Mapping[str, float]
    """Of every cause in CAUSES; their sum is ``seconds``."""
    seconds_by_phase: Mapping[str, float]
    """Of the recoveries' phases, in the words of their policy."""
    energy_j: float | None
    """Of all devices that work, waiting ones included; None where their power is not known."""
    failures: int
    """Events of the trace that took devices the job computed on."""
    recoveries: int
    """Times that training stood still because of failures; failures while it does are part of the same one."""
    mean_recovery_s: float
    """From a failure to the next useful work, the work that is done again included; 0 without recoveries."""
    worst_recovery_s: float
    restarts: int
    """Times that a checkpoint was read."""
    joins: int
    """Times that devices were taken in again, or slow ones left out."""
    segments: tuple[Segment, ...] = ()

    @property
    def goodput(self) -> float:
        """Samples that count, relative to those of stock 1F1B on the whole grid that nothing disturbs."""
        return self.trained / (self.seconds * self.stock_samples_per_s)

    @property
    def own_goodput(self) -> float:
        """Samples that count, relative to those of the same policy that nothing disturbs."""
        return self.trained / (self.seconds * self.own_samples_per_s)

    def share(self, cause: str) -> float:
        """Of the time that went to a cause."""
        return self.seconds_by_cause[cause] / self.seconds
