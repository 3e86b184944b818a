"""One communicator per process: c10d's view of it, quiet modes, Megatron's groups."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_elas.runtime.communicator.buffers import as_bytes
from megatron_elas.runtime.communicator.channels import FIRST_FREE, POINT_TO_POINT, channel_of
from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.runtime.communicator.signatures import pack
from megatron_elas.runtime.transport.base import Part
from megatron_elas.runtime.transport.program import Program
from megatron_elas.runtime.transport.sockets import SocketTransport
from megatron_elas.spec.errors import EpochChanged
from tests.runtime.communicator.test_epochs import check_sum, joined, make_barrier
from tests.runtime.workers import KILLED, introduce, run_workers, wait_until


def test_channels_follow_from_names() -> None:
    assert [channel_of(name) for name in ("0", "17")] == [0, 17]
    hashed = channel_of("a3f0c1")
    assert hashed == channel_of("a3f0c1")
    assert 1 << 31 <= hashed < POINT_TO_POINT
    assert hashed + POINT_TO_POINT < FIRST_FREE


def test_communicators_follow_each_other_in_one_process(tmp_path: Path) -> None:
    for _ in range(3):
        with joined(0, 1, tmp_path) as (_, communicator):
            group = dist.new_group([0])
            assert communicator.groups == [dist.GroupMember.WORLD, group]
            dist.destroy_process_group(group)
            assert communicator.groups == [dist.GroupMember.WORLD]
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [1, 1, 1]
        assert not dist.is_initialized()
        assert not communicator.groups
        for file in tmp_path.iterdir():
            file.unlink()


def test_a_closed_communicator_makes_no_groups(tmp_path: Path) -> None:
    with joined(0, 1, tmp_path):
        pass
    with pytest.raises(RuntimeError, match="was closed"):
        dist.init_process_group("elastic", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def test_a_world_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    transport = SocketTransport(4, f"unix:{tmp_path}/4", "secret")
    with pytest.raises(ValueError, match="worker 4 is not in the world"):
        Communicator(transport, [1, 2])
    communicator = Communicator(transport, [4, 5])
    communicator.register_backend()
    with pytest.raises(ValueError, match="world_size is 3, but the communicator has 2"):
        dist.init_process_group("elastic", store=dist.HashStore(), rank=0, world_size=3)
    with pytest.raises(ValueError, match="rank 1 is worker 5, not 4"):
        dist.init_process_group("elastic", store=dist.HashStore(), rank=1, world_size=2)
    communicator.close()
    transport.close()


# ---------------------------------------------------------------- quiet modes


def own_slot_only(own: list[float], before: float, size: int) -> list[float]:
    """What a gather into one tensor leaves there when it is completed locally."""
    rank = dist.get_rank()
    return [before] * (len(own) * rank) + own + [before] * (len(own) * (size - 1 - rank))


def local_results(size: int) -> None:
    """Every collective of a silent group of ``size`` gives what one member alone can know."""
    tensor = torch.arange(4.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [0, 1, 2, 3]
    work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    assert tensor.tolist() == [0, 1, 2, 3]
    slots = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(slots, tensor)
    assert all(slot.tolist() == [0, 1, 2, 3] for slot in slots)
    whole = torch.full((4 * size,), 7.0)
    dist.all_gather_into_tensor(whole, tensor)
    assert whole.tolist() == own_slot_only([0, 1, 2, 3], 7, size), "the others' slots may hold their parameters"
    wholes = [torch.full((4 * size,), 7.0) for _ in range(2)]
    group = dist.GroupMember.WORLD
    group.all_gather_single_coalesced(wholes, [tensor, tensor + 1]).wait()
    assert [one.tolist() for one in wholes] == [own_slot_only([at, 1 + at, 2 + at, 3 + at], 7, size) for at in (0, 1)]
    share = torch.zeros(2)
    dist.reduce_scatter_tensor(share, torch.arange(2.0 * size))
    assert share.tolist() == [2 * dist.get_rank(), 2 * dist.get_rank() + 1]
    objects = [None] * size
    dist.all_gather_object(objects, "mine")
    assert objects == ["mine"] * size
    dist.broadcast(tensor, size - 1)
    dist.barrier()
    with pytest.raises(EpochChanged, match="muted"):
        dist.send(tensor, 1 - dist.get_rank())
    with pytest.raises(EpochChanged, match="muted"):
        dist.recv(tensor, 1 - dist.get_rank())


@pytest.mark.process
def test_a_muted_worker_talks_to_nobody(tmp_path: Path) -> None:
    ready = make_barrier(2)

    def body(own: int) -> bool:
        with joined(own, 2, tmp_path) as (transport, communicator):
            if own == 0:
                communicator.muted = True
                local_results(2)
                assert not transport._links
                communicator.muted = False
            ready.wait()
            check_sum(None, [0, 1], own)
            ready.wait()
        return True

    assert all(run_workers(2, body))


@pytest.mark.process
def test_a_tolerant_worker_finishes_locally_and_remembers_why(tmp_path: Path) -> None:
    ready = make_barrier(2)

    def body(own: int) -> bool:
        with joined(own, 2, tmp_path) as (transport, communicator):
            check_sum(None, [0, 1], own)
            if own == 1:
                ready.wait()
                transport.cancel()
                transport.adopt(1, lost=())
                check_sum(None, [0, 1], own)
                ready.wait()
                return True
            communicator.tolerant = True
            tensor = torch.arange(3_000_000.0)
            transport.cancel()
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.arange(3_000_000.0))
            first = communicator.pending_error
            assert isinstance(first, EpochChanged)
            local_results(2)
            assert communicator.pending_error is first
            ready.wait()
            transport.adopt(1, lost=())
            communicator.clear_pending()
            communicator.tolerant = False
            check_sum(None, [0, 1], own)
            transport.cancel()
            with pytest.raises(EpochChanged):
                dist.barrier()
            ready.wait()
        return True

    assert all(run_workers(2, body))


@pytest.mark.process
def test_a_reduction_cut_half_way_gives_back_the_own_value_when_tolerated(tmp_path: Path) -> None:
    """The peer joins, sends its part, and stops; without a copy the tensor would be half reduced."""
    ready = make_barrier(2)

    def body(own: int) -> bool:
        with joined(own, 2, tmp_path) as (transport, communicator):
            check_sum(None, [0, 1], own)
            if own == 1:
                run = transport.run

                def only_the_first_rounds(channel: int, tag: int, program: Program, *args: object) -> None:
                    assert len(program.rounds) > 3
                    run(channel, tag, program._replace(rounds=program.rounds[:-1]), *args)
                    raise EpochChanged("stopped by the test")

                transport.run = only_the_first_rounds
                with pytest.raises(EpochChanged):
                    dist.all_reduce(torch.ones(3_000_000))
                transport.close()
                ready.wait()
                return True
            communicator.tolerant = True
            tensor = torch.arange(3_000_000.0)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.arange(3_000_000.0))
            assert "worker 1" in str(communicator.pending_error)
            ready.wait()
        return True

    assert all(run_workers(2, body))


@pytest.mark.process
def test_a_gather_into_one_tensor_cut_half_way_leaves_the_others_slots_as_they_were(tmp_path: Path) -> None:
    """The peer stops after some of its shard has arrived; kept parameters must not become a mixture."""
    ready = make_barrier(2)
    length = 3_000_000

    def body(own: int) -> bool:
        with joined(own, 2, tmp_path) as (transport, communicator):
            check_sum(None, [0, 1], own)
            whole = torch.full((2 * length,), 7.0)
            share = whole[own * length : (own + 1) * length]  # in place, as Megatron gathers parameters
            share.fill_(own)
            if own == 1:
                group = communicator.groups[0]
                group._begin(pack("all_gather", torch.float32, count=2 * length), transport.epoch)
                (link,) = transport._links.values()
                transport.post(group.channel, group._tag, Part(0, as_bytes(share)))
                wait_until(lambda: link.queued < share.nbytes - (3 << 20))  # more has gone than fits into the socket
                transport.close()
                ready.wait()
                return True
            communicator.tolerant = True
            dist.all_gather_into_tensor(whole, share)
            assert "worker 1" in str(communicator.pending_error)
            assert torch.equal(whole[:length], torch.full((length,), 0.0))
            assert torch.equal(whole[length:], torch.full((length,), 7.0))
            ready.wait()
        return True

    assert all(run_workers(2, body))


# ---------------------------------------------------------------- over everybody


@pytest.mark.process
def test_rows_and_barriers_go_over_the_first_group_without_torchs_default_one(tmp_path: Path) -> None:
    ready = make_barrier(3)
    arrived = multiprocessing.get_context("fork").Value("i", 0)

    def body(own: int) -> bool:
        transport = introduce(own, 3, tmp_path)
        communicator = Communicator(transport, range(3))
        group = communicator.open_group("everybody", [2, 0, 1])
        communicator.open_group("another", [own])
        rows = communicator.all_gather_rows((own, -own, (1 << 62) + own))
        assert rows == [[worker, -worker, (1 << 62) + worker] for worker in (2, 0, 1)]
        for turn in range(1, 4):
            with arrived.get_lock():
                arrived.value += 1
            communicator.barrier()
            assert arrived.value >= 3 * turn
            communicator.barrier()
        communicator.muted = True
        communicator.barrier()
        assert communicator.all_gather_rows([own]) == [[own]] * 3
        communicator.muted = False
        ready.wait()
        transport.cancel()
        with pytest.raises(EpochChanged):
            communicator.barrier()
        with pytest.raises(EpochChanged):
            communicator.all_gather_rows([own])
        communicator.tolerant = True
        assert communicator.all_gather_rows([own]) == [[own]] * 3
        assert communicator.pending_error is not None
        communicator.clear_pending()
        communicator.tolerant = False
        ready.wait()
        if own == 1:
            transport.close()
            return True
        group.edit([2, 0])
        transport.adopt(1, lost=[1])
        assert communicator.all_gather_rows([own]) == [[2], [0]]
        communicator.close()
        transport.close()
        return True

    assert all(run_workers(3, body))


# ---------------------------------------------------------------- Megatron


@pytest.mark.process
def test_megatron_builds_all_its_groups_over_it(tmp_path: Path) -> None:
    from megatron.core import parallel_state  # before the fork: it takes seconds

    ready = make_barrier(4)

    def body(own: int) -> int:
        with joined(own, 4, tmp_path) as (transport, communicator):
            started = time.perf_counter()
            parallel_state.initialize_model_parallel(1, 2, create_gloo_process_groups=False)
            print(f"{len(communicator.groups)} groups in {(time.perf_counter() - started) * 1e3:.1f} ms")
            assert not transport._links
            ready.wait()  # before it the first to be done would link up with the others
            data = parallel_state.get_data_parallel_group()
            pipeline = parallel_state.get_pipeline_model_parallel_group()
            model = parallel_state.get_model_parallel_group()
            assert data.members == ((0, 1) if own < 2 else (2, 3))
            assert pipeline.members == ((0, 2) if own in (0, 2) else (1, 3))
            for group in (data, pipeline, model, None):
                check_sum(group, list(group.members) if group else [0, 1, 2, 3], own)
            assert parallel_state.get_pipeline_model_parallel_rank() == own // 2
            if own < 2:
                dist.send(
                    torch.full((3,), float(own)), parallel_state.get_pipeline_model_parallel_next_rank(), pipeline
                )
            else:
                got = torch.zeros(3)
                dist.recv(got, parallel_state.get_pipeline_model_parallel_prev_rank(), pipeline)
                assert got.tolist() == [own - 2.0] * 3
            # worker 1 leaves: its cell's pipeline is one stage, the data-parallel group of stage 0 one member
            transport.cancel()
            communicator.drain()
            ready.wait()
            if own == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            for group in communicator.groups:
                group.edit([worker for worker in group.members if worker != 1])
            communicator.renumber({0: 0, 2: 1, 3: 2})
            transport.adopt(1, lost=[1])
            for group in (data, model, None):
                check_sum(group, list(group.members) if group else [0, 2, 3], own)
            return len({group.channel for group in communicator.groups}) - len(communicator.groups)

    assert run_workers(4, body) == [0, KILLED, 0, 0]
