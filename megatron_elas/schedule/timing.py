"""When every action of a schedule starts and ends: exact, and as fast as plain Python goes.

An action starts when its cell has ended the one before and everything it waits for has arrived; sends run beside the
computing. ``Program`` sorts the actions of a schedule once; ``Program.run`` times them in one sweep, so that the same
schedule can be timed under many durations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_elas.schedule.actions import Action, Kind, Schedule
from megatron_elas.schedule.routes import Flow
from megatron_elas.spec.cost import PassTime, StageTimes
from megatron_elas.spec.errors import BadUsage

AllTimes = Sequence[StageTimes | Sequence[StageTimes]]
"""Of every stage: the times of its cells, or one for all of them."""

Step = tuple[Kind, int]
"""A pass, and the index of its item in a ``Flow``."""

NO_LINK = PassTime(sample_s=0.0)


class Deadlock(BadUsage):
    """The actions wait for each other in a circle, or for one that is nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """How long passes and transfers take."""

    cells: tuple[tuple[StageTimes, ...], ...]
    """``cells[stage][cell]``."""
    links: tuple[PassTime, ...]
    """Of every boundary between stages: from the end of a pass to its result's arrival, in either direction."""

    @staticmethod
    def of(times: AllTimes, items: Sequence[Sequence[object]], links: Sequence[PassTime] = ()) -> Durations:
        """Times per stage or per cell, for stages of as many cells as ``items`` has. Without links none take time."""
        cells = []
        for stage, own in zip(times, items, strict=True):
            cells.append((stage,) * len(own) if isinstance(stage, StageTimes) else tuple(stage))
        return Durations(cells=tuple(cells), links=tuple(links) or (NO_LINK,) * (len(items) - 1))


class Timeline:
    """When everything happens. Times are seconds from the step's begin."""

    def __init__(self, program: Program, starts: list[float], ends: list[float]) -> None:
        self.program = program
        self.starts = starts
        """Of the actions in ``program.actions``."""
        self.ends = ends

    @property
    def step_s(self) -> float:
        """End of the last action."""
        return max(self.ends, default=0.0)

    def cell(self, stage: int, cell: int) -> list[tuple[Action, float, float]]:
        """(action, start, end) of one cell, in order."""
        return [(self.program.actions[i], self.starts[i], self.ends[i]) for i in self.program.of_cell(stage, cell)]

    def cell_end_s(self, stage: int, cell: int) -> float:
        """End of a cell's last action."""
        own = self.program.of_cell(stage, cell)
        return self.ends[own[-1]] if own else 0.0

    def stage_end_s(self, stage: int) -> float:
        """When the stage's gradients are complete."""
        return max(self.cell_end_s(stage, cell) for cell in range(len(self.program.schedule.items[stage])))

    def busy_s(self, stage: int, cell: int) -> float:
        """Seconds that a cell computes."""
        return sum(self.ends[i] - self.starts[i] for i in self.program.of_cell(stage, cell))

    def bubble(self, stage: int, cell: int) -> float:
        """Share of the step in which a cell does not compute."""
        step = self.step_s
        return 1 - self.busy_s(stage, cell) / step if step else 0.0


