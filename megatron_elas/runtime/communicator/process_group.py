"""A ``torch.distributed`` process group whose members can change while everybody holds it.

The object's identity never changes: modules, optimizers and Megatron's globals keep it, and see the new size and rank
after ``edit``.

Order: collectives of a group run in the order they are called; an asynchronous one goes to the group's thread, and a
synchronous one behind it waits its turn. Sends and receives run beside them, see ``point_to_point``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from megatron_elas.runtime.communicator.collective_group import CollectiveGroup
from megatron_elas.runtime.communicator.signatures import pack
from megatron_elas.runtime.communicator.work import JoinedWork
from megatron_elas.runtime.transport.base import Part, ProtocolError
from megatron_elas.spec.errors import EpochChanged


class ElasticProcessGroup(CollectiveGroup):
    """Made by ``Communicator.open_group``."""

    # ------------------------------------------------------------------ point to point

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Work:
        """Send. A small tensor may be changed when this returns, a large one after ``wait``, see ``point_to_point``."""
        self._check_message("send", tensors, dstRank)
        try:
            work = self._mailbox.send(tensors[0], dstRank, tag)
        except EpochChanged as error:
            error.add_note(f"in send to rank {dstRank} of {self}")
            raise
        return self._collect(work)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Work:
        """Ask for a tensor with this tag. Receives of one tag are filled in the order they are asked for."""
        self._check_message("recv", tensors, srcRank)
        return self._collect(self._mailbox.receive(tensors[0], srcRank, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Ask for a tensor with this tag from whoever sends one first; ``source_rank`` of the work tells who it was.

        It listens to all members, so links to all are made, and one that leaves ends the epoch.
        """
        self._check_message("recv", tensors, self._me)
        return self._collect(self._mailbox.receive(tensors[0], None, tag))

    def _check_message(self, what: str, tensors: list[Tensor], rank: int) -> None:
        if self._owner.silent:
            raise EpochChanged(f"{what} refused in {self}: communication is muted until the next step")
        self._check_root(what, rank)
        if len(tensors) != 1 or not tensors[0].is_cpu:
            raise self._refuse(what, f"it takes one tensor on the CPU, got {len(tensors)} on {tensors[0].device}")

    # ------------------------------------------------------------------ several operations as one

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalesced = self._coalesced, None
        return JoinedWork(works or [])

    # ------------------------------------------------------------------ groups of some of the members

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> ElasticProcessGroup | None:
        """Make a group of some ranks of this one, without any exchange.

        ``dist.split_group`` itself asks for an accelerator; ``dist.new_group`` does the same on CPUs.

        Args:
            new_ranks: Ranks in this group, in the order of the new one.
            timeout: Not looked at, as in all groups.
            opts: Not looked at.
            group_name: Equal on all its members and unique in the process.
            group_desc: See ``description``.
            device_types: Not looked at.

        Returns:
            None where this worker is no member.
        """
        for rank in new_ranks:
            self._check_root("split_group", rank)
        if group_name is None:
            raise self._refuse("split_group", "a group_name is needed, equal on all its members")
        if self._me not in new_ranks:
            return None
        group = self._owner.open_group(group_name, [self._members[rank] for rank in new_ranks])
        group.setGroupDesc(group_desc or "undefined")
        return group

    # ------------------------------------------------------------------ barriers that tell who is missing

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when all members have called it; after ``timeout``, say which have not.

        All missing ranks are named, with ``wait_all_ranks`` or without.

        Raises:
            TimeoutError: Rank 0 names the ranks that did not come; the others say that rank 0 has not answered. The
                epoch has ended for them.
        """
        if self._owner.silent or self.size() == 1:
            return
        self._runner.drain()
        epoch = self._transport.epoch
        limit_s = None if timeout is None else timeout.total_seconds()
        nothing = memoryview(b"")
        hub = self._me == 0
        peers = [Part(member, nothing) for member in (self._members[1:] if hub else self._members[:1])]
        try:
            self._begin(pack("monitored_barrier"), epoch)
            for sends, receives in ([(), peers], [peers, ()]) if hub else ([peers, ()], [(), peers]):
                self._transport.exchange(self._channel, self._tag, sends, receives, limit_s)
        except (TimeoutError, ProtocolError) as error:
            raise type(error)(self._explained("monitored_barrier", error, epoch)) from None
        except EpochChanged as error:
            error.add_note(f"in monitored_barrier of {self}, epoch {epoch}")
            raise
