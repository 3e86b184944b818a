"""After a loss every new owner gets its shard, element by element, from whoever has it, over all stages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.runtime.executor import Executor
from megatron_elas.runtime.migration import apply_moves
from megatron_elas.runtime.restoring import make_store
from megatron_elas.runtime.snapshots import SnapshotMode, SnapshotPool
from megatron_elas.runtime.state import Fit, WorkerState
from megatron_elas.runtime.store import ShardStore
from megatron_elas.runtime.transport.base import Part
from megatron_elas.runtime.transport.sockets import SocketTransport
from megatron_elas.runtime.verification.inspection import flat_sums
from megatron_elas.spec.catalogue import Catalogue, Parameter
from megatron_elas.spec.errors import EpochChanged, StateInvalid
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Cell, Placement
from megatron_elas.spec.moves import plan_moves
from megatron_elas.spec.plan import ElasticPlan, Settlement
from megatron_elas.spec.remap import plan_remap
from megatron_elas.spec.shards import ShardLayout
from tests.runtime.workers import at_once

VERSION = 7
STEP = 5.0
"""Updates that the optimizer has made; one step was left out, or the training began from a checkpoint."""
WORD, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def make_catalogue(layers: int, *, tied: bool = False) -> Catalogue:
    """Of a small model; every layer has another size."""
    sizes = [(f"decoder.layers.{i}.qkv", 300 + 7 * i) for i in range(layers)]
    middle = [
        (Parameter(name=name, count=size), Parameter(name=f"decoder.layers.{i}.norm", count=17))
        for i, (name, size) in enumerate(sizes)
    ]
    embedding = (Parameter(name=WORD, count=500, tied=tied), Parameter(name="embedding.position", count=60))
    head = (Parameter(name="decoder.final_layernorm.weight", count=17), Parameter(name=OUTPUT, count=500, tied=tied))
    return Catalogue(units=(embedding, *middle, head))


def element(name: str, lane: int, slot: int, index: int) -> float:
    """What is there in the state: says where it belongs, and is the same in both copies of a tied weight."""
    named = WORD if name == OUTPUT else name
    return float((sum(map(ord, named)) % 97) * 100_000 + lane * 10_000 + slot * 3_000 + index)


def untied(name: str, lane: int, slot: int, index: int) -> float:
    """As ``element``, with another head."""
    return element(name, lane, slot, index) + (0.5 if name == OUTPUT else 0.0)


Content = Callable[[str, int, int, int], float]


def pattern(layout: ShardLayout, lane: int, content: Content) -> torch.Tensor:
    """The flat shard."""
    values = [
        content(piece.name, lane, slot, index)
        for slot in range(3)
        for piece in layout.pieces
        for index in range(piece.start, piece.stop)
    ]
    return torch.tensor([*values, STEP])


def make_job(grid: tuple[int, int, int], layers: Sequence[int], copies: int = 1) -> JobSpec:
    tp, pp, dp = grid
    return JobSpec(
        tensor_parallel=tp, pipeline_parallel=pp, data_parallel=dp, micro_batch_size=1, num_microbatches=4 * dp,
        stage_layers=tuple(layers), snapshot_replicas=copies,
    )  # fmt: skip


class Crew:
    """All workers of a job in one process, each with what it holds of version ``VERSION`` under the first plan."""

    def __init__(self, folder: Path, job: JobSpec, *, tied: bool = False) -> None:
        self.job, self.catalogue = job, make_catalogue(job.num_layers, tied=tied)
        self.content: Content = element if tied else untied
        self.plans = {0: initial_plan(job, {worker: str(worker) for worker in range(job.world_size)})}
        self.lost: set[int] = set()
        self.transports = [
            SocketTransport(worker, f"unix:{folder}/{worker}", "token") for worker in range(job.world_size)
        ]
        for transport in self.transports:
            transport.set_addresses({other.worker: other.address for other in self.transports})
        self.executors = {worker: self._executor(worker) for worker in range(job.world_size)}

    def close(self) -> None:
        """End threads and links."""
        for executor in self.executors.values():
            executor._pool.close()
        for transport in self.transports:
            transport.close()

    def _executor(self, worker: int) -> Executor:
        plan = self.plans[0]
        state = WorkerState(
            worker=worker, plan=plan, live=VERSION, catalogue=self.catalogue, fitted=Fit.of(plan, worker)
        )
        store = make_store(self.catalogue, plan, worker, 1)
        self._fill(store, plan, (worker, *plan.wards_of(worker)), worker)
        state.stores[0] = (plan, store)
        transport = self.transports[worker]
        nothing = cast(Any, SimpleNamespace())
        pool = SnapshotPool(transport, nothing, SnapshotMode.REPLAY)
        return Executor(state, nothing, transport, pool, nothing, nothing, lambda *place: None)

    def _fill(self, store: ShardStore, plan: ElasticPlan, owners: Collection[int], me: int) -> None:
        for owner in owners:
            copies = store.copy_of(owner, me)
            lane = plan.placement.seat(owner).lane
            copies.begin(VERSION).copy_(pattern(self.catalogue.layout(plan, owner), lane, self.content))
            copies.complete(VERSION)

    def lose(self, *workers: int) -> ElasticPlan:
        """The plan without them."""
        self.lost |= set(workers)
        epoch = max(self.plans) + 1
        domains = {worker: str(worker) for worker in range(self.job.world_size)}
        self.plans[epoch] = replan(self.job, self.plans[0], self.lost, epoch, domains)
        return self.plans[epoch]

    def settlement(self) -> Settlement:
        base = self.plans[0]
        holders = [
            (owner, next(b for b in base.backups_of(owner) if b not in self.lost)) for owner in sorted(self.lost)
        ]
        return Settlement(base_epoch=0, resume_step=VERSION, lead_activity=VERSION, holders=tuple(holders))

    def restore(self, worker: int, plan: ElasticPlan) -> tuple[ShardStore | None, int]:
        """What the worker does of a recovery."""
        executor = self.executors[worker]
        alive = {*plan.placement.workers, *plan.placement.spares}
        base_plan, base = executor._state.stores[0]
        restoring = executor._prepare(base_plan, base, plan, self.settlement(), alive)
        assert restoring is not None
        restoring.run()
        store, sent = restoring.store, restoring.sent
        if sent is not None:
            assert store is not None and sent == flat_sums(store.own.get(VERSION)), "checksums that came with the shard"
        return restoring.store, restoring.moved_bytes

    def restore_all(self, plan: ElasticPlan) -> dict[int, tuple[ShardStore | None, int]]:
        """All survivors at once; every new owner has all it should have after."""
        results: dict[int, tuple[ShardStore | None, int]] = {}
        survivors = [*plan.placement.workers, *plan.placement.spares]
        at_once(*(lambda w=worker: results.update({w: self.restore(w, plan)}) for worker in survivors))  # type: ignore[misc]
        for worker in plan.placement.workers:
            store = results[worker][0]
            assert store is not None
            lane = plan.placement.seat(worker).lane
            expected = pattern(self.catalogue.layout(plan, worker), lane, self.content)
            assert torch.equal(store.own.get(VERSION), expected), f"worker {worker}"
        for worker in plan.placement.spares:
            assert results[worker][0] is None
        return results


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Callable[..., Crew]]:
    """Makes crews, and closes them."""
    made: list[Crew] = []

    def make(grid: tuple[int, int, int], layers: Sequence[int], copies: int = 1, *, tied: bool = False) -> Crew:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Crew(folder, make_job(grid, layers, copies), tied=tied))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_lost_stage_comes_from_its_backups_in_other_stages(crew: Callable[..., Crew]) -> None:
    team = crew((1, 4, 1), (1, 1, 1, 1))
    assert team.plans[0].backups_of(1) == (2,), "in another stage"
    stages = tuple((Cell(row=0, workers=(worker,)),) for worker in (0, 2, 3))
    plan = replace(
        team.lose(1),
        placement=Placement(stages=stages),
        layers=((0, 1), (1, 3), (3, 4)),
        items=team.plans[0].items[:3],
        warmups=(),
    )
    results = team.restore_all(plan)
    assert {worker: sent for worker, (_, sent) in results.items()} == {0: 0, 2: 0, 3: 0}, (
        "the new owner of layer 1 has its copy already"
    )


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_any_stage_of_a_single_pipeline_may_be_lost(lost: int, crew: Callable[..., Crew]) -> None:
    team = crew((1, 4, 1), (2, 1, 2, 1))
    team.restore_all(team.lose(lost))


def test_three_of_four_workers_are_lost_at_once_and_the_last_one_has_it_all(crew: Callable[..., Crew]) -> None:
    team = crew((1, 4, 1), (1, 1, 1, 1), copies=3)
    plan = team.lose(0, 1, 3)
    assert plan.placement.describe() == "stage 0: [2]"
    ((store, sent),) = team.restore_all(plan).values()
    assert store is not None and sent == 0 and store.layout.numel == 560 + sum(317 + 7 * i for i in range(4)) + 517


def test_both_cells_of_a_stage_are_lost_and_a_cell_of_the_other_one_takes_their_place(
    crew: Callable[..., Crew],
) -> None:
    team = crew((2, 2, 2), (2, 2), copies=2)
    plan = team.lose(4, 7)
    assert plan.placement.describe() == "stage 0: [0,1] [2,3] | stage 1: [6,5]", "mates of both make a cell"
    team.restore_all(plan)
    team = crew((1, 2, 2), (2, 2), copies=2)
    plan = team.lose(2, 3)
    assert plan.placement.describe() == "stage 0: [0] | stage 1: [1]"
    team.restore_all(plan)


def test_a_tied_weight_is_found_at_the_other_end_and_has_one_copy_in_one_stage(crew: Callable[..., Crew]) -> None:
    team = crew((1, 2, 1), (2, 2), tied=True)
    plan = team.lose(0)
    ((store, _),) = team.restore_all(plan).values()
    assert store is not None
    names = {piece.name for piece in store.layout.pieces}
    assert WORD in names and OUTPUT not in names


@pytest.mark.parametrize(("lost", "missing"), [(0, WORD), (1, OUTPUT)])
def test_either_end_of_a_tied_weight_gives_the_other_one(lost: int, missing: str) -> None:
    catalogue = make_catalogue(2, tied=True)
    base = initial_plan(make_job((1, 2, 1), (1, 1)), {})
    plan = ElasticPlan(
        epoch=1, placement=base.placement, layers=((0, 1), (1, 2)), items=base.items, backups=base.backups
    )
    layouts = catalogue.layouts(base, 0)
    new = {5: ShardLayout(pieces=tuple(p for p in catalogue.layout(plan, lost).pieces if p.name == missing))}
    moves = plan_moves(layouts, new, {1 - lost: 1 - lost}, catalogue.twins)
    assert [(move.owner, move.numel) for move in moves] == [(1 - lost, 500)]
    with pytest.raises(StateInvalid, match=f"element 0 of {missing} has no holder"):
        plan_moves(layouts, new, {1 - lost: 1 - lost})


def test_workers_that_own_what_they_owned_keep_their_store_and_take_no_part(crew: Callable[..., Crew]) -> None:
    team = crew((1, 3, 2), (2, 2, 2))
    before = {worker: team.executors[worker]._state.stores[0][1] for worker in range(6)}
    plan = team.lose(5)
    results = team.restore_all(plan)
    for worker in (0, 1, 2, 3):
        store, sent = results[worker]
        assert store is not None and sent == 0
        old = before[worker]
        assert old is not None and store.own is old.own
    assert results[2][0] is before[2] and results[3][0] is before[3], "same duties: the very same store"
    kept = results[0][0]
    assert kept is not None and kept.wards.keys() == {1, 4}, "worker 4 has no replica any more"
    assert kept.wards[1] is before[0].wards[1] and kept.wards[4].held == (), "the copy of 1 stays, that of 4 is new"  # type: ignore[union-attr]


def test_a_cell_of_spares_leaves_the_lane_mates_state_where_it_is(crew: Callable[..., Crew]) -> None:
    team = crew((2, 1, 3), (2,))
    plan = team.lose(1, 2)
    assert plan.placement.describe() == "stage 0: [0,3] [4,5]"
    team.restore_all(plan)


def test_a_second_fault_during_the_moves_leaves_the_first_layout_whole(crew: Callable[..., Crew]) -> None:
    team = crew((1, 3, 2), (2, 2, 2), copies=3)
    plan = team.lose(0, 1)  # the first stage
    errors: dict[int, BaseException] = {}

    def cut(worker: int) -> None:
        try:
            team.restore(worker, plan)
        except EpochChanged as error:
            errors[worker] = error

    base = team.plans[0]
    victim = next(
        worker
        for worker in (4, 5, 3, 2)
        if _moves(team, plan, worker) and all(set(base.backups_of(owner)) - {0, 1, worker} for owner in (0, 1, worker))
    )
    others = sorted({2, 3, 4, 5} - {victim})
    waiting = [threading.Thread(target=cut, args=(worker,)) for worker in others]
    for thread in waiting:  # the victim never comes
        thread.start()
    for worker in others:
        team.transports[worker].cancel()
    for thread in waiting:
        thread.join(20)
        assert not thread.is_alive()
    assert errors, "nobody was cut short"
    second = team.lose(victim)
    for worker in others:
        team.transports[worker].adopt(2, lost={0, 1, victim})
    assert sorted(second.placement.workers) == others
    team.restore_all(second)


def _moves(team: Crew, plan: ElasticPlan, victim: int) -> list[Any]:
    """Those between the victim and another worker."""
    holders = dict(team.settlement().holders) | {w: w for w in range(6) if w not in team.lost}
    moves = plan_remap(team.catalogue, team.plans[0], plan, holders)
    return [move for move in moves if victim in (move.source, move.target) and move.source != move.target]


class Wires:
    """Collects what would be sent."""

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], list[Part]] = {}

    def of(self, worker: int, *, receive: bool) -> Any:
        def exchange(channel: object, tag: int, sends: Sequence[Part], receives: Sequence[Part]) -> None:
            if not receive:
                for part in sends:
                    self.parts.setdefault((worker, part.peer), []).append(part)
            else:
                for part in receives:
                    sent = self.parts[part.peer, worker].pop(0)
                    assert len(sent.buffer) == len(part.buffer)
                    part.buffer[:] = sent.buffer

        return SimpleNamespace(exchange=exchange)


@given(data=st.data())
def test_from_any_plan_to_any_later_one_every_owner_gets_its_elements_once(data: st.DataObject) -> None:
    grid = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 2)), label="grid")
    layers = data.draw(st.lists(st.integers(1, 2), min_size=grid[1], max_size=grid[1]), label="layers")
    tied = data.draw(st.booleans(), label="tied") and grid[1] > 1
    job = make_job(grid, layers, copies=2)
    catalogue, content = make_catalogue(job.num_layers, tied=tied), element if tied else untied
    domains = {worker: str(worker) for worker in range(job.world_size)}
    base = initial_plan(job, domains)
    if data.draw(st.booleans(), label="a loss before"):
        gone = data.draw(st.integers(0, job.world_size - 1))
        if job.world_size - 1 >= grid[0]:
            base = replan(job, base, [gone], 1, domains)
    living = [*base.placement.workers, *base.placement.spares]
    lost = data.draw(st.sets(st.sampled_from(living), max_size=2), label="lost")
    if len(living) - len(lost) < grid[0]:
        return
    plan = replan(job, base, lost, 2, domains)
    holders = {}
    for owner in base.placement.workers:
        holder = next((w for w in (owner, *base.backups_of(owner)) if w not in lost), None)
        if holder is None:
            return
        holders[owner] = holder
    shards = {
        owner: pattern(catalogue.layout(base, owner), base.placement.seat(owner).lane, content)
        for owner in base.placement.workers
    }
    moves = plan_remap(catalogue, base, plan, holders)
    targets = {move.target for move in moves}
    new = {worker: torch.full((catalogue.layout(plan, worker).flat_numel,), -1.0) for worker in targets}
    wires = Wires()
    for receive in (False, True):
        for worker in sorted(set(living) - lost):
            sources = {owner: shards[owner] for owner, holder in holders.items() if holder == worker}
            scratch = new.get(worker)
            apply_moves(moves, worker, sources, scratch, wires.of(worker, receive=receive))
    assert not any(wires.parts.values()), "sent and not received"
    for worker in plan.placement.workers:
        layout = catalogue.layout(plan, worker)
        expected = pattern(layout, plan.placement.seat(worker).lane, content)
        if layout.numel:
            assert torch.equal(new.get(worker, shards.get(worker)), expected)
    assert len({(m.target, m.new_offset) for m in moves}) == len(moves)
    assert sum(m.numel for m in moves) == sum(catalogue.layout(plan, worker).numel for worker in targets)
