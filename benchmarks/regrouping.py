"""Removing a killed worker from all groups of a grid, and seating a spare in its place: edits against rebuilding.

The groups are those that Megatron's ``initialize_model_parallel`` makes for TP 2 x PP 2 x DP N/4, on the elastic
backend in one job and on gloo in another; the jobs take turns. Worker 1 is killed by SIGKILL. Then

* ours: all groups with the dead worker are edited in place;
* partial rebuild: gloo groups with it are destroyed and made anew, and so is the world;
* full rebuild: everything is destroyed and made anew.

Then a process that was started before (and has imported Megatron) joins in the dead one's place. c10d's default group
cannot be joined, so a partial rebuild makes bare ``ProcessGroupGloo`` objects. Ours has no such limit, and makes the
spare's groups, known to torch, in the measured time. What the others edit by and the spare makes its groups from is a
``Membership``, which comes with the controller's message: that is made before the time runs.

A time runs on each rank from a common barrier after the death was noticed, and the largest counts. ``ops`` is, from
another barrier, the first all-reduce on every group that had the dead worker, with its result checked; ours opens all
missing links before it. Nothing else runs until all are done, not even Python's garbage collector.
"""

from __future__ import annotations

import gc
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from elastic_peers import open_transport
from megatron.core import parallel_state
from results import print_ratio, print_table
from shared_board import SharedBoard, wait_for_death

from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.runtime.communicator.membership import GroupMembers, Membership
from megatron_elas.testing.ranks import run_mortal_ranks

TENSOR_PARALLEL = PIPELINE_PARALLEL = 2
DEAD = 1
GLOO_LIMIT = timedelta(seconds=120)

Times = dict[str, float]


def measure_regrouping(sizes: Sequence[int], turns: int, scheme: str) -> None:
    """Remove and join for every number of workers."""
    for workers in sizes:
        taken: list[Times] = []
        for turn in range(turns):
            jobs = [(edit_rank, workers + 1), (rebuild_rank, workers + 2)]
            times: Times = {}
            for function, ranks in jobs if turn % 2 else reversed(jobs):
                times |= run_job(function, ranks, workers, scheme)
            taken.append(times)
        report(workers, taken)


def run_job(function: Callable[..., Times], ranks: int, workers: int, scheme: str) -> Times:
    """One job with one killed worker: the largest of each time over its ranks, in seconds."""
    survivors = workers - 1
    parties = {"addresses": workers + 1, "ready": ranks, "removed": survivors, "joined": workers, "end": ranks - 1}
    board = SharedBoard(parties, numbers=2)
    with tempfile.TemporaryDirectory(prefix="elas-bench-") as folder:
        ends = run_mortal_ranks(ranks, function, 60 + 6 * workers, (workers, Path(folder), scheme, board))
    for end in ends:
        if end.error is not None:
            raise end.error
    statuses = [end.status for end in ends]
    expected = [-signal.SIGKILL if rank == DEAD else 0 for rank in range(ranks)]
    if statuses != expected:
        sys.exit(f"of {workers} workers only worker {DEAD} was to be killed, but the ranks ended with {statuses}")
    told = [end.result for end in ends if end.result]
    for times in told:
        for name in times:
            if name.endswith("_ops"):
                times[name] += times[name.removesuffix("_ops")]
    return {name: max(times[name] for times in told if name in times) for name in {n for times in told for n in times}}


# ---------------------------------------------------------------- ours


def edit_rank(rank: int, ranks: int, workers: int, folder: Path, scheme: str, board: SharedBoard) -> Times:
    """A worker, or (the last rank) the spare, on the elastic backend."""
    times: Times = {}
    transport = open_transport(rank, ranks, folder, scheme, board)
    spare = workers
    if rank != spare:
        lists = join_elastic(communicator := Communicator(transport, range(workers)))
        for group in communicator.groups:
            check_group(group)
        communicator_of: Communicator | None = communicator
    else:
        lists, communicator_of = recorded_lists(workers), None
    addresses = {at: (folder / f"{at}.address").read_text() for at in range(ranks)}
    removed = plan_membership(1, lists, {at: at for at in range(workers) if at != DEAD}, addresses)
    joined = plan_membership(2, lists, {at: spare if at == DEAD else at for at in range(workers)}, addresses)
    die_here_or_go_on(rank, board)
    if communicator_of is not None:
        transport.cancel()  # as the announcement of a loss does
        communicator_of.drain()
        affected = [group for group in communicator_of.groups if DEAD in group.members]
        board.wait("removed")
        with timed(times, "edit"):
            communicator_of.edit(removed)
        board.wait("removed")
        with timed(times, "edit_ops"):
            with timed(times, "edit_links"):
                communicator_of.open_links()
            check_groups(affected)
        board.wait("removed")
        transport.cancel()
        communicator_of.drain()
    gc.collect()
    board.wait("joined")
    with timed(times, "join"):
        if communicator_of is None:
            communicator_of = Communicator.join(transport, joined)
        else:
            communicator_of.edit(joined)
    board.wait("joined")
    with timed(times, "join_ops"):
        with timed(times, "join_links"):
            communicator_of.open_links()
        check_groups(group for group in communicator_of.groups if spare in group.members)
    board.wait("end")
    communicator_of.close()
    transport.close()
    return times


