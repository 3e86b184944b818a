"""Carries the six checks out: one exchange of rows, and two more to name what does not fit."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_elas.runtime.verification.checks import Check, Failure, cover, find_failures
from megatron_elas.runtime.verification.checksum import MODULUS, key_of, to_row
from megatron_elas.runtime.verification.inspection import Inspection, find_piece, flat_sums, range_sums
from megatron_elas.runtime.verification.rows import Row, Sums, total
from megatron_elas.spec.errors import VerificationFailed
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.shards import Piece, ShardLayout

Gather = Callable[[Sequence[int]], list[list[int]]]
"""Brings everybody's row to everybody, by ascending worker id."""

_NAME_INTS = 32
"""A name takes this many 64-bit integers in an exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy of another worker's shard."""

    layout: ShardLayout
    flat: torch.Tensor
    """fp32, 3 P + 1 elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one worker brings to the checks."""

    worker: int
    version: int
    """The step that is run next."""
    inspection: Inspection
    expected: Mapping[str, int]
    """Elements of every parameter that the worker's stage holds under the plan, in the order of the model."""
    sent: Sums | None = None
    """Checksums that came with the shard, if it came from elsewhere."""
    source: torch.Tensor | None = None
    """The flat shard that the state in use was filled from, if it was filled."""
    mirrors: Mapping[int, Copy] = field(default_factory=dict)
    """By owner, complete with the version."""
    borrowed: tuple[tuple[int, int], ...] = ()
    """Pairs (lost owner, backup) whose copies the state was restored from, if every such owner has another backup that
    lives; the same on all workers."""

    def row(self, plan: ElasticPlan) -> Row:
        """For the exchange."""
        seen = self.inspection
        used = seen.slot_sums
        sent = self.sent or (used if self.source is None else flat_sums(self.source))
        whole = [Piece(name=name, start=0, stop=count) for name, count in self.expected.items()]
        copies = [self.mirrors[ward] for ward in plan.wards_of(self.worker) if ward in self.mirrors]
        counters = seen.counters
        return Row(
            version=self.version,
            consumed_samples=counters.consumed_samples,
            schedule_samples=counters.schedule_samples,
            loss_scale=counters.loss_scale,
            streams=counters.streams,
            fewest_updates=counters.optimizer_steps[0],
            most_updates=counters.optimizer_steps[1],
            num_parameters=len(seen.parameters),
            parameters=_sum_names(seen.parameters),
            num_expected=len(self.expected),
            expected_parameters=_sum_names(self.expected),
            num_elements=sum(self.expected.values()),
            weights=total(seen.weights),
            owned=sum(state.piece.numel for state in seen.pieces),
            covered=total(cover([state.piece for state in seen.pieces])),
            expected_cover=total(cover(whole)),
            uncast=sum(state.uncast for state in seen.pieces),
            used=used,
            sent=sent,
            wards=tuple(flat_sums(copy.flat) for copy in copies),
            ward_updates=tuple(int(copy.flat[-1]) for copy in copies),
        )


def verify(
    plan: ElasticPlan,
    evidence: Evidence,
    gather: Gather,
    drop: Callable[[int], None],
    checks: Collection[Check] = tuple(Check),
    row: Row | None = None,
) -> None:
    """Compare all that must fit together. Called by every seated worker; also a barrier.

    Args:
        plan: The plan that begins.
        evidence: What this worker brings.
        gather: Exchanges rows.
        drop: Called with the owner of a copy kept here that is bad, or was used in vain while there is another one.
            Before anybody can have told the controller, who may end the epoch at once.
        checks: Which of the six; the same on all workers.
        row: That of the evidence, where it was made before.

    Raises:
        VerificationFailed: Something does not fit; on all workers, with the same sentence.
    """
    mine = evidence.row(plan) if row is None else row
    rows = {
        worker: Row.from_ints(plan, worker, numbers)
        for worker, numbers in zip(plan.placement.workers, gather(mine.to_ints(plan)), strict=True)
    }
    failures = [failure for failure in find_failures(plan, rows) if failure.check in checks]
    if not failures:
        return
    first = failures[0]
    mirrors = first.mirrors if len(failures) == 1 else ()
    borrowed = () if mirrors else evidence.borrowed
    for owner, backup in (*mirrors, *borrowed):
        if backup == evidence.worker:
            drop(owner)
    name = _find_name(plan, first, evidence, rows, gather)
    more = "".join(f"; also, {failure.check}: {failure.sentence}" for failure in failures[1:])
    raise VerificationFailed(
        f"epoch {plan.epoch}: the check of {first.check} failed before step {evidence.version}: {first.sentence}"
        f"{f', first in {name}' if name else ''}{more}",
        check=str(first.check),
        step=evidence.version,
        mirrors=mirrors,
        another_source=bool(borrowed),
    )


