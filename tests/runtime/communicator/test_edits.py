"""Edits and joins of all groups of a grid, in one transaction."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.runtime.communicator.membership import GroupMembers, Membership
from megatron_elas.runtime.transport import dialler
from megatron_elas.runtime.transport.sockets import SocketTransport
from megatron_elas.spec.errors import EpochChanged, PeerLost
from tests.runtime.communicator.test_epochs import joined, make_barrier
from tests.runtime.memberships import membership_of
from tests.runtime.transport.together import in_thread
from tests.runtime.workers import KILLED, run_workers, wait_until

TP, PP = 2, 2


def grid_lists(workers: Sequence[int]) -> list[tuple[str, list[tuple[int, ...]]]]:
    """The groups that Megatron makes of TP 2 x PP 2 x DP, in its order; ``workers`` by position in the grid.

    Position (stage * D + row) * TP + lane, as tp-cp-ep-dp-pp numbers them.
    """
    rows = len(workers) // (TP * PP)

    def at(stage: int, row: int, lane: int) -> int:
        return workers[(stage * rows + row) * TP + lane]

    lanes, stages, all_rows = range(TP), range(PP), range(rows)
    data = [tuple(at(s, r, t) for r in all_rows) for s in stages for t in lanes]
    model = [tuple(at(s, r, t) for s in stages for t in lanes) for r in all_rows]
    tensor = [tuple(at(s, r, t) for t in lanes) for s in stages for r in all_rows]
    pipe = [tuple(at(s, r, t) for s in stages) for r in all_rows for t in lanes]
    both = [tuple(at(s, r, t) for r in all_rows for t in lanes) for s in stages]
    return [
        ("DATA_PARALLEL_GROUP", data),
        ("DATA_PARALLEL_GROUP_WITH_CP", data),
        ("MODEL_PARALLEL_GROUP", model),
        ("TENSOR_MODEL_PARALLEL_GROUP", tensor),
        ("PIPELINE_MODEL_PARALLEL_GROUP", pipe),
        ("EMBEDDING_GROUP", pipe),
        ("TENSOR_AND_DATA_PARALLEL_GROUP", both),
    ]


def grid_groups(workers: Sequence[int]) -> dict[str, GroupMembers]:
    """By name: a row keeps the names of its groups when rows come and go."""
    rows = len(workers) // (TP * PP)
    groups = {"0": GroupMembers(members=tuple(sorted(workers)), description="default_pg")}
    for kind, (description, lists) in enumerate(grid_lists(workers)):
        for number, members in enumerate(lists):
            name = 1000 * (kind + 1)
            if "DATA" in description:
                name += number
            else:  # a row's groups: by its first worker, and by lane or stage
                pipes = "PIPE" in description or "EMB" in description
                row, part = (number // TP, number % TP) if pipes else (number % rows, number // rows)
                name += 20 * workers[row * TP] + part
            groups[str(name)] = GroupMembers(members=members, description=description)
    return groups


def grid(epoch: int, workers: Sequence[int], folder: Path, spares: Sequence[int] = ()) -> Membership:
    """Sockets have names by worker, so that addresses need no exchange."""
    return Membership(
        epoch=epoch,
        addresses={worker: f"unix:{folder}/{worker}" for worker in (*workers, *spares)},
        ranks={worker: rank for rank, worker in enumerate(sorted(workers))},
        groups=grid_groups(workers),
    )


@contextlib.contextmanager
def member(own: int, membership: Membership) -> Iterator[tuple[SocketTransport, Communicator]]:
    transport = SocketTransport(own, membership.addresses[own], "secret")
    communicator = Communicator.join(transport, membership)
    try:
        yield transport, communicator
    finally:
        communicator.close()
        transport.close()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[tuple[SocketTransport, Communicator]]:
    """Worker 0 of one, with torch."""
    groups = {"0": GroupMembers(members=(0,))}
    with member(0, Membership(epoch=0, addresses={0: f"unix:{folder}/0"}, ranks={0: 0}, groups=groups)) as made:
        yield made


def check_groups(communicator: Communicator, membership: Membership, own: int, exchange: bool = True) -> None:
    """Every group works, through torch, by the membership's members and ranks."""
    ranks = membership.ranks
    assert dist.get_rank() == ranks[own]
    assert dist.get_world_size() == len(ranks)
    assert communicator.world == membership.world
    named = membership.of(own)
    assert {group.group_name for group in communicator.groups} == set(named)
    for group in sorted(communicator.groups, key=lambda group: int(group.group_name)):
        members = named[group.group_name].members
        assert group.members == members
        assert group.description == named[group.group_name].description
        assert dist.get_process_group_ranks(group) == [ranks[worker] for worker in members]
        assert dist.get_group_rank(group, dist.get_rank()) == group.rank() == members.index(own)
        assert dist.get_global_rank(group, 0) == ranks[members[0]]
        assert c10d._resolve_process_group(group.group_name) is group
        if not exchange:
            continue
        tensor = torch.full((50_000,), float(own))
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.full((50_000,), float(sum(members))))
        objects: list[Any] = [None] * len(members)
        dist.all_gather_object(objects, own, group=group)
        assert objects == list(members)


