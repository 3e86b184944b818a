"""One worker of ``check_on_device.py``: runs the checks in order, together with the others, and writes what it found.

There is no controller here. Workers agree on the end of an epoch through files, and play the faults themselves: one
does not come to an operation, one kills itself.

    device_checks.py KIND FOLDER WORKERS WORKER DEVICE
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_elas.runtime.communicator.accelerators.accelerator import Accelerator
from megatron_elas.runtime.communicator.accelerators.driver import Driver
from megatron_elas.runtime.communicator.accelerators.group import DeviceProcessGroup
from megatron_elas.runtime.communicator.accelerators.plane import DevicePlane, Verdict
from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.runtime.communicator.membership import GroupMembers, Membership
from megatron_elas.runtime.transport.sockets import SocketTransport
from megatron_elas.spec.errors import EpochChanged

PATIENCE_S = 60.0
HANG_S = 0.3
"""From the start of an operation that cannot end to the news of it."""
FUSED_CHANNEL = 1 << 30


class Platform:
    """What differs between devices. The tests put one of their own in its place."""

    def __init__(self, kind: str, index: int) -> None:
        self.device = torch.device(kind, index)
        self.numel = 16 << 20
        self.has_streams = True
        if kind == "npu":
            importlib.import_module("torch_npu")
        self._library: Any = getattr(torch, kind)
        self._library.set_device(index)

    def make_driver(self) -> Driver:
        """For the device's vendor."""
        if self.device.type == "npu":
            from megatron_elas.runtime.communicator.accelerators.hccl import HcclDriver

            return HcclDriver()
        from megatron_elas.runtime.communicator.accelerators.nccl import NcclDriver

        return NcclDriver()

    def synchronize(self) -> None:
        """Wait until the device is done."""
        self._library.synchronize()

    def keep_busy(self) -> None:
        """Give the device work for a good 100 ms; returns at once."""
        side = 8192
        if not hasattr(self, "_matrix"):
            self._matrix = torch.randn(side, side, device=self.device, dtype=torch.bfloat16)
            self._matrix @ self._matrix
            self.synchronize()
            began_s = time.monotonic()
            self._matrix @ self._matrix
            self.synchronize()
            self._repeats = max(1, round(0.15 / (time.monotonic() - began_s)))
        for _ in range(self._repeats):
            self._matrix @ self._matrix


class Skip(Exception):
    """A capability is not there, for the reason given."""


