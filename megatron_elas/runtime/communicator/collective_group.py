"""The collectives of ``torch.distributed`` that move and do not reduce; see ``reducing_group``."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import Work

from megatron_elas.runtime.communicator import collectives
from megatron_elas.runtime.communicator.buffers import bytes_of, copy_to, nothing
from megatron_elas.runtime.communicator.reducing_group import ReducingGroup
from megatron_elas.runtime.communicator.running_group import Call
from megatron_elas.runtime.communicator.signatures import pack
from megatron_elas.runtime.communicator.work import as_one
from megatron_elas.runtime.transport.program import Program, Region


class CollectiveGroup(ReducingGroup):
    """A group with all collectives."""

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
        return as_one(works, outputs)

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
                copy_to(slot, tensor.detach().reshape(-1))

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
        return self._submit(Call(recipe, tensors, nothing, len(tensors), tensors), tensors, opts)

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
                copy_to(output, shares[me])

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
        alone = partial(copy_to, outputs[me], inputs[me])
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
                at, theirs = (bytes_of(tensor) for tensor in (output, input))
                at[slice(incoming[me][0], sum(incoming[me]))] = theirs[slice(outgoing[me][0], sum(outgoing[me]))]

        return self._submit(Call(recipe, [output, input], alone, 1), [output], opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        """Return when all members have called it."""

        def build() -> tuple[int, Program]:
            return pack("barrier"), collectives.barrier(self._team)

        recipe = self._recipe(("barrier",), "barrier", build)
        return self._submit(Call(recipe, (), nothing, 0, limit_s=self._limit_s(opts)), None, opts)

    # ------------------------------------------------------------------ parts

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
