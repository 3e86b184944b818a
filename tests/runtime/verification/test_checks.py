"""Each fault is found by its check, and by no other; the sentence names what it struck."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.planner.plan import initial_plan
from megatron_elas.runtime.verification.checks import Check, cover, find_failures
from megatron_elas.runtime.verification.checksum import MODULUS
from megatron_elas.runtime.verification.inspection import UNKNOWN, Counters, Inspection, inspect_piece, weight_sums
from megatron_elas.runtime.verification.rows import Row, total
from megatron_elas.runtime.verification.verify import Copy, Evidence, verify
from megatron_elas.spec.errors import VerificationFailed
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.shards import Piece, ShardLayout

PLAN = initial_plan(
    JobSpec(tensor_parallel=1, pipeline_parallel=2, data_parallel=2, micro_batch_size=1, num_microbatches=8), {}
)
SIZES = {"decoder.layers.0.weight": 70, "decoder.layers.0.bias": 10, "decoder.norm.weight": 20}
CUT = 50
"""Of a stage's elements the first cell owns so many."""
VERSION = 5


def pieces_of(cell: int) -> tuple[Piece, ...]:
    """Of the first or second half of the stage's elements."""
    low, high = (0, CUT) if cell == 0 else (CUT, sum(SIZES.values()))
    pieces, position = [], 0
    for name, count in SIZES.items():
        first, last = max(position, low), min(position + count, high)
        if first < last:
            pieces.append(Piece(name=name, start=first - position, stop=last - position))
        position += count
    return tuple(pieces)


@dataclass
class Sound:
    """A worker whose state fits; faults are planted in it."""

    worker: int
    names: dict[str, int] = field(default_factory=lambda: dict(SIZES))
    pieces: list[Piece] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    counters: Counters = field(
        default_factory=lambda: Counters(
            consumed_samples=40, schedule_samples=40, loss_scale=3, optimizer_steps=(5, 5), streams=7
        )
    )

    def __post_init__(self) -> None:
        seat = PLAN.placement.seat(self.worker)
        masters = torch.randn(sum(SIZES.values()), generator=torch.Generator().manual_seed(seat.stage))
        parts = masters.split(list(SIZES.values()))
        self.weights = {name: part.bfloat16() for name, part in zip(SIZES, parts, strict=True)}
        self.pieces = list(pieces_of(seat.cell))
        self.claims = list(self.pieces)
        self.shards = {}
        for cell, owner in enumerate(PLAN.placement.replicas(seat.stage, 0)):
            master = masters[:CUT] if cell == 0 else masters[CUT:]
            self.shards[owner] = torch.cat([master, 0.1 * master, master**2, torch.tensor([5.0])])
        self.used = self.shards[self.worker].clone()

    def inspect(self) -> Inspection:
        slots = self.used[:-1].view(3, -1)
        states, offset = [], 0
        for piece, claim in zip(self.pieces, self.claims, strict=True):
            own = [slot[offset : offset + piece.numel] for slot in slots]
            state = inspect_piece(piece, offset, own, self.weights[piece.name][piece.start : piece.stop])
            states.append(replace(state, piece=claim))
            offset += piece.numel
        return Inspection(
            parameters=self.names, weights=weight_sums(self.weights), pieces=states, counters=self.counters
        )

    def evidence(self) -> Evidence:
        (ward,) = PLAN.wards_of(self.worker)
        layout = ShardLayout(pieces=pieces_of(PLAN.placement.seat(ward).cell))
        return Evidence(
            worker=self.worker,
            version=VERSION,
            inspection=self.inspect(),
            expected=SIZES,
            source=self.shards[self.worker],
            mirrors={ward: Copy(layout=layout, flat=self.shards[ward])},
        )


Plant = Callable[[Sequence[Sound]], None]


def missing_parameter(workers: Sequence[Sound]) -> None:
    del workers[2].names["decoder.layers.0.bias"]


def dropped_name(workers: Sequence[Sound]) -> None:
    workers[1].names["bias"] = workers[1].names.pop("decoder.layers.0.bias")


def cut_parameter(workers: Sequence[Sound]) -> None:
    workers[3].names["decoder.norm.weight"] = 19


