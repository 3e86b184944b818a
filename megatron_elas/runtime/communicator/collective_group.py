"""The collectives of ``torch.distributed``, each as a program over the members.

Methods have the names that torch 2.11 to 2.14 call, old and new. A call says what its buffers are; everything else
follows from their sizes, the root and the reduce operation, and is made once for each combination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Work

from megatron_elas.runtime.communicator import collectives
from megatron_elas.runtime.communicator.reduction import AVG, PREMUL_SUM, SUM, Reduction, code_of
from megatron_elas.runtime.communicator.running_group import Call, RunningGroup
from megatron_elas.runtime.communicator.signatures import pack
from megatron_elas.runtime.communicator.work import JoinedWork
from megatron_elas.runtime.transport.program import Program, Region


class CollectiveGroup(RunningGroup):
    """A group with collectives."""

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Reduce each tensor over all members, in place."""
        if len(tensors) > 1 and any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            return self._by_dtype(self.allreduce, tensors, opts)
        op = _reduce_op(opts)
        code, dtype, item = code_of(op), tensors[0].dtype, tensors[0].element_size()
        sizes = tuple([tensor.nbytes for tensor in tensors])

        def build() -> tuple[int, Program]:
            team = self._team
            reducer = self._reduction(
                "all_reduce", code, dtype, ring=any(collectives.rings(team, size) for size in sizes)
            )
            return pack("all_reduce", dtype, code, count=sum(sizes) // item), collectives.together(
                [collectives.all_reduce(team, Region(at, 0, size), item, reducer) for at, size in enumerate(sizes)]
            )

        recipe = self._recipe(("all_reduce", code, dtype, sizes), "all_reduce", build)
        before = after = None
        if code != SUM:
            before = _scaling(op, code, tensors)
            if code == AVG and any(collectives.rings(self._team, size) for size in sizes):
                after = partial(_divide, tensors, self.size())
        return self._submit(Call(recipe, tensors, _nothing, len(tensors), tensors, before, after), tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """Reduce each tensor to the root's; the others keep theirs."""
        op, root = _reduce_op(opts), opts.rootRank
        code = code_of(op)
        self._check_root("reduce", root)
        works = []
        for tensor in tensors:
            dtype, item, size = tensor.dtype, tensor.element_size(), tensor.nbytes
            buffer, after = tensor, None
            if code == PREMUL_SUM:
                buffer = tensor.detach() * op.factor
                after = partial(tensor.detach().copy_, buffer) if self._me == root else None

            def build(dtype: torch.dtype = dtype, item: int = item, size: int = size) -> tuple[int, Program]:
                reducer = self._reduction("reduce", code, dtype)
                return pack("reduce", dtype, code, root, size // item), collectives.reduce(
                    self._team, Region(0, 0, size), item, root, reducer
                )

            recipe = self._recipe(("reduce", code, dtype, root, size), "reduce", build)
            call = Call(recipe, [buffer], _nothing, int(self._me == root), [tensor], after=after)
            works.append(self._submit(call, tensors, opts))
        return _as_one(works, tensors)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        """Reduce ``inputs[k][i]`` over all members to member i's ``outputs[k]``."""
        if len(outputs) != len(inputs):
            raise self._refuse("reduce_scatter", f"{len(outputs)} outputs for {len(inputs)} lists of inputs")
        works = []
        for output, shares in zip(outputs, inputs, strict=True):
            self._check_count("reduce_scatter", "inputs", shares)
            works.append(self._reduce_scatter_list(output, shares, outputs, opts))
        return _as_one(works, outputs)

    def _reduce_scatter_list(self, output: Tensor, shares: list[Tensor], result: list[Tensor], opts: Any) -> Work:
        op = _reduce_op(opts)
        code, dtype, item, me = code_of(op), output.dtype, output.element_size(), self._me
        sizes = tuple([share.nbytes for share in shares])
        in_place = shares[me].data_ptr() == output.data_ptr()
        if sizes[me] != output.nbytes or any(share.dtype != dtype for share in shares):
            raise self._refuse(
                "reduce_scatter",
                f"the output has {output.numel()} elements of {dtype}, the inputs "
                f"{[share.numel() for share in shares]} of {sorted({str(share.dtype) for share in shares})}",
            )

        def build() -> tuple[int, Program]:
            inputs = [Region(1 + at, 0, size) for at, size in enumerate(sizes)]
            target = inputs[me] if in_place else Region(0, 0, sizes[me])
            ring = not self._team.sums_in_order
            reducer = self._reduction("reduce_scatter", code, dtype, ring=ring)
            return pack("reduce_scatter", dtype, code, count=sum(sizes) // item), collectives.reduce_scatter(
                self._team, target, inputs, item, reducer
            )

        recipe = self._recipe(("reduce_scatter list", code, dtype, sizes, in_place), "reduce_scatter", build)
        if code == PREMUL_SUM:
            shares = [share * op.factor for share in shares]
        after = partial(_divide, [output], self.size()) if code == AVG and not self._team.sums_in_order else None
        alone = partial(_copy_to, output, shares[me])
        # in place, the program writes to the share; where that is not contiguous, to a copy of it
        written = 1 + (me + 1) * in_place
        return self._submit(Call(recipe, [output, *shares], alone, written, after=after), result, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Reduce ``input`` over all members and give each its equal share."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """``reduce_scatter_single`` of several tensors."""
        if len(outputs) > 1 and any(output.dtype != outputs[0].dtype for output in outputs):
            return self._by_dtype(self.reduce_scatter_single_coalesced, outputs, opts, inputs)
        op = _reduce_op(opts)
        code, dtype, item, me = code_of(op), outputs[0].dtype, outputs[0].element_size(), self._me
        self._check_wholes("reduce_scatter", outputs, inputs)
        sizes = tuple([output.nbytes for output in outputs])
        in_place = tuple(
            [
                whole.data_ptr() + me * size == output.data_ptr()
                for output, whole, size in zip(outputs, inputs, sizes, strict=True)
            ]
        )

        def build() -> tuple[int, Program]:
            reducer = self._reduction("reduce_scatter", code, dtype, ring=not self._team.sums_in_order)
            programs = []
            for at, (size, same) in enumerate(zip(sizes, in_place, strict=True)):
                slots = self._slots(len(sizes) + at, size)
                target = slots[me] if same else Region(at, 0, size)
                programs.append(collectives.reduce_scatter(self._team, target, slots, item, reducer))
            count = sum(sizes) // item * self.size()
            return pack("reduce_scatter", dtype, code, count=count), collectives.together(programs)

        recipe = self._recipe(("reduce_scatter", code, dtype, sizes, in_place), "reduce_scatter", build)
        if code == PREMUL_SUM:
            inputs = [whole * op.factor for whole in inputs]
        after = partial(_divide, outputs, self.size()) if code == AVG and not self._team.sums_in_order else None

        def alone() -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                _copy_to(output, whole.detach().reshape(self.size(), -1)[me].view(output.shape))

        return self._submit(Call(recipe, [*outputs, *inputs], alone, len(outputs), after=after), outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ------------------------------------------------------------------ gathers

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Bring member i's ``inputs[k]`` to everybody's ``outputs[k][i]``.

        Completed locally, every slot gets the own tensor: torch's object gathers unpickle what is in them.
        """
        if len(outputs) != len(inputs):
            raise self._refuse("all_gather", f"{len(outputs)} lists of outputs for {len(inputs)} inputs")
        for slots in outputs:
            self._check_count("all_gather", "outputs", slots)
        works = [
            self._all_gather_list(slots, tensor, outputs, opts) for slots, tensor in zip(outputs, inputs, strict=True)
        ]
        return _as_one(works, outputs)

    def _all_gather_list(self, slots: list[Tensor], tensor: Tensor, result: list[list[Tensor]], opts: Any) -> Work:
        me, size, dtype = self._me, tensor.nbytes, tensor.dtype
        sizes = tuple([slot.nbytes for slot in slots])
        in_place = slots[me].data_ptr() == tensor.data_ptr()
        if sizes[me] != size:
            raise self._refuse(
                "all_gather", f"the input has {tensor.numel()} elements, the own output {slots[me].numel()}"
            )

        def build() -> tuple[int, Program]:
            regions = [Region(at, 0, length) for at, length in enumerate(sizes)]
            own = regions[me] if in_place else Region(len(slots), 0, size)
            count = sum(sizes) // tensor.element_size()
            return pack("all_gather", dtype, count=count), collectives.all_gather(self._team, regions, own)

        recipe = self._recipe(("all_gather list", dtype, sizes, in_place), "all_gather", build)

        def alone() -> None:
            own = tensor.detach().clone()  # it may be one of the slots
            for slot in slots:
                if slot.shape == own.shape:
                    slot.detach().copy_(own)

        return self._submit(Call(recipe, [*slots, tensor], alone, len(slots)), result, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Bring member i's ``inputs[k]`` to everybody's ``outputs[i][k]``."""
        self._check_count("all_gather_coalesced", "lists of outputs", outputs)
        if any(len(slots) != len(inputs) for slots in outputs):
            raise self._refuse(
                "all_gather_coalesced", f"{[len(slots) for slots in outputs]} outputs for {len(inputs)} inputs"
            )
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
        me, dtype = self._me, inputs[0].dtype
        self._check_wholes("all_gather", inputs, outputs)
        sizes = tuple([tensor.nbytes for tensor in inputs])
        in_place = tuple(
            [
                whole.data_ptr() + me * size == own.data_ptr()
                for whole, own, size in zip(outputs, inputs, sizes, strict=True)
            ]
        )

        def build() -> tuple[int, Program]:
            programs = []
            for at, (size, same) in enumerate(zip(sizes, in_place, strict=True)):
                slots = self._slots(at, size)
                own = slots[me] if same else Region(len(sizes) + at, 0, size)
                programs.append(collectives.all_gather(self._team, slots, own))
            count = sum(whole.numel() for whole in outputs)
            return pack("all_gather", dtype, count=count), collectives.together(programs)

        recipe = self._recipe(("all_gather", dtype, sizes, in_place), "all_gather", build)

        def alone() -> None:
            for whole, tensor in zip(outputs, inputs, strict=True):
                slot = whole.detach().view(self.size(), -1)[me]
                _copy_to(slot, tensor.detach().reshape(-1))

        return self._submit(Call(recipe, [*outputs, *inputs], alone, len(outputs), outputs), outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    # ------------------------------------------------------------------ from and to a root

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        """Copy the root's tensors to everybody."""
        root = opts.rootRank
        self._check_root("broadcast", root)
        dtypes = tuple([tensor.dtype for tensor in tensors])
        sizes = tuple([tensor.nbytes for tensor in tensors])

        def build() -> tuple[int, Program]:
            programs = [
                collectives.broadcast(self._team, Region(at, 0, size), dtype.itemsize, root)
                for at, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
            ]
            count = sum(tensor.numel() for tensor in tensors)
            return pack("broadcast", dtypes[0], root=root, count=count), collectives.chain(*programs)

        recipe = self._recipe(("broadcast", dtypes, sizes, root), "broadcast", build)
        return self._submit(Call(recipe, tensors, _nothing, len(tensors), tensors), tensors, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        """Bring everybody's tensor to the root's ``outputs[0]``."""
        root, me = opts.rootRank, self._me
        self._check_root("gather", root)
        (tensor,) = inputs
        slots = outputs[0] if outputs and me == root else []
        if me == root:
            self._check_count("gather", "outputs", slots)
            if any(slot.nbytes != tensor.nbytes for slot in slots):
                raise self._refuse(
                    "gather", f"the input has {tensor.numel()} elements, the outputs {[slot.numel() for slot in slots]}"
                )
        size, dtype = tensor.nbytes, tensor.dtype

        def build() -> tuple[int, Program]:
            regions = [Region(at, 0, size) for at in range(len(slots))]
            own = Region(len(slots), 0, size)
            return pack("gather", dtype, root=root, count=tensor.numel()), collectives.gather(
                self._team, regions, own, root
            )

        recipe = self._recipe(("gather", dtype, size, root), "gather", build)

        def alone() -> None:
            for slot in slots:
                slot.detach().copy_(tensor)

        return self._submit(Call(recipe, [*slots, tensor], alone, len(slots)), outputs, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        """Bring the root's ``inputs[0][i]`` to member i's ``outputs[0]``."""
        root, me = opts.rootRank, self._me
        self._check_root("scatter", root)
        (output,) = outputs
        shares = inputs[0] if inputs and me == root else []
        if me == root:
            self._check_count("scatter", "inputs", shares)
            if any(share.nbytes != output.nbytes for share in shares):
                raise self._refuse(
                    "scatter", f"the output has {output.numel()} elements, the inputs {[s.numel() for s in shares]}"
                )
        size, dtype = output.nbytes, output.dtype

        def build() -> tuple[int, Program]:
            regions = [Region(1 + at, 0, size) for at in range(len(shares))]
            return pack("scatter", dtype, root=root, count=output.numel()), collectives.scatter(
                self._team, Region(0, 0, size), regions, root
            )

        recipe = self._recipe(("scatter", dtype, size, root), "scatter", build)

        def alone() -> None:
            if shares:
                _copy_to(output, shares[me])

        return self._submit(Call(recipe, [output, *shares], alone, 1), outputs, opts)

    # ------------------------------------------------------------------ all to all, barrier

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Bring ``inputs[i]`` to member i's ``outputs[me]``."""
        self._check_count("all_to_all", "outputs", outputs)
        self._check_count("all_to_all", "inputs", inputs)
        me, count, dtype = self._me, self.size(), inputs[0].dtype
        sizes = tuple([tensor.nbytes for tensor in (*outputs, *inputs)])
        self._check_own_piece(sizes[me], sizes[count + me])

        def build() -> tuple[int, Program]:
            regions = [Region(at, 0, size) for at, size in enumerate(sizes)]
            return pack("all_to_all", dtype), collectives.all_to_all(self._team, regions[:count], regions[count:])

        recipe = self._recipe(("all_to_all list", dtype, sizes), "all_to_all", build)
        alone = partial(_copy_to, outputs[me], inputs[me])
        return self._submit(Call(recipe, [*outputs, *inputs], alone, count), outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """``alltoall`` of pieces along the first dimension; no sizes means equal ones."""
        me, dtype = self._me, input.dtype
        incoming, outgoing = self._pieces(output, output_split_sizes), self._pieces(input, input_split_sizes)
        self._check_own_piece(incoming[me][1], outgoing[me][1])

        def build() -> tuple[int, Program]:
            return pack("all_to_all", dtype), collectives.all_to_all(
                self._team, [Region(0, *piece) for piece in incoming], [Region(1, *piece) for piece in outgoing]
            )

        recipe = self._recipe(("all_to_all", dtype, incoming, outgoing), "all_to_all", build)

        def alone() -> None:
            if incoming[me][1]:
                at, theirs = (_bytes_of(tensor) for tensor in (output, input))
                at[slice(incoming[me][0], sum(incoming[me]))] = theirs[slice(outgoing[me][0], sum(outgoing[me]))]

        return self._submit(Call(recipe, [output, input], alone, 1), [output], opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        """Return when all members have called it."""

        def build() -> tuple[int, Program]:
            return pack("barrier"), collectives.barrier(self._team)

        recipe = self._recipe(("barrier",), "barrier", build)
        return self._submit(Call(recipe, (), _nothing, 0, limit_s=self._limit_s(opts)), None, opts)

    # ------------------------------------------------------------------ parts

    def _by_dtype(
        self,
        collective: Callable[..., Work],
        tensors: list[Tensor],
        opts: Any,
        others: list[Tensor] | None = None,
    ) -> Work:
        """A coalesced collective of several dtypes: one after the other for each of them."""
        works = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            chosen = [at for at, tensor in enumerate(tensors) if tensor.dtype == dtype]
            arguments = [[some[at] for at in chosen] for some in (tensors, others) if some is not None]
            works.append(collective(*arguments, opts))
        return JoinedWork(works, tensors)

    def _reduction(self, kind: str, code: int, dtype: torch.dtype, *, ring: bool = False) -> Reduction:
        """How a program reduces. PREMUL_SUM has scaled before; the averages of rings are divided after."""
        if code == PREMUL_SUM or (code == AVG and ring and dtype.is_floating_point):
            code = SUM
        try:
            return Reduction(code, dtype)
        except (TypeError, NotImplementedError) as error:
            raise type(error)(f"{kind} in {self}: {error}") from None

    def _slots(self, buffer: int, size: int) -> list[Region]:
        return [Region(buffer, at * size, size) for at in range(self.size())]

    def _check_count(self, kind: str, what: str, some: Sequence[object]) -> None:
        if len(some) != self.size():
            raise self._refuse(kind, f"it needs {self.size()} {what}, one for each rank, got {len(some)}")

    def _check_wholes(self, kind: str, parts: list[Tensor], wholes: list[Tensor]) -> None:
        """Each whole is contiguous and has a part for every member."""
        if len(parts) != len(wholes):
            raise self._refuse(kind, f"{len(parts)} parts for {len(wholes)} whole tensors")
        count = self.size()
        for part, whole in zip(parts, wholes, strict=True):
            if whole.nbytes != count * part.nbytes or whole.dtype != part.dtype or not whole.is_contiguous():
                raise self._refuse(
                    kind,
                    f"expected one contiguous {part.dtype} tensor of {count} x {part.numel()} elements, "
                    f"got {whole.dtype} with {whole.numel()}",
                )

    def _check_own_piece(self, incoming: int, outgoing: int) -> None:
        if incoming != outgoing:
            raise self._refuse(
                "all_to_all", f"{outgoing} bytes are for the own rank, but {incoming} are expected from it"
            )

    def _pieces(self, tensor: Tensor, rows: list[int] | None) -> tuple[tuple[int, int], ...]:
        """Start and size, in bytes, of each member's piece along the first dimension."""
        count, length = self.size(), tensor.shape[0] if tensor.dim() else 1
        if not rows:
            if length % count:
                raise self._refuse("all_to_all", f"{length} rows cannot be split evenly; give split sizes")
            rows = [length // count] * count
        if len(rows) != count or sum(rows) != length:
            raise self._refuse("all_to_all", f"split sizes {list(rows)} do not fit {length} rows and {count} ranks")
        row = tensor.nbytes // length if length else 0
        pieces, start = [], 0
        for number in rows:
            pieces.append((start, number * row))
            start += number * row
        return tuple(pieces)


def _nothing() -> None:
    """A collective over one member in place."""


def _reduce_op(opts: Any) -> ReduceOp:
    return ReduceOp(ReduceOp.RedOpType.SUM) if opts is None else opts.reduceOp


def _scaling(op: ReduceOp, code: int, tensors: Sequence[Tensor]) -> Callable[[], None] | None:
    """What PREMUL_SUM does before the sum."""
    return partial(_multiply, tensors, op.factor) if code == PREMUL_SUM else None


def _multiply(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    for tensor in tensors:
        tensor.detach().mul_(factor)


def _divide(tensors: Sequence[Tensor], count: int) -> None:
    for tensor in tensors:
        tensor.detach().div_(count)


def _copy_to(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.detach().copy_(source.detach())


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _as_one(works: list[Work], result: Any) -> Work:
    return works[0] if len(works) == 1 else JoinedWork(works, result)
