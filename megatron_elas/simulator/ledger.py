"""Simulated time, and what it went to."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from megatron_elas.simulator.outcome import CAUSES, Segment


class Ledger:
    """Segments without gaps, from 0 to ``now``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.segments: list[Segment] = []
        self._settled = 0
        """No segment before this index is thrown away any more."""

    def advance(
        self, to_s: float, cause: str, phase: str = "", *, devices: int, cells: int = 0, samples_per_s: float = 0.0
    ) -> None:
        """Time passes, and goes to one thing."""
        if to_s <= self.now:
            return
        segment = Segment(
            begin_s=self.now,
            end_s=to_s,
            cause=cause,
            phase=phase,
            samples_per_s=samples_per_s,
            cells=cells,
            devices=devices,
        )
        last = self.segments[-1] if len(self.segments) > self._settled else None
        if last is not None and replace(last, begin_s=self.now, end_s=to_s) == segment:
            self.segments[-1] = replace(last, end_s=to_s)
        else:
            self.segments.append(segment)
        self.now = to_s

    def throw_away(self, since_s: float) -> float:
        """What was trained since then was for nothing; gives its seconds."""
        seconds = 0.0
        at = len(self.segments) - 1
        while at >= self._settled and self.segments[at].end_s > since_s:
            segment = self.segments[at]
            if segment.cause == "training":
                begin_s = max(segment.begin_s, since_s)
                seconds += segment.end_s - begin_s
                self.segments[at] = replace(segment, begin_s=begin_s, cause="redone")
                if begin_s > segment.begin_s:
                    self.segments.insert(at, replace(segment, end_s=begin_s))
            at -= 1
        return seconds

    def settle(self) -> None:
        """Nothing that was trained so far will be thrown away, or all of it was."""
        self._settled = len(self.segments)

    def seconds_by_cause(self) -> dict[str, float]:
        """Of every cause."""
        seconds = dict.fromkeys(CAUSES, 0.0)
        for segment in self.segments:
            seconds[segment.cause] += segment.seconds
        return seconds

    def seconds_by_phase(self) -> dict[str, float]:
        """Of every phase that has a name."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for segment in self.segments:
            if segment.phase:
                seconds[segment.phase] += segment.seconds
        return dict(seconds)

    def samples(self, cause: str) -> float:
        """That were computed in all segments of a cause."""
        return sum(segment.seconds * segment.samples_per_s for segment in self.segments if segment.cause == cause)

    def device_seconds(self) -> float:
        """Of all devices that work."""
        return sum(segment.seconds * segment.devices for segment in self.segments)