class Program:
    """The actions of a schedule, sorted so that each comes after all it waits for.

    Actions are numbered cell by cell, in the order of each.
    """

    def __init__(self, schedule: Schedule, flow: Flow | None = None) -> None:
        """Sort.

        Args:
            schedule: To be timed.
            flow: Of its items, when there is one already.

        Raises:
            Deadlock: The orders cannot be carried out even when sends never block.
        """
        flow = flow or Flow(schedule.items)
        self._prepare(flow, [_steps(flow, schedule, cell) for cell in range(flow.num_cells)])
        self._sort()
        self.schedule = schedule

    @classmethod
    def of_steps(cls, flow: Flow, steps: Sequence[Sequence[Step]], sequence: Sequence[int] | None = None) -> Program:
        """From orders whose actions are named by indices of items.

        Args:
            flow: Of the items.
            steps: Of every cell, stage by stage.
            sequence: Cells, each named once for each of its actions, so that every action comes after what it waits
                for; without it, actions are sorted.

        Raises:
            Deadlock: As above.
        """
        program = cls.__new__(cls)
        program._prepare(flow, steps)
        if sequence is None:
            program._sort()
        else:
            at = [own.start for own in program._own]
            order = []
            for cell in sequence:
                order.append(at[cell])
                at[cell] += 1
            program._keep(order)
        return program

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule."""
        return schedule_of(self.flow, self.steps)

    @cached_property
    def actions(self) -> list[Action]:
        """All of them, cell by cell."""
        return [action for cells in self.schedule.orders for order in cells for action in order]

    def of_cell(self, stage: int, cell: int) -> range:
        """Indices of a cell's actions, in order."""
        return self._own[self.flow.first_cell[stage] + cell]

    def _prepare(self, flow: Flow, steps: Sequence[Sequence[Step]]) -> None:
        """List all actions, and what each waits for besides the one before it on its cell."""
        self.flow = flow
        self.steps = steps
        """Of every cell, stage by stage."""
        forward, backward = [-1] * len(flow.items), [-1] * len(flow.items)
        kind_of = flow.kind_of
        keys: dict[tuple[str, int], int] = {}
        key: tuple[str, int]
        classes: list[int] = []
        self._own: list[range] = []
        i = 0
        for order in steps:
            begin = i
            split = {item for kind, item in order if kind == "W"}
            for kind, item in order:
                key = (kind, kind_of[item])
                if kind == "F":
                    forward[item] = i
                elif kind == "B":
                    backward[item] = i
                    if item not in split:
                        key = ("BW", kind_of[item])
                classes.append(keys.setdefault(key, len(keys)))
                i += 1
            self._own.append(range(begin, i))
        self._classes, self._keys = classes, tuple(keys)
        waits: list[list[tuple[int, int]]] = []
        nothing: list[tuple[int, int]] = []
        before, after = flow.before, flow.after
        for order in steps:
            for kind, item in order:
                if kind == "F":
                    waits.append([(forward[source], way) for source, way in before[item]])
                elif kind == "B":
                    waits.append([(backward[source], way) for source, way in after[item]])
                else:
                    waits.append(nothing)
        self._waits = waits
        if min(min(forward, default=0), min(backward, default=0)) < 0:
            self._complain(forward, backward)

    def _complain(self, forward: Sequence[int], backward: Sequence[int]) -> None:
        """Raise Deadlock where something waits for an action that is on no list."""
        flow = self.flow
        for order in self.steps:
            for kind, item in order:
                sources, where = (flow.before[item], forward) if kind == "F" else (flow.after[item], backward)
                for source, _ in () if kind == "W" else sources:
                    if where[source] < 0:
                        raise Deadlock(
                            f"{_action(flow, kind, item)} waits for item {flow.items[source].number} of stage "
                            f"{flow.stage_of_cell[flow.cell_of[source]]}, which is never run there: list it"
                        )

    def _sort(self) -> None:
        """Kahn's algorithm over cells: each is advanced as far as it goes, then those that it set free."""
        order, at = self._advance(self._waits)
        if len(order) < len(self._waits):
            raise Deadlock(self._describe_stop(at))
        self._keep(order)

    def _keep(self, order: Sequence[int]) -> None:
        before = list(range(-1, len(self._waits) - 1))
        for own in self._own:
            if own:
                before[own.start] = -1
        self._sweep = [(i, before[i], self._waits[i]) for i in order]

    def _advance(self, waits: list[list[tuple[int, int]]]) -> tuple[list[int], list[int]]:
        """Actions in an order in which each comes after what it waits for, and where every cell has stopped."""
        missing = [len(own) for own in waits]
        followers: list[list[int]] = [[] for _ in waits]
        for i, own in enumerate(waits):
            for source, _ in own:
                followers[source].append(i)
        cell_of = [cell for cell, own in enumerate(self._own) for _ in own]
        at = [own.start for own in self._own]
        stops = [own.stop for own in self._own]
        todo = list(range(len(at)))
        order: list[int] = []
        while todo:
            cell = todo.pop()
            i, stop = at[cell], stops[cell]
            while i < stop and not missing[i]:
                order.append(i)
                for follower in followers[i]:
                    missing[follower] -= 1
                    other = cell_of[follower]
                    if not missing[follower] and at[other] == follower:
                        todo.append(other)
                i += 1
            at[cell] = i
        return order, at

    def runs_with_receives_ahead(self, ahead: int) -> bool:
        """Whether the orders can be carried out when a send waits until its receive is posted.

        An action's receives are posted when the action ``ahead + 1`` places before it has computed, together with that
        action's sends; the sends have to be taken before the sender goes on.
        """
        waits = [list(own) for own in self._waits]
        first = {i: own.start for own in self._own for i in own}
        last = {own.stop - 1 for own in self._own}
        for receiver, own in enumerate(self._waits):
            posted = receiver - 1 - ahead
            if posted < first[receiver]:
                continue
            for sender, _ in own:
                if sender not in last:
                    waits[sender + 1].append((posted, 0))
        order, _ = self._advance(waits)
        return len(order) == len(self.actions)

    def check_joined(self) -> None:
        """Raise Deadlock unless the orders can be carried out where the first action of a cell waits until all cells of
        its stage have what their first action needs: they gather parameters together.
        """
        waits = list(self._waits)
        for stage, cells in enumerate(self.flow.stages):
            first = self.flow.first_cell[stage]
            begins = [own.start for own in self._own[first : first + len(cells)] if own]
            together = [wait for begin in begins for wait in self._waits[begin]]
            for begin in begins:
                waits[begin] = together
        order, at = self._advance(waits)
        if len(order) < len(waits):
            raise Deadlock(f"where all cells of a stage begin together, {self._describe_stop(at)}")

    def _describe_stop(self, at: list[int]) -> str:
        stuck = []
        for cell, i in enumerate(at):
            if i < self._own[cell].stop:
                stage, place = self.flow.find(cell)
                step = self.steps[cell][i - self._own[cell].start]
                stuck.append(f"cell {place} of stage {stage} at {_action(self.flow, *step)}")
        return f"the orders wait for each other: {', '.join(stuck)}"

    def run(self, durations: Durations, begin_s: Sequence[float] | None = None) -> Timeline:
        """Time every action.

        Args:
            durations: Of passes and transfers.
            begin_s: Of every stage: before which its cells start nothing; without it all start at 0.
        """
        flow = self.flow
        lengths = [_seconds(durations, flow, *key) for key in self._keys]
        delays = [durations.links[boundary].seconds(samples) for boundary, samples in flow.ways]
        length = [lengths[c] for c in self._classes]
        starts = [0.0] * len(length)
        # One more, so that "the action before the first" has an end.
        ends = [0.0] * (len(length) + 1)
        begins = {} if begin_s is None else {own.start: begin_s[flow.find(c)[0]] for c, own in enumerate(self._own)}
        for i, before, waits in self._sweep:
            now = ends[before] if before >= 0 else begins.get(i, 0.0)
            for source, delay in waits:
                arrival = ends[source] + delays[delay]
                if arrival > now:
                    now = arrival
            starts[i] = now
            ends[i] = now + length[i]
        ends.pop()
        return Timeline(self, starts, ends)


