"""Shards travel between workers: to backups each step, and to new owners after a loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_elas.runtime.migration import apply_moves
from megatron_elas.runtime.replicator import Replicator
from megatron_elas.runtime.store import ShardStore
from megatron_elas.runtime.transport.sockets import SocketTransport
from megatron_elas.runtime.verification.inspection import flat_sums
from megatron_elas.spec.errors import EpochChanged
from megatron_elas.spec.moves import plan_moves
from megatron_elas.spec.shards import Piece, ShardLayout
from tests.runtime.workers import at_once


@pytest.fixture
def transports(tmp_path: Path) -> Iterator[list[SocketTransport]]:
    """Of workers 0, 1 and 2, in one process."""
    made = [SocketTransport(worker, f"unix:{tmp_path}/{worker}", "token") for worker in range(3)]
    for transport in made:
        transport.set_addresses({other.worker: other.address for other in made})
    yield made
    for transport in made:
        transport.close()


def layout(*ranges: tuple[str, int, int]) -> ShardLayout:
    return ShardLayout(pieces=tuple(Piece(name=name, start=start, stop=stop) for name, start, stop in ranges))


def pattern(owner: int, shard: ShardLayout) -> torch.Tensor:
    """A flat shard in which every element says slot, parameter and element."""
    values = [
        1000.0 * slot + 100.0 * int(piece.name[1:]) + element
        for slot in range(3)
        for piece in shard.pieces
        for element in range(piece.start, piece.stop)
    ]
    return torch.tensor([*values, 5.0])


LAYOUTS = [layout(("p0", 0, 10)), layout(("p0", 10, 15), ("p1", 0, 5)), layout(("p1", 5, 15))]


def stores() -> list[ShardStore]:
    """A ring: worker ``w`` is backed up by ``w + 1``."""
    return [
        ShardStore(layout=LAYOUTS[w], backups=[(w + 1) % 3], wards={(w - 1) % 3: LAYOUTS[(w - 1) % 3]})
        for w in range(3)
    ]


def test_every_backup_holds_its_wards_version_when_the_exchange_is_over(transports: list[SocketTransport]) -> None:
    copies, replicators = stores(), [Replicator(transport) for transport in transports]
    for version in (3, 4):
        for worker, store in enumerate(copies):
            store.own.begin(version).copy_(pattern(worker, LAYOUTS[worker]) + version)
            store.own.complete(version)
            replicators[worker].start(store, version)
        for replicator in replicators:
            replicator.wait()
    for worker, store in enumerate(copies):
        ward = (worker - 1) % 3
        for version in (3, 4):
            assert torch.equal(store.wards[ward].get(version), pattern(ward, LAYOUTS[ward]) + version)
    for replicator in replicators:
        replicator.close()


def test_a_copy_that_was_cut_is_not_held_and_the_one_before_is(transports: list[SocketTransport]) -> None:
    copies = stores()
    replicator = Replicator(transports[0])
    copies[0].wards[2].begin(3)
    copies[0].wards[2].complete(3)
    copies[0].own.begin(4)
    copies[0].own.complete(4)
    replicator.start(copies[0], 4)  # nobody answers
    transports[0].cancel()
    with pytest.raises(EpochChanged):
        replicator.wait()
    replicator.drain()
    assert copies[0].holding(0, 4).wards == {2: (3,)}
    replicator.close()


def test_new_shards_are_put_together_from_owners_and_from_the_backup_of_the_lost_one(
    transports: list[SocketTransport],
) -> None:
    old = dict(enumerate(LAYOUTS))
    new = {0: layout(("p0", 0, 15)), 2: layout(("p1", 0, 15))}
    moves = plan_moves(old, new, {0: 0, 1: 2, 2: 2})
    targets = {worker: torch.full((shard.flat_numel,), -1.0) for worker, shard in new.items()}
    held = {0: [0], 2: [1, 2]}
    sent = {}

    def move(worker: int) -> None:
        sources = {owner: pattern(owner, LAYOUTS[owner]) for owner in held[worker]}
        sent[worker] = apply_moves(moves, worker, sources, targets[worker], transports[worker])

    at_once(lambda: move(0), lambda: move(2))
    for worker, shard in new.items():
        assert torch.equal(targets[worker][:-1], pattern(worker, shard)[:-1])
    assert {worker: moved for worker, (moved, _) in sent.items()} == {0: 0, 2: 3 * 5 * 4}, (
        "only the lost worker's part of p0 has to travel"
    )
    for worker, (_, sums) in sent.items():
        assert sums == flat_sums(targets[worker]), "checksums of what was sent, in its new place"


def test_a_worker_without_a_seat_gives_what_it_holds(transports: list[SocketTransport]) -> None:
    new = {2: layout(("p0", 0, 15), ("p1", 0, 15))}
    moves = plan_moves(dict(enumerate(LAYOUTS)), new, {0: 0, 1: 1, 2: 2})
    target = torch.full((new[2].flat_numel,), -1.0)
    at_once(
        lambda: apply_moves(moves, 0, {0: pattern(0, LAYOUTS[0])}, None, transports[0]),
        lambda: apply_moves(moves, 1, {1: pattern(1, LAYOUTS[1])}, None, transports[1]),
        lambda: apply_moves(moves, 2, {2: pattern(2, LAYOUTS[2])}, target, transports[2]),
    )
    assert torch.equal(target[:-1], pattern(2, new[2])[:-1])


def test_after_a_loss_only_copies_that_are_missing_are_sent(transports: list[SocketTransport]) -> None:
    copies, replicators = stores(), [Replicator(transport) for transport in transports]
    for worker, store in enumerate(copies):
        store.own.begin(4).copy_(pattern(worker, LAYOUTS[worker]))
        store.own.complete(4)
    copies[1].wards[0].begin(4).fill_(-1.0)  # told apart from what worker 0 would send
    copies[1].wards[0].complete(4)
    copies[2].wards[1].begin(4).fill_(-1.0)  # cut while it came in
    for worker, store in enumerate(copies):
        replicators[worker].renew(store, 4)
    for replicator in replicators:
        replicator.wait()
    assert copies[1].wards[0].get(4).unique().tolist() == [-1.0], "a copy that was there was sent again"
    assert torch.equal(copies[2].wards[1].get(4), pattern(1, LAYOUTS[1]))
    assert torch.equal(copies[0].wards[2].get(4), pattern(2, LAYOUTS[2]))
    for replicator in replicators:
        replicator.close()


def test_a_copy_that_is_there_stays_held_when_asking_for_it_is_cut_short(transports: list[SocketTransport]) -> None:
    store = ShardStore(layout=LAYOUTS[0], backups=[1], wards={2: LAYOUTS[2]})
    replicator = Replicator(transports[0])
    for versions in (store.own, store.wards[2]):
        versions.begin(4)
        versions.complete(4)
    replicator.renew(store, 4)  # nobody answers
    transports[0].cancel()
    replicator.drain()
    assert store.wards[2].held == (4,)
    replicator.close()
