"""What the controller wants done. Values; the service carries them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_elas.control.messages import ToAgent, ToWorker
from megatron_elas.control.states import Search
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Send a message to each of these workers."""

    workers: tuple[int, ...]
    message: ToWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class TellAgent:
    """Send a message to a node's agent."""

    node: int
    message: ToAgent


@dataclass(frozen=True, slots=True)
class WelcomeAgents:
    """All nodes are there: have every agent start its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePlan:
    """Ask the planner, without delaying anything else; answered by ``PlanMade`` or ``PlanRefused``."""

    job: JobSpec
    epoch: int
    old: ElasticPlan | None
    """None asks for the initial plan."""
    lost: tuple[int, ...]
    """Relative to ``old``."""
    domains: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImprovePlan:
    """Ask the planner for a plan to go over to while nobody is lost; answered by ``PlanImproved`` or ``PlanKept``."""

    job: JobSpec
    plan: ElasticPlan
    """In force."""
    search: Search
    domains: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowBlock:
    """Print a block; the same goes to ``events.jsonl`` as numbers and names."""

    epoch: int
    text: str
    phases_ms: Mapping[str, float]
    """Columns of the phase table, and ``total``, their sum."""
    facts: Mapping[str, object]
    """The rest of the block, as values that JSON can hold."""


class ShowMigration(ShowBlock):
    """That of a migration."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer a tool that waits; nothing where it does not any more."""

    request: int
    ok: bool
    text: str


class ShowRecovery(ShowBlock):
    """That of a recovery."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLoss:
    """For ``events.jsonl``: a worker is lost. Its recovery is another line there, later, if it comes to that."""

    epoch: int
    """That ends with it."""
    worker: int
    facts: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line for the log."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob:
    """Nothing is left to do: end with this code, saying why unless the sentence is empty."""

    exit_code: int
    sentence: str
    worker: int | None = None
    """Whose output has more; None where no worker's has."""
    steps: int = 0
    """That training has done, checkpoints that it went on from included; 0 where workers do not tell."""
    lost: int = 0
    """Workers."""
    drained: int = 0
    unstruck: tuple[str, ...] = ()
    """Scripted faults that have not struck."""


Command = (
    Tell
    | TellAgent
    | WelcomeAgents
    | MakePlan
    | ImprovePlan
    | ShowRecovery
    | ShowMigration
    | LogLoss
    | Reply
    | Note
    | EndJob
)
