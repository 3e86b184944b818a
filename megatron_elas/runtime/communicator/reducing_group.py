"""The reductions of ``torch.distributed``, each as a program over the members.

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
from megatron_elas.runtime.communicator.buffers import copy_to, divide, multiply, nothing
from megatron_elas.runtime.communicator.reduction import AVG, PREMUL_SUM, SUM, Reduction, code_of
from megatron_elas.runtime.communicator.running_group import Call, RunningGroup
from megatron_elas.runtime.communicator.signatures import pack
from megatron_elas.runtime.communicator.work import CompletedWork, JoinedWork, as_one
from megatron_elas.runtime.transport.program import Program, Region


class ReducingGroup(RunningGroup):
    """A group with reductions."""

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Reduce each tensor over all members, in place."""
        if tensors[0].is_sparse:
            return self._all_reduce_sparse(tensors, opts)
        if len(tensors) > 1 and any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            return self._by_dtype(self.allreduce, tensors, opts)
        op = _reduce_op(opts)
        code, dtype = code_of(op), tensors[0].dtype
        sizes = tuple([tensor.nbytes for tensor in tensors])
        key = ("all_reduce", code, dtype, sizes)
        recipe = self._recipes.get(key) or self._recipe(
            key, "all_reduce", partial(self._build_all_reduce, code, dtype, sizes)
        )
        before = after = None
        if code == PREMUL_SUM:
            before = partial(multiply, tensors, op.factor)
        elif code == AVG and any(collectives.rings(self._team, size) for size in sizes):
            after = partial(divide, tensors, self.size())
        return self._submit(Call(recipe, tensors, nothing, len(tensors), tensors, before, after), tensors, opts)

    def _all_reduce_sparse(self, tensors: list[Tensor], opts: Any) -> Work:
        """The sum of a sparse COO tensor: everybody gets everybody's entries. Done when it returns."""
        if len(tensors) > 1 or code_of(_reduce_op(opts)) != SUM:
            raise self._refuse("all_reduce", "of sparse tensors it takes one at a time, with SUM")
        tensor = tensors[0]
        if not self._owner.silent and self.size() > 1:
            own = tensor.detach().coalesce()
            counts = torch.zeros(self.size(), dtype=torch.int64)
            self.all_gather_single(counts, torch.tensor([own._nnz()])).wait()
            dimensions, dense = own.sparse_dim(), own.shape[own.sparse_dim() :]
            indices = [torch.zeros((dimensions, count), dtype=torch.int64) for count in counts.tolist()]
            values = [torch.zeros((count, *dense), dtype=own.dtype) for count in counts.tolist()]
            self.allgather([indices], [own.indices()]).wait()
            self.allgather([values], [own.values()]).wait()
            total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), own.shape)
            with torch.no_grad():  # a detached one would not share what is written
                tensor.copy_(total.coalesce())
        return self._collect(CompletedWork(tensors))

    def _build_all_reduce(self, code: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[int, Program]:
        team, item = self._team, dtype.itemsize
        ring = any(collectives.rings(team, size) for size in sizes)
        reducer = self._reduction("all_reduce", code, dtype, ring=ring)
        return pack("all_reduce", dtype, code, count=sum(sizes) // item), collectives.together(
            [collectives.all_reduce(team, Region(at, 0, size), item, reducer) for at, size in enumerate(sizes)]
        )

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
            call = Call(recipe, [buffer], nothing, int(self._me == root), [tensor], after=after)
            works.append(self._submit(call, tensors, opts))
        return as_one(works, tensors)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        """Reduce ``inputs[k][i]`` over all members to member i's ``outputs[k]``."""
        if len(outputs) != len(inputs):
            raise self._refuse("reduce_scatter", f"{len(outputs)} outputs for {len(inputs)} lists of inputs")
        works = []
        for output, shares in zip(outputs, inputs, strict=True):
            self._check_count("reduce_scatter", "inputs", shares)
            works.append(self._reduce_scatter_list(output, shares, outputs, opts))
        return as_one(works, outputs)

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
        after = partial(divide, [output], self.size()) if code == AVG and not self._team.sums_in_order else None
        alone = partial(copy_to, output, shares[me])
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
        after = partial(divide, outputs, self.size()) if code == AVG and not self._team.sums_in_order else None

        def alone() -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                copy_to(output, whole.detach().reshape(self.size(), -1)[me].view(output.shape))

        return self._submit(Call(recipe, [*outputs, *inputs], alone, len(outputs), after=after), outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

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


def _reduce_op(opts: Any) -> ReduceOp:
    return ReduceOp(ReduceOp.RedOpType.SUM) if opts is None else opts.reduceOp