def wait_for_all(folder: Path, own: int, workers: Sequence[int]) -> None:
    """Until all of them listen; their sockets have names a moment before."""
    (folder / f"{own}.listens").touch()
    wait_until(lambda: all((folder / f"{worker}.listens").exists() for worker in workers))


# ---------------------------------------------------------------- the grid


@pytest.mark.process
def test_a_spare_takes_the_place_of_a_dead_worker_in_all_groups(tmp_path: Path) -> None:
    before = grid(0, range(8), tmp_path, spares=[8])
    places = [0, 1, 2, 8, 4, 5, 6, 7]
    after = grid(1, places, tmp_path)
    ready, edited = make_barrier(9), make_barrier(8)

    def body(own: int) -> object:
        if own == 8:  # a fresh process: it has made no groups before
            transport = SocketTransport(8, before.addresses[8], "secret")
            ready.wait()
            communicator = Communicator.join(transport, after)
            edited.wait()
            check_groups(communicator, after, own)
            edited.wait()
            communicator.close()
            transport.close()
            return True
        with member(own, before) as (transport, communicator):
            wait_for_all(tmp_path, own, range(8))
            check_groups(communicator, before, own)
            held = {group.group_name: group for group in communicator.groups}
            ready.wait()
            if own == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            transport.cancel()
            communicator.drain()
            communicator.edit(after)
            assert all(held[group.group_name] is group for group in communicator.groups), "identity is kept"
            assert 3 not in {peer for peer, _ in transport._links}
            edited.wait()
            communicator.open_links()
            check_groups(communicator, after, own)
            edited.wait()
        return True

    results = run_workers(9, body, timeout_s=60)
    assert results == [KILLED if worker == 3 else True for worker in range(9)]


@pytest.mark.process
def test_a_grid_grows_by_a_row_shrinks_by_another_and_grows_again(tmp_path: Path) -> None:
    """Several edits in a row; rows of four: workers 0 to 7 are there, 8 to 11 come, 2, 3, 6, 7 go and come again."""
    first, second = [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 8, 9, 4, 5, 6, 7, 10, 11]
    third = [0, 1, 8, 9, 4, 5, 10, 11]
    steps = [
        grid(0, first, tmp_path),
        grid(1, second, tmp_path),
        replace(grid(2, third, tmp_path), addresses=grid(2, second, tmp_path).addresses),  # the others stay as spares
        grid(3, second, tmp_path),
    ]
    barriers = [make_barrier(8), *(make_barrier(12) for _ in steps[1:])]
    starts = [make_barrier(12) for _ in steps[1:]]

    def body(own: int) -> int:
        communicator: Communicator | None = None
        transport = SocketTransport(own, steps[-1].addresses[own], "secret")
        wait_for_all(tmp_path, own, range(12))
        for number, step in enumerate(steps):
            if number:
                starts[number - 1].wait()
            if communicator is None and own in step.ranks:
                communicator = Communicator.join(transport, step)
            elif communicator is not None and number:
                transport.cancel()
                communicator.drain()
                communicator.edit(step)
            if number or own in step.ranks:
                barriers[number].wait()
            if communicator is not None and own in step.ranks:
                check_groups(communicator, step, own)
                if number == 3:
                    fresh = dist.new_group([0, 1, len(step.ranks) - 1])  # torch counts on where it stands everywhere
                    if dist.get_rank() in (0, 1, len(step.ranks) - 1):
                        objects: list[Any] = [None] * 3
                        dist.all_gather_object(objects, own, group=fresh)
                        assert objects == [0, 1, 11]
        assert communicator is not None
        starts[-1].wait()  # everybody is done before anybody closes
        links = len(transport._links)
        communicator.close()
        transport.close()
        return links

    links = run_workers(12, body, timeout_s=90)
    assert all(links)


