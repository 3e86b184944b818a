"""The exact calls on ``ProcessGroupNCCL`` over a group's life. ``test_signatures`` checks the fake's signatures."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, BroadcastOptions, GatherOptions, ReduceOptions, ScatterOptions

from megatron_elas.runtime.communicator.accelerators.failures import Failure
from megatron_elas.runtime.communicator.accelerators.group import DeviceProcessGroup
from megatron_elas.runtime.communicator.accelerators.nccl import WATCHDOG_OFF, NcclDriver
from megatron_elas.runtime.communicator.accelerators.rendezvous import Meeting
from megatron_elas.runtime.communicator.channels import INTRODUCTION
from megatron_elas.spec.errors import EpochChanged, PeerLost
from tests.runtime.communicator.accelerators.fakes import FakeNccl, Record, nccl_of
from tests.runtime.communicator.accelerators.job import DEVICE, Member, on_device, running
from tests.runtime.workers import wait_until

ALL = {"all": [0, 1, 2], "pair": [0, 1], "other": [0, 2]}


def reduce_on(name: str) -> Callable[[Member], Any]:
    return lambda member: member.all_reduce(name)


def enter(epoch: int, members: dict[str, list[int]], lost: tuple[int, ...] = ()) -> Callable[[Member], None]:
    return lambda member: member.change(epoch, members, lost)


@pytest.fixture(autouse=True)
def keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WATCHDOG_OFF:
        monkeypatch.delenv(name, raising=False)


# ---------------------------------------------------------------- making


def test_an_inner_group_is_made_with_the_first_device_tensor_and_not_before(tmp_path: Path) -> None:
    with running(3, tmp_path, ALL) as job:
        job.each([0, 1, 2], lambda member: member.groups["all"].allreduce([torch.ones(2)]).wait())
        assert not any(member.record.calls for member in job.members)
        job.each([0, 1, 2], reduce_on("all"))
        for rank, member in enumerate(job.members):
            assert member.record.calls == [
                ("make", 0, rank, 3, 0),
                ("connect", 0, "meta:0"),
                ("allreduce", 0, 1),
                ("allreduce", 0, 1),
            ]
            inner = member.record.groups[0]
            assert inner.bound_device_id == DEVICE
            assert inner.options.global_ranks_in_group == [0, 1, 2]
        ids = {member.record.groups[0].meeting_id for member in job.members}
        assert len(ids) == 1 and None not in ids
        names = {member.record.groups[0].options.group_name for member in job.members}
        assert len(names) == 1
        job.each([0, 1, 2], reduce_on("all"))
        assert [member.record.names().count("make") for member in job.members] == [1, 1, 1]


def test_the_group_object_knows_both_devices_and_keeps_its_ranks(tmp_path: Path) -> None:
    with running(1, tmp_path, {"alone": [0]}) as job:
        group = job[0].groups["alone"]
        assert [device.type for device in group._device_types] == ["cpu", "meta"]
        job[0].all_reduce("alone").wait()
        assert (group.rank(), group.size(), group.name()) == (0, 1, "elastic")
        assert job[0].record.calls[0] == ("make", 0, 0, 1, 0)


def test_torchs_watchdog_is_switched_off_and_a_different_wish_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    NcclDriver(binding=nccl_of(Record()))
    assert {name: os.environ[name] for name in WATCHDOG_OFF} == WATCHDOG_OFF
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING was 1 and is set to 0" in caplog.text


def test_once_connected_the_store_leaves_the_transport_alone(tmp_path: Path) -> None:
    with running(2, tmp_path, {"pair": [0, 1]}) as job:
        job.each([0, 1], reduce_on("pair"))
        job[0].transport.cancel()
        for member in job.members:
            store = member.record.groups[0].store
            store.set("a watchdog's", "note")
            assert store.get("a watchdog's") == b"note"
            assert not store.check(["dump"])


# ---------------------------------------------------------------- operations


def rooted(kind: type, root: int) -> Any:
    options = kind()
    options.rootRank = root
    return options


OPERATIONS: list[tuple[str, Callable[[DeviceProcessGroup], Any], list[tuple[Any, ...]]]] = [
    ("allreduce", lambda g: g.allreduce([on_device(2)], AllreduceOptions()), [("allreduce", 0, 1)]),
    ("coalesced", lambda g: g.allreduce_coalesced([on_device(2)] * 2), [("allreduce_coalesced", 0, 2)]),
    (
        "reduce_scatter_single",
        lambda g: g.reduce_scatter_single(on_device(2), on_device(2)),
        [("_reduce_scatter_base", 0, 2, 2)],
    ),
    ("old name", lambda g: g._reduce_scatter_base(on_device(2), on_device(2)), [("_reduce_scatter_base", 0, 2, 2)]),
    ("all_gather_single", lambda g: g.all_gather_single(on_device(3), on_device(3)), [("_allgather_base", 0, 3, 3)]),
    ("old gather", lambda g: g._allgather_base(on_device(3), on_device(3)), [("_allgather_base", 0, 3, 3)]),
    ("allgather", lambda g: g.allgather([[on_device(3)]], [on_device(3)]), [("allgather", 0, 1)]),
    ("broadcast", lambda g: g.broadcast([on_device(3)], rooted(BroadcastOptions, 0)), [("broadcast", 0, 0)]),
    ("reduce", lambda g: g.reduce([on_device(3)], rooted(ReduceOptions, 0)), [("reduce", 0, 0)]),
    ("list", lambda g: g.reduce_scatter([on_device(3)], [[on_device(3)]]), [("reduce_scatter", 0, 1)]),
    ("gather", lambda g: g.gather([], [on_device(3)], rooted(GatherOptions, 0)), [("gather", 0, 0)]),
    ("scatter", lambda g: g.scatter([on_device(3)], [], rooted(ScatterOptions, 0)), [("scatter", 0, 0)]),
    ("alltoall", lambda g: g.alltoall([on_device(3)], [on_device(3)]), [("alltoall", 0, 1)]),
    ("to all", lambda g: g.all_to_all_single(on_device(3), on_device(3)), [("alltoall_base", 0, [], [])]),
    (
        "to all, cut",
        lambda g: g.all_to_all_single(on_device(3), on_device(3), [3], [3]),
        [("alltoall_base", 0, [3], [3])],
    ),
    (
        "reduce_scatter of several",
        lambda g: g.reduce_scatter_tensor_coalesced([on_device(2)] * 2, [on_device(2)] * 2),
        [("_start_coalescing", 0), *[("_reduce_scatter_base", 0, 2, 2)] * 2, ("_end_coalescing", 0)],
    ),
    (
        "all_gather of several",
        lambda g: g.allgather_into_tensor_coalesced([on_device(2)] * 2, [on_device(2)] * 2),
        [("_start_coalescing", 0), *[("_allgather_base", 0, 2, 2)] * 2, ("_end_coalescing", 0)],
    ),
    (
        "list gather of several",
        lambda g: g.allgather_coalesced([[on_device(2)] * 2], [on_device(2)] * 2),
        [("_start_coalescing", 0), *[("allgather", 0, 1)] * 2, ("_end_coalescing", 0)],
    ),
]


@pytest.mark.parametrize(("name", "operate", "calls"), OPERATIONS, ids=[entry[0] for entry in OPERATIONS])
def test_every_collective_is_the_vendors(
    name: str, operate: Callable[[DeviceProcessGroup], Any], calls: list[Any], tmp_path: Path
) -> None:
    with running(1, tmp_path, {"alone": [0]}) as job:
        assert operate(job[0].groups["alone"]).wait()
        assert job[0].record.calls[3:] == calls


def test_operations_started_as_one_use_one_inner_group_and_give_one_work(tmp_path: Path) -> None:
    def exchange(member: Member) -> bool:
        group, other = member.groups["pair"], 1 - member.worker
        group._start_coalescing(DEVICE)
        group.send([on_device(2)], other, 5)
        group.recv([on_device(2)], other, 5)
        return bool(group._end_coalescing(DEVICE).wait())

    with running(2, tmp_path, {"pair": [0, 1]}) as job:
        assert job.each([0, 1], exchange) == [True, True]
        assert job[0].record.calls[3:] == [
            ("_start_coalescing", 0),
            ("send", 0, 1, 5),
            ("recv", 0, 1, 5),
            ("_end_coalescing", 0),
        ]


def send_or_receive(member: Member) -> bool:
    group = member.groups["all"]
    work = group.send([on_device(2)], 2, 9) if member.worker == 0 else group.recv([on_device(2)], 0, 9)
    assert not member.record.calls
    return bool(work.wait())


def test_a_single_send_starts_when_it_is_waited_for_and_needs_only_its_two_workers(tmp_path: Path) -> None:
    with running(3, tmp_path, ALL) as job:
        job.each([0, 2], send_or_receive)
        made = ("connect", 0, "meta:0"), ("allreduce", 0, 1)
        assert job[0].record.calls == [("make", 0, 0, 2, 0), *made, ("send", 0, 1, 9)]
        assert job[2].record.calls == [("make", 0, 1, 2, 0), *made, ("recv", 0, 0, 9)]
        assert not job[1].record.calls


def test_workers_that_all_send_first_do_not_wait_for_each_other(tmp_path: Path) -> None:
    def exchange(member: Member) -> bool:
        group, me = member.groups["all"], member.worker
        works = [group.send([on_device(2)], (me + 1) % 3, 0), group.recv([on_device(2)], (me - 1) % 3, 0)]
        works += [group.send([on_device(2)], (me - 1) % 3, 1), group.recv([on_device(2)], (me + 1) % 3, 1)]
        return all(work.wait() for work in works)

    with running(3, tmp_path, ALL) as job:
        assert job.each([0, 1, 2], exchange) == [True, True, True]
        with_1, with_2 = ([call for call in job[0].record.calls if call[1] == number][3:] for number in (0, 1))
        assert with_1 == [("_start_coalescing", 0), ("send", 0, 1, 0), ("recv", 0, 1, 1), ("_end_coalescing", 0)]
        assert with_2 == [("_start_coalescing", 1), ("recv", 1, 1, 0), ("send", 1, 1, 1), ("_end_coalescing", 1)]


def test_a_send_that_nobody_waits_for_starts_before_the_next_operation(tmp_path: Path) -> None:
    def send_and_reduce(member: Member) -> None:
        if member.worker == 0:
            member.groups["pair"].send([on_device(2)], 1, 0)
        else:
            member.groups["pair"].recv([on_device(2)], 0, 0)
        member.all_reduce("all")

    with running(3, tmp_path, ALL) as job:
        job.each([0, 1, 2], lambda member: send_and_reduce(member) if member.worker < 2 else member.all_reduce("all"))
        operations = [name for name in job[0].record.names() if name not in ("make", "connect")]
        assert operations == [
            "allreduce",
            "send",
            "allreduce",
            "allreduce",
        ]  # the first of each inner group connects it


def test_sends_that_did_not_start_are_dropped_with_their_epoch(tmp_path: Path) -> None:
    with running(3, tmp_path, ALL) as job:
        work = job[0].groups["all"].send([on_device(2)], 1, 0)
        job.each([0, 1], enter(1, {"all": [0, 1], "pair": [0, 1], "other": [0]}, (2,)))
        with pytest.raises(EpochChanged, match="a transfer of group all was dropped"):
            work.wait()
        assert job[0].record.names() == ["epoch"]


def test_waiting_is_the_vendors_own_so_the_cpu_goes_on(tmp_path: Path) -> None:
    with running(1, tmp_path, {"alone": [0]}) as job:
        job[0].record.busy = True
        work = job[0].all_reduce("alone")
        assert not work.is_completed()
        assert work.wait() and work.wait(timedelta(seconds=3))
        assert job[0].record.works[1].waits == [None, timedelta(seconds=3)]
        job[0].record.works[1].done = True
        assert work.is_completed()


def test_muted_groups_complete_locally_on_any_device(tmp_path: Path) -> None:
    with running(2, tmp_path, {"pair": [0, 1]}) as job:
        job[0].communicator.muted = True
        assert job[0].all_reduce("pair").wait()
        assert not job[0].record.calls


# ---------------------------------------------------------------- epochs


def test_an_idle_group_is_shrunk_and_groups_that_lost_nobody_are_kept(tmp_path: Path) -> None:
    with running(3, tmp_path, ALL) as job:
        job.each([0, 1, 2], reduce_on("all"))
        job.each([0, 1], reduce_on("pair"))
        job.each([0, 1], enter(1, {"all": [0, 1], "pair": [0, 1], "other": [0]}, (2,)))
        job.each([0, 1], reduce_on("all"))
        job.each([0, 1], reduce_on("pair"))
        for rank in (0, 1):
            assert job[rank].since(1) == [
                ("shrink", 0, [2], 1),
                ("make", 2, rank, 2, 0),
                ("abort", 0),
                ("allreduce", 2, 1),
                ("allreduce", 1, 1),
            ]
        assert job[0].record.groups[2].bound_device_id == DEVICE


def test_only_groups_with_an_operation_in_flight_are_aborted_and_all_members_make_a_new_one(tmp_path: Path) -> None:
    with running(3, tmp_path, ALL) as job:
        job.each([0, 1], reduce_on("pair"))
        job[0].record.busy = True  # worker 0's operation hangs, worker 1's is done
        works = job.each([0, 1, 2], reduce_on("all"))
        job[0].record.busy = False
        assert [member.record.names().count("abort") for member in job.members] == [0, 0, 0]
        for member in job.members:
            member.communicator.cancel()
        assert [call for call in job[0].record.calls if call[0] == "abort"] == [("abort", 1)]
        assert "abort" not in job[1].record.names()
        with pytest.raises(EpochChanged, match=r"allreduce of group all on meta:0, epoch 0"):
            works[0].wait()
        assert works[1].wait()
        job.each([0, 1], enter(1, {"all": [0, 1], "pair": [0, 1], "other": [0]}, (2,)))
        job.each([0, 1], reduce_on("all"))
        job.each([0, 1], reduce_on("pair"))
        assert job[0].since(1) == [
            ("make", 2, 0, 2, 0),
            ("connect", 2, "meta:0"),
            ("allreduce", 2, 1),
            ("allreduce", 2, 1),
            ("allreduce", 0, 1),
        ]
        assert job[1].since(1) == [
            ("abort", 1),
            ("make", 2, 1, 2, 0),
            ("connect", 2, "meta:0"),
            ("allreduce", 2, 1),
            ("allreduce", 2, 1),
            ("allreduce", 0, 1),
        ]


@pytest.mark.parametrize("lack", ["build", "runtime"])
def test_without_shrink_a_new_inner_group_takes_the_place(lack: str, tmp_path: Path) -> None:
    with running(3, tmp_path, ALL) as job:
        for member in job.members:
            if lack == "build":
                member.record.shrinks = False
            else:
                member.record.version = (2, 26, 5)
        job.each([0, 1, 2], reduce_on("all"))
        job.each([0, 2], enter(1, {"all": [0, 2], "pair": [0], "other": [0, 2]}, (1,)))
        assert [job[worker].record.groups[0].aborted for worker in (0, 2)] == [True, True]
        job.each([0, 2], reduce_on("all"))
        assert [call[0] for call in job[2].since(1)] == ["make", "connect", "allreduce", "allreduce"]
        assert job[2].since(1)[0] == ("make", 1, 1, 2, 0)


def test_if_one_member_cannot_shrink_all_make_a_new_inner_group(tmp_path: Path) -> None:
    with running(3, tmp_path, ALL) as job:
        job.each([0, 1, 2], reduce_on("all"))
        job[2].record.shrink_error = dist.DistBackendError("ncclSystemError")
        job.each([0, 2], enter(1, {"all": [0, 2], "pair": [0], "other": [0, 2]}, (1,)))
        job.each([0, 2], reduce_on("all"))
        assert job[0].record.names().count("shrink") == job[2].record.names().count("shrink") == 1
        assert [job[worker].record.names()[-4:] for worker in (0, 2)] == [
            ["make", "connect", "allreduce", "allreduce"]
        ] * 2
        assert job[0].record.groups[-1].meeting_id == job[2].record.groups[-1].meeting_id


def test_a_member_that_joins_gets_a_new_inner_group_with_the_others(tmp_path: Path) -> None:
    with running(3, tmp_path, {"all": [0, 1, 2], "pair": [0, 1], "other": [2]}) as job:
        job.each([0, 1], reduce_on("pair"))
        job[2].groups["pair"] = job[2].groups.pop("other")
        channel = job[0].groups["pair"].channel
        job[2].groups["pair"].edit([2], channel)
        job.each([0, 1, 2], enter(1, {"pair": [0, 1, 2]}))
        job.each([0, 1, 2], reduce_on("pair"))
        assert {member.record.groups[-1].meeting_id for member in job.members} == {job[0].record.groups[-1].meeting_id}
        assert [member.since(1)[-4][:1] + member.since(1)[-4][2:] for member in job.members] == [
            ("make", 0, 3, 0),
            ("make", 1, 3, 0),
            ("make", 2, 3, 0),
        ]


def test_groups_that_become_one_do_not_take_their_parts_for_the_whole(tmp_path: Path) -> None:
    with running(4, tmp_path, {"left": [0, 1], "right": [2, 3]}) as job:
        job.each([0, 1], reduce_on("left"))
        job.each([2, 3], reduce_on("right"))
        channel = job[0].groups["left"].channel

        def fuse(member: Member) -> None:
            member.groups["one"] = next(iter(member.groups.values()))
            member.groups["one"].edit(member.groups["one"].members, channel)
            if member.worker == 3:  # the others are ahead, and one of them has begun to meet it
                wait_until(lambda: (0, channel + INTRODUCTION) in member.transport._links)
            member.change(1, {"one": [0, 1, 2, 3]})
            member.all_reduce("one")

        job.each(range(4), fuse)
        for rank, member in enumerate(job.members):
            assert member.since(1)[-4][2:] == (rank, 4, 0)
        assert len({member.record.groups[-1].meeting_id for member in job.members}) == 1


def test_connecting_is_given_up_when_the_epoch_ends(tmp_path: Path) -> None:
    with running(2, tmp_path, {"pair": [0, 1]}) as job:
        for member in job.members:
            member.record.ready = False

        def cancel() -> None:
            wait_until(lambda: all("allreduce" in member.record.names() for member in job.members))
            for member in job.members:
                member.communicator.cancel()

        canceller = threading.Thread(target=cancel)
        canceller.start()
        outcomes = job.attempt([0, 1], reduce_on("pair"))
        canceller.join()
        assert [type(outcome) for outcome in outcomes] == [EpochChanged, EpochChanged]
        assert all(member.record.groups[0].aborted for member in job.members)


def test_waiting_for_a_member_that_does_not_come_ends_with_the_epoch(tmp_path: Path) -> None:
    with running(3, tmp_path, ALL) as job:
        canceller = threading.Timer(0.1, lambda: [job[worker].communicator.cancel() for worker in (0, 1)])
        canceller.start()
        outcomes = job.attempt([0, 1], reduce_on("all"))
        canceller.join()
        assert [type(outcome) for outcome in outcomes] == [EpochChanged, EpochChanged]


def test_a_member_that_dies_while_the_others_connect_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(meeting: Meeting) -> tuple[bytes, bytes]:
        raise PeerLost(meeting.members[0], "closed by peer")

    monkeypatch.setattr(Meeting, "next_value", no_answer)
    with running(2, tmp_path, {"pair": [0, 1]}) as job:
        outcomes = job.attempt([0, 1], reduce_on("pair"))
        assert isinstance(outcomes[1], PeerLost) and outcomes[1].peer == 0  # torch tells it as a DistBackendError
        assert job[1].record.groups[0].aborted


def test_nothing_is_started_after_the_cancel(tmp_path: Path) -> None:
    with running(1, tmp_path, {"alone": [0]}) as job:
        job[0].all_reduce("alone")
        before = list(job[0].record.calls)
        job[0].communicator.cancel()
        with pytest.raises(EpochChanged, match=r"allreduce of group alone on meta:0, epoch 0: .* worker 0"):
            job[0].all_reduce("alone")
        assert job[0].record.calls == before


# ---------------------------------------------------------------- errors

REMOTE = "NCCL error: remote process exited or there was a network error, NCCL version 2.29.7\nncclRemoteError"


def test_in_a_pair_the_peer_is_named(tmp_path: Path) -> None:
    with running(2, tmp_path, {"pair": [0, 1]}) as job:
        job.each([0, 1], reduce_on("pair"))
        job[0].record.fail_next = dist.DistBackendError(REMOTE)
        with pytest.raises(
            PeerLost, match=r"worker 1 broke: allreduce of group pair on meta:0, epoch 0: .*remote"
        ) as caught:
            job[0].all_reduce("pair")
        assert caught.value.peer == 1
        assert job[0].record.groups[0].aborted


def test_in_a_larger_group_nobody_can_be_named_and_the_epoch_has_to_end(tmp_path: Path) -> None:
    with running(3, tmp_path, ALL) as job:
        works = job.each([0, 1, 2], reduce_on("all"))
        job[0].record.works[1].error = dist.DistBackendError(REMOTE)
        with pytest.raises(EpochChanged, match=r"allreduce of group all on meta:0, epoch 0: peer: ") as caught:
            works[0].wait()
        assert not isinstance(caught.value, PeerLost)
        with pytest.raises(EpochChanged, match="waits for the next epoch"):
            job[0].all_reduce("all")
        job.each([0, 1], enter(1, {"all": [0, 1], "pair": [0, 1], "other": [0]}, (2,)))
        job.each([0, 1], reduce_on("all"))
        assert [job[worker].record.names()[-4:] for worker in (0, 1)] == [
            ["make", "connect", "allreduce", "allreduce"]
        ] * 2


def test_the_callers_own_mistakes_are_raised_as_they_are(tmp_path: Path) -> None:
    with running(2, tmp_path, {"pair": [0, 1]}) as job:
        job.each([0, 1], reduce_on("pair"))
        mistake = dist.DistBackendError("NCCL error: invalid usage")
        job[0].record.fail_next = mistake
        with pytest.raises(dist.DistBackendError) as caught:
            job[0].all_reduce("pair")
        assert caught.value is mistake
        assert not job[0].record.groups[0].aborted


def test_between_steps_an_operation_that_was_cut_short_is_noted_and_not_raised(tmp_path: Path) -> None:
    with running(1, tmp_path, {"alone": [0]}) as job:
        member = job[0]
        member.record.busy = True
        work = member.all_reduce("alone")
        member.communicator.tolerant = True
        member.communicator.cancel()
        assert work.wait()
        assert "epoch 0" in str(member.communicator.pending_error)


def test_a_failed_operation_counts_as_in_flight_because_the_device_may_be_at_it(tmp_path: Path) -> None:
    with running(1, tmp_path, {"alone": [0]}) as job:
        job[0].all_reduce("alone")
        job[0].record.works[-1].failed = dist.DistBackendError(REMOTE)
        assert job[0].record.works[-1].is_completed()
        job[0].communicator.cancel()
        assert job[0].record.groups[0].aborted


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("NCCL communicator was aborted on rank 0.", Failure.ABORTED),
        (REMOTE, Failure.PEER),
        ("NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)", Failure.PEER),
        ("Watchdog caught collective operation timeout", Failure.TIMEOUT),
        ("CUDA error: uncorrectable ECC error encountered", Failure.DEVICE),
        ("NCCL error: invalid usage", None),
        ("Tensors must be contiguous", None),
    ],
)
def test_texts_tell_failures(text: str, failure: Failure | None) -> None:
    record = Record()
    driver = NcclDriver(binding=nccl_of(record))
    inner = SimpleNamespace(get_error=lambda: SimpleNamespace(name="SUCCESS"))
    assert driver.classify(inner, RuntimeError(text)) is failure


def test_where_the_text_says_nothing_the_inner_groups_opinion_counts() -> None:
    driver = NcclDriver(binding=FakeNccl)
    for name, failure in (("REMOTE_ERROR", Failure.PEER), ("COMM_ERROR", Failure.PEER), ("TIMEOUT", Failure.TIMEOUT)):
        inner = SimpleNamespace(get_error=lambda name=name: SimpleNamespace(name=name))
        assert driver.classify(inner, RuntimeError("something")) is failure


def test_interrupting_again_changes_nothing(tmp_path: Path) -> None:
    with running(1, tmp_path, {"alone": [0]}) as job:
        job[0].record.busy = True
        job[0].all_reduce("alone")
        for _ in range(3):
            job[0].communicator.cancel()
        assert job[0].record.names().count("abort") == 1