def _sum_names(sizes: Mapping[str, int]) -> int:
    return sum(key_of("parameter", name, count) for name, count in sizes.items()) % MODULUS


def _find_name(plan: ElasticPlan, failure: Failure, evidence: Evidence, rows: Mapping[int, Row], gather: Gather) -> str:
    """What does not fit is called so. Every seated worker calls it."""
    length = max(row.num_expected for row in rows.values())
    vectors: dict[int, list[int]] = {}
    if failure.check in (Check.REPLICAS, Check.OWNERS, Check.CONTENTS):
        mine = _by_name(failure, evidence)[:length]
        gathered = gather([to_row(number) for number in mine] + [0] * (length - len(mine)))
        vectors = dict(zip(plan.placement.workers, gathered, strict=True))
    speaker = failure.mirrors[0][1] if failure.mirrors else failure.workers[0]
    name = _own_finding(failure, evidence, vectors) if evidence.worker == speaker else ""
    texts = gather(_pack(name))
    return _unpack(texts[plan.placement.workers.index(speaker)])


def _by_name(failure: Failure, evidence: Evidence) -> list[int]:
    """A number per parameter, or per piece, of which one differs."""
    seen = evidence.inspection
    match failure.check:
        case Check.REPLICAS:
            return [seen.weights.get(name, 0) for name in evidence.expected]
        case Check.OWNERS:
            covered = cover([state.piece for state in seen.pieces])
            return [covered.get(name, 0) for name in evidence.expected]
        case _:
            return [sum(state.sums) for state in seen.pieces]


def _own_finding(failure: Failure, evidence: Evidence, vectors: Mapping[int, Sequence[int]]) -> str:
    """The name that this worker can tell; empty when it finds none."""
    seen, expected = evidence.inspection, evidence.expected
    match failure.check:
        case Check.PARAMETERS:
            names = [name for name, count in expected.items() if seen.parameters.get(name) != count]
            names += [name for name in seen.parameters if name not in expected]
        case Check.REPLICAS:
            columns = zip(expected, zip(*(vectors[worker] for worker in failure.workers), strict=True), strict=False)
            names = [name for name, numbers in columns if len(set(numbers)) > 1]
        case Check.OWNERS:
            columns = zip(expected, zip(*(vectors[worker] for worker in failure.workers), strict=True), strict=False)
            whole = cover([Piece(name=name, start=0, stop=count) for name, count in expected.items()])
            names = [name for name, numbers in columns if (sum(numbers) - whole[name]) % MODULUS]
        case Check.CONTENTS if failure.mirrors:
            owner = failure.mirrors[0][0]
            names = _differing_pieces(evidence.mirrors[owner], vectors[owner])
        case Check.CONTENTS:
            found = None if evidence.source is None else find_piece(seen, evidence.source)
            names = [] if found is None else [found]
        case Check.CAST:
            names = [state.piece.name for state in seen.pieces if state.uncast]
        case Check.COUNTERS:
            names = []
    return names[0] if names else ""


def _differing_pieces(mirror: Copy, sums: Sequence[int]) -> list[str]:
    layout = mirror.layout
    return [
        piece.name
        for piece, offset, number in zip(layout.pieces, layout.offsets(), sums, strict=False)
        if (sum(range_sums(mirror.flat, offset, piece.numel, offset)) - number) % MODULUS
    ]


def _pack(text: str) -> list[int]:
    """As 64-bit integers; what is too long is cut."""
    data = text.encode()[: 8 * _NAME_INTS]
    return list(struct.unpack(f"<{_NAME_INTS}q", data.ljust(8 * _NAME_INTS, b"\0")))


def _unpack(numbers: Sequence[int]) -> str:
    return struct.pack(f"<{_NAME_INTS}q", *numbers).rstrip(b"\0").decode(errors="ignore")
