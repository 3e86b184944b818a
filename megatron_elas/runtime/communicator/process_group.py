"""A ``torch.distributed`` process group whose members can change while everybody holds it.

The object's identity never changes: modules, optimizers and Megatron's globals keep it, and see the new size and rank
after ``edit``. Methods have the names that torch 2.11 to 2.14 call, old and new.

Order: collectives of a group run in the order they are called; an asynchronous one goes to the group's thread, and a
synchronous one behind it waits its turn. Sends never wait for the receiver. A receive happens in ``wait``, in the order
of the calls per peer; tags are checked, not searched for, so both sides must use one order.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Work

from megatron_elas.runtime.communicator import collectives
from megatron_elas.runtime.communicator.buffers import as_bytes, flatten, write_back
from megatron_elas.runtime.communicator.channels import POINT_TO_POINT
from megatron_elas.runtime.communicator.collectives import Team
from megatron_elas.runtime.communicator.reduction import Reduction
from megatron_elas.runtime.communicator.runner import Runner
from megatron_elas.runtime.communicator.work import CompletedWork, DeferredReceive, ElasticWork, JoinedWork
from megatron_elas.runtime.transport.base import Part, ProtocolError, Transport
from megatron_elas.spec.errors import EpochChanged

BACKEND = "elastic"

_KINDS = {
    kind: code
    for code, kind in enumerate(
        (
            "point-to-point",
            "all_reduce",
            "reduce",
            "reduce_scatter",
            "all_gather",
            "broadcast",
            "gather",
            "scatter",
            "all_to_all",
            "barrier",
        )
    )
}
"""In the low byte of a tag, so that mixed-up operations are told apart."""

Body = Callable[[Team], None]
Alone = Callable[[], None]


class GroupOwner(Protocol):
    """What a group asks of its communicator."""

    @property
    def silent(self) -> bool:
        """Complete locally, without touching the transport."""

    @property
    def tolerant(self) -> bool:
        """Complete locally when the epoch ends meanwhile."""

    def note_failure(self, error: EpochChanged) -> None:
        """An operation was completed locally because of ``error``."""

    def forget(self, group: ElasticProcessGroup) -> None:
        """The group was shut down."""


class _Inbox:
    """Receives from one peer that are asked for and not done."""

    __slots__ = ("lock", "waiting")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: deque[DeferredReceive] = deque()


class ElasticProcessGroup(dist.ProcessGroup):
    """Made by ``Communicator.open_group``."""

    def __init__(
        self, owner: GroupOwner, transport: Transport, *, name: str, members: Sequence[int], channel: int
    ) -> None:
        """Make a group.

        Args:
            owner: Its communicator.
            transport: Shared by all groups of the process.
            name: c10d's; unique in the process.
            members: Worker ids in group order; the own one is among them.
            channel: Of its collectives, see ``channels``.
        """
        super().__init__(list(members).index(transport.worker), len(members))
        self._owner = owner
        self._transport = transport
        self._name = name
        self._description = "undefined"
        self._runner = Runner(f"elastic-group-{name}")
        self._inboxes: defaultdict[int, _Inbox] = defaultdict(_Inbox)
        self._coalesced: list[Work] | None = None
        self._sequence = 0
        self._tag = 0
        self._epoch = transport.epoch
        self._original_members = tuple(members)
        self.edit(members, channel)

    # ------------------------------------------------------------------ membership

    @property
    def members(self) -> tuple[int, ...]:
        """Worker ids in group order, now."""
        return self._members

    @property
    def original_members(self) -> tuple[int, ...]:
        """Worker ids in group order when the group was made."""
        return self._original_members

    @property
    def channel(self) -> int:
        """Channel of the collectives."""
        return self._channel

    @property
    def description(self) -> str:
        """What the group is for, as its creator said (Megatron's ``group_desc``)."""
        return self._description

    def edit(self, members: Sequence[int], channel: int | None = None) -> None:
        """Change who takes part, in place. Costs microseconds; links are made when first used.

        All members call it between two epochs, with no operation in flight. ``Communicator.edit`` calls it, and brings
        torch's maps of ranks up to date. Members must agree on ``members`` and ``channel`` if they use a collective
        afterwards; groups that become one need a common channel.

        Raises:
            ValueError: This worker is not a member, or one is named twice.
        """
        worker = self._transport.worker
        new = tuple(members)
        if worker not in new or len(set(new)) != len(new):
            raise ValueError(f"{self} cannot have members {new}: worker {worker} must be one, and each only once")
        self._drop_receives()
        self._inboxes.clear()  # they go by rank
        self._members = new
        self._me = new.index(worker)
        if channel is not None:
            self._channel = channel
        self._sequence = 0
        self._team = Team(new, self._me, self._exchange)

    def drain(self) -> None:
        """Wait until no asynchronous operation is in flight, and drop receives nobody has waited for.

        Quick after ``Transport.cancel``. To be called before ``adopt``, by a thread that is in no operation itself.
        """
        self._runner.drain()
        self._drop_receives()

    def _drop_receives(self) -> None:
        for inbox in self._inboxes.values():
            while inbox.waiting:
                inbox.waiting.popleft().finish(EpochChanged(f"{self}: a receive was dropped when its epoch ended"))

    def __repr__(self) -> str:
        members = getattr(self, "_members", self._original_members)
        return f"group {self._name} ({self._description}) of workers {list(members)}"

    # ------------------------------------------------------------------ what torch asks about a group

    def rank(self) -> int:
        """Own position in the group."""
        return self._me

    def size(self) -> int:
        """Number of members."""
        return len(self._members)

    getRank = rank
    getSize = size

    def name(self) -> str:
        """Name of the backend."""
        return BACKEND

    getBackendName = name
    _get_backend_name = name

    @property
    def group_name(self) -> str:
        """c10d's name."""
        return self._name

    def getGroupName(self) -> str:
        """c10d's name."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    @property
    def group_desc(self) -> str:
        """See ``description``."""
        return self._description

    def getGroupDesc(self) -> str:
        """See ``description``."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupDesc = _set_group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _set_sequence_number_for_group(self) -> None:
        pass

    def set_timeout(self, timeout: timedelta) -> None:
        """No effect: operations end with the epoch, not by a clock."""

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """End the group's thread and leave the communicator. Operations in flight must end by themselves."""
        self._runner.close()
        self._owner.forget(self)

    def abort(self) -> None:
        """Cancel all communication of the process, as torch's abort of the default group does."""
        self._transport.cancel()

    # ------------------------------------------------------------------ running

    def _submit(
        self,
        kind: str,
        body: Body,
        alone: Alone,
        result: Any,
        opts: Any,
        keep: Sequence[Tensor] = (),
    ) -> Work:
        """Run a collective now or on the group's thread.

        Args:
            kind: One of ``_KINDS``.
            body: Runs it over the members.
            alone: Completes it without the others.
            result: For the future.
            opts: torch's options, or None.
            keep: Tensors that ``alone`` must find as they were before ``body`` wrote to them.
        """
        perform = partial(self._perform, kind, body, alone, keep, self._transport.epoch)
        work: ElasticWork
        if getattr(opts, "asyncOp", False):
            work = self._runner.submit(perform, result)
        elif self._runner.busy:
            work = self._runner.submit(perform, result)
            work.wait()
        else:
            perform()
            work = CompletedWork(result)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _perform(self, kind: str, body: Body, alone: Alone, keep: Sequence[Tensor], epoch: int) -> None:
        owner = self._owner
        if owner.silent:
            alone()
            return
        saved = [tensor.detach().clone() for tensor in keep] if owner.tolerant else ()
        try:
            self._begin(_KINDS[kind], epoch)
            if len(self._members) == 1:
                alone()
            else:
                body(self._team)
        except (EpochChanged, ProtocolError) as error:
            error.add_note(f"in {kind} of {self}, epoch {epoch}")
            if not owner.tolerant or not isinstance(error, EpochChanged):
                raise
            owner.note_failure(error)
            for tensor, before in zip(keep, saved, strict=True):
                tensor.detach().copy_(before)
            alone()

    def _begin(self, code: int, epoch: int) -> None:
        transport = self._transport
        if transport.cancelled or transport.epoch != epoch:
            raise EpochChanged(f"epoch {epoch} ended on worker {transport.worker}")
        if self._epoch != epoch:
            # members may have been cut off at different operations: count anew
            self._epoch = epoch
            self._sequence = 0
        self._sequence += 1
        self._tag = self._sequence << 8 | code

    def _exchange(self, sends: list[Part], receives: list[Part]) -> None:
        self._transport.exchange(self._channel, self._tag, sends, receives)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalesced = self._coalesced, None
        return JoinedWork(works or [])

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Reduce each tensor over all members, in place."""
        op = _reduce_op(opts)

        def body(team: Team) -> None:
            for tensor in tensors:
                flat = flatten(tensor)
                collectives.all_reduce(team, flat, Reduction(op, flat.dtype))
                write_back(flat, tensor)

        return self._submit("all_reduce", body, _nothing, tensors, opts, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """Reduce each tensor to the root's; the others keep theirs."""
        op, root = _reduce_op(opts), opts.rootRank

        def body(team: Team) -> None:
            for tensor in tensors:
                flat = flatten(tensor)
                collectives.reduce(team, flat, root, Reduction(op, flat.dtype))
                if team.me == root:
                    write_back(flat, tensor)

        return self._submit("reduce", body, _nothing, tensors, opts, tensors)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        """Reduce ``inputs[k][i]`` over all members to member i's ``outputs[k]``."""
        op = _reduce_op(opts)

        def body(team: Team) -> None:
            for output, shares in zip(outputs, inputs, strict=True):
                flat = flatten(output)
                collectives.reduce_scatter(team, flat, [flatten(share) for share in shares], Reduction(op, flat.dtype))
                write_back(flat, output)

        def alone() -> None:
            for output, shares in zip(outputs, inputs, strict=True):
                output.detach().copy_(shares[self._me])

        return self._submit("reduce_scatter", body, alone, outputs, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Reduce ``input`` over all members and give each its equal share."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """``reduce_scatter_single`` of several tensors."""
        shares = [_shares(whole, output, self.size()) for output, whole in zip(outputs, inputs, strict=True)]
        return self.reduce_scatter(outputs, shares, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ------------------------------------------------------------------ moving

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Bring member i's ``inputs[k]`` to everybody's ``outputs[k][i]``.

        Completed locally, every slot gets the own tensor: torch's object gathers unpickle what is in them.
        """

        def alone() -> None:
            for slots, tensor in zip(outputs, inputs, strict=True):
                own = tensor.detach().clone()  # it may be one of the slots
                for slot in slots:
                    if slot.shape == own.shape:
                        slot.detach().copy_(own)

        for slots in outputs:
            if len(slots) != self.size():
                raise ValueError(f"all_gather in {self} needs {self.size()} outputs, got {len(slots)}")
        return self._submit("all_gather", _gathering(outputs, inputs), alone, outputs, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Bring member i's ``inputs[k]`` to everybody's ``outputs[i][k]``."""
        by_input = [[slots[at] for slots in outputs] for at in range(len(inputs))]
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Bring the members' tensors into ``output``, in member order."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """``all_gather_single`` of several tensors.

        Completed locally, the others' slots stay as they were: they may hold other replicas' parameters.
        """
        slots = [_shares(whole, share, self.size()) for whole, share in zip(outputs, inputs, strict=True)]

        def alone() -> None:
            for own_slots, tensor in zip(slots, inputs, strict=True):
                own_slots[self._me].copy_(tensor.detach())

        return self._submit("all_gather", _gathering(slots, inputs), alone, outputs, opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        """Copy the root's tensors to everybody."""
        root = opts.rootRank

        def body(team: Team) -> None:
            for tensor in tensors:
                flat = flatten(tensor)
                collectives.broadcast(team, flat, root)
                write_back(flat, tensor)

        return self._submit("broadcast", body, _nothing, tensors, opts, tensors)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        """Bring everybody's tensor to the root's ``outputs[0]``."""
        root = opts.rootRank
        slots = outputs[0] if outputs else []

        def body(team: Team) -> None:
            flats = [flatten(slot) for slot in slots]
            collectives.gather(team, flats, flatten(inputs[0]), root)
            for flat, slot in zip(flats, slots, strict=True):
                write_back(flat, slot)

        def alone() -> None:
            for slot in slots:
                slot.detach().copy_(inputs[0])

        return self._submit("gather", body, alone, outputs, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        """Bring the root's ``inputs[0][i]`` to member i's ``outputs[0]``."""
        root = opts.rootRank
        shares = inputs[0] if inputs else []

        def body(team: Team) -> None:
            flat = flatten(outputs[0])
            collectives.scatter(team, flat, [flatten(share) for share in shares], root)
            write_back(flat, outputs[0])

        def alone() -> None:
            if shares:
                outputs[0].detach().copy_(shares[self._me])

        return self._submit("scatter", body, alone, outputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Bring ``inputs[i]`` to member i's ``outputs[me]``."""

        def body(team: Team) -> None:
            flats = [flatten(output) for output in outputs]
            collectives.all_to_all(team, flats, [flatten(tensor) for tensor in inputs])
            for flat, output in zip(flats, outputs, strict=True):
                write_back(flat, output)

        def alone() -> None:
            outputs[self._me].detach().copy_(inputs[self._me])

        return self._submit("all_to_all", body, alone, outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """``alltoall`` of pieces along the first dimension; no sizes means equal ones."""
        return self.alltoall(
            _pieces(output, output_split_sizes, self.size()), _pieces(input, input_split_sizes, self.size()), opts
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        """Return when all members have called it."""
        return self._submit("barrier", collectives.barrier, _nothing, None, opts)

    # ------------------------------------------------------------------ point to point

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Work:
        """Send eagerly: the tensor may be changed when this returns."""
        self._refuse_if_silent("send")
        flat = flatten(tensors[0])
        part = Part(self._members[dstRank], as_bytes(flat))
        try:
            self._transport.post(self._channel + POINT_TO_POINT, tag, part)
        except EpochChanged as error:
            error.add_note(f"in send to rank {dstRank} of {self}")
            raise
        return self._collect(CompletedWork(tensors))

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Work:
        """Ask for a tensor; it is received in ``wait``, after those asked for before."""
        self._refuse_if_silent("recv")
        inbox = self._inboxes[srcRank]
        receive = partial(self._receive, srcRank, self._members[srcRank], tag, tensors[0], self._transport.epoch)
        work = DeferredReceive(tensors, partial(self._receive_up_to, inbox), receive, srcRank)
        inbox.waiting.append(work)
        return self._collect(work)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Not offered: a link is received from only when its peer is named."""
        raise NotImplementedError(f"{self} cannot receive from any source; name the source rank")

    def _refuse_if_silent(self, what: str) -> None:
        if self._owner.silent:
            raise EpochChanged(f"{what} refused in {self}: communication is muted until the next step")

    def _collect(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _receive(self, rank: int, peer: int, tag: int, tensor: Tensor, epoch: int) -> None:
        if self._transport.epoch != epoch:
            raise EpochChanged(f"{self}: a receive of epoch {epoch} was waited for in epoch {self._transport.epoch}")
        flat = flatten(tensor)
        try:
            self._transport.exchange(self._channel + POINT_TO_POINT, tag, (), (Part(peer, as_bytes(flat)),))
        except (EpochChanged, ProtocolError) as error:
            error.add_note(f"in recv from rank {rank} of {self}")
            raise
        write_back(flat, tensor)

    def _receive_up_to(self, inbox: _Inbox, last: DeferredReceive) -> None:
        with inbox.lock:
            while not last.is_completed():
                if not inbox.waiting:
                    last.finish(EpochChanged(f"{self}: a receive was dropped when its epoch ended"))
                    return
                inbox.waiting.popleft().receive()


def _nothing() -> None:
    """A collective over one member in place."""


def _gathering(outputs: list[list[Tensor]], inputs: list[Tensor]) -> Body:
    """Bring member i's ``inputs[k]`` to everybody's ``outputs[k][i]``."""

    def body(team: Team) -> None:
        for slots, tensor in zip(outputs, inputs, strict=True):
            flats = [flatten(slot) for slot in slots]
            collectives.all_gather(team, flats, flatten(tensor))
            for flat, slot in zip(flats, slots, strict=True):
                write_back(flat, slot)

    return body


def _reduce_op(opts: Any) -> ReduceOp:
    return ReduceOp.SUM if opts is None else opts.reduceOp


def _shares(whole: Tensor, share: Tensor, count: int) -> list[Tensor]:
    """Cut ``whole`` into ``count`` tensors like ``share``; views, so ``whole`` must be contiguous.

    Raises:
        ValueError: Sizes or dtypes do not fit.
    """
    if whole.numel() != count * share.numel() or whole.dtype != share.dtype or not whole.is_contiguous():
        raise ValueError(
            f"expected one contiguous {share.dtype} tensor of {count} x {share.numel()} elements, "
            f"got {whole.dtype} with {whole.numel()}"
        )
    return list(whole.detach().view(count, *share.shape).unbind(0))


def _pieces(tensor: Tensor, sizes: list[int] | None, count: int) -> list[Tensor]:
    if not sizes:
        rows = tensor.shape[0]
        if rows % count:
            raise ValueError(f"all_to_all_single of {rows} rows over {count} members needs split sizes")
        sizes = [rows // count] * count
    return list(tensor.detach().split(list(sizes)))
