"""One worker's step pass by pass, as it was measured: what a Gantt is drawn of.

A job writes one JSON object per line, ``json.dumps(as_table(trace))``; ``read_step_traces`` reads such a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from megatron_elas.spec.device import require_not_negative, require_positive
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.step_report import PASSES
from megatron_elas.spec.tables import read_lines

KINDS = (*PASSES, "wait", "exchange", "optimizer")
"""What a worker does: passes; waiting for the input of a pass; gradients and parameters between replicas, and copies of
them for backups; the optimizer's own computing."""
MOST_SPANS = 1024
"""Of a trace: about 100 kB as JSON."""
MOST_CELLS = 64
"""Of a job that trace their steps: their first lanes do."""
MOST_ASKED = 1000
"""Steps that can be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that a worker did."""

    kind: str
    """One of KINDS."""
    start_s: float
    """From the step's begin."""
    end_s: float
    item: int | None = None
    """Number of a pass's item; None for what is no pass."""
    samples: int = 0
    """Of that item."""
    apart_s: float = 0.0
    """Seconds of a pass in which it waited for parameters that were being gathered."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadUsage(f"kind is {self.kind!r}: write one of {', '.join(KINDS)}")
        if not 0 <= self.start_s <= self.end_s < math.inf:
            raise BadUsage(f"{self.kind} from {self.start_s} to {self.end_s} s: write times from 0 up, in order")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One worker's finished step. Spans follow one another: a worker does one thing at a time."""

    worker: int
    epoch: int
    step: int
    stage: int
    cell: int
    first_layer: int
    """Of the worker's stage."""
    last_layer: int
    """One past the last of the worker's stage."""
    began_s: float
    """When the step began, as ``time.time()`` on the worker's host. Workers of one host share that clock; clocks of
    hosts are as near to one another as the cluster keeps them (with NTP, about a millisecond)."""
    step_s: float
    """As in the step's ``StepReport``."""
    spans: tuple[Span, ...] = ()
    left_out: int = 0
    """Spans beyond MOST_SPANS."""
    first: bool = False
    """The first step that the worker ran under its plan: it holds what a recovery or a migration left to do."""

    def __post_init__(self) -> None:
        require_positive(self, "step_s")
        require_not_negative(self, "worker", "epoch", "step", "stage", "cell", "first_layer", "left_out")
        if self.last_layer < self.first_layer:
            raise BadUsage(f"layers [{self.first_layer}, {self.last_layer}) end before they begin")
        if len(self.spans) > MOST_SPANS:
            raise BadUsage(f"a trace of {len(self.spans)} spans: leave out those beyond {MOST_SPANS}")

    @property
    def end_s(self) -> float:
        """Of the step or its last span, from the step's begin."""
        return max(self.step_s, max((span.end_s for span in self.spans), default=0.0))


def traces_steps(plan: ElasticPlan, worker: int) -> bool:
    """Whether the seated worker is one of those that tell traces: of at most MOST_CELLS cells, of each stage as many,
    evenly, though of every stage one at least.
    """
    seat = plan.placement.seat(worker)
    cells = len(plan.placement.stages[seat.stage])
    chosen = max(1, min(cells, MOST_CELLS // plan.placement.num_stages))
    return seat.lane == 0 and seat.cell * chosen % cells < chosen


def parse_steps(text: str) -> frozenset[int]:
    """Steps that are written as ``5,20-22``. Raises BadUsage."""
    steps: set[int] = set()
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise BadUsage(f"steps are {text!r}: write numbers from 0 up and ranges, such as 5,20-22")
        span = range(int(first), int(last or first) + 1)
        if len(steps) + span.stop - span.start > MOST_ASKED:
            raise BadUsage(f"steps are {text!r}, more than {MOST_ASKED}: ask for fewer")
        steps.update(span)
    return frozenset(steps)


def read_step_traces(path: Path) -> tuple[StepTrace, ...]:
    """The traces of a file with one JSON object per line, see ``tables.read_lines``. Raises BadUsage."""
    return read_lines(StepTrace, path)
