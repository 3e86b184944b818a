"""The exact calls on torch-npu over an epoch's change. ``test_signatures`` checks the fakes' signatures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_elas.runtime.communicator.accelerators.failures import DeviceFault, Failure
from megatron_elas.runtime.communicator.accelerators.hccl import HcclDriver
from megatron_elas.spec.errors import EpochChanged
from tests.runtime.communicator.accelerators.job import Member, on_device, running

GROUPS = {"all": [0, 1, 2], "pair": [0, 1]}


def start(member: Member) -> None:
    """Numbers of inner groups: all 0, pair 1."""
    member.all_reduce("all")
    if "pair" in member.groups:
        member.all_reduce("pair")


def lose_worker_2(member: Member) -> None:
    member.change(1, {"all": [0, 1], "pair": [0, 1]}, (2,))


def test_an_inner_group_connects_with_a_first_operation(tmp_path: Path) -> None:
    with running(3, tmp_path, GROUPS, "hccl") as job:
        job.each([0, 1, 2], start)
        assert job[2].record.calls == [
            ("make", 0, 2, 3, -(2**31)),
            ("allreduce", 0, 1),
            ("synchronize", 0),
            ("allreduce", 0, 1),
        ]
        inner = job[2].record.groups[0]
        assert inner.options.global_ranks_in_group == [0, 1, 2]
        assert inner.options.group_id == job[0].record.groups[0].options.group_id  # type: ignore[attr-defined]
        assert len({member.record.groups[0].meeting_id for member in job.members}) == 1


def test_the_device_is_stopped_and_restarted_and_only_changed_groups_are_made_anew(tmp_path: Path) -> None:
    with running(3, tmp_path, GROUPS, "hccl") as job:
        job.each([0, 1, 2], start)
        job[0].record.busy = True
        hanging = job[0].groups["pair"].allreduce([on_device(2)])
        job[0].record.busy = False
        before = len(job[0].record.calls)
        job.each([0, 1], lose_worker_2)
        assert job[0].record.calls[before:] == [
            ("stop_device", 0),
            ("set_watchdog_status", 0, 2),
            ("set_watchdog_status", 1, 2),
            ("abort_hccl_comm", 0, "members changed"),
            ("restart_device", 0, False),
            ("clear_workmeta_list", 1),
            ("set_watchdog_status", 1, 1),
            ("reinit_process_group", None, False),
            ("resume_hccl_comm", 1, 0),
            ("epoch", 1),
        ]
        with pytest.raises(EpochChanged, match="allreduce of group pair on meta:0, epoch 0"):
            hanging.wait()
        job.each([0, 1], start)
        assert job[1].since(1) == [
            ("make", 2, 1, 2, -(2**31)),
            ("allreduce", 2, 1),
            ("synchronize", 0),
            ("allreduce", 2, 1),
            ("allreduce", 1, 1),
        ]


def test_a_device_that_was_not_used_is_neither_stopped_nor_restarted(tmp_path: Path) -> None:
    with running(3, tmp_path, GROUPS, "hccl") as job:
        job.each([0, 1], lose_worker_2)
        assert job[0].record.calls == [("epoch", 1)]


def test_the_device_is_stopped_once_however_often_the_epoch_is_announced(tmp_path: Path) -> None:
    with running(1, tmp_path, {"alone": [0]}, "hccl") as job:
        job[0].all_reduce("alone")
        for _ in range(3):
            job[0].communicator.cancel()
        job[0].change(1, {"alone": [0]})
        job[0].change(2, {"alone": [0]})
        assert [name for name in job[0].record.names() if name.endswith("_device")] == [
            "stop_device",
            "restart_device",
        ] * 2


def test_where_cann_cannot_resume_every_group_is_made_anew(tmp_path: Path) -> None:
    with running(3, tmp_path, GROUPS, "hccl") as job:
        job.each([0, 1, 2], start)
        job[0].record.fail_next = RuntimeError("HcclCommResume is not there")
        job.each([0, 1], lose_worker_2)
        assert ("abort_hccl_comm", 1, "members changed") in job[0].record.calls
        job.each([0, 1], start)
        assert [call[:2] for call in job[1].since(1) if call[0] == "make"] == [("make", 2), ("make", 3)]
        assert job[0].record.groups[-1].meeting_id == job[1].record.groups[-1].meeting_id


def test_resources_are_rebuilt_where_that_is_asked_for() -> None:
    calls = []
    npu = SimpleNamespace(
        stop_device=lambda device_id: calls.append(("stop", device_id)),
        restart_device=lambda device_id, rebuild_all_resources: calls.append(
            ("restart", device_id, rebuild_all_resources)
        ),
    )
    device = SimpleNamespace(index=3)
    driver = HcclDriver(library=SimpleNamespace(npu=npu), rebuild_all_resources=True)
    assert driver.stop(device) and driver.restart(device, [])  # type: ignore[arg-type]
    assert calls == [("stop", 3), ("restart", 3, True)]


def test_several_sends_and_receives_at_once_are_the_vendors(tmp_path: Path) -> None:
    with running(1, tmp_path, {"alone": [0]}, "hccl") as job:
        job[0].groups["alone"].batch_isend_irecv(["isend", "irecv"], [on_device(1)] * 2, [0, 0]).wait()
        assert job[0].record.calls[-1] == ("batch_isend_irecv", 0, ["isend", "irecv"], [0, 0])


def test_damaged_memory_is_this_workers_own_fault(tmp_path: Path) -> None:
    with running(3, tmp_path, GROUPS, "hccl") as job:
        job.each([0, 1, 2], start)
        job[0].record.fail_next = RuntimeError("UCE ERROR.[ERROR] device 0")
        with pytest.raises(DeviceFault, match="worker 0: UCE ERROR"):
            job[0].all_reduce("all")
        job[0].record.fail_next = RuntimeError("SUSPECT REMOTE ERROR.")
        with pytest.raises(EpochChanged, match="peer: SUSPECT REMOTE ERROR"):
            job[0].all_reduce("all")


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("FORCE STOP.\n[ERROR] ERR00100 PTA call acl api failed", Failure.ABORTED),
        ("UCE ERROR.", Failure.DEVICE),
        ("HCCS LINK ERROR.", Failure.PEER),
        ("SUSPECT MEM ERROR.", Failure.DEVICE),
        ("SUSPECT REMOTE ERROR.", Failure.PEER),
        ("invalid argument", None),
    ],
)
def test_texts_tell_failures(text: str, failure: Failure | None) -> None:
    driver = HcclDriver(library=SimpleNamespace())
    assert driver.classify(None, RuntimeError(text)) is failure
