"""What every operation of a group needs: who the members are, and how a program is run over them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from megatron_elas.runtime.communicator.buffers import as_bytes, flatten, write_back
from megatron_elas.runtime.communicator.channels import POINT_TO_POINT
from megatron_elas.runtime.communicator.collectives import Team
from megatron_elas.runtime.communicator.point_to_point import Mailbox
from megatron_elas.runtime.communicator.runner import Runner
from megatron_elas.runtime.communicator.signatures import SEQUENCES, explain
from megatron_elas.runtime.communicator.work import CompletedWork, ElasticWork, seconds
from megatron_elas.runtime.transport.base import ProtocolError, Transport
from megatron_elas.runtime.transport.program import Program
from megatron_elas.spec.errors import EpochChanged

BACKEND = "elastic"

RECIPES = 512
"""Programs that a group keeps; when there are more, it starts anew."""

_WORKERS_TEXT = re.compile(r"workers? (\d+(?:, \d+)*)")


class GroupOwner(Protocol):
    """What a group asks of its communicator."""

    @property
    def silent(self) -> bool:
        """Complete locally, without touching the transport."""

    @property
    def tolerant(self) -> bool:
        """Complete locally when the epoch ends meanwhile."""

    @property
    def deterministic(self) -> bool:
        """See ``Communicator``."""

    def open_group(self, name: str, members: Sequence[int]) -> Any:
        """Make another group, see ``Communicator``."""

    def note_failure(self, error: EpochChanged) -> None:
        """An operation was completed locally because of ``error``."""

    def forget(self, group: RunningGroup) -> None:
        """The group was shut down."""


class Recipe(NamedTuple):
    """How a collective is done; equal calls share it."""

    kind: str
    signature: int
    """Its tag without the number, see ``signatures``."""
    program: Program


class Call(NamedTuple):
    """One collective as it was asked for."""

    recipe: Recipe
    buffers: Sequence[Tensor]
    """What the program calls buffer 0, 1, ..."""
    alone: Callable[[], None]
    """Completes it without the others."""
    written: int = 1
    """The program writes to the first so many buffers."""
    keep: Sequence[Tensor] = ()
    """Tensors that ``alone`` must find as they were before the program wrote to them."""
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None
    """What the program cannot compute, on the buffers."""
    limit_s: float | None = None


_NO_PROGRAM = Program(())

_DONE = CompletedWork(())
"""What torch gets for synchronous calls: it only waits for it, and making one takes as long as half of the call."""


class RunningGroup(dist.ProcessGroup):
    """Membership and the running of programs."""

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
        self._mailbox = Mailbox(transport, self.__repr__)
        self._coalesced: list[Work] | None = None
        self._has_run = False
        self._sequence = 0
        self._tag = 0
        self._epoch = transport.epoch
        self._recipes: dict[object, Recipe] = {}
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

    @property
    def deterministic(self) -> bool:
        """Sums are in the order of the members whatever their number, see ``collectives``."""
        return self._team.deterministic

    @property
    def has_run(self) -> bool:
        """A collective was asked for since the group was made, or by members that were there before."""
        return self._has_run

    def presume_run(self) -> None:
        """The others have used the group before this worker came to it."""
        self._has_run = True

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
        if channel is not None:
            self._channel = channel
        self._members = new
        self._me = new.index(worker)
        self._mailbox.reset(new, self._me, self._channel + POINT_TO_POINT)
        self._sequence = 0
        self._team = Team(new, self._me, self._owner.deterministic)
        self._recipes.clear()

    def drain(self) -> None:
        """Wait until no asynchronous operation is in flight, and drop receives nobody has waited for.

        Quick after ``Transport.cancel``. To be called before ``adopt``, by a thread that is in no operation itself.
        """
        self._runner.drain()
        self._mailbox.drop()

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

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

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

    def _recipe(self, key: tuple[object, ...], kind: str, build: Callable[[], tuple[int, Program]]) -> Recipe:
        """The recipe of a call, from earlier ones or from ``build`` (signature, program).

        Args:
            key: All that the recipe depends on, besides the members.
            kind: For messages.
            build: Called where there is none, and where there are others than this member.
        """
        recipe = self._recipes.get(key)
        if recipe is None:
            if len(self._recipes) >= RECIPES:
                self._recipes.clear()
            signature, program = build() if len(self._members) > 1 else (0, _NO_PROGRAM)
            recipe = self._recipes[key] = Recipe(kind, signature, program)
        return recipe

    def _submit(self, call: Call, result: Any, opts: Any) -> Work:
        """Run a collective now or on the group's thread.

        Args:
            call: What to run.
            result: For the future.
            opts: torch's options, or None.
        """
        epoch = self._transport.epoch
        work: ElasticWork
        if opts is not None and opts.asyncOp:
            work = self._runner.submit(partial(self._perform, call, epoch), result)
        elif self._runner.busy:
            work = self._runner.submit(partial(self._perform, call, epoch), result)
            work.wait()
        else:
            self._perform(call, epoch)
            work = _DONE if opts is not None else CompletedWork(result)
        return self._collect(work)

    def _collect(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _perform(self, call: Call, epoch: int) -> None:
        owner = self._owner
        if owner.silent:
            call.alone()
            return
        saved = [tensor.detach().clone() for tensor in call.keep] if owner.tolerant else ()
        try:
            self._begin(call.recipe.signature, epoch)
            if len(self._members) > 1:
                self._run(call)
            else:
                if call.before is not None:
                    call.before()
                call.alone()
        except ProtocolError as error:
            raise ProtocolError(self._explained(call.recipe.kind, error, epoch)) from None
        except TimeoutError as error:
            raise TimeoutError(self._explained(call.recipe.kind, error, epoch)) from None
        except EpochChanged as error:
            error.add_note(f"in {call.recipe.kind} of {self}, epoch {epoch}")
            if not owner.tolerant:
                raise
            owner.note_failure(error)
            for tensor, before in zip(call.keep, saved, strict=True):
                tensor.detach().copy_(before)
            call.alone()

    def _begin(self, signature: int, epoch: int) -> None:
        transport = self._transport
        if transport.cancelled or transport.epoch != epoch:
            raise EpochChanged(f"epoch {epoch} ended on worker {transport.worker}")
        if self._epoch != epoch:
            # members may have been cut off at different operations: count anew
            self._epoch = epoch
            self._sequence = 0
        self._has_run = True
        self._sequence = sequence = (self._sequence + 1) % SEQUENCES
        self._tag = signature | sequence

    def _run(self, call: Call) -> None:
        if call.before is not None:
            call.before()
        flats: list[Tensor] = []
        views: list[memoryview] = []
        copied = False
        for tensor in call.buffers:
            if not tensor.is_cpu:
                raise self._refuse(call.recipe.kind, f"a tensor is on {tensor.device}; the elastic backend is for CPUs")
            if not tensor.is_contiguous():
                tensor = flatten(tensor)
                copied = True
            flats.append(tensor)
            views.append(as_bytes(tensor))
        program = call.recipe.program
        if call.limit_s is None:
            self._transport.run(self._channel, self._tag, program, views)
        else:
            self._transport.run(self._channel, self._tag, program, views, call.limit_s)
        if copied:
            for flat, tensor in zip(flats[: call.written], call.buffers, strict=False):
                write_back(flat, tensor)
        if call.after is not None:
            call.after()

    def _limit_s(self, opts: Any) -> float | None:
        return None if opts is None else seconds(opts.timeout)

    # ------------------------------------------------------------------ messages

    def _explained(self, kind: str, error: Exception, epoch: int) -> str:
        """A transport's message with the group, its ranks, and what the tags in it mean."""

        def with_ranks(match: re.Match[str]) -> str:
            workers = [int(worker) for worker in match[1].split(", ")]
            if not set(workers) <= set(self._members):
                return match[0]
            ranks = ", ".join(str(self._members.index(worker)) for worker in workers)
            plural = "s" if len(workers) > 1 else ""
            return f"rank{plural} {ranks} (worker{plural} {match[1]})"

        text = _WORKERS_TEXT.sub(with_ranks, explain(str(error)))
        return f"{kind} in {self}, epoch {epoch}, at rank {self._me}: {text}"

    def _refuse(self, kind: str, why: str) -> ValueError:
        """The error of a call that cannot be."""
        return ValueError(f"{kind} in {self}, epoch {self._transport.epoch}, at rank {self._me}: {why}")

    def _check_root(self, kind: str, root: int) -> None:
        if not 0 <= root < len(self._members):
            raise self._refuse(kind, f"rank {root} is not one of the ranks 0 to {len(self._members) - 1}")