class Checks:
    """The checks, in order."""

    def __init__(self, platform: Platform, folder: Path, count: int, worker: int) -> None:
        self.platform, self.folder, self.count, self.worker = platform, folder, count, worker
        self.last = count - 1
        self.aborted = count > 1
        self.transport = SocketTransport(worker, f"unix:{folder}/{worker}.sock", "check_on_device")
        self.members = list(range(count))
        self.meet("listening")
        self.transport.set_addresses({at: f"unix:{folder}/{at}.sock" for at in self.members})
        self.driver = platform.make_driver()
        self.accelerator = Accelerator(self.driver, self.transport, platform.device)
        self.communicator = Communicator(self.transport, self.members, self.accelerator)
        self.communicator.register_backend()
        dist.init_process_group("elastic", store=dist.HashStore(), rank=worker, world_size=count)
        everybody = dist.GroupMember.WORLD
        assert isinstance(everybody, DeviceProcessGroup)
        self.everybody = everybody
        self.first = self.members[:-1] or [0]
        self.kept = self._new_group(self.first)
        grown, lone = self._new_group(self.first), self._new_group([self.last])
        self.grown = lone if worker == self.last and count > 1 else grown

    def _new_group(self, ranks: list[int]) -> DeviceProcessGroup | None:
        group = dist.new_group(ranks)
        return group if isinstance(group, DeviceProcessGroup) else None

    # ------------------------------------------------------------ tools

    def meet(self, place: str) -> None:
        """Wait for all members at a place; files, because the transport is among what is checked."""
        (self.folder / f"{place}-{self.worker}").touch()
        deadline_s = time.monotonic() + PATIENCE_S
        while not all((self.folder / f"{place}-{at}").exists() for at in self.members):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the others did not come to '{place}' within {PATIENCE_S:g} s")
            time.sleep(0.0005)

    @contextlib.contextmanager
    def check(self, name: str, place: bool = True) -> Iterator[dict[str, Any]]:
        """Run one check from a common start, and write what became of it. Sets ``ms`` unless the body does."""
        if place:
            self.meet(name.replace(" ", "-"))
        found: dict[str, Any] = {"name": name, "status": "pass", "ms": None, "detail": ""}
        began_s = time.monotonic()
        try:
            yield found
            if found["ms"] is None:
                found["ms"] = 1e3 * (time.monotonic() - began_s)
        except Skip as reason:
            found.update(status="not available", detail=str(reason), ms=None)
        except BaseException as error:
            found.update(status="fail", detail=f"{type(error).__name__}: {error}".replace("\n", " ")[:400])
            raise
        finally:
            with (self.folder / f"results-{self.worker}").open("a") as results:
                results.write(json.dumps(found) + "\n")

    def full(self, value: float, numel: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor on the device."""
        return torch.full((numel or self.platform.numel,), value, device=self.platform.device, dtype=dtype)

    def sum_right(self, group: Any, members: list[int]) -> None:
        """An all_reduce over the members gives the sum of what they put in."""
        tensor = self.full(self.worker + 1.0, 1000)
        dist.all_reduce(tensor, group=group)
        expect(tensor, sum(members) + len(members))

    def median_ms(self, operate: Callable[[], Any], times: int = 5) -> float:
        """Of an operation until the device is done, after one to warm up."""
        taken_ms = []
        for _ in range(times + 1):
            self.platform.synchronize()
            began_s = time.monotonic()
            operate()
            self.platform.synchronize()
            taken_ms.append(1e3 * (time.monotonic() - began_s))
        return statistics.median(taken_ms[1:])

    def enter(self, epoch: int, lost: list[int]) -> None:
        """What a recovery does to the communicator, the lost ones being known."""
        self.communicator.cancel()
        self.communicator.drain()
        self.members = [worker for worker in self.members if worker not in lost]
        everybody = tuple(self.members)
        groups = {self.everybody.group_name: GroupMembers(members=everybody)}
        if self.kept is not None:
            first = tuple(worker for worker in self.first if worker in self.members)
            groups[self.kept.group_name] = GroupMembers(members=first)
        if self.grown is not None:
            groups[self.grown.group_name] = GroupMembers(members=everybody, channel=FUSED_CHANNEL)
        self.communicator.edit(
            Membership(
                epoch=epoch,
                addresses={at: f"unix:{self.folder}/{at}.sock" for at in self.members},
                ranks={worker: rank for rank, worker in enumerate(self.members)},
                groups=groups,
            )
        )

    def cancel_soon(self) -> tuple[threading.Thread, list[float]]:
        """Bring the news of an epoch's end after ``HANG_S``. Gives when it began and what the call took."""
        times_s: list[float] = []

        def cancel() -> None:
            times_s.append(time.monotonic())
            self.communicator.cancel()
            times_s.append(time.monotonic() - times_s[0])

        timer = threading.Timer(HANG_S, cancel)
        timer.start()
        return timer, times_s

    # ------------------------------------------------------------ the checks

    def run(self) -> None:
        """All of them."""
        self.operations()
        self.point_to_point()
        self.asynchronous()
        self.abort()
        self.recover_from_abort()
        if self.count > 1:
            self.lose_last()
        if self.count > 2:
            self.lose_one_in_operation()
        self.close()

    def operations(self) -> None:
        """Collectives give the right numbers."""
        everyone = sum(self.members) + self.count
        with self.check("inner group made"):
            self.sum_right(None, self.members)
            self.platform.synchronize()
        mebibytes = self.platform.numel * 4 >> 20
        with self.check("all_reduce") as found:
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                tensor = self.full(self.worker + 1, 1000, dtype)
                dist.all_reduce(tensor)
                expect(tensor, everyone)
            tensor = self.full(1.0)
            found["ms"] = self.median_ms(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX))
            found["detail"] = f"{mebibytes} MiB"
            expect(tensor, 1.0)
        whole = torch.arange(self.count * 1000, device=self.platform.device, dtype=torch.float32)
        share = torch.arange(1000, device=self.platform.device, dtype=torch.float32) + 1000 * self.worker
        with self.check("reduce_scatter") as found:
            output = torch.empty_like(share)
            dist.reduce_scatter_tensor(output, whole)
            expect(output, share * self.count)
            large = self.full(1.0)[: self.platform.numel // self.count * self.count]
            part = torch.empty_like(large[: large.numel() // self.count])
            found["ms"] = self.median_ms(lambda: dist.reduce_scatter_tensor(part, large))
            found["detail"] = f"{mebibytes} MiB"
        with self.check("all_gather") as found:
            gathered = torch.empty_like(whole)
            dist.all_gather_into_tensor(gathered, share)
            expect(gathered, whole)
            found["ms"] = self.median_ms(lambda: dist.all_gather_into_tensor(large, part))
            found["detail"] = f"{mebibytes} MiB"
        with self.check("several as one"):
            tensors = [self.full(self.worker + 1.0, 10) for _ in range(3)]
            with dist._coalescing_manager(device=self.platform.device):
                for tensor in tensors:
                    dist.all_reduce(tensor)
            outputs = [torch.empty_like(whole) for _ in range(2)]
            with dist._coalescing_manager():
                for output in outputs:
                    dist.all_gather_into_tensor(output, share)
            for tensor in tensors:
                expect(tensor, everyone)
            for output in outputs:
                expect(output, whole)

    def point_to_point(self) -> None:
        """Sends and receives; all workers come to the second check, two to the first."""
        if self.count < 2:
            return
        with self.check("send and receive") as found:
            tensor = self.full(7.0 if self.worker == 0 else 0.0)
            if self.worker == 0:
                dist.send(tensor, self.last, tag=3)
                dist.recv(tensor, self.last, tag=4)
                expect(tensor, 8.0)
                found["detail"] = "there and back"
            elif self.worker == self.last:
                dist.recv(tensor, 0, tag=3)
                expect(tensor, 7.0)
                dist.send(tensor + 1, 0, tag=4)
        with self.check("sends and receives as one"):
            right, left = (self.worker + 1) % self.count, (self.worker - 1) % self.count
            incoming = self.full(-1.0, 1000)
            operations = [
                dist.P2POp(dist.isend, self.full(float(self.worker), 1000), right),
                dist.P2POp(dist.irecv, incoming, left),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            expect(incoming, float(left))

    def asynchronous(self) -> None:
        """Neither starting an operation nor waiting for it stops the CPU, and what follows sees its result."""
        with self.check("asynchronous operations") as found:
            self.need_streams()
            self.platform.keep_busy()  # measures itself
            self.platform.synchronize()
            tensor = self.full(1.0, 1000)
            self.platform.synchronize()
            began_s = time.monotonic()
            self.platform.keep_busy()
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            done = work.is_completed()
            work.wait()
            doubled = tensor * 2
            started_ms = 1e3 * (time.monotonic() - began_s)
            self.platform.synchronize()
            total_ms = 1e3 * (time.monotonic() - began_s)
            expect(doubled, 2.0 * self.count)
            if done or started_ms > total_ms / 2:
                raise AssertionError(
                    f"the CPU was held {started_ms:.1f} of {total_ms:.1f} ms; completed at once: {done}"
                )
            found["ms"], found["detail"] = started_ms, f"on the CPU, {total_ms:.0f} ms on the device"

    def need_streams(self) -> None:
        """Skip the check on a stand-in."""
        if not self.platform.has_streams:
            raise Skip("this device runs operations on the CPU's time")

    def abort(self) -> None:
        """An operation that cannot end, or has not yet, is cut short, and its work says so."""
        if self.count > 1:
            self.abort_under_hung_peer()
            return
        with self.check("abort with an operation in flight") as found:
            self.used(self.kept)
            self.need_streams()
            self.platform.keep_busy()
            work = dist.all_reduce(self.full(1.0, 1000), async_op=True)
            assert work is not None and not work.is_completed()
            began_s = time.monotonic()
            self.communicator.cancel()
            found["ms"] = 1e3 * (time.monotonic() - began_s)
            found["detail"] = "the call that aborts; what waits on the device before it goes on"
            self.aborted = True
            expect_cut_short(work.wait)
            self.platform.synchronize()

    def used(self, group: DeviceProcessGroup | None) -> None:
        """The group has an inner group, so that there is something to keep."""
        if group is not None:
            self.sum_right(group, list(group.members))
            self.platform.synchronize()

    def abort_under_hung_peer(self) -> None:
        self.used(self.kept)
        self.meet("hanging")
        if self.worker == self.last:
            (self.folder / "hung").touch()  # it does not come
        with self.check("abort with an operation in flight") as found:
            if self.worker != self.last:
                work = dist.all_reduce(self.full(1.0), async_op=True)
                assert work is not None
                timer, times_s = self.cancel_soon()
                self.platform.synchronize()
                returned_s = time.monotonic()
                timer.join()
                if not times_s or returned_s < times_s[0]:
                    raise AssertionError("the operation ended although a member was missing")
                found["ms"], found["detail"] = 1e3 * times_s[1], "the call that aborts"
                expect_cut_short(work.wait)
        with self.check("abort under a hung peer") as found:
            if self.worker != self.last:
                found["ms"], found["detail"] = 1e3 * (returned_s - times_s[0]), "until a thread that waits is back"

    def recover_from_abort(self) -> None:
        """New epoch, same members: the aborted group is made anew, the idle one is the same, one gets a member."""
        before = plane_of(self.kept).inner if self.kept is not None else None
        self.enter(1, [])
        with self.check("rebuild after an abort") as found:
            self.sum_right(None, self.members)
            self.platform.synchronize()
            if not self.aborted:
                raise Skip("nothing was aborted")
            found["ms"], found["detail"] = preparation(self.everybody, Verdict.NEW)
        with self.check("other groups stay as they are") as found:
            if self.kept is not None:
                self.stays(found, before)
        if self.count > 1:
            with self.check("join") as found:
                self.sum_right(self.grown, self.members)
                self.platform.synchronize()
                assert self.grown is not None
                found["ms"], found["detail"] = preparation(self.grown, Verdict.NEW)

    def stays(self, found: dict[str, Any], before: Any) -> None:
        assert self.kept is not None
        self.sum_right(self.kept, list(self.kept.members))
        self.platform.synchronize()
        found["ms"], found["detail"] = preparation(self.kept, Verdict.KEEP)
        if plane_of(self.kept).inner is not before:
            raise AssertionError("its inner group is another one")

    def lose_last(self) -> None:
        """The last worker is killed while all are idle; the others go on without it."""
        before = plane_of(self.kept).inner if self.kept is not None else None
        self.meet("before-death")
        if self.worker == self.last:
            self.platform.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)
        shrinks = self.driver.can_shrink(plane_of(self.everybody).inner)
        self.enter(2, [self.last])
        with self.check("shrink after a death") as found:
            self.sum_right(None, self.members)
            self.platform.synchronize()
            ms, verdict = preparation(self.everybody, Verdict.SHRINK if shrinks else Verdict.NEW)
            if not shrinks:
                raise Skip(f"the library cannot shrink; a new inner group was made in {ms:.1f} ms and is right")
            found["ms"], found["detail"] = ms, verdict
        if self.count > 2:
            with self.check("other groups stay after a death") as found:
                self.stays(found, before)

    def lose_one_in_operation(self) -> None:
        """The last of those that are left is killed while the others wait for it on the device."""
        victim = self.members[-1]
        self.meet("before-second-death")
        if self.worker == victim:
            time.sleep(HANG_S / 3)  # the others are in their operation
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_reduce(self.full(1.0), async_op=True)
        assert work is not None
        timer, times_s = self.cancel_soon()
        self.platform.synchronize()
        returned_s = time.monotonic()
        timer.join()
        self.enter(3, [victim])
        with self.check("death during an operation") as found:
            with contextlib.suppress(EpochChanged):
                work.wait()
            self.sum_right(None, self.members)
            self.platform.synchronize()
            ms, verdict = preparation(self.everybody, Verdict.NEW)
            back_ms = max(0.0, 1e3 * (returned_s - times_s[0]))
            found["ms"], found["detail"] = back_ms + ms, f"back in {back_ms:.1f} ms, {verdict} in {ms:.1f} ms"

    def close(self) -> None:
        """Leave together."""
        self.meet("end")
        self.transport.cancel()
        self.communicator.close()
        self.transport.close()


def expect(tensor: Tensor, wanted: float | Tensor) -> None:
    """Every element is as wanted."""
    right = tensor == wanted
    if not bool(right.all()):
        raise AssertionError(
            f"{int((~right).sum())} of {tensor.numel()} elements are wrong, one is {tensor[~right][0]}"
        )


def expect_cut_short(wait: Callable[[], Any]) -> None:
    """Waiting tells that the epoch has ended."""
    try:
        wait()
    except EpochChanged:
        return
    raise AssertionError("an operation that was aborted did not tell")


def plane_of(group: DeviceProcessGroup) -> DevicePlane:
    """The data plane of all its members."""
    return group._plane


def preparation(group: DeviceProcessGroup, expected: Verdict) -> tuple[float, str]:
    """What readying the inner group took in this epoch, in ms, and what it was."""
    costs = plane_of(group).last_costs
    assert costs is not None
    if costs.verdict is not expected:
        raise AssertionError(f"expected {expected.name}, but it was {costs.verdict.name}")
    return 1e3 * costs.seconds, costs.verdict.name.lower()


def main() -> int:
    """Run the checks of one worker."""
    kind, folder, count, worker, device = sys.argv[1:]
    if ":" in kind:
        module, function = kind.split(":")
        platform = getattr(importlib.import_module(module), function)(Path(folder), int(worker))
    else:
        platform = Platform(kind, int(device))
    try:
        Checks(platform, Path(folder), int(count), int(worker)).run()
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
        os._exit(1)  # the library's threads may hang in what is broken
    return 0


if __name__ == "__main__":
    sys.exit(main())