@pytest.mark.process
def test_a_worker_leaves_groups_that_no_longer_have_it(tmp_path: Path) -> None:
    ready = make_barrier(3)

    def body(own: int) -> bool:
        with joined(own, 3, tmp_path) as (transport, communicator):
            group = dist.new_group([0, 1, 2])
            name = group.group_name
            check = torch.ones(1)
            dist.all_reduce(check, group=group)
            ready.wait()
            transport.cancel()
            communicator.drain()
            ready.wait()
            membership = membership_of(communicator, 1, range(3), {name: GroupMembers(members=(0, 2))})
            communicator.edit(membership)
            ready.wait()
            check_groups(communicator, membership_with_descriptions(membership, communicator), own)
            if own == 1:
                assert group not in c10d._world.pg_map
                assert communicator.groups == [dist.GroupMember.WORLD]
            else:
                assert (1, group.channel) not in transport._links
        return True

    assert all(run_workers(3, body))


def membership_with_descriptions(membership: Membership, communicator: Communicator) -> Membership:
    """Descriptions of groups that exist are not the membership's business."""
    said = {group.group_name: group.description for group in communicator.groups}
    groups = {n: replace(group, description=said.get(n, "undefined")) for n, group in membership.groups.items()}
    return replace(membership, groups=groups)


# ---------------------------------------------------------------- all or nothing


def snapshot(transport: SocketTransport, communicator: Communicator) -> Any:
    return (
        transport.epoch,
        dict(transport._connections._addresses),
        communicator.world,
        [(id(g), g.members, g.channel) for g in communicator.groups],
        {id(group): dict(ranks) for group, ranks in c10d._world.pg_group_ranks.items()},
        dist.get_rank(),
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"epoch": 0}, "epoch 0 cannot be adopted after 0"),
        (
            {"addresses": {1: "unix:/1", 2: "unix:/2"}, "ranks": {1: 0}, "groups": {}},
            r"worker 0 is not among the living",
        ),
        ({"groups": {"0": (0, 1, 2)}}, r"does not name group other .* of which workers \[3\] have no global rank"),
        ({"groups": {"other": (0, 1)}}, r"does not name group 0"),
        ({"groups": {"0": (0, 1, 2), "other": (0, 1), "7": (0, 2), "x7": (0, 1)}}, "have the same channel 7"),
        ({"groups": {"0": (0, 1, 2), "other": (0, 1), "spare": (0, 2, 0)}}, "each only once"),
        ({"groups": {"0": (0, 1, 2), "other": (0, 1), "foreign": (0, 1)}}, "torch has another group named 'foreign'"),
    ],
)
def test_an_edit_that_cannot_be_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], text: str
) -> None:
    with alone(tmp_path) as (transport, communicator):
        monkeypatch.setitem(c10d._world.pg_names, dist.ProcessGroup(0, 1), "foreign")  # as of another backend
        communicator.open_group("other", [0, 1, 3])
        communicator.open_group("spare", [0, 1])
        communicator._groups["0"].edit([0, 1, 3])
        before = snapshot(transport, communicator)
        said: dict[str, Any] = {
            "epoch": 1,
            "addresses": {worker: f"unix:/{worker}" for worker in range(3)},
            "ranks": {0: 0, 1: 1, 2: 2},
        } | changes
        with pytest.raises(ValueError, match=text):
            said["groups"] = {
                name: GroupMembers(members=members, channel=7 if name == "x7" else None)
                for name, members in changes.get("groups", {"0": (0, 1, 2)}).items()
            }
            communicator.edit(Membership(**said))
        assert snapshot(transport, communicator) == before


def test_one_that_has_no_place_cannot_join(tmp_path: Path) -> None:
    membership = grid(3, range(8), tmp_path, spares=[8])
    transport = SocketTransport(8, membership.addresses[8], "secret")
    with contextlib.closing(transport):
        with pytest.raises(ValueError, match="worker 8 cannot join epoch 3, which gives it no rank or no group"):
            Communicator.join(transport, membership)
        assert transport.epoch == 0
        assert not dist.is_initialized()


