"""The audits of a log folder: every worker's lines, put together to one record per step that counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_elas.cli.text import format_ranges
from megatron_elas.spec.audit import (
    AUDIT_FORMAT,
    KINDS,
    STATES,
    TENSORS,
    StepLine,
    unlink,
    unpack,
    unpack_floats,
)
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.layout import Cell, Placement

AUDIT_FILES = "audit.*.jsonl"
_MODULUS = 1 << 64

Place = tuple[str | int, ...]
"""Of samples: (end of the pipeline, sample). Of tensors: (name, lane, number of the range). Of masks: (sample, layer,
site, lane). Of losses: (name,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """Who sat where in an epoch."""

    placement: Placement
    layers: tuple[tuple[int, int], ...]
    """Of every stage."""
    tied: frozenset[str]
    """Parameters that are the copy, on the last stage, of another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedStep:
    """What all workers told of a step."""

    step: int
    epoch: int
    is_end: bool
    """Training has ended before it."""
    seats: Seats
    values: Mapping[str, Mapping[Place, str]]
    """By kind and place."""
    signed: Mapping[str, Mapping[Place, float]]
    """Signed sums of kinds of tensors, likewise, but of other ranges (``signed_size``)."""
    counts: Mapping[tuple[str, int], int]
    """Elements of every parameter and lane."""
    writers: Mapping[tuple[str, Place], tuple[int, ...]]
    """Who told of a kind and place; of tensors ``STATES[0]`` stands for all kinds."""

    def writers_of(self, kind: str, place: Place) -> tuple[int, ...]:
        """The workers that told of it, ascending."""
        is_mapped = kind in self.values and kind in TENSORS
        return self.writers.get((STATES[0] if is_mapped else kind, place), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRun:
    """The newest run of a log folder."""

    folder: Path
    run: str
    every: int
    """Steps from one that is told to the next."""
    kinds: tuple[str, ...]
    """That are told, in the order of ``KINDS``."""
    level: str
    """Of the job's consistency; empty where it was not told."""
    lanes: int
    steps: tuple[int, ...]
    """That are told by all who ran them and count, ascending."""
    unfinished: tuple[int, ...]
    """After those, that not all have told."""
    absent: tuple[int, ...]
    """Workers whose lines these lack."""
    _lines: Mapping[int, Mapping[int, StepLine]]
    """By step and worker."""
    _seats: Mapping[int, Seats]
    """By epoch."""

    @property
    def final(self) -> int | None:
        """The last of ``steps``, if training has ended before it, so that only its state is told."""
        last = self.steps[-1] if self.steps else None
        return last if last is not None and any(line.is_end for line in self._lines[last].values()) else None

    def describe_steps(self) -> str:
        """Which there are."""
        text = describe_span(self.steps, "the final state", self.final) if self.steps else "no whole step"
        if self.unfinished:
            who = f"worker{'s' if len(self.absent) > 1 else ''} {format_ranges(self.absent)}"
            text += f" ({'and ' if self.steps else ''}{format_ranges(self.unfinished)} without a line of {who})"
        return text

    def read_losses(self, step: int) -> dict[str, str]:
        """By name, of one of ``steps``, as written; several in one text where workers tell of different ones."""
        found: dict[str, set[str]] = defaultdict(set)
        for line in self._lines[step].values():
            for name, loss in line.losses.items():
                found[name].add(str(loss))
        return {name: " ".join(sorted(own)) for name, own in found.items()}

    def read_step(self, step: int) -> AuditedStep:
        """One of ``steps``, put together. Raises BadUsage when the parts do not make a whole."""
        lines = self._lines[step]
        epoch = next(iter(lines.values())).epoch
        seats = self._seats[epoch]
        try:
            return _merge(step, epoch, seats, lines, self.kinds)
        except (LookupError, TypeError, ValueError) as error:
            raise BadUsage(
                f"{self.folder}: step {step} of the audit makes no sense ({error}): it was changed"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The line with which a run begins."""

    run: str
    worker: int
    every: int
    kinds: frozenset[str]
    level: str
    began_s: float
    """Since 1970."""

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> _Head:
        """Raises LookupError, TypeError or ValueError."""
        return _Head(
            run=str(table["run"]),
            worker=int(table["worker"]),
            every=int(table.get("every", 1)),
            kinds=frozenset(map(str, table.get("kinds", ()))),
            level=str(table.get("level", "")),
            began_s=float(table.get("began_s", 0.0)),
        )


@dataclass(slots=True)
class _File:
    """The newest run in one worker's file."""

    head: _Head
    seats: dict[int, Seats] = field(default_factory=dict)
    lines: list[StepLine] = field(default_factory=list)


def describe_span(steps: Sequence[int], state: str, final: int | None) -> str:
    """Steps in words, ``state`` being those of the step that training has ended before, if it is among them."""
    whole = [step for step in steps if step != final]
    parts = [f"step{'s' if len(whole) > 1 else ''} {format_ranges(whole)}"] if whole else []
    return " and ".join([*parts, *([state] if len(whole) < len(steps) else [])])


def read_audit(folder: Path) -> AuditedRun:
    """The newest run that was audited into a folder.

    Raises:
        BadUsage: There is no such folder, it holds no audit, or one that was changed or of which files are missing.
    """
    if not folder.is_dir():
        raise BadUsage(f"{folder} is no folder: give the one that elasrun --log-dir named")
    paths = sorted(folder.glob(AUDIT_FILES))
    if not paths:
        raise BadUsage(
            f"{folder} holds no audit ({AUDIT_FILES}): run the job with --elastic-audit N and give the folder that "
            f"elasrun --log-dir named; with several nodes, the files of all of them in one folder"
        )
    files = {read.head.worker: read for path in paths if (read := _read_file(path)) is not None}
    if not files:
        raise BadUsage(f"{folder} holds no line of an audit yet: let the job come to its first step")
    newest = max((file.head for file in files.values()), key=lambda head: head.began_s)
    files = {worker: file for worker, file in files.items() if file.head.run == newest.run}
    seats = _join_seats(folder, files)
    lines, missing = _join_lines(folder, files, seats)
    told = frozenset.intersection(*(file.head.kinds for file in files.values()))
    return AuditedRun(
        folder=folder,
        run=newest.run,
        every=newest.every,
        kinds=tuple(kind for kind in KINDS if kind in told),
        level=newest.level,
        lanes=next(iter(seats.values())).placement.tensor_parallel if seats else 1,
        steps=tuple(sorted(lines)),
        unfinished=tuple(missing),
        absent=tuple(sorted({worker for absent in missing.values() for worker in absent})),
        _lines=lines,
        _seats=seats,
    )


def _read_file(path: Path) -> _File | None:
    """None where the worker was killed before its first line was whole."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadUsage(f"{path} cannot be read ({error.strerror}): name another folder") from error
    *whole, _ = text.split("\n")  # what follows the last end is a line that its writer did not come to finish
    found: _File | None = None
    chain = ""
    for number, line in enumerate(whole, 1):
        try:
            table, chain = unlink(line, chain)
            if "audit" in table:
                if table["audit"] != AUDIT_FORMAT:
                    raise BadUsage(
                        f"{path}, line {number} is of format {table['audit']}, and this release reads {AUDIT_FORMAT}: "
                        f"compare it with the release that wrote it"
                    )
                found = _File(_Head.from_table(table))
            elif found is None:
                raise ValueError("no run begins before it")
            elif "stages" in table:
                found.seats[int(table["epoch"])] = _read_seats(table)
            else:
                found.lines.append(StepLine.from_table(table))
        except BadUsage:
            raise
        except (LookupError, TypeError, ValueError) as error:
            raise BadUsage(
                f"{path}, line {number} is not as a worker wrote it ({error}): take the file as it was written"
            ) from None
    return found


def _read_seats(table: Mapping[str, Any]) -> Seats:
    stages = table["stages"]
    placement = Placement(
        stages=tuple(
            tuple(Cell(row=row, workers=tuple(workers)) for row, workers in enumerate(stage["cells"]))
            for stage in stages
        )
    )
    if not placement.tensor_parallel:
        raise ValueError("a cell without workers")
    return Seats(
        placement=placement,
        layers=tuple((int(stage["layers"][0]), int(stage["layers"][1])) for stage in stages),
        tied=frozenset(table.get("tied", ())),
    )


def _join_seats(folder: Path, files: Mapping[int, _File]) -> dict[int, Seats]:
    joined: dict[int, tuple[int, Seats]] = {}
    tied: dict[int, set[str]] = defaultdict(set)
    for worker, file in files.items():
        for epoch, seats in file.seats.items():
            other, known = joined.setdefault(epoch, (worker, seats))
            if (known.placement, known.layers) != (seats.placement, seats.layers):
                raise BadUsage(
                    f"{folder}: workers {other} and {worker} tell of other seats in epoch {epoch}, so their files are "
                    f"not of one run: keep the files of one run in a folder"
                )
            tied[epoch] |= seats.tied
    return {
        epoch: Seats(placement=seats.placement, layers=seats.layers, tied=frozenset(tied[epoch]))
        for epoch, (_, seats) in joined.items()
    }


def _join_lines(
    folder: Path, files: Mapping[int, _File], seats: Mapping[int, Seats]
) -> tuple[dict[int, dict[int, StepLine]], dict[int, list[int]]]:
    """The lines that count by step and worker; and for the steps at the end that are not whole, who did not tell."""
    by_epoch: dict[int, dict[int, dict[int, StepLine]]] = defaultdict(lambda: defaultdict(dict))
    for worker, file in files.items():
        for line in file.lines:
            by_epoch[line.epoch][line.step][worker] = line
    counting: dict[int, dict[int, StepLine]] = {}
    for _, steps in sorted(by_epoch.items()):
        begin = min(steps)
        counting = {step: lines for step, lines in counting.items() if step < begin} | steps
    missing = {}
    for step, lines in sorted(counting.items()):
        epoch = next(iter(lines.values())).epoch
        absent = sorted(set(seats[epoch].placement.workers) - lines.keys()) if epoch in seats else sorted(lines)
        if absent:
            missing[step] = absent
    whole = {step: lines for step, lines in counting.items() if step not in missing}
    for step, absent in missing.items():
        if any(later > step for later in whole):
            raise BadUsage(
                f"{folder} has no line of {'workers' if len(absent) > 1 else 'worker'} {format_ranges(absent)} of step "
                f"{step}: put the audit files of all nodes into one folder"
            )
    return whole, missing


def _merge(step: int, epoch: int, seats: Seats, lines: Mapping[int, StepLine], told: Sequence[str]) -> AuditedStep:
    values: dict[str, dict[Place, str]] = {}
    writers: dict[tuple[str, Place], tuple[int, ...]] = {}
    is_end = any(line.is_end for line in lines.values())
    for kind in told:
        if kind not in TENSORS and not is_end:
            found: dict[Place, set[str]] = defaultdict(set)
            for worker, line in sorted(lines.items()):
                for place, value in _entries(kind, line):
                    found[place].add(value)
                    writers[kind, place] = (*writers.get((kind, place), ()), worker)
            values[kind] = {place: " ".join(sorted(own)) for place, own in found.items()}
    counts: dict[tuple[str, int], int] = {}
    covered: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for worker, line in sorted(lines.items()):
        lane = seats.placement.seat(worker).lane
        for piece in line.pieces:
            if counts.setdefault((piece.name, lane), piece.count) != piece.count:
                raise ValueError(f"{piece.name} has {piece.count} elements, and {counts[piece.name, lane]}")
            covered[piece.name, lane].append((piece.start, piece.stop))
            if not piece.sums:
                raise ValueError(f"nothing is told of {piece.name}")
            ranges = range(piece.first_range, piece.first_range + len(unpack(next(iter(piece.sums.values())))))
            for number in ranges:
                key = STATES[0], (piece.name, lane, number)
                writers[key] = (*writers.get(key, ()), worker)
    for (name, lane), parts in covered.items():
        ends = [0, *(stop for _, stop in sorted(parts))]
        if [start for start, _ in sorted(parts)] != ends[:-1] or ends[-1] != counts[name, lane]:
            raise ValueError(f"the elements of {name} in lane {lane} are not there once each")
    signed = {}
    for kind in told:
        if kind in (STATES if is_end else TENSORS):
            values[kind], signed[kind] = _add_up(kind, seats, lines)
    return AuditedStep(
        step=step,
        epoch=epoch,
        is_end=is_end,
        seats=seats,
        values=values,
        signed=signed,
        counts=counts,
        writers=writers,
    )


def _entries(kind: str, line: StepLine) -> Iterator[tuple[Place, str]]:
    if kind == "samples":
        for sample, value in line.samples.items():
            for end in line.ends:
                yield (end, int(sample)), value
    elif kind == "masks":
        for place, value in line.masks.items():
            *numbers, lane = place.split("/")
            yield (*map(int, numbers), lane), value
    else:
        for name, loss in line.losses.items():
            yield (name,), loss


def _add_up(kind: str, seats: Seats, lines: Mapping[int, StepLine]) -> tuple[dict[Place, str], dict[Place, float]]:
    """Checksums, and signed sums, of whole ranges."""
    totals: dict[Place, int] = defaultdict(int)
    signed: dict[Place, float] = defaultdict(float)
    for worker, line in sorted(lines.items()):
        lane = seats.placement.seat(worker).lane
        for piece in line.pieces:
            for number, part in enumerate(unpack(piece.sums[kind]), piece.first_range):
                totals[piece.name, lane, number] += part
            for number, share in zip(piece.signed_ranges, unpack_floats(piece.signed[kind]), strict=True):
                signed[piece.name, lane, number] += share
    return {place: f"{total % _MODULUS:016x}" for place, total in totals.items()}, signed
