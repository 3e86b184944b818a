"""All groups of one process, and their link to ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_elas.runtime.communicator.accelerators.accelerator import Accelerator
from megatron_elas.runtime.communicator.accelerators.group import DeviceProcessGroup
from megatron_elas.runtime.communicator.channels import FIRST_FREE, POINT_TO_POINT, channel_of
from megatron_elas.runtime.communicator.process_group import ElasticProcessGroup
from megatron_elas.runtime.communicator.running_group import BACKEND, RunningGroup
from megatron_elas.runtime.transport.base import Transport
from megatron_elas.spec.errors import EpochChanged


class Communicator:
    """Makes, edits and silences groups.

    Between steps (logging, timers) two modes keep a worker from hanging or unwinding there:

    * ``tolerant``: a collective that fails because the epoch ended completes locally instead; the first error is kept
      in ``pending_error``, and from then on everything behaves as muted until ``clear_pending``.
    * ``muted``: every collective completes locally. Reductions give the own value, gathers into a list the own value
      in every slot, gathers into one tensor write their own slot only; sends and receives are refused with
      ``EpochChanged``.
    """

    def __init__(
        self,
        transport: Transport,
        world: Sequence[int],
        accelerator: Accelerator | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        """Make a communicator without groups.

        Args:
            transport: Of this process; stays the caller's to close.
            world: Worker id of each global rank.
            accelerator: Carries tensors that lie on this process's device. Without one, groups take CPU tensors only.
            deterministic: Groups of more than ``collectives.DIRECT_MEMBERS`` sum in the order of their members too,
                as smaller ones always do, for the price of a link between any two members. Equal on all workers.

        Raises:
            ValueError: The own worker is not in ``world``.
        """
        if transport.worker not in world:
            raise ValueError(f"worker {transport.worker} is not in the world {list(world)}")
        self._transport = transport
        self._world = tuple(world)
        self._accelerator = accelerator
        self._deterministic = deterministic
        self._groups: dict[str, ElasticProcessGroup] = {}
        self._muted = False
        self._tolerant = False
        self._pending: EpochChanged | None = None
        self._closed = False
        self.silent = False
        """Muted, or an error is pending. Read by groups before every operation."""

    @property
    def transport(self) -> Transport:
        """Of all groups."""
        return self._transport

    @property
    def world(self) -> tuple[int, ...]:
        """Worker id of each global rank, now."""
        return self._world

    @property
    def deterministic(self) -> bool:
        """Every sum is in the order of the group's members; see ``__init__``."""
        return self._deterministic

    @property
    def groups(self) -> list[ElasticProcessGroup]:
        """All groups, in the order they were made; the default group is first."""
        return list(self._groups.values())

    # ------------------------------------------------------------------ torch

    def register_backend(self) -> None:
        """Make ``"elastic"`` a backend of ``torch.distributed``, served by this communicator.

        A later communicator's call takes its place. As default group it needs no rendezvous:
        ``dist.init_process_group("elastic", store=dist.HashStore(), rank=..., world_size=...)``. The store is never
        read; nothing is exchanged until the first operation.
        """
        devices = ["cpu"] if self._accelerator is None else ["cpu", self._accelerator.device.type]
        dist.Backend.register_backend(BACKEND, self._create, extended_api=True, devices=devices)

    def _create(self, options: Any, backend_options: object = None) -> ElasticProcessGroup:
        """c10d's creator. The default group comes without ranks."""
        if self._closed:
            raise RuntimeError("the communicator of the elastic backend was closed; register another one first")
        ranks = list(options.global_ranks_in_group)
        members = [self._world[rank] for rank in ranks] if ranks else list(self._world)
        if len(members) != options.group_size:
            raise ValueError(f"world_size is {options.group_size}, but the communicator has {len(members)} workers")
        if members[options.group_rank] != self._transport.worker:
            raise ValueError(
                f"rank {options.group_rank} is worker {members[options.group_rank]}, not {self._transport.worker}"
            )
        return self.open_group(options.group_id, members)

    def open_group(self, name: str, members: Sequence[int]) -> ElasticProcessGroup:
        """Make a group without telling torch; ``register_backend`` and ``dist.new_group`` are the usual way.

        Args:
            name: Equal on all members and unique in the process; the channel follows from it.
            members: Worker ids in group order.

        Raises:
            ValueError: The name is taken.
        """
        if name in self._groups:
            raise ValueError(f"a group named {name!r} exists already")
        channel = channel_of(name)
        if self._accelerator is None:
            group = ElasticProcessGroup(self, self._transport, name=name, members=members, channel=channel)
        else:
            group = DeviceProcessGroup(
                self, self._transport, self._accelerator, name=name, members=members, channel=channel
            )
        self._groups[name] = group
        return group

    def forget(self, group: RunningGroup) -> None:
        """Take a shut-down group out of ``groups``."""
        self._groups = {name: other for name, other in self._groups.items() if other is not group}

    def close(self) -> None:
        """Shut all groups down and destroy torch's default group, if it is ours.

        Call ``Transport.cancel`` before, if operations may be in flight. Other communicators can be made and
        registered afterwards.
        """
        if self._closed:
            return
        if dist.is_initialized() and isinstance(dist.GroupMember.WORLD, ElasticProcessGroup):
            dist.destroy_process_group()
        for group in self.groups:
            group.shutdown()
        if self._accelerator is not None:
            self._accelerator.close()
        self._closed = True

    # ------------------------------------------------------------------ epochs

    def cancel(self) -> None:
        """End every operation now, on the transport and on the accelerator. Any thread; may be called again."""
        self._transport.cancel()
        if self._accelerator is not None:
            self._accelerator.interrupt()

    def drain(self) -> None:
        """Wait until no asynchronous operation of any group is in flight. After ``Transport.cancel`` or ``cancel``."""
        if self._accelerator is not None and self._transport.cancelled:
            self._accelerator.interrupt()
        for group in self.groups:
            group.drain()

    def renumber(self, dense: Mapping[int, int]) -> None:
        """Write torch's maps of global ranks anew for all groups, in place, after edits. Readies the accelerator.

        Global ranks are dense: ``dist.get_rank()`` of a worker changes when lower ones leave, because Megatron
        indexes by rank and lets the last rank log. Worker ids stay.

        Args:
            dense: Global rank of each living worker; 0 to len - 1.

        Raises:
            ValueError: Ranks are not dense, a group has a member without rank, or the default group's order is
                another one.
        """
        world = sorted(dense, key=lambda worker: dense[worker])
        if [dense[worker] for worker in world] != list(range(len(world))):
            raise ValueError(f"global ranks must be 0 to {len(dense) - 1}, got {dict(dense)}")
        for group in self.groups:
            unknown = [worker for worker in group.members if worker not in dense]
            if unknown:
                raise ValueError(
                    f"{group}: workers {unknown} have no global rank in {dict(dense)}; edit the group first"
                )
        default = dist.GroupMember.WORLD
        if default in self.groups and list(default.members) != world:
            raise ValueError(f"the default group has members {list(default.members)}, the ranks say {world}")
        for group in self.groups:
            ranks = c10d._world.pg_group_ranks.get(group)
            if ranks is not None:
                ranks.clear()
                ranks.update({dense[worker]: position for position, worker in enumerate(group.members)})
        self._world = tuple(world)
        if default in self.groups:
            torch._C._distributed_c10d._set_global_rank(dense[self._transport.worker])
        if self._accelerator is not None:
            self._accelerator.settle()

    def close_unused_links(self, carriers: Collection[ElasticProcessGroup]) -> None:
        """Close the links of groups that no operation will use after an edit. All seated workers call it after an edit.

        Channels that are no group's are left alone.

        Args:
            carriers: Groups whose members agree on who the members are, so that they communicate.
        """
        used = {
            (peer, channel)
            for group in carriers
            for channel in (group.channel, group.channel + POINT_TO_POINT)
            for peer in group.members
        }
        self._transport.keep_links(lambda peer, channel: channel >= FIRST_FREE or (peer, channel) in used)

    # ------------------------------------------------------------------ over everybody

    def barrier(self) -> None:
        """Return when all seated workers have called it. A collective of the first group, as the next one."""
        self._everybody.barrier().wait()

    def all_gather_rows(self, row: Sequence[int]) -> list[list[int]]:
        """Bring everybody's row (64-bit integers, equally many on all workers) to everybody.

        Returns:
            A row per seated worker, in the order of the first group's members.
        """
        group = self._everybody
        mine = torch.tensor(row, dtype=torch.int64)
        rows = torch.empty((group.size(), len(row)), dtype=torch.int64)
        group.allgather([list(rows.unbind(0))], [mine]).wait()
        gathered: list[list[int]] = rows.tolist()
        return gathered

    @property
    def _everybody(self) -> ElasticProcessGroup:
        """The first group that was made: torch's default one, where there is one."""
        group = next(iter(self._groups.values()), None)
        assert group is not None, "no group was made yet"
        return group

    # ------------------------------------------------------------------ between steps

    @property
    def muted(self) -> bool:
        """Every collective completes locally."""
        return self._muted

    @muted.setter
    def muted(self, value: bool) -> None:
        self._muted = value
        self._set_silent()

    @property
    def tolerant(self) -> bool:
        """A collective that fails because the epoch ended completes locally."""
        return self._tolerant

    @tolerant.setter
    def tolerant(self, value: bool) -> None:
        self._tolerant = value

    @property
    def pending_error(self) -> EpochChanged | None:
        """The first error that was tolerated and not cleared."""
        return self._pending

    def note_failure(self, error: EpochChanged) -> None:
        """Called by a group that completed an operation locally because of ``error``."""
        if self._pending is None:
            self._pending = error.with_traceback(None)
            self._set_silent()

    def clear_pending(self) -> None:
        """Forget the tolerated error and speak again."""
        self._pending = None
        self._set_silent()

    def _set_silent(self) -> None:
        self.silent = self._muted or self._pending is not None