def test_a_spare_keeps_its_groups_until_it_has_a_rank_again(tmp_path: Path) -> None:
    with alone(tmp_path) as (transport, communicator):
        group = communicator.open_group("other", [0, 1])
        addresses = {worker: f"unix:/{worker}" for worker in (0, 2)}
        transport.cancel()
        communicator.edit(Membership(epoch=1, addresses=addresses, ranks={2: 0}))
        assert transport.epoch == 1 and not transport.cancelled
        assert group.members == (0, 1)
        transport.cancel()
        groups = {"0": GroupMembers(members=(0, 2)), "other": GroupMembers(members=(2, 0))}
        communicator.edit(Membership(epoch=2, addresses=addresses, ranks={0: 0, 2: 1}, groups=groups))
        assert group.members == (2, 0)
        assert dist.get_world_size() == 2


# ---------------------------------------------------------------- faults


class Few:
    """A few workers as threads' worth of objects in one process, without torch's tables."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.transports = [SocketTransport(worker, f"unix:{folder}/{worker}", "secret") for worker in range(count)]
        self.communicators = [
            Communicator.join(transport, self.membership(0, range(count)), with_torch=False)
            for transport in self.transports
        ]

    def membership(self, epoch: int, workers: Sequence[int], addresses: dict[int, str] | None = None) -> Membership:
        everybody = tuple(sorted(workers))
        return Membership(
            epoch=epoch,
            addresses={worker: f"unix:{self.folder}/{worker}" for worker in everybody} | (addresses or {}),
            ranks={worker: rank for rank, worker in enumerate(everybody)},
            groups={
                "0": GroupMembers(members=everybody),
                "1": GroupMembers(members=everybody[:2], description="FIRST_TWO"),
                "2": GroupMembers(members=everybody[::-1]),
            },
        )

    def edit(self, membership: Membership) -> None:
        for worker in membership.ranks:
            self.transports[worker].cancel()
        for worker in membership.ranks:
            self.communicators[worker].drain()
            self.communicators[worker].edit(membership)

    def all_of(self, workers: Sequence[int], function: Callable[[Communicator], object]) -> None:
        """On a thread each; who waits in vain because of another's error comes after it."""
        with ThreadPoolExecutor(len(workers)) as pool:
            futures = [pool.submit(function, self.communicators[worker]) for worker in workers]
            done, waiting = wait(futures, 10, FIRST_EXCEPTION)
            failed = [future.exception() for future in done if future.exception() is not None]
            if failed or waiting:
                for transport in self.transports:
                    transport.cancel()
            if failed:
                raise failed[0]
            assert not waiting, "still blocked"

    def check(self, workers: Sequence[int]) -> None:
        def barriers(communicator: Communicator) -> None:
            for group in sorted(communicator.groups, key=lambda group: group.group_name):
                tensor = torch.tensor([float(communicator.transport.worker)])
                group.allreduce([tensor]).wait()
                assert tensor.item() == sum(group.members)

        self.all_of(workers, barriers)

    def close(self) -> None:
        for communicator, transport in zip(self.communicators, self.transports, strict=True):
            communicator.close()
            transport.close()


@pytest.fixture
def few(tmp_path: Path) -> Iterator[Few]:
    made = Few(tmp_path, 4)
    yield made
    made.close()


def silent(few: Few, name: str) -> socket.socket:
    """A peer that is connected to and says nothing."""
    quiet = socket.socket(socket.AF_UNIX)
    quiet.bind(str(few.folder / name))
    quiet.listen(100)
    return quiet


def test_a_newer_membership_ends_the_dials_of_the_one_before(few: Few) -> None:
    """Worker 3 is replaced by one that never answers; while it is dialled, the news comes that it is gone too."""
    few.check(range(4))
    with silent(few, "deaf"):
        first = few.membership(1, [0, 1, 2, 9], {9: f"unix:{few.folder}/deaf"})
        for worker in (0, 1, 2):
            few.transports[worker].cancel()
        for worker in (0, 1, 2):
            few.communicators[worker].edit(first)
        joins = [in_thread(few.communicators[worker].open_links) for worker in (0, 1, 2)]
        wait_until(lambda: all(few.transports[worker]._connections._dialling for worker in (0, 1, 2)))
        second = few.membership(2, [0, 1, 2])
        for worker in (0, 1, 2):
            few.transports[worker].cancel()
        for join in joins:
            with pytest.raises(EpochChanged):
                join()
        for worker in (0, 1, 2):
            few.communicators[worker].edit(second)
        few.all_of((0, 1, 2), lambda communicator: communicator.open_links())
        few.check((0, 1, 2))
        assert all(not t._connections._dialling and not t._connections._wakers for t in few.transports)