def permuted_values(workers: Sequence[Sound]) -> None:
    values = workers[1].weights["decoder.layers.0.weight"]  # not its own part of it
    values[[0, 32]] = values[[32, 0]]


def diverged_replica(workers: Sequence[Sound]) -> None:
    workers[0].weights["decoder.norm.weight"][3] += 1


def double_owner(workers: Sequence[Sound]) -> None:
    first = workers[1].claims[0]
    workers[1].claims[0] = replace(first, start=first.start - 1)


def shifted_owner(workers: Sequence[Sound]) -> None:
    first = workers[3].claims[0]
    workers[3].claims[0] = replace(first, start=first.start - 1, stop=first.stop - 1)


def stale_moment(workers: Sequence[Sound]) -> None:
    workers[2].used[CUT + 3] *= 1.25


def permuted_moments(workers: Sequence[Sound]) -> None:
    workers[2].used[[2 * CUT, 2 * CUT + 32]] = workers[2].used[[2 * CUT + 32, 2 * CUT]]


def diverged_backup(workers: Sequence[Sound]) -> None:
    workers[1].shards[0][2 * CUT + 1] = 0.5


def bf16_desync(workers: Sequence[Sound]) -> None:
    for worker in workers[2:]:
        worker.weights["decoder.layers.0.weight"].view(torch.int16)[2] += 1  # of worker 2's; gathered by worker 3


def step_counter_reset(workers: Sequence[Sound]) -> None:
    workers[3].counters = replace(workers[3].counters, optimizer_steps=(0, 5))


def schedule_reset(workers: Sequence[Sound]) -> None:
    workers[1].counters = replace(workers[1].counters, schedule_samples=0)


def lost_loss_scale(workers: Sequence[Sound]) -> None:
    workers[2].counters = replace(workers[2].counters, loss_scale=4)


def lost_samples(workers: Sequence[Sound]) -> None:
    workers[3].counters = replace(workers[3].counters, consumed_samples=48)


def lost_stream(workers: Sequence[Sound]) -> None:
    workers[0].counters = replace(workers[0].counters, streams=8)


def backup_counts_less(workers: Sequence[Sound]) -> None:
    workers[2].shards[3][-1] = 4


PLANTS: dict[Plant, tuple[Check, str]] = {
    missing_parameter: (
        Check.PARAMETERS,
        "worker 2 holds 2 parameters, the stage has 3.*, first in decoder.layers.0.bias",
    ),
    dropped_name: (Check.PARAMETERS, "worker 1 holds 3 parameters.* another name.*, first in decoder.layers.0.bias"),
    cut_parameter: (Check.PARAMETERS, "worker 3 .* another name or size, first in decoder.norm.weight"),
    permuted_values: (Check.REPLICAS, "weights of stage 0 lane 0 differ .*, first in decoder.layers.0.weight"),
    diverged_replica: (Check.REPLICAS, "weights of stage 0 lane 0 differ .*, first in decoder.norm.weight"),
    double_owner: (
        Check.OWNERS,
        "workers 0, 1 own optimizer state of 101 .* has 100.*, first in decoder.layers.0.weight",
    ),
    shifted_owner: (
        Check.OWNERS,
        "workers 2, 3 own optimizer state of 100 .* has 100: an element has no owner, or two",
    ),
    stale_moment: (
        Check.CONTENTS,
        "exp_avg in use on worker 2 is not what it got .*, first in decoder.layers.0.weight",
    ),
    permuted_moments: (Check.CONTENTS, "exp_avg_sq in use on worker 2 is not what it got"),
    diverged_backup: (
        Check.CONTENTS,
        "copy of worker 0's exp_avg_sq on its backup, worker 1, .*, first in decoder.layers.0",
    ),
    bf16_desync: (Check.CAST, "1 weights on worker 2 are not their masters, cast, first in decoder.layers.0.weight"),
    step_counter_reset: (Check.COUNTERS, "optimizer of worker 3.* has counted 0 updates, that of worker 0 5"),
    schedule_reset: (Check.COUNTERS, "worker 1 is at samples of the learning-rate schedule 0, worker 0 at 40"),
    lost_loss_scale: (Check.COUNTERS, r"worker 2 is at loss scaler's state \(checksum\) 4, worker 0 at 3"),
    lost_samples: (Check.COUNTERS, "worker 3 is at consumed samples 48, worker 0 at 40"),
    lost_stream: (Check.COUNTERS, "worker 1 is at random streams 7, worker 0 at 8"),
    backup_counts_less: (Check.COUNTERS, "optimizer of worker 3, or a copy of it, has counted 4 updates"),
}


