"""What Megatron does with gradients between the last backward pass and the optimizer, where it uses pipeline groups.

After a loss stages differ in their numbers of cells, so "my pipeline" is only one worker's view and carries no
collective. Both sums are made over other roads here, with the same terms and so the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_elas.host.attachment import attachment
from megatron_elas.host.gradient_sums import GradientSums
from megatron_elas.host.model import buffers_of
from megatron_elas.runtime.channels import TIED_GRADIENTS
from megatron_elas.runtime.communicator.buffers import as_bytes
from megatron_elas.runtime.transport.base import Part, Transport
from megatron_elas.spec.buckets import owned_range
from megatron_elas.spec.layout import Placement


class Overlap(NamedTuple):
    """Elements ``start`` to ``stop`` of the tied weight, owned here and by ``peer`` on the other end stage."""

    peer: int
    start: int
    stop: int


def find_overlaps(placement: Placement, worker: int, numel: int) -> list[Overlap]:
    """Who at the other end of the pipeline owns which part of what ``worker`` owns of the tied weight.

    The weight is a bucket of its own on both end stages; each cuts it evenly over its own cells.

    Args:
        placement: Has at least two stages.
        worker: Seated on the first or the last stage.
        numel: Elements of the weight on this lane.
    """
    seat = placement.seat(worker)
    last = placement.num_stages - 1
    others = placement.replicas(last - seat.stage, seat.lane)
    mine = placement.replicas(seat.stage, seat.lane)
    low, high = _cut(mine.index(worker), len(mine), numel)
    overlaps = []
    for index, peer in enumerate(others):
        start, stop = _cut(index, len(others), numel)
        if max(low, start) < min(high, stop):
            overlaps.append(Overlap(peer, max(low, start), min(high, stop)))
    return overlaps


def _cut(index: int, replicas: int, numel: int) -> tuple[int, int]:
    start, end = owned_range(index, replicas, numel)
    return min(numel, start), min(numel, end)


def sum_tied_gradients(
    model: Sequence[Any], placement: Placement, worker: int, transport: Transport, sums: GradientSums | None = None
) -> None:
    """Add the two end stages' gradients of a tied embedding, each worker for the slice that it owns.

    Called when both stages have reduced their own, by all workers of the first and the last stage; others return. With
    ``sums``, what is added are their totals.

    Raises:
        EpochChanged: The membership ended.
    """
    stage, last = placement.seat(worker).stage, placement.num_stages - 1
    if last == 0 or stage not in (0, last):
        return
    for buffer in buffers_of(model):
        for param, (start, end, _) in buffer.param_index_map.items():
            if getattr(param, "shared_embedding", False):
                gradient = buffer.grad_data[start:end] if sums is None else sums.total_of(param)
                overlaps = find_overlaps(placement, worker, gradient.numel())
                _add_theirs([gradient[o.start : o.stop] for o in overlaps], [o.peer for o in overlaps], transport)
                for overlap in overlaps if sums is not None else ():
                    sums.write(param, overlap.start, overlap.stop)


def _add_theirs(mine: Sequence[torch.Tensor], peers: Sequence[int], transport: Transport) -> None:
    theirs = [torch.empty_like(part) for part in mine]
    transport.exchange(
        TIED_GRADIENTS,
        0,
        [Part(peer, as_bytes(part)) for peer, part in zip(peers, mine, strict=True)],
        [Part(peer, as_bytes(part)) for peer, part in zip(peers, theirs, strict=True)],
    )
    if theirs:  # none where this worker owns nothing but padding
        torch._foreach_add_(list(mine), theirs)


def wrap_tied_embedding_reduce(original: Any) -> Any:
    """Megatron's all-reduce over the embedding group, by slices over the plan's end stages."""

    @functools.wraps(original)
    def _allreduce_word_embedding_grads(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        attached = attachment()
        placement = attached.route.plan.placement
        sum_tied_gradients(model, placement, attached.worker, attached.transport, attached.sums)

    return _allreduce_word_embedding_grads


def wrap_finalize_gradients(original: Any) -> Any:
    """The end of a backward pass, with tokens counted over the last stage's cells instead of along pipelines."""

    @functools.wraps(original)
    def finalize_model_grads(model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any) -> None:
        if attachment().counter.step >= 0:
            attachment().strike(attachment().counter.step, "reduce", None)
        with attachment().timer.exchanging():
            if (sums := attachment().sums) is not None:
                sums.settle()
            original(model, None, *args, **kwargs)
        if num_tokens is None:
            if (rows := attachment().summed_rows) > 1:
                for chunk in model:
                    chunk.scale_gradients(1.0 / rows)
            return
        route = attachment().route
        counts = route.seat.stage == route.plan.placement.num_stages - 1 and route.seat.lane == 0
        total = num_tokens.clone() if counts else torch.zeros_like(num_tokens)
        dist.all_reduce(total)
        scaling = 1.0 / torch.clamp(total, min=1)
        for chunk in model:
            chunk.scale_gradients(scaling)

    return finalize_model_grads


class SyncOff:
    """What ``DistributedDataParallel.no_sync`` gives: gradients are not reduced until it is left.

    Megatron's own is a generator. Its pipeline schedules enter it and never leave it when they only run forward, or are
    cut short; then Python leaves it when it lets go of the schedule's frame. That may be late, and on any thread (one
    that looks at this thread's frames is enough), in the middle of a later step, whose gradients would be reduced
    before their last micro-batches. This one is left by those who leave it; every schedule begins by entering.
    """

    def __init__(self, ddp: Any) -> None:
        self._groups = [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]

    def __enter__(self) -> None:
        for group in self._groups:
            group.is_last_microbatch = False

    def __exit__(self, *error: object) -> None:
        for group in self._groups:
            group.is_last_microbatch = True


def wrap_no_sync(original: Any) -> Any:
    """``no_sync`` that ends only when it is told to."""

    @functools.wraps(original)
    def no_sync(self: Any) -> SyncOff:
        return SyncOff(self)

    return no_sync