@pytest.mark.parametrize("kind", ["silent", "gone"])
def test_a_member_lost_before_its_first_use_is_named_with_address_and_group(
    few: Few, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialler, "ANSWER_LIMIT_S", 0.3)
    address = f"unix:{few.folder}/deaf"
    few.check(range(4))
    with contextlib.ExitStack() as stack:
        if kind == "silent":
            stack.enter_context(silent(few, "deaf"))
        membership = few.membership(1, [0, 1, 2, 9], {9: address})
        for worker in (0, 1, 2):
            few.transports[worker].cancel()
        for worker in (0, 1, 2):
            few.communicators[worker].edit(membership)
        for first_use in (few.communicators[0].open_links, few.communicators[2].barrier):
            with pytest.raises(PeerLost, match=rf"could not dial {address}: .*of group 0 \(.*\) of workers") as caught:
                first_use()
            assert caught.value.peer == 9, "the controller is told of it by this number"
        few.edit(few.membership(2, [0, 1, 2]))
        few.check((0, 1, 2))


def run_cycles(few: Few, cycles: int, seed: int) -> tuple[list[dict[str, int]], int]:
    """Remove and add workers in turns, link by ``open_links`` or by first use, in a part of the cycles.

    Returns:
        Counts of the process now and then, with all workers in; how often a group was used.
    """
    chance = random.Random(seed)
    counts: list[dict[str, int]] = []
    uses = 0
    epoch = max(transport.epoch for transport in few.transports)
    for cycle in range(cycles):
        living = sorted(chance.sample(range(4), 3)) if cycle % 2 else range(4)
        out = [worker for worker in range(4) if worker not in living]
        epoch += 1
        few.edit(few.membership(epoch, living))
        for worker in out:  # as a process that ended and comes again: no link is left at its end either
            few.transports[worker].cancel()
            few.transports[worker].keep_links(lambda peer, channel: False)
        if chance.random() < 0.1:
            uses += 1
            if chance.random() < 0.5:
                few.all_of(living, lambda communicator: communicator.open_links())
            few.check(living)
        if cycle % (cycles // 10) == 0:
            few.check(living)
            few.all_of(living, lambda communicator: communicator.open_links())
            gc.collect()
            wait_until(lambda: all(not t._connections._listener._strangers for t in few.transports))
            if len(counts) > 1:  # what the last dials used may be closing still, and their threads may be ending
                wait_until(lambda: open_descriptors() <= counts[1]["fds"] and running_threads() <= counts[1]["threads"])
            counts.append(
                {
                    "links": sum(len(transport._links) for transport in few.transports),
                    "fds": open_descriptors(),
                    "threads": running_threads(),
                    "lost": sum(len(transport._connections._lost) for transport in few.transports),
                    "rss": int(Path("/proc/self/statm").read_text().split()[1]) * 4,
                }
            )
    return counts, uses


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def running_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def check_flat(counts: list[dict[str, int]], rss_kib: int) -> None:
    for name in ("links", "fds", "threads"):
        seen = [count[name] for count in counts[1:]]
        assert max(seen) == seen[0], f"{name}: {seen}"
    assert counts[-1]["rss"] - counts[2]["rss"] <= rss_kib, [count["rss"] for count in counts]


def test_hundreds_of_edits_leave_links_descriptors_threads_and_memory_as_they_are(few: Few) -> None:
    counts, uses = run_cycles(few, 400, seed=3)
    assert uses > 20
    check_flat(counts, rss_kib=4096)


@pytest.mark.slow
def test_ten_thousand_edits_leave_links_descriptors_threads_and_memory_as_they_are(few: Few) -> None:
    counts, uses = run_cycles(few, 10_000, seed=4)
    assert uses > 500
    check_flat(counts, rss_kib=4096)
