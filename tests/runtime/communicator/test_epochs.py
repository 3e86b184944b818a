"""Groups across epochs: edits in place, cancels in the middle of everything, and what is left afterwards."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP needs it, and importing it takes seconds: before the forks
import torch.distributed as dist
from torch import Tensor

from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.runtime.communicator.membership import GroupMembers
from megatron_elas.runtime.communicator.process_group import ElasticProcessGroup
from megatron_elas.runtime.transport.sockets import SocketTransport
from megatron_elas.spec.errors import EpochChanged, PeerLost
from tests.runtime.memberships import edit_to
from tests.runtime.workers import KILLED, introduce, run_workers, wait_until

pytestmark = pytest.mark.process

LIMIT_S = 5.0
"""From a cancel to the exception, whatever the peer does, on an overloaded machine."""
MIB_4 = 1 << 18
"""fp32 elements in a MiB."""


def make_barrier(parties: int) -> Barrier:
    """Stands for the control plane, which does not use the links."""
    return multiprocessing.get_context("fork").Barrier(parties, timeout=60)


@contextlib.contextmanager
def joined(
    worker: int, count: int, folder: Path, scheme: str = "unix"
) -> Iterator[tuple[SocketTransport, Communicator]]:
    """A worker with an elastic default group."""
    transport = introduce(worker, count, folder, scheme)
    communicator = Communicator(transport, range(count))
    communicator.register_backend()
    dist.init_process_group("elastic", store=dist.HashStore(), rank=worker, world_size=count)
    yield transport, communicator
    transport.cancel()
    communicator.close()
    transport.close()


def check_sum(group: ElasticProcessGroup | None, workers: list[int], own: int) -> None:
    for length in (3, 100_000):
        tensor = torch.full((length,), float(own + 1))
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.full((length,), float(sum(workers) + len(workers))))


# ---------------------------------------------------------------- edits


def test_groups_shrink_from_four_to_two_while_everybody_holds_them(tmp_path: Path) -> None:
    ready = {2: make_barrier(2), 3: make_barrier(3)}

    def body(own: int) -> object:
        with joined(own, 4, tmp_path) as (transport, communicator):
            everybody = dist.new_group([0, 1, 2, 3], group_desc="everybody")
            pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
            pair = pairs[own % 2]
            backwards = dist.new_group([2, 3, 0], sort_ranks=False)
            module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
            identities = [id(group) for group in communicator.groups]
            check_sum(everybody, [0, 1, 2, 3], own)
            check_sum(pair, [own % 2, own % 2 + 2], own)
            dist.barrier()

            for epoch, living in ((1, [0, 2, 3]), (2, [0, 2])):
                if own not in living:
                    return KILLED
                transport.cancel()
                communicator.drain()
                ready[len(living)].wait()
                started = time.perf_counter()
                dense = {worker: rank for rank, worker in enumerate(living)}
                edit_to(communicator, epoch, living)
                print(f"edit of {len(communicator.groups)} groups: {(time.perf_counter() - started) * 1e6:.0f} us")

                assert [id(group) for group in communicator.groups] == identities
                assert communicator.world == tuple(living)
                assert dist.get_rank() == living.index(own)
                assert dist.get_world_size() == len(living)
                assert dist.get_process_group_ranks(everybody) == list(range(len(living)))
                assert everybody.members == tuple(living)
                assert everybody.original_members == (0, 1, 2, 3)
                assert everybody.description == "everybody"
                assert dist.get_global_rank(pair, 0) == dense[pair.members[0]]
                assert dist.get_group_rank(pair, dist.get_rank()) == pair.rank()
                if own in (0, 2):
                    assert dist.get_process_group_ranks(pair) == [dense[0], dense[2]]
                    assert backwards.members == ((2, 3, 0) if epoch == 1 else (2, 0))
                    assert dist.get_process_group_ranks(backwards) == [dense[w] for w in backwards.members]
                    if own == 0:
                        dist.send(torch.ones(3), dense[2], group=pair)
                    else:
                        got = torch.zeros(3)
                        assert dist.recv(got, dense[0], group=pair) == dense[0]
                if own in backwards.members:
                    check_sum(backwards, list(backwards.members), own)
                check_sum(everybody, living, own)
                check_sum(None, living, own)
                check_sum(pair, list(pair.members), own)
                fresh = dist.new_group([0, len(living) - 1])  # by the new ranks
                if own in (living[0], living[-1]):
                    assert fresh.members == (living[0], living[-1])
                    check_sum(fresh, [living[0], living[-1]], own)
                module.zero_grad()
                module(torch.tensor([[1.0, float(own)]])).sum().backward()
                mean = sum(living) / len(living)
                torch.testing.assert_close(module.module.weight.grad, torch.tensor([[1.0, mean]]))
                identities = [id(group) for group in communicator.groups]
        return "done"

    assert run_workers(4, body) == ["done", KILLED, "done", KILLED]


def test_two_groups_become_one_on_a_common_channel(tmp_path: Path) -> None:
    ready = make_barrier(4)

    def body(own: int) -> bool:
        with joined(own, 4, tmp_path) as (transport, communicator):
            group = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][own // 2]
            check_sum(group, list(group.members), own)
            transport.cancel()
            ready.wait()
            fused = {group.group_name: GroupMembers(members=(0, 1, 2, 3), channel=1 << 20)}
            edit_to(communicator, 1, range(4), fused)
            assert group.channel == 1 << 20
            assert not transport._links, "links of the group of two are of no use any more"
            ready.wait()  # only now may a peer open the next ones
            check_sum(group, [0, 1, 2, 3], own)
            transport.cancel()
            ready.wait()
            edit_to(communicator, 2, range(4))
            assert set(transport._links) == {(peer, 1 << 20) for peer in range(4) if peer != own}
            ready.wait()
        return True

    assert all(run_workers(4, body))


def test_an_edit_forgets_who_was_received_from(tmp_path: Path) -> None:
    with joined(0, 1, tmp_path) as (_, communicator):
        group = communicator.open_group("other", [0, 1, 2])
        group.recv([torch.zeros(1)], 2)
        group.edit([0, 1])
        assert not group._mailbox.inboxes, "they go by rank, and ranks change"


def test_hundred_edits_leave_no_descriptor_or_thread(tmp_path: Path) -> None:
    ready = make_barrier(3)

    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def sockets() -> int:
        kinds = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile, or the listing's own
                kinds.append(os.readlink(f"/proc/self/fd/{name}").partition(":")[0])
        return kinds.count("socket")

    def body(own: int) -> bool:
        inherited = sockets()
        with joined(own, 3, tmp_path) as (transport, communicator):
            group = dist.new_group([0, 1, 2])
            after_ten = (0, 0)
            for epoch in range(1, 101):
                work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
                check_sum(group, list(group.members), own)
                work.wait()
                if group.size() > 1:
                    dist.isend(torch.ones(5), group.members[(group.rank() + 1) % group.size()], group=group)
                ready.wait()
                transport.cancel()
                communicator.drain()
                ready.wait()
                apart = epoch % 3
                members = (own,) if own == apart else tuple(at for at in range(3) if at != apart)
                edit_to(communicator, epoch, range(3), {group.group_name: GroupMembers(members=members)})
                if epoch == 10:
                    ready.wait()  # a peer that is ahead would open the next links
                    wait_until(lambda: sockets() == inherited + 1)  # where it listens
                    after_ten = counts()
                    ready.wait()
            ready.wait()
            wait_until(lambda: counts() == after_ten)
            ready.wait()
        return True

    assert all(run_workers(3, body))


# ---------------------------------------------------------------- cancels


def blocking_operations(group: Any, victim: int) -> dict[str, Callable[[], object]]:
    """Operations that the victim (by rank in ``group``) does not take part in."""
    # made before: a cancel cannot interrupt the making of a tensor
    small, large, huge = torch.ones(10), torch.ones(3 * MIB_4), torch.ones(64 * MIB_4)

    def wait_for_queued() -> None:
        works = [dist.all_reduce(torch.ones(100_000), group=group, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()

    def send_and_receive() -> None:
        dist.send(huge[: 16 * MIB_4], victim, group=group)
        dist.recv(small, victim, group=group)

    return {
        "all_reduce": lambda: dist.all_reduce(small, group=group),
        "all_reduce of 64 MiB": lambda: dist.all_reduce(huge, group=group),
        "asynchronous all_reduce": wait_for_queued,
        "future": lambda: dist.all_reduce(small, group=group, async_op=True).get_future().wait(),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.ones(9), torch.ones(27), group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(large, torch.ones(MIB_4), group=group),
        "broadcast": lambda: dist.broadcast(small, victim, group=group),
        "barrier": lambda: dist.barrier(group=group),
        "objects": lambda: dist.all_gather_object([None] * 3, "x", group=group),
        "recv": lambda: dist.recv(small, victim, group=group),
        "irecv": lambda: dist.irecv(small, victim, group=group).wait(),
        "send, then recv": send_and_receive,
    }


@pytest.mark.parametrize("state", ["absent", "stopped", "dead"])
def test_every_blocked_operation_ends_when_cancelled_and_the_links_work_on(tmp_path: Path, state: str) -> None:
    victim = 2
    ready = make_barrier(2)
    all_ready = make_barrier(3)

    def survivor(own: int, victim_pid: int, transport: SocketTransport, communicator: Communicator) -> dict[str, float]:
        group, pair = communicator.groups[1:3]
        took_ms = {}
        for epoch, (name, operation) in enumerate(blocking_operations(group, victim).items(), start=1):
            cancelled_at: list[float] = []

            def cancel(cancelled_at: list[float] = cancelled_at) -> None:
                cancelled_at.append(time.perf_counter())
                transport.cancel()

            if epoch == 1 and own == 0 and state != "absent":
                os.kill(victim_pid, signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
            timer = threading.Timer(0.03, cancel)
            timer.start()
            with pytest.raises(EpochChanged) as caught:
                operation()
            ended_at = time.perf_counter()
            if state != "dead":
                assert not isinstance(caught.value, PeerLost), caught.value
            timer.join()
            took_ms[name] = (ended_at - cancelled_at[0]) * 1e3
            started = time.perf_counter()
            communicator.drain()
            assert time.perf_counter() - started < LIMIT_S
            ready.wait()
            lost = [victim] if state == "dead" else []
            transport.adopt(epoch, lost=lost)
            check_sum(pair, [0, 1], own)
            # peers must have left the old epoch before the next one is cancelled
            ready.wait()
        return took_ms

    def body(own: int) -> object:
        with joined(own, 3, tmp_path) as (transport, communicator):
            dist.new_group([0, 1, 2])
            if own == victim:
                dist.new_group([0, 1])
                pids: list[Any] = [None] * 3
                dist.all_gather_object(pids, os.getpid())
                all_ready.wait()  # stopped or killed here
                result: object = "woke up"
                transport.cancel()
            else:
                dist.new_group([0, 1])
                pids = [None] * 3
                dist.all_gather_object(pids, os.getpid())
                check_sum(communicator.groups[2], [0, 1], own)
                result = survivor(own, pids[victim], transport, communicator)
                ready.wait()
                if state == "dead":
                    return result
                if state == "stopped" and own == 0:
                    os.kill(pids[victim], signal.SIGCONT)
                transport.cancel()
                all_ready.wait()
            communicator.drain()
            all_ready.wait()
            transport.adopt(100, lost=())
            check_sum(communicator.groups[1], [0, 1, 2], own)
            all_ready.wait()
        return result

    results = run_workers(3, body)
    assert results[victim] == (KILLED if state == "dead" else "woke up")
    for took_ms in results[:victim]:
        print(state, {name: round(value, 2) for name, value in took_ms.items()})
        assert max(took_ms.values()) < LIMIT_S * 1e3, took_ms


@pytest.mark.parametrize(("scheme", "rounds"), [("unix", 100), ("tcp", 40)])
def test_random_aborts_give_no_wrong_result(tmp_path: Path, scheme: str, rounds: int) -> None:
    ready = make_barrier(4)

    def disturb(own: int, round_number: int, group: Any) -> None:
        """Run operations until the epoch ends."""
        common = random.Random(round_number)  # the same on all
        absent = common.choice([-1, -1, 0, 1, 2, 3])
        while True:
            kind = common.choice(["sum", "queued", "gather", "around", "scatter", "objects"])
            length = common.choice([1, 500, 40_000, 400_000])
            leaves = common.random() < 0.2
            if leaves and own == absent:
                return
            if kind == "sum":
                dist.all_reduce(torch.ones(length), group=group)
            elif kind == "queued":
                works = [dist.all_reduce(torch.ones(length), group=group, async_op=True) for _ in range(3)]
                for work in works:
                    work.wait()
            elif kind == "gather":
                dist.all_gather_into_tensor(torch.ones(4 * length), torch.ones(length), group=group)
            elif kind == "scatter":
                dist.reduce_scatter_tensor(torch.ones(length), torch.ones(4 * length), group=group)
            elif kind == "around":
                dist.isend(torch.ones(length), (own + 1) % 4, group=group)
                dist.recv(torch.ones(length), (own - 1) % 4, group=group)
            else:
                dist.all_gather_object([None] * 4, "x" * length, group=group)

    def verify(own: int, epoch: int, group: Any) -> None:
        work_on = torch.arange(30_000).remainder(17).float()
        summed = work_on + own + epoch
        queued = summed.clone()
        work = dist.all_reduce(queued, group=group, async_op=True)
        dist.all_reduce(summed, group=group)
        work.wait()
        expected = work_on * 4 + 6 + 4 * epoch
        assert torch.equal(summed, expected)
        assert torch.equal(queued, expected)
        got = torch.empty(50_000)
        dist.isend(torch.full((50_000,), float(own + epoch)), (own + 1) % 4, group=group)
        dist.recv(got, (own - 1) % 4, group=group)
        assert torch.equal(got, torch.full((50_000,), float((own - 1) % 4 + epoch)))

    def body(own: int) -> object:
        mine = random.Random(1000 + own)
        delays_ms = []
        with joined(own, 4, tmp_path, scheme) as (transport, communicator):
            group = dist.new_group([0, 1, 2, 3])
            verify(own, 0, group)
            fds = sorted(link.fd for link in transport._links.values())
            for epoch in range(1, rounds + 1):
                cancelled_at: list[float] = []

                def cancel(cancelled_at: list[float] = cancelled_at) -> None:
                    cancelled_at.append(time.perf_counter())
                    transport.cancel()

                timer = threading.Timer(mine.random() * 0.012, cancel)
                timer.start()
                with contextlib.suppress(EpochChanged):
                    disturb(own, epoch, group)
                    timer.join()
                ended_at = time.perf_counter()
                timer.join()
                delays_ms.append((ended_at - cancelled_at[0]) * 1e3)
                communicator.drain()
                ready.wait()
                transport.adopt(epoch, lost=())
                verify(own, epoch, group)
            assert {link.fd for link in transport._links.values()} >= set(fds), "a link was dialled anew"
            ready.wait()
        delays_ms.sort()
        return delays_ms[len(delays_ms) // 2], delays_ms[-1]

    for median_ms, worst_ms in run_workers(4, body, timeout_s=110):
        print(f"cancel to exception: median {median_ms:.2f} ms, worst {worst_ms:.2f} ms")
        assert worst_ms < LIMIT_S * 1e3


# ---------------------------------------------------------------- receives and queued operations


def test_a_receive_waits_only_when_asked_to_and_keeps_the_order(tmp_path: Path) -> None:
    ready = make_barrier(2)

    def body(own: int) -> bool:
        with joined(own, 2, tmp_path):
            if own == 1:
                tensors: list[Tensor] = [torch.zeros(4) for _ in range(3)]
                works = [dist.irecv(tensor, 0) for tensor in tensors]
                assert not any(work.is_completed() for work in works)
                ready.wait()  # nothing was sent before it
                works[2].wait()
                assert all(work.is_completed() and work.is_success() for work in works)
                assert [tensor[0].item() for tensor in tensors] == [0.0, 1.0, 2.0]
            else:
                ready.wait()
                for at in range(3):
                    dist.send(torch.full((4,), float(at)), 1)
            dist.barrier()
            ready.wait()
        return True

    assert all(run_workers(2, body))


def test_what_was_asked_for_in_an_old_epoch_fails_in_the_new_one(tmp_path: Path) -> None:
    ready = make_barrier(2)

    def body(own: int) -> bool:
        with joined(own, 2, tmp_path) as (transport, communicator):
            check_sum(None, [0, 1], own)
            received = dist.irecv(torch.zeros(4), 1 - own)
            queued = dist.all_reduce(torch.ones(4), async_op=True) if own == 0 else None
            transport.cancel()
            communicator.drain()
            ready.wait()
            transport.adopt(1, lost=())
            with pytest.raises(EpochChanged, match="dropped when its epoch ended"):
                received.wait()
            if queued is not None:
                assert queued.is_completed()
                assert isinstance(queued.exception(), EpochChanged)
                with pytest.raises(EpochChanged):
                    queued.wait()
            check_sum(None, [0, 1], own)
            ready.wait()
        return True

    assert all(run_workers(2, body))


def test_a_large_send_ends_when_it_is_taken_and_small_ones_behind_it_keep_their_order(tmp_path: Path) -> None:
    ready = make_barrier(2)
    large = 16 << 20  # far more than sockets hold

    def body(own: int) -> bool:
        with joined(own, 2, tmp_path):
            if own == 0:
                works = [dist.isend(torch.full((large // 4,), 5.0), 1), dist.isend(torch.full((3,), 6.0), 1)]
                assert not any(work.is_completed() for work in works)
                with pytest.raises(TimeoutError, match=r"was not taken by its receiver within 0\.05 s"):
                    works[0].wait(timedelta(seconds=0.05))
                ready.wait()
                assert all(work.wait() for work in works)
                assert all(work.is_success() for work in works)
            else:
                ready.wait()
                first, second = torch.empty(large // 4), torch.empty(3)
                dist.recv(first, 0)
                dist.recv(second, 0)
                assert (first == 5).all() and (second == 6).all()
            # both at once, each sends first
            theirs = torch.empty(large // 4)
            sent = dist.isend(torch.full((large // 4,), float(own)), 1 - own)
            dist.recv(theirs, 1 - own)
            sent.wait()
            assert (theirs == 1 - own).all()
            ready.wait()
        return True

    assert all(run_workers(2, body))


def test_a_large_send_ends_with_its_epoch_and_the_next_one_goes_through(tmp_path: Path) -> None:
    ready = make_barrier(2)
    large = 16 << 20

    def body(own: int) -> bool:
        with joined(own, 2, tmp_path) as (transport, communicator):
            sent: list[Any] = []
            if own == 0:
                sent = [dist.isend(torch.ones(large // 4), 1), dist.isend(torch.ones(1), 1)]
            ready.wait()
            transport.cancel()
            for work in sent:
                with pytest.raises(EpochChanged):
                    work.wait()
            communicator.drain()
            ready.wait()
            transport.adopt(1, lost=())
            got = torch.empty(large // 4)
            if own == 0:
                dist.send(torch.full((large // 4,), 3.0), 1)
            else:
                dist.recv(got, 0)
                assert (got == 3).all()
            ready.wait()
        return True

    assert all(run_workers(2, body))


def test_an_operation_queued_behind_one_that_failed_sends_nothing(tmp_path: Path) -> None:
    """Its frames would be taken for those of the operation that others are still in."""
    ready = make_barrier(4)

    def body(own: int) -> bool:
        with joined(own, 4, tmp_path) as (transport, communicator):
            check_sum(None, [0, 1, 2, 3], own)
            ready.wait()
            if own == 3:  # its death, of which only worker 2 knows yet
                transport._links[2, communicator.groups[0].channel].close("broken by the test")
            ready.wait()
            if own == 2:
                # Cut before it has sent its second message to worker 0, which is the next thing that it sends there.
                queued = [
                    dist.all_reduce(torch.ones(3), async_op=True),
                    dist.broadcast(torch.ones(3), 2, async_op=True),
                ]
                for work in queued:
                    with pytest.raises(PeerLost):
                        work.wait()
            ready.wait()
            if own < 2:
                timer = threading.Timer(0.1, transport.cancel)
                timer.start()
                with pytest.raises(EpochChanged):
                    dist.all_reduce(torch.ones(3))
                timer.join()
            ready.wait()
        return True

    assert all(run_workers(4, body))


def test_errors_name_the_group_the_peer_and_the_epoch(tmp_path: Path) -> None:
    ready = make_barrier(2)

    def body(own: int) -> bool:
        with joined(own, 2, tmp_path):
            dist.new_group([0, 1], group_desc="data-parallel")
            group = dist.new_group([0, 1], group_desc="tensor-parallel")
            check_sum(group, [0, 1], own)
            if own == 0:
                ready.wait()
                return True
            ready.wait()
            with pytest.raises(PeerLost, match=r"link to worker 0 broke: .*epoch 0") as caught:
                dist.all_reduce(torch.ones(4), group=group)
            assert "all_reduce of group 2 (tensor-parallel) of workers [0, 1], epoch 0" in caught.value.__notes__[0]
            with pytest.raises(EpochChanged):  # poisoned until the next epoch
                dist.barrier()
        return True

    assert all(run_workers(2, body))
