"""1F1B of any items at any number of cells, quickly: all cells of a stage that have as many items run side by side.

As exact as ``one_f_one_b_program`` and ``Program.run``: every pass of every cell is timed, and a pass waits for just
what it waits for there. But passes are gone through in lines, the k-th pass of all such cells at once. A line is run
when everything is there that any of its passes waits for. So it may be that lines wait for each other in a circle
though passes do not; then nothing is said. Stages with the same items, the same object, are looked at once.

As in the running job, the first pass of every cell is gone through only once all cells of the stage have their first
input (see ``schedule.warmups``). It costs no time here: an order that is gone through is one for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron_elas.schedule.routes import Range, ranges_of, sweep
from megatron_elas.spec.cost import PassTime, StageTimes
from megatron_elas.spec.items import Item, StageItems


class Line(NamedTuple):
    """Passes that are run at once: of all cells of a stage with as many items, those at one place of their order."""

    start: int
    stop: int
    """Of the stage's items, numbered line by line."""
    samples: Sequence[int]
    """Of every item; one number: of all of them."""


class Crossing(NamedTuple):
    """What a line receives: from items of another stage, so many samples of each."""

    lines: frozenset[int]
    """Of the other stage, that must have been run."""
    sources: tuple[tuple[Sequence[int], Sequence[int]], ...]
    """(item of the other stage, samples) for every item of the line: the first one of each, the second one of each, and
    so on; what has fewer repeats its first one. One number of samples: of all of them."""


class _Stage:
    """A stage's items, numbered line by line."""

    def __init__(self, items: StageItems) -> None:
        self.items = items
        groups: dict[int, list[Sequence[Item]]] = {}
        for own in items:
            groups.setdefault(len(own), []).append(own)
        self.counts = list(groups)
        """Of every group of cells: items of each cell."""
        self.widths = list(map(len, groups.values()))
        self.first_line: list[int] = []
        """Of every group; the others of the group follow."""
        self.lines: list[Line] = []
        flat: list[Item] = []
        self.line_of: list[int] = []
        """Of every item."""
        for count, cells in groups.items():
            self.first_line.append(len(self.lines))
            for line in zip(*cells, strict=True):
                start = len(flat)
                flat += line
                samples = [item.samples for item in line]
                self.line_of += [len(self.lines)] * len(line)
                self.lines.append(Line(start, len(flat), _short(samples)))
            assert len(self.lines) - self.first_line[-1] == count
        self.ranges: list[Range] = ranges_of(flat)


def _short(values: list[int]) -> Sequence[int]:
    """One of them where all are the same."""
    return values[:1] if values.count(values[0]) == len(values) else values


Known = dict[int, _Stage]
"""Stages that were looked at, by the identities of their items, which live as long."""


class Lockstep:
    """Items of all stages, ready for 1F1B."""

    def __init__(self, items: Sequence[StageItems], known: Known | None = None) -> None:
        """Look at them.

        Args:
            items: Of every stage and cell.
            known: What was looked at before, and is added to.

        Raises:
            BadUsage: A sample is on one stage only, or twice on one.
        """
        known = {} if known is None else known
        for cells in items:
            if id(cells) not in known:
                known[id(cells)] = _Stage(cells)
        self._stages = [known[id(cells)] for cells in items]
        pairs: dict[tuple[int, int], list[Crossing]] = {}
        """By a stage and another one beside it, before or after it: what its lines receive from that one."""
        self._received: list[list[Crossing] | None] = [None]
        """Of every stage: what each of its lines receives from the stage before; None: what that one's has itself."""
        self._returned: list[list[Crossing] | None] = []
        """The same of the stage after it."""
        for earlier, later in pairwise(self._stages):
            key = id(later), id(earlier)
            if key not in pairs and earlier is not later:
                pairs[key], pairs[id(earlier), id(later)] = _cross(earlier, later)
            self._received.append(pairs.get(key))
            self._returned.append(pairs.get((id(earlier), id(later))))
        self._returned.append(None)

    def run(
        self, warmups: Sequence[int], times: Sequence[StageTimes] = (), links: Sequence[PassTime] = ()
    ) -> float | None:
        """Seconds from the first forward pass to the last gradient; None: lines, maybe passes, wait in a circle.

        Args:
            warmups: Forward passes of every stage before forward and backward take turns.
            times: Of every stage; empty: nothing takes time.
            links: Between stages; empty: nothing takes time.
        """
        run = _Run(self._stages, self._received, self._returned, warmups, times, links)
        return run.step_s if run.go() else None