def join_elastic(communicator: Communicator) -> list[tuple[int, ...]]:
    """Make the default group and Megatron's on the elastic backend; gives the ranks of each of Megatron's."""
    communicator.register_backend()
    rank = communicator.world.index(communicator.transport.worker)
    dist.init_process_group("elastic", store=dist.HashStore(), rank=rank, world_size=len(communicator.world))
    return make_megatron_groups()


def plan_membership(
    epoch: int, lists: Sequence[Sequence[int]], seats: Mapping[int, int], addresses: Mapping[int, str]
) -> Membership:
    """The message from which all edit: every group that had the dead worker.

    Args:
        epoch: That begins.
        lists: First ranks of Megatron's groups, which c10d numbers from 1 in this order.
        seats: Who has the seat of each first rank now; seats that nobody has are left out.
        addresses: Of everybody.
    """
    named = {"0": sorted(seats)} | {str(1 + at): ranks for at, ranks in enumerate(lists) if DEAD in ranks}
    members = {name: tuple(seats[rank] for rank in ranks if rank in seats) for name, ranks in named.items()}
    return Membership(
        epoch=epoch,
        addresses={worker: address for worker, address in addresses.items() if worker != DEAD},
        ranks={worker: at for at, worker in enumerate(seats.values())},
        groups={name: GroupMembers(members=workers) for name, workers in members.items() if workers},
    )


# ---------------------------------------------------------------- gloo


def rebuild_rank(rank: int, ranks: int, workers: int, folder: Path, scheme: str, board: SharedBoard) -> Times:
    """A worker, the spare (the last rank but one), or (the last rank) who keeps the store, on gloo."""
    spare, keeper = workers, workers + 1
    if rank == keeper:
        kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        board.numbers[1] = kept.port
        board.wait("ready")
        board.wait("end")
        return {}
    while not board.numbers[1]:
        time.sleep(0.01)
    store = dist.TCPStore("127.0.0.1", board.numbers[1], is_master=False, timeout=GLOO_LIMIT, wait_for_workers=False)
    times: Times = {}
    lists: list[tuple[int, ...]] = []
    if rank != spare:
        lists = join_gloo(store, "first", rank, workers)
    else:
        # What a spare can know beforehand: who is to be in which group.
        lists = recorded_lists(workers)
    affected = [list(ranks) for ranks in lists if DEAD in ranks and len(ranks) > 1]
    die_here_or_go_on(rank, board)
    seats = [spare if worker == DEAD else worker for worker in range(workers)]
    if rank != spare:
        remove_on_gloo(rank, workers, store, lists, board, times)
    gc.collect()
    board.wait("joined")
    with timed(times, "join_partial"):
        groups = []
        for at, ranks_of in enumerate([*affected, list(range(workers))]):
            members = [seats[r] for r in ranks_of]
            if rank in members:
                prefix = dist.PrefixStore(f"joined/{at}", store)
                groups.append(dist.ProcessGroupGloo(prefix, members.index(rank), len(members), GLOO_LIMIT))
    board.wait("joined")
    with timed(times, "join_partial_ops"):
        for group in groups:
            check_bare_group(group)
    board.wait("joined")
    del groups, group
    gc.collect()
    parallel_state.destroy_model_parallel()
    board.wait("joined")
    with timed(times, "join_full"):
        if rank != spare:
            with timed(times, "join_destroy"):
                dist.destroy_process_group()
        join_gloo(store, "joined", seats.index(rank), workers)
    struck = [group for group in groups_of_c10d() if DEAD in dist.get_process_group_ranks(group)]
    board.wait("joined")
    with timed(times, "join_full_ops"):
        check_groups(struck)
    board.wait("end")
    dist.destroy_process_group()
    return times


def remove_on_gloo(
    rank: int, workers: int, store: Any, lists: Sequence[Sequence[int]], board: SharedBoard, times: Times
) -> None:
    """Both ways to go on without the dead worker, one after the other."""
    left = [worker for worker in range(workers) if worker != DEAD]
    affected = [[r for r in ranks if r != DEAD] for ranks in lists if DEAD in ranks and len(ranks) > 1]
    broken = [g for g in groups_of_c10d()[1:] if DEAD in dist.get_process_group_ranks(g)]
    board.wait("removed")
    with timed(times, "partial"):
        for group in broken:
            dist.destroy_process_group(group)
        groups = [dist.new_group(ranks, timeout=GLOO_LIMIT) for ranks in (*affected, left)]
    board.wait("removed")
    with timed(times, "partial_ops"):
        check_groups([group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER])
    board.wait("removed")
    del groups, broken, group
    parallel_state.destroy_model_parallel()
    gc.collect()
    rank_of = {worker: at for at, worker in enumerate(left)}
    board.wait("removed")
    with timed(times, "full"):
        with timed(times, "destroy"):
            dist.destroy_process_group()
        init_gloo(dist.PrefixStore("removed", store), rank_of[rank], len(left))
        struck = []
        for ranks in lists:
            remaining = [rank_of[r] for r in ranks if r != DEAD]
            if remaining:
                group = dist.new_group(remaining, timeout=GLOO_LIMIT)
                if DEAD in ranks and group is not dist.GroupMember.NON_GROUP_MEMBER:
                    struck.append(group)
    board.wait("removed")
    with timed(times, "full_ops"):
        check_groups([dist.GroupMember.WORLD, *struck])
    board.wait("removed")