def rows_of(workers: Sequence[Sound]) -> dict[int, Row]:
    sent = {worker.worker: worker.evidence().row(PLAN).to_ints(PLAN) for worker in workers}
    assert len({len(numbers) for numbers in sent.values()}) == 1
    return {worker: Row.from_ints(PLAN, worker, numbers) for worker, numbers in sent.items()}


def sound_workers() -> list[Sound]:
    return [Sound(worker) for worker in PLAN.placement.workers]


def verify_all(workers: Sequence[Sound]) -> list[VerificationFailed | None]:
    """What each worker says, each in a thread of its own."""
    meeting = threading.Barrier(len(workers), timeout=60)
    rows: dict[int, Sequence[int]] = {}
    results: list[VerificationFailed | None] = [None] * len(workers)

    def run(worker: Sound) -> None:
        def gather(row: Sequence[int]) -> list[list[int]]:
            meeting.wait()
            rows[worker.worker] = row
            meeting.wait()
            return [list(rows[other]) for other in sorted(rows)]

        try:
            verify(PLAN, worker.evidence(), gather, worker.dropped.append)
        except VerificationFailed as error:
            results[worker.worker] = error

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


def test_sound_workers_pass() -> None:
    assert find_failures(PLAN, rows_of(sound_workers())) == ()
    assert verify_all(sound_workers()) == [None] * 4


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_each_fault_is_found_by_one_check_and_named_by_all_workers(plant: Plant) -> None:
    check, _ = PLANTS[plant]
    workers = sound_workers()
    plant(workers)
    assert [failure.check for failure in find_failures(PLAN, rows_of(workers))] == [check]
    errors = verify_all(workers)
    assert {(str(error), error.check, error.step) for error in errors if error} == {
        (str(errors[0]), str(check), VERSION)
    }
    assert None not in errors
    with pytest.raises(VerificationFailed, match=PLANTS[plant][1]):
        raise errors[0]  # type: ignore[misc]


def test_every_check_has_a_fault_that_it_alone_finds() -> None:
    assert {check for check, _ in PLANTS.values()} == set(Check)


def test_a_bad_copy_beside_a_sound_owner_is_named_for_renewal() -> None:
    workers = sound_workers()
    diverged_backup(workers)
    assert {error.mirrors for error in verify_all(workers) if error} == {((0, 1),)}
    assert [worker.dropped for worker in workers] == [[], [0], [], []]
    lost_samples(workers)  # something else is wrong as well: no copy is to blame
    errors = verify_all(workers)
    assert {error.mirrors for error in errors if error} == {()}
    assert [worker.dropped for worker in workers] == [[], [0], [], []], "nothing is dropped then"
    assert "; also, counters: worker 3 is at consumed samples 48" in str(errors[2])


def test_a_worker_that_owns_nothing_counts_no_updates() -> None:
    workers = sound_workers()
    workers[2].counters = replace(workers[2].counters, optimizer_steps=(UNKNOWN, UNKNOWN))
    workers[3].shards[2][-1] = 0  # the copy of its shard, which is padding
    assert find_failures(PLAN, rows_of(workers)) == ()


@given(st.lists(st.integers(1, 99), unique=True, max_size=6), st.data())
def test_only_tilings_cover_a_parameter(cuts: list[int], data: st.DataObject) -> None:
    edges = [0, *sorted(cuts), 100]
    tiles = [Piece(name="p", start=a, stop=b) for a, b in itertools.pairwise(edges)]
    whole = total(cover([Piece(name="p", start=0, stop=100)]))
    assert sum(total(cover([tile])) for tile in data.draw(st.permutations(tiles))) % MODULUS == whole
    broken = data.draw(st.integers(0, len(tiles) - 1))
    assert total(cover([*tiles, tiles[broken]])) != whole
    assert total(cover(tiles[:broken] + tiles[broken + 1 :])) != whole