def _cross(earlier: _Stage, later: _Stage) -> tuple[list[Crossing], list[Crossing]]:
    """What the later one's lines receive, and what the earlier one's do."""
    pieces = sweep(earlier.ranges, later.ranges)
    counts = [stop - start for start, stop, _, _ in pieces]
    senders, receivers = [i for _, _, i, _ in pieces], [j for _, _, _, j in pieces]
    return _crossings(later, earlier, receivers, senders, counts), _crossings(
        earlier, later, senders, receivers, counts
    )


def _crossings(
    stage: _Stage, other: _Stage, items: Sequence[int], sources: Sequence[int], counts: Sequence[int]
) -> list[Crossing]:
    """Of every line. Of every piece that crosses: the item, the one of the other stage, and samples."""
    first, samples = [-1] * len(stage.line_of), [0] * len(stage.line_of)
    # Few items, if any, have more than one source. Of every line: item -> its other sources.
    more: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for item, source, count in zip(items, sources, counts, strict=True):
        if first[item] < 0:
            first[item], samples[item] = source, count
        else:
            more.setdefault(stage.line_of[item], {}).setdefault(item, []).append((source, count))
    found = []
    line_of = other.line_of.__getitem__
    for number, (start, stop, _) in enumerate(stage.lines):
        which, parts = first[start:stop], samples[start:stop]
        layers = [(which, parts)]
        if number in more:
            layers += _more_layers(which, parts, start, more[number])
        lines = frozenset([line for which, _ in layers for line in map(line_of, which)])
        found.append(Crossing(lines, tuple([(which, _short(parts)) for which, parts in layers])))
    return found


def _more_layers(
    first: list[int], samples: list[int], start: int, others: Mapping[int, Sequence[tuple[int, int]]]
) -> Iterator[tuple[list[int], list[int]]]:
    """Second sources of a line that begins with item ``start``, then third ones, and so on."""
    for layer in range(max(map(len, others.values()))):
        which, parts = first[:], samples[:]
        for item, own in others.items():
            if layer < len(own):
                which[item - start], parts[item - start] = own[layer]
        yield which, parts


