"""All groups of one process, and their link to ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_elas.runtime.communicator import torch_tables
from megatron_elas.runtime.communicator.accelerators.accelerator import Accelerator
from megatron_elas.runtime.communicator.accelerators.group import DeviceProcessGroup
from megatron_elas.runtime.communicator.channels import (
    FIRST_FREE,
    POINT_TO_POINT,
    channel_of,
    channels_of_group,
    related_to,
)
from megatron_elas.runtime.communicator.membership import DEFAULT_GROUP, Membership
from megatron_elas.runtime.communicator.neighbours import neighbours
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
        self._living = frozenset(world)
        """Also those without a rank."""
        self._deterministic = deterministic
        self._groups: dict[str, ElasticProcessGroup] = {}
        self._views: frozenset[str] = frozenset()
        """Names of groups that need no links."""
        self._muted = False
        self._tolerant = False
        self._pending: EpochChanged | None = None
        self._closed = False
        self.silent = False
        """Muted, or an error is pending. Read by groups before every operation."""
        transport.name_channels(self._name_channel)
        transport.relate_channels(related_to)

    @classmethod
    def join(
        cls,
        transport: Transport,
        membership: Membership,
        *,
        with_torch: bool = True,
        accelerator: Accelerator | None = None,
        deterministic: bool = False,
    ) -> Communicator:
        """Make communicator and groups of a worker that comes to a running job, from what the others edit by.

        Nothing is exchanged.

        Args:
            transport: As in ``__init__``; it adopts the epoch.
            membership: As the others have it. The worker need not be new to them.
            with_torch: Make torch's default group and have torch know all groups, as on the others.
            accelerator: See ``__init__``.
            deterministic: See ``__init__``.

        Raises:
            ValueError: This worker has no rank, or no group, in the membership; nothing was changed.
        """
        worker = transport.worker
        if worker not in membership.ranks or not membership.of(worker):
            raise ValueError(
                f"worker {worker} cannot join epoch {membership.epoch}, which gives it no rank or no group"
            )
        if with_torch and DEFAULT_GROUP not in membership.groups:
            raise ValueError(f"epoch {membership.epoch} does not name torch's default group, {DEFAULT_GROUP!r}")
        communicator = cls(transport, membership.world, accelerator, deterministic=deterministic)
        communicator._adopt(membership)
        if with_torch:
            communicator.register_backend()
            torch_tables.init_torch(membership.ranks[worker], len(membership.ranks))
        communicator._edit_groups(membership)
        for group in communicator.groups:
            group.presume_run()
        return communicator

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

    def edit(self, membership: Membership) -> None:
        """Enter an epoch with other members: addresses, transport, groups, torch's ranks and links, or none of them.

        All workers of the membership call it, between two epochs (``Transport.cancel`` and ``drain`` before), with no
        operation in flight. Nothing is exchanged; it takes microseconds. Groups keep their identity, and those that
        this worker is new in are made. Global ranks are dense: ``dist.get_rank()`` of a worker changes when lower ones
        leave, because Megatron indexes by rank and lets the last rank log. Worker ids stay.

        A worker without a rank adopts the epoch and keeps its groups as they are until it gets one.

        Afterwards ``open_links`` can make the links that small operations miss, all at once; the first operations
        make theirs otherwise. A newer membership cancels that, and is edited to in the same way.

        Raises:
            ValueError: The epoch is not a newer one, or the membership does not fit this worker's groups; nothing was
                changed.
        """
        self._check_edit(membership)
        self._adopt(membership)
        if self._transport.worker in membership.ranks:
            self._edit_groups(membership)

    def _check_edit(self, membership: Membership) -> None:
        worker, epoch = self._transport.worker, membership.epoch
        if epoch <= self._transport.epoch:
            raise ValueError(f"epoch {epoch} cannot be adopted after {self._transport.epoch}: epochs only grow")
        if worker not in membership.addresses:
            raise ValueError(f"epoch {epoch}: worker {worker} is not among the living {sorted(membership.addresses)}")
        if worker not in membership.ranks:
            return
        channels: dict[int, str] = {}
        own = membership.of(worker)
        for name, group in self._groups.items():
            if name not in membership.groups:
                gone = [member for member in group.members if member not in membership.ranks]
                if gone:
                    raise ValueError(
                        f"epoch {epoch} does not name {group}, of which workers {gone} have no global rank any more"
                    )
                if group is dist.GroupMember.WORLD and group.members != membership.world:
                    raise ValueError(
                        f"epoch {epoch} does not name the default group, whose members {list(group.members)} are not "
                        f"those with a rank, {list(membership.world)}"
                    )
                channels[group.channel] = name
            elif name not in own and group is dist.GroupMember.WORLD:
                raise ValueError(f"epoch {epoch}: worker {worker} has a rank and cannot leave the default group")
        for name, new in own.items():
            known = self._groups.get(name)
            channel = channel_of(name) if new.channel is None and known is None else new.channel
            if channel is None:
                assert known is not None
                channel = known.channel
            if channel in channels:
                raise ValueError(
                    f"epoch {epoch}: groups {channels[channel]} and {name} have the same channel {channel}"
                )
            channels[channel] = name
            if known is None and torch_tables.is_taken(name):
                raise ValueError(f"epoch {epoch}: torch has another group named {name!r} already")

    def _adopt(self, membership: Membership) -> None:
        living = frozenset(membership.addresses)
        self._transport.set_addresses(membership.addresses)
        if membership.epoch > self._transport.epoch:
            self._transport.adopt(membership.epoch, lost=self._living - living)
        self._living = living

    def _edit_groups(self, membership: Membership) -> None:
        worker = self._transport.worker
        self._world = membership.world
        own = membership.of(worker)
        for name, new in own.items():  # the default group first: torch asks it for the own rank
            if name in self._groups:
                self._groups[name].edit(new.members, new.channel)
        with_torch = torch_tables.owns_torch(self.groups)
        if with_torch:
            torch_tables.write_own_rank(membership.ranks[worker])
        for group in self.groups:
            if group.group_name in membership.groups and group.group_name not in own:
                self._leave(group)
            else:
                torch_tables.write_ranks(group, membership.ranks)
        for name, new in own.items():
            if name in self._groups:
                continue
            if with_torch:
                ranks = [membership.ranks[member] for member in new.members]
                torch_tables.make_group(name, ranks, ranks.index(membership.ranks[worker]), new.description)
            else:
                self.open_group(name, new.members)._set_group_desc(new.description)
            self._groups[name].presume_run()
            if new.channel is not None:
                self._groups[name].edit(new.members, new.channel)
        if with_torch:
            for name in membership.groups:
                torch_tables.count_group(name)
        self._views -= membership.groups.keys()
        self._views |= {name for name, new in own.items() if new.is_view}
        self._close_unused_links()
        if self._accelerator is not None:
            self._accelerator.settle()

    def _leave(self, group: ElasticProcessGroup) -> None:
        if group in c10d._world.pg_map:
            dist.destroy_process_group(group)
        else:
            group.shutdown()

    def open_links(self, limit_s: float | None = None) -> None:
        """Make the missing links that barriers and collectives of small tensors use, all at once.

        Of the groups that have run a collective. What else is needed comes about when it is first used.

        Raises:
            EpochChanged: Cancelled meanwhile, for example by a newer membership.
            PeerLost: A member has left, or did not answer in time.
        """
        wanted = {
            (peer, group.channel)
            for group in self.groups
            if group.group_name not in self._views and group.has_run
            for peer in neighbours(group.members, group.rank())
        }
        self._transport.open_links(wanted, limit_s)

    def _close_unused_links(self) -> None:
        """Close the links of groups that no operation will use after an edit; others than groups' stay.

        Those that one will use may be here already: a member that is ahead has opened them.
        """
        used = {
            (peer, channel)
            for group in self.groups
            if group.group_name not in self._views
            for channel in channels_of_group(group.channel)
            for peer in group.members
        }
        self._transport.keep_links(lambda peer, channel: channel >= FIRST_FREE or (peer, channel) in used)

    def _name_channel(self, channel: int) -> str:
        of = channel - POINT_TO_POINT if POINT_TO_POINT <= channel < 2 * POINT_TO_POINT else channel
        for group in self.groups:
            if group.channel == of:
                return f"channel {channel} of {group}"
        return f"channel {channel}"

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

    def all_gather_texts(self, text: str) -> list[str]:
        """Bring everybody's text to everybody, in the order of ``all_gather_rows``."""
        mine = text.encode()
        lengths = [length for (length,) in self.all_gather_rows((len(mine),))]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        padded[: len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
        rows = torch.empty((len(lengths), padded.numel()), dtype=torch.uint8)
        self._everybody.allgather([list(rows.unbind(0))], [padded]).wait()
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]

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
