"""One worker's emulated device: takes the time of passes through a model's units, of its transfers and its update."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_elas.platform.emulated.board import Board
from megatron_elas.platform.emulated.errors import ErrorLog
from megatron_elas.platform.emulated.timeline import Timeline
from megatron_elas.spec.cost import UnitCost, Work


class EmulatedDevice:
    """Used by the thread that computes. All times given are those of the real device; it takes them at ``speed``."""

    def __init__(
        self, worker: int, speed: float = 1.0, board: Board | None = None, timeline: Timeline | None = None
    ) -> None:
        """An idle device.

        Args:
            worker: Its own id.
            speed: How much faster than the real device it runs.
            board: Of all devices of the machine. Without one its clock is nominal, and it does not know when others
                have sent or computed something.
            timeline: Its own; a new one when None.
        """
        self._worker = worker
        self._speed = speed
        self._board = board
        self.timeline = timeline or Timeline()
        self.errors = ErrorLog()
        self._asked_s = self._pushed_s = 0.0

    @property
    def clock(self) -> float:
        """Relative to the nominal one."""
        return 1.0 if self._board is None else self._board.clock(self._worker, self.timeline.now())

    def run_pass(self, name: str, kind: str, units: Sequence[UnitCost], samples: float) -> None:
        """A pass through these units takes its time; its real work is done.

        Args:
            name: Of the units, for the statistics.
            kind: One of ``spec.step_report.PASSES``.
            units: That it runs through.
            samples: In it.
        """
        clock = self.clock
        seconds = sum(work.seconds(samples, clock) for unit in units for work in _works(unit, kind))
        self.run(f"{name} {kind}", seconds)
        if self._board is not None and kind != "forward":
            self._board.computed(self._worker, self.timeline.end_s)

    def begin_update(self, others: Collection[int]) -> float:
        """What follows the passes of a step begins, when all these workers have computed theirs. Gives the time."""
        if self._board is None:
            self.timeline.start_anew()
        else:
            self.timeline.wait_for(max(map(self._board.computed_s, others)))
        return self.timeline.end_s

    def run(self, name: str, seconds: float) -> None:
        """Something else takes its time; its real work is done."""
        ran = self.timeline.run(seconds / self._speed)
        self.errors.add(name, ran)
        self._asked_s += ran.asked_s

    def idle_until(self, begin_s: float, seconds: float) -> None:
        """Nothing can be done before so long after the time that ``begin_update`` gave."""
        self.timeline.wait_for(begin_s + seconds / self._speed)

    def sends(self, tag: int) -> None:
        """What was computed last is about to be sent as a message with this tag."""
        if self._board is not None:
            self._board.sent(self._worker, tag, self.timeline.end_s)

    def receives(self, sender: int, tag: int, seconds: float) -> None:
        """A message is here, which the link takes so long for: wait until it would have come."""
        if self._board is not None:
            self.timeline.wait_for(self._board.sent_s(sender, tag) + seconds / self._speed)

    def begin_pass(self) -> None:
        """Whatever the next operation needs is there since now."""
        self.timeline.start_anew()

    def overrun(self) -> tuple[float, float]:
        """Since the last call: seconds that operations were asked to take, and that the process was too slow by."""
        asked_s, pushed_s = self._asked_s, self.timeline.pushed_s - self._pushed_s
        self._asked_s, self._pushed_s = 0.0, self.timeline.pushed_s
        return asked_s, pushed_s


def _works(unit: UnitCost, kind: str) -> tuple[Work, ...]:
    if kind == "forward":
        return (unit.forward,)
    if kind == "input_gradient":
        return (unit.input_gradient,)
    if kind == "weight_gradient":
        return (unit.weight_gradient,)
    return unit.input_gradient, unit.weight_gradient
