"""What reaches the controller besides messages: observations of its own process."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_elas.control.messages import (
    AgentHello,
    CopyDiffered,
    Crashed,
    Declined,
    Drained,
    Failed,
    FaultFired,
    Finished,
    Hello,
    Inject,
    LeaveOut,
    Migrated,
    PeerUnreachable,
    Recovered,
    Settled,
    Stalled,
    Terminate,
    Unverified,
    WorkerExited,
    WorkerHung,
)
from megatron_elas.control.states import Search
from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.plan import ElasticPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """The connection to a node's agent ended, or the agent sent nothing for longer than the limit."""

    node: int
    silent_s: float | None = None
    """None when the connection ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSilent:
    """A joined worker sent nothing for longer than the limit."""

    worker: int
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMade:
    """The planner's answer to ``MakePlan``."""

    plan: ElasticPlan
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRefused:
    """The planner found none."""

    epoch: int
    exit_code: ExitCode
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanImproved:
    """The planner's answer to ``ImprovePlan``: a plan to go over to."""

    search: Search
    plan: ElasticPlan
    seconds: float
    in_force_s: float | None = None
    """What a step takes under the plan in force, by the costs that this one's ``predicted_s`` is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKept:
    """The planner's answer to ``ImprovePlan``: the plan in force stays."""

    search: Search
    sentence: str
    """Why."""
    failed: bool = False
    """It is not what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeAsked:
    """Somebody asks for another plan: a tool, or the script that the job was launched with."""

    drained: tuple[int, ...] = ()
    """Workers that are to leave."""
    layers: tuple[int, ...] | None = None
    """Transformer layers that every stage is to have."""
    request: int | None = None
    """Of the tool; None: the next line of the script."""
    wait: bool = True
    """Whether the tool waits until those who are to leave are let go, not only for a plan."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; deadlines are looked at."""

    waiting: frozenset[int] = frozenset()
    """Workers whose last heartbeat said that their main thread waits for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """This is a new process that goes on where an earlier controller was killed."""

    away_s: float
    """Since that one ended; counts against nobody."""


Event = (
    AgentHello
    | AgentLost
    | ChangeAsked
    | Crashed
    | Declined
    | Drained
    | Failed
    | FaultFired
    | Finished
    | Hello
    | Inject
    | PeerUnreachable
    | PlanImproved
    | PlanKept
    | PlanMade
    | PlanRefused
    | Recovered
    | Migrated
    | Restarted
    | Settled
    | Stalled
    | LeaveOut
    | Unverified
    | CopyDiffered
    | Terminate
    | Tick
    | WorkerExited
    | WorkerHung
    | WorkerSilent
)
