"""Gradients that are summed in fixed point, for ``--elastic-consistency bitwise``.

Every micro-batch's gradient of a parameter is rounded to integers and added, in int64 buffers laid out like DDP's own
gradient buffers; these integers are what replicas reduce. A worker turns the totals of the shards that it owns to fp32
when all is added, so what the optimizer sees depends on the micro-batches' gradients alone: not on the order in which
they came, nor on who computed which.

Which power of two gradients are multiplied with before they are rounded is told by the step before
(``spec.exponents``); if that was not a good one, which all workers know before anything is made of the sums, the
step's passes are run again with a better one.

# Lengths are elements. A place is a parameter's part of a buffer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from torch.distributed import _coalescing_manager

from megatron_elas.host.model import bucket_groups_of, buffers_of, named_parameters
from megatron_elas.runtime.fixed_point.sums import add, to_float
from megatron_elas.spec.catalogue import Catalogue
from megatron_elas.spec.errors import StateInvalid
from megatron_elas.spec.exponents import NOT_FINITE, UNKNOWN, Verdict, judge, largest_term

logger = logging.getLogger(__name__)

TOTALS = "elas_totals"
"""Attribute of a DDP buffer: its int64 totals."""
RUNS = 3
"""Of the passes of a step. The second one has exponents from the gradients of the first one, so it fits."""

SavedExponents = tuple[int, dict[str, int]]
"""The step that they are for; and by global name of the parameter, those that are known."""


class PassesAgain(Exception):
    """The gradients of the step do not fit their exponents: run its passes again. Raised on all workers together."""


@dataclass(frozen=True, slots=True)
class Captured:
    """Exponents at the start of a step."""

    step: int
    exponents: tuple[int, ...]


@dataclass(slots=True)
class _Place:
    total: torch.Tensor
    """(numel,) int64."""
    number: int
    """Of the parameter, in the order of the catalogue; both ends of a tied embedding have one."""
    largest: torch.Tensor
    """(1,) int32, see ``fixed_point.sums``."""


class GradientSums:
    """Of one worker. What it knows of a step's exponents is the same on all workers with a seat."""

    def __init__(self, num_microbatches: int) -> None:
        """``num_microbatches`` are those of the whole batch."""
        self._term_bits = largest_term(num_microbatches)
        self._model: Sequence[Any] = ()
        self._numbers: dict[str, int] = {}
        """Of every parameter of the model, by global name."""
        self._count = 0
        """Of different numbers."""
        self._epoch: int | None = None
        self._step = -1
        self._exponents: tuple[int, ...] = ()
        """Of the step under way."""
        self._runs = 0
        self._next = Captured(-1, ())
        self._places: dict[torch.nn.Parameter, _Place] = {}
        self._spans: dict[Any, torch.Tensor] = {}
        """Totals of every bucket."""
        self._largest = torch.zeros(0, dtype=torch.int32)
        self._place_numbers = torch.zeros(0, dtype=torch.int64)
        """Of the parameters of the places, in the order of ``_largest``."""
        self._worthless: frozenset[int] = frozenset()
        """Numbers of parameters whose totals are, in a step with gradients that are not finite."""
        self._loaded: SavedExponents | None = None

    # ------------------------------------------------------------ what it is about

    def follow(self, model: Sequence[Any], catalogue: Catalogue) -> None:
        """Sum the gradients of this model, of whose parameters the catalogue knows all."""
        self._model = model
        self._numbers, self._count = {}, 0
        for parameter in (parameter for unit in catalogue.units for parameter in unit):
            twin = self._numbers.get(catalogue.twins.get(parameter.name, ""))
            self._numbers[parameter.name] = self._count if twin is None else twin
            self._count += twin is None
        if self._loaded is not None:
            self._take_loaded()

    def forget_places(self, *, free: bool) -> None:
        """The model's buffers are about to be cut otherwise; ``free``: let go of the totals, too."""
        self._places, self._spans = {}, {}
        if free:
            for ddp in self._model:
                for buffer in vars(ddp).get("buffers", ()):  # none in one that is being made anew
                    vars(buffer).pop(TOTALS, None)

    # ------------------------------------------------------------ a step

    def begin(self, step: int, epoch: int) -> None:
        """The passes of a step are about to run, on all workers with a seat.

        In the first step of an epoch they tell each other the exponents: who comes to a seat may not know them.
        """
        self._runs = self._runs + 1 if self._step == step and self._epoch == epoch else 1
        known = self._known_for(step)
        if epoch != self._epoch:
            known = self._tell_all(known)
        self._step, self._epoch, self._exponents = step, epoch, known

    def clear(self, ddp: Any) -> None:
        """Set all totals of a chunk of the model to zero; make them where they are missing."""
        if not self._places:
            self._lay_out()
        for buffer in buffers_of([ddp]):
            getattr(buffer, TOTALS).zero_()
        self._largest.zero_()

    def add(self, param: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Add a micro-batch's gradient; to be called for each use of a parameter apart."""
        place = self._places[param]
        add(gradient.reshape(-1), place.total, self._exponent_of(place), place.largest)

    def _exponent_of(self, place: _Place) -> int:
        exponent = self._exponents[place.number]
        return 0 if exponent == UNKNOWN else exponent

    def settle(self) -> None:
        """All passes of the step have run everywhere: see whether the gradients fit the exponents.

        Raises:
            PassesAgain: They do not.
            StateInvalid: Nor do they when the passes have run again.
            EpochChanged: The membership ended.
        """
        board = torch.zeros(len(self._exponents), dtype=torch.int32)
        board.scatter_reduce_(0, self._place_numbers, self._largest.cpu(), "amax")
        dist.all_reduce(board, op=dist.ReduceOp.MAX)
        verdict = judge(self._exponents, board.tolist(), self._term_bits)
        if verdict.runs_again:
            self._drain()
            self._run_again(verdict)
        self._worthless = frozenset(verdict.misfits)
        self._next = Captured(self._step + 1, verdict.exponents)

    def _run_again(self, verdict: Verdict) -> None:
        if self._runs >= RUNS:
            raise StateInvalid(
                f"step {self._step}: gradients did not fit the exponents that were chosen for them when the passes ran "
                f"before, so the same passes give other gradients now: look for operations that are not deterministic, "
                f"or train with --elastic-consistency numerical"
            )
        if set(self._exponents) != {UNKNOWN} and dist.get_rank() == 0:  # a job that begins knows none
            logger.warning(
                "step %d: its passes run again, as gradients of %d parameters are far from those of the step before",
                self._step, len(verdict.misfits),
            )  # fmt: skip
        raise PassesAgain(self._step, verdict.exponents)

    def retry(self, again: PassesAgain) -> None:
        """Run the step's passes with the exponents that were found out; called after ``restore``."""
        step, exponents = again.args
        self._next = Captured(step, exponents)

    # ------------------------------------------------------------ reduction

    def reduce(self, group: Any) -> None:
        """Begin to reduce the totals of a group of buckets, as Megatron's ``start_grad_sync`` its gradients."""
        if group.is_first_batch and group.grad_reduce_handle is not None:
            return  # as Megatron's: a later stage begins before the end of the first step, where it would begin again
        assert group.grad_reduce_handle is None, "two reductions of one group are under way"
        self._check(group)
        collective = group.intra_distributed_optimizer_instance_group
        size, rank = group.intra_distributed_optimizer_instance_size, group.intra_distributed_optimizer_instance_rank
        overlap = group.ddp_config.overlap_grad_reduce
        with _coalescing_manager(collective, async_ops=overlap) as manager:
            for bucket in group.buckets:
                total = self._spans[bucket]
                own = param_and_grad_buffer.shard_buffer(total, size)[rank]
                dist.reduce_scatter_tensor(own, total, op=dist.ReduceOp.SUM, group=collective, async_op=overlap)
        group.grad_reduce_handle = manager if overlap else None

    def _check(self, group: Any) -> None:
        """Megatron's checks of the gradients of this worker, which it makes before they are reduced."""
        config = group.ddp_config
        if not config.check_for_nan_in_grad and not config.check_for_large_grads:
            return
        buckets = [SimpleNamespace(grad_data=self._sketch(bucket, config)) for bucket in group.buckets]
        type(group).check_grads(
            SimpleNamespace(buckets=buckets),
            check_for_nan_or_inf=config.check_for_nan_in_grad,
            check_for_large=config.check_for_large_grads,
        )

    def _sketch(self, bucket: Any, config: Any) -> torch.Tensor:
        """Something with the norm of the bucket's gradients here, or only as finite where that is all that is asked."""
        places = [self._places[param] for param in bucket.params_list]
        worst = torch.stack([place.largest for place in places]).max().view(1)
        if int(worst) >= NOT_FINITE or not config.check_for_large_grads:
            return worst.view(torch.float32)
        parts = [torch.empty(place.total.numel(), device=place.total.device) for place in places]
        for place, part in zip(places, parts, strict=True):
            to_float(place.total, self._exponent_of(place), part)
        return torch.cat(parts)

    def convert(self, group: Any) -> None:
        """The totals of a group of buckets are reduced: write what this worker owns of them to the gradients."""
        size, rank = group.intra_distributed_optimizer_instance_size, group.intra_distributed_optimizer_instance_rank
        for bucket in group.buckets:
            own = bucket.grad_data.numel() // size
            for param in bucket.params_list:
                start, end = bucket.param_to_index[param]
                low, high = max(start, rank * own), min(end, (rank + 1) * own)
                if low < high:
                    self.write(param, low - start, high - start)

    def total_of(self, param: torch.nn.Parameter) -> torch.Tensor:
        """(numel,) int64; whole on this worker alone, or reduced for what it owns."""
        return self._places[param].total

    def write(self, param: torch.nn.Parameter, start: int, stop: int) -> None:
        """Write the gradient of these elements of a parameter, from its total."""
        place, gradient = self._places[param], param.main_grad.view(-1)[start:stop]
        if place.number in self._worthless:
            gradient.fill_(torch.nan)
        else:  # where the exponent is not known, all gradients were zeros
            to_float(place.total[start:stop], self._exponent_of(place), gradient)

    def _drain(self) -> None:
        """Wait for all reductions that have begun. They have on all replicas."""
        for group in bucket_groups_of(self._model):
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None

    # ------------------------------------------------------------ exponents are state

    def capture(self) -> Captured:
        """What ``restore`` needs."""
        return self._next

    def restore(self, captured: Captured) -> None:
        """Go back to the start of the step at which this was captured."""
        self._next = captured

    def to_save(self, step: int) -> SavedExponents:
        """For the checkpoint before ``step``, on all workers with a seat: one of them may have come to it just now.

        Raises:
            EpochChanged: The membership ended.
        """
        if not self._numbers:  # before the first step
            return step, {}
        self._next = Captured(step, self._tell_all(self._known_for(step)))
        known = self._next.exponents
        return step, {name: known[number] for name, number in self._numbers.items() if known[number] != UNKNOWN}

    def load(self, saved: SavedExponents | None) -> None:
        """A checkpoint was read, and this was in it; training goes on with the step after it."""
        self._loaded = saved or (-1, {})
        if self._numbers:
            self._take_loaded()

    def _take_loaded(self) -> None:
        assert self._loaded is not None
        (step, saved), self._loaded = self._loaded, None
        found = [UNKNOWN] * self._count
        for name, exponent in saved.items():
            if name in self._numbers:
                found[self._numbers[name]] = exponent
        self._next = Captured(step, tuple(found))

    def _known_for(self, step: int) -> tuple[int, ...]:
        return self._next.exponents if self._next.step == step else (UNKNOWN,) * self._count

    def _tell_all(self, known: tuple[int, ...]) -> tuple[int, ...]:
        """What any worker knows. Those who know a step's exponents know the same ones."""
        if not known:  # a checkpoint before the first step
            return known
        told = torch.tensor(known, dtype=torch.int32)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return tuple(told.tolist())

    # ------------------------------------------------------------ buffers

    def _lay_out(self) -> None:
        named = list(named_parameters(self._model))
        buffers = list(buffers_of(self._model))
        totals = {}
        for buffer in buffers:
            total = getattr(buffer, TOTALS, None)
            if total is None or total.shape != buffer.grad_data.shape:
                vars(buffer).pop(TOTALS, None)
                total = torch.zeros_like(buffer.grad_data, dtype=torch.int64)
                setattr(buffer, TOTALS, total)
            totals.update({param: total[start:end] for param, (start, end, _) in buffer.param_index_map.items()})
            for bucket in buffer.buckets:
                self._spans[bucket] = total[bucket.offset : bucket.offset + bucket.grad_data.numel()]
        device = buffers[0].grad_data.device if buffers else None
        self._largest = torch.zeros(len(named), dtype=torch.int32, device=device)
        self._places = {
            param: _Place(totals[param], self._numbers[name], self._largest[number : number + 1])
            for number, (name, param) in enumerate(named)
        }
        self._place_numbers = torch.tensor([self._numbers[name] for name, _ in named], dtype=torch.int64)