def time_schedule(schedule: Schedule, durations: Durations) -> Timeline:
    """When everything happens. Raises Deadlock, or BadUsage when an action does not belong where it is listed."""
    return Program(schedule).run(durations)


def schedule_of(flow: Flow, steps: Sequence[Sequence[Step]]) -> Schedule:
    """The schedule of orders whose actions are named by indices of items."""
    orders: list[list[tuple[Action, ...]]] = [[] for _ in flow.stages]
    for stage, order in zip(flow.stage_of_cell, steps, strict=True):
        orders[stage].append(tuple([Action(stage, kind, flow.items[i].number) for kind, i in order]))
    return Schedule(items=flow.stages, orders=tuple(map(tuple, orders)))


def _action(flow: Flow, kind: Kind, item: int) -> Action:
    return Action(flow.stage_of_cell[flow.cell_of[item]], kind, flow.items[item].number)


def _steps(flow: Flow, schedule: Schedule, cell: int) -> list[Step]:
    """The order of a cell. Raises BadUsage."""
    stage, place = flow.find(cell)
    index = flow.index[stage]
    steps: list[Step] = []
    for action in schedule.orders[stage][place]:
        item = index.get(action.item, -1)
        if item < 0 or flow.cell_of[item] != cell or action.stage != stage:
            raise BadUsage(f"{action} is listed on cell {place} of stage {stage}, which has no such item")
        steps.append((action.kind, item))
    return steps


def _seconds(durations: Durations, flow: Flow, kind: str, item_kind: int) -> float:
    cell, samples = flow.kinds[item_kind]
    stage, place = flow.find(cell)
    times = durations.cells[stage][place]
    if kind == "F":
        return times.forward.seconds(samples)
    if kind == "W":
        return times.weight_gradient.seconds(samples)
    both = times.input_gradient.seconds(samples)
    return both + times.weight_gradient.seconds(samples) if kind == "BW" else both