def join_gloo(store: Any, prefix: str, rank: int, workers: int) -> list[tuple[int, ...]]:
    """Make the default group and Megatron's on gloo; gives the ranks of each of Megatron's."""
    init_gloo(dist.PrefixStore(prefix, store), rank, workers)
    return make_megatron_groups()


def init_gloo(store: Any, rank: int, workers: int) -> None:
    """The default group."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=GLOO_LIMIT)


def groups_of_c10d() -> list[Any]:
    """This process's, in the order they were made; the default group is first."""
    return list(dist.distributed_c10d._world.pg_map)


def recorded_lists(workers: int) -> list[tuple[int, ...]]:
    """What ``make_megatron_groups`` gives, found out with a backend that does nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workers)
    lists = make_megatron_groups()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return lists


# ---------------------------------------------------------------- both


def make_megatron_groups() -> list[tuple[int, ...]]:
    """Megatron's own groups over the default one; gives the ranks of each, in the order they were made."""
    made: list[tuple[int, ...]] = []
    original = parallel_state.create_group

    def create_group(ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        made.append(tuple(ranks))
        return original(ranks, *args, **kwargs)

    parallel_state.create_group = create_group
    try:
        parallel_state.initialize_model_parallel(
            TENSOR_PARALLEL, PIPELINE_PARALLEL, distributed_timeout_minutes=2, create_gloo_process_groups=False
        )
    finally:
        parallel_state.create_group = original
    return made


def die_here_or_go_on(rank: int, board: SharedBoard) -> None:
    """Everybody is ready; the dead one is killed, and the others return when it is gone.

    From here on garbage is collected between what is timed and not in it: with all that Megatron imports it takes long.
    """
    gc.collect()
    gc.disable()
    if rank == DEAD:
        board.numbers[0] = os.getpid()
    board.wait("ready")
    if rank == DEAD:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_death(board.numbers[0])


@contextmanager
def timed(times: Times, name: str) -> Iterator[None]:
    """Keeps the seconds that the body takes."""
    started = time.perf_counter()
    yield
    times[name] = time.perf_counter() - started


def check_groups(groups: Iterable[Any]) -> None:
    """One all-reduce on each group of more than one."""
    for group in groups:
        check_group(group)


def check_group(group: Any) -> None:
    """An all-reduce gives what it must."""
    if group.size() > 1:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == group.size(), f"{group}: {tensor.item()} instead of {group.size()}"


def check_bare_group(group: Any) -> None:
    """``check_group`` without c10d."""
    if group.size() > 1:
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()
        assert tensor.item() == group.size()


# ---------------------------------------------------------------- telling


def report(workers: int, taken: Sequence[Times]) -> None:
    """A table of medians and the RESULT lines."""

    def cells(*names: str) -> list[str]:
        return [f"{statistics.median(times[name] for times in taken) * 1e3:.2f}" for name in names]

    print_table(
        f"{workers} workers, TP 2 x PP 2 x DP {workers // 4}, medians of {len(taken)}, in ms",
        ("ours", "+ ops", "partial", "+ ops", "full", "+ ops", "of which destroy"),
        {
            "remove": cells("edit", "edit_ops", "partial", "partial_ops", "full", "full_ops", "destroy"),
            "join": cells(
                "join", "join_ops", "join_partial", "join_partial_ops", "join_full", "join_full_ops", "join_destroy"
            ),
        },
    )
    links = cells("edit_links", "join_links")
    print(f"opening the missing links takes {links[0]} ms of ours in a removal, {links[1]} ms in a join")

    def ratio(name: str, upper: str, lower: str, less: str | None = None) -> None:
        above = [times[upper] - (times[less] if less else 0) for times in taken]
        print_ratio(f"{name}@{workers}", above, [times[lower] for times in taken])

    for ours, ops in (("edit", ""), ("edit_ops", "_ops")):
        ratio(f"{ours}_vs_full", f"full{ops}", ours)
        ratio(f"{ours}_vs_full_nodestroy", f"full{ops}", ours, "destroy")
        ratio(f"{ours}_vs_partial", f"partial{ops}", ours)
    ratio("join_ops_vs_full", "join_full_ops", "join_ops")
    ratio("join_ops_vs_full_nodestroy", "join_full_ops", "join_ops", "join_destroy")
    ratio("join_ops_vs_partial", "join_partial_ops", "join_ops")
