"""What a job costs, from the shape of its model and the numbers of a device.

# h hidden, q queries (heads x head size), k keys (grouped heads x head size), f width of the MLP, s tokens of a sample,
# T lanes of a cell, e bytes of an element. Matrices are counted 2 x rows x columns per token.

Forward of a layer, FLOP per token: ``2 (h (q + 2k) + q h + 3 h f) + 4 s q`` (with a gate; all pairs of tokens, as the
usual count of utilization has it). B has the same matrices and twice the attention, W the same matrices and no
attention. With full recomputation B runs the forward pass again.

Element-wise time is memory traffic: norms, rotary positions, gate and residuals, about ``e (10 h + 2 q + 2 k + 3 f)``
bytes per token forward and twice that backward. Collectives of a cell: two all-reduces (or their two halves) of ``e h``
bytes per token and layer forward, two more backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megatron_elas.planner.memory import layer_activations, layer_parameters
from megatron_elas.schedule.greedy import Limit
from megatron_elas.schedule.timing import Durations
from megatron_elas.spec.cluster import Cluster, Link
from megatron_elas.spec.cost import JobCost, PassTime, UnitCost, Work
from megatron_elas.spec.items import StageItems
from megatron_elas.spec.job_profile import JobProfile
from megatron_elas.spec.shape import ModelShape, TrainingShape
from megatron_elas.spec.shards import SLOTS, VERSIONS

OPTIMIZER_TRAFFIC = 30
"""Bytes that Adam moves per parameter: gradient, master, two moments read; master, moments and weight written."""


def estimate_job(job: JobProfile, cluster: Cluster) -> JobCost:
    """The cost of a job's units on one device of a cell, at the nominal clock.

    How the layers are dealt to stages does not matter.
    """
    estimate = _Estimate(job.shape, job.training, cluster, job.spec.tensor_parallel)
    element = job.training.weight_bytes
    return JobCost(
        embedding=estimate.embedding(),
        layers=(estimate.layer(),) * job.num_layers,
        head=estimate.head(),
        loss=estimate.loss(),
        boundary_bytes=element * job.shape.hidden * job.shape.sequence // estimate.spread,
        weight_bytes=element,
        gradient_bytes=job.training.gradient_bytes,
        optimizer_bytes=8 if element == 4 else 12,
        optimizer_sharded=job.training.sharded_optimizer,
        copy_bytes=VERSIONS * len(SLOTS) * 4,
        sum_bytes=job.training.sum_bytes,
    )


def stage_durations(
    cost: JobCost,
    cuts: Sequence[int],
    items: Sequence[StageItems],
    *,
    clocks: Sequence[float] | None = None,
    link: Link | None = None,
) -> Durations:
    """How long passes and transfers take on stages of these layers.

    Args:
        cost: Of the job.
        cuts: Stage ``s`` has layers ``[cuts[s], cuts[s + 1])``; one more than stages.
        items: Of every stage and cell.
        clocks: Of every stage; None: the nominal one.
        link: Between stages; None: transfers take no time.
    """
    clocks = clocks or (1.0,) * len(items)
    times = [cost.stage_times(first, last, clock) for (first, last), clock in zip(pairwise(cuts), clocks, strict=True)]
    links = [crossing(cost, link)] if link else []
    return Durations.of(times, items, links * (len(items) - 1))


def crossing(cost: JobCost, link: Link) -> PassTime:
    """How long an item takes from one stage to the next."""
    return PassTime(sample_s=cost.boundary_bytes / link.bandwidth, fixed_s=link.latency_s)


def stage_limits(
    cost: JobCost, cuts: Sequence[int], items: Sequence[StageItems], memory_bytes: int
) -> tuple[Limit, ...]:
    """How many samples fit on the cells of stages of these layers, beside their state.

    Args:
        cost: Of the job.
        cuts: As for ``stage_durations``.
        items: Of every stage and cell.
        memory_bytes: Of a device, as far as a plan may fill it.
    """
    return tuple(
        Limit(
            samples=cost.samples_that_fit(
                first,
                last,
                cells=len(cells),
                memory_bytes=memory_bytes,
                largest_item=max(item.samples for own in cells for item in own),
            ),
            kept_share=cost.kept_share(first, last),
        )
        for (first, last), cells in zip(pairwise(cuts), items, strict=True)
    )


class _Estimate:
    def __init__(self, shape: ModelShape, training: TrainingShape, cluster: Cluster, tensor_parallel: int) -> None:
        self.shape, self.training = shape, training
        self.cluster, self.device = cluster, cluster.device
        self.lanes = tensor_parallel
        self.spread = tensor_parallel if training.sequence_parallel else 1
        """Lanes that share what tensor parallelism alone leaves whole on each."""

    def layer(self) -> UnitCost:
        """A transformer layer."""
        shape, training = self.shape, self.training
        hidden, queries = shape.hidden, shape.heads * shape.head_size
        keys, element = shape.kv_heads * shape.head_size, training.weight_bytes
        widened = (2 if shape.gated else 1) * shape.ffn
        columns = hidden * (queries + 2 * keys) + queries * hidden + hidden * widened + shape.ffn * hidden
        matrices = 2 * columns * shape.sequence / self.lanes
        attention = 4 * shape.sequence * queries * shape.sequence / self.lanes
        traffic = element * (
            (10 * hidden) / self.spread + (2 * (queries + keys) + (3 if shape.gated else 2) * shape.ffn) / self.lanes
        )
        steady = traffic * shape.sequence / self.device.memory_bandwidth
        collectives = 2 * self._all_reduce_s(element * hidden * shape.sequence)
        forward = self._work(matrices + attention, steady + collectives)
        again = training.recompute == "full"
        kept = 4 * hidden / self.spread + (2 * queries + 2 * keys + shape.ffn + widened) / self.lanes
        activation = layer_activations(shape, training, self.lanes) * shape.sequence
        return UnitCost(
            forward=forward,
            input_gradient=self._work(
                matrices + 2 * attention + (matrices + attention if again else 0),
                2 * steady + collectives + (steady + collectives if again else 0),
                passes=2 if again else 1,
            ),
            weight_gradient=self._work(matrices, 0.0),
            parameters=layer_parameters(shape, self.lanes),
            activation_bytes=element * hidden * shape.sequence / self.spread if again else activation,
            kept_bytes=element * kept * shape.sequence,
            working_bytes=activation if again else 0.0,
            optimizer_s=self._optimizer_s(layer_parameters(shape, self.lanes)),
        )

    def embedding(self) -> UnitCost:
        """A look-up: rows read and written forward, and added to the gradient of the weights."""
        shape = self.shape
        count = shape.vocab * shape.hidden // self.lanes + shape.positions * shape.hidden
        rows = 2 * self.training.weight_bytes * shape.hidden * shape.sequence / self.device.memory_bandwidth
        reduced = self._all_reduce_s(self.training.weight_bytes * shape.hidden * shape.sequence)
        dropped = shape.hidden / self.spread if self.training.hidden_dropout else 0
        return UnitCost(
            forward=self._work(0.0, rows + reduced),
            input_gradient=Work(),
            weight_gradient=self._work(0.0, 2 * rows),
            parameters=count,
            activation_bytes=(8 + dropped) * shape.sequence,
            kept_bytes=self.training.weight_bytes * shape.hidden * shape.sequence / self.spread,
            optimizer_s=self._optimizer_s(count),
        )

    def head(self) -> UnitCost:
        """The final norm and the matrix that gives a number for every word."""
        shape, element = self.shape, self.training.weight_bytes
        tied = shape.tied and len(shape.layers) == 1
        count = shape.norm_vectors * shape.hidden + (0 if tied else shape.vocab * shape.hidden // self.lanes)
        matrix = 2 * shape.hidden * shape.vocab * shape.sequence / self.lanes
        norm = 2 * element * shape.hidden * shape.sequence / self.spread / self.device.memory_bandwidth
        reduced = self._all_reduce_s(element * shape.hidden * shape.sequence)
        return UnitCost(
            forward=self._work(matrix, norm),
            input_gradient=self._work(matrix, 2 * norm + reduced),
            weight_gradient=self._work(matrix, 0.0),
            parameters=count,
            activation_bytes=2 * element * shape.hidden * shape.sequence / self.spread,
            kept_bytes=element * (shape.hidden / self.spread + shape.vocab / self.lanes) * shape.sequence,
            optimizer_s=self._optimizer_s(count),
        )

    def loss(self) -> UnitCost:
        """Softmax and cross entropy over the vocabulary: passes over fp32 logits."""
        logits = 4 * self.shape.vocab * self.shape.sequence / self.lanes
        once = logits / self.device.memory_bandwidth
        return UnitCost(
            forward=self._work(0.0, 4 * once),
            input_gradient=self._work(0.0, 2 * once),
            weight_gradient=Work(),
            parameters=0,
            # The last stage runs B right after F, so that one sample's logits live at a time.
            activation_bytes=0.0,
            working_bytes=logits,
        )

    def _work(self, flop: float, steady_s: float, passes: int = 1) -> Work:
        return Work(
            compute_s=flop / (self.device.peak_flops * self.device.efficiency),
            steady_s=steady_s,
            fixed_s=passes * self.device.layer_pass_s,
        )

    def _optimizer_s(self, parameters: int) -> float:
        return OPTIMIZER_TRAFFIC * parameters / self.device.memory_bandwidth

    def _all_reduce_s(self, num_bytes: float) -> float:
        return self.cluster.all_reduce_s(num_bytes, self.lanes)