class _Run:
    """One way through."""

    def __init__(
        self,
        stages: Sequence[_Stage],
        received: Sequence[list[Crossing] | None],
        returned: Sequence[list[Crossing] | None],
        warmups: Sequence[int],
        times: Sequence[StageTimes],
        links: Sequence[PassTime],
    ) -> None:
        self.stages, self.crossings = stages, (received, returned)
        self.warmups = warmups
        self.lengths: list[list[_Seconds]] = []
        """Of passes, forward and backward, of every stage; empty: nothing takes time."""
        if times:
            self.lengths = [
                [_Seconds(own.forward) for own in times],
                [_Seconds(own.input_gradient, own.weight_gradient) for own in times],
            ]
        self.sent = [_Seconds(link) for link in links or (_NO_LINK,) * (len(stages) - 1)]
        """From the end of a pass to its result's arrival, over every boundary."""
        self.groups = [(stage, group) for stage, own in enumerate(stages) for group in range(len(own.counts))]
        self.done = [[[False] * len(own.lines) for own in stages] for _ in range(2)]
        """Forward and backward, of every stage and line."""
        self.ends = [[[0.0] * len(own.line_of) for own in stages] if times else [] for _ in range(2)]
        """The same of every stage and item."""
        self.now = [[0.0] * stages[stage].widths[group] for stage, group in self.groups]
        self.at = [(0, 0)] * len(self.groups)
        """Forward and backward passes of every group."""
        self.waits: dict[tuple[int, int, int], list[int]] = {}
        """Groups that wait for a line: by direction, stage and line."""
        self.joined = [False] * len(stages)
        self.todo = list(range(len(self.groups) - 1, -1, -1))

    @property
    def step_s(self) -> float:
        """When the last cell is done."""
        return max(map(max, self.now))

    def go(self) -> bool:
        """Whether everything was run."""
        while self.todo:
            self._advance(self.todo.pop())
        return all(
            back == self.stages[stage].counts[group]
            for (stage, group), (_, back) in zip(self.groups, self.at, strict=True)
        )

    def _advance(self, which: int) -> None:
        """Run lines of a group until one has to wait."""
        stage, group = self.groups[which]
        own = self.stages[stage]
        count, first, ahead = own.counts[group], own.first_line[group], self.warmups[stage]
        ran, back = self.at[which]
        while back < count:
            way = 0 if ran < count and ran - back <= ahead else 1
            line = first + (back if way else ran)
            if not (self._is_there(which, way, stage, line) if way or ran else self._joins(which, stage)):
                break
            if self.lengths:
                self._time(which, way, stage, line)
            self.done[way][stage][line] = True
            if self.waits:
                self.todo += self.waits.pop((way, stage, line), ())
            if way:
                back += 1
            else:
                ran += 1
        self.at[which] = ran, back

    def _joins(self, which: int, stage: int) -> bool:
        """Whether all cells of the stage have their first input."""
        if not self.joined[stage]:
            self.joined[stage] = all(self._is_there(which, 0, stage, line) for line in self.stages[stage].first_line)
        return self.joined[stage]

    def _is_there(self, which: int, way: int, stage: int, line: int) -> bool:
        """Whether a line has its inputs; the group is woken later when not."""
        other = stage + 1 if way else stage - 1
        if not 0 <= other < len(self.stages):
            return True
        crossings, done = self.crossings[way][stage], self.done[way][other]
        for source in (line,) if crossings is None else crossings[line].lines:
            if not done[source]:
                self.waits.setdefault((way, other, source), []).append(which)
                return False
        return True

    def _time(self, which: int, way: int, stage: int, line: int) -> None:
        start, stop, samples = self.stages[stage].lines[line]
        now, lengths = self.now[which], self.lengths[way][stage]
        other = stage + 1 if way else stage - 1
        sources: Sequence[tuple[list[float], Sequence[int]]] = ()
        if 0 <= other < len(self.stages):
            ends, sent = self.ends[way][other], self.sent[stage if way else other]
            crossings = self.crossings[way][stage]
            if crossings is None:
                sources = ((ends[start:stop], samples),)
            else:
                sources = [([ends[item] for item in items], parts) for items, parts in crossings[line].sources]
        if len(sources) == len(samples) == 1 and len(sources[0][1]) == 1:  # Nearly always.
            (arrived, parts), length = sources[0], lengths[samples[0]]
            delay = sent[parts[0]]
            now = [
                (own if own > (there := each + delay) else there) + length
                for own, each in zip(now, arrived, strict=True)
            ]
        else:
            for arrived, parts in sources:
                now = _later(now, arrived, parts, sent)
            now = _longer(now, samples, lengths)
        self.now[which] = self.ends[way][stage][start:stop] = now


_NO_LINK = PassTime(sample_s=0.0)


class _Seconds(dict[int, float]):
    """Of so many samples, one time after the other; looked up again and again."""

    def __init__(self, *times: PassTime) -> None:
        super().__init__()
        self._times = times

    def __missing__(self, samples: int) -> float:
        seconds = self[samples] = sum([time.seconds(samples) for time in self._times])
        return seconds


def _later(now: list[float], sent: list[float], samples: Sequence[int], delays: _Seconds) -> list[float]:
    """When passes can start whose cells are free now, and whose inputs arrive so much after they were sent."""
    waits = [delays[samples[0]]] * len(now) if len(samples) == 1 else [delays[count] for count in samples]
    return [own if own > (there := each + delay) else there for own, each, delay in zip(now, sent, waits, strict=True)]


def _longer(now: list[float], samples: Sequence[int], lengths: _Seconds) -> list[float]:
    """When passes that start now end."""
    if len(samples) == 1:
        length = lengths[samples[0]]
        return [each + length for each in now]
    return [each + lengths[count] for each, count in zip(now, samples, strict=True)]
