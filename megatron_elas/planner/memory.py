"""How much memory a worker needs, from the shape of the model and of the run. Pure arithmetic.

# P parameters of a stage and lane, D cells of the stage, T lanes, e bytes of a weight.

Per worker, in bytes::

    weights     e P                 bucket padding (at most 256 elements per layer and cell) is not counted
    gradients   g P                 g = 4 when reduced in fp32, else e
    sums        8 P at bitwise      gradients in fixed point, beside Megatron's buffer; else 0
    optimizer   12 P / D            fp32 master and Adam's two moments; 8 P / D when weights are fp32, being masters
                                    themselves. Not divided by D without the distributed optimizer

and with --elastic in host memory, for S = P / D elements of an own shard and S_w of a ward's (runtime.store)::

    replay      own 4 S             the reduced gradients on their way to the backups
                per ward 16 S_w     master and both moments in fp32, and the gradients they are updated with
    copy        own 24 S            two versions of master and moments
                per ward 24 S_w     the same
    off         nothing

While a recovery goes on there are shards of both layouts. When a cell is lost S grows to S' = P / (D - 1), and beyond
the above a worker needs 12 (S + S') + 4 S' + 16 S_w' per ward with ``replay``, and 12 S' + 12 S_w' per ward with
``copy``. With D = 1 the lost stage's layers go to others; then S' = S + the largest shard of another stage.

Sources: the first three are the table of Megatron Core's guide on the distributed optimizer (bf16 weights, fp32
gradients: 6 + 12 / D bytes). Activations follow V. Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (arXiv 2205.05198), section 4 and table 2, term by term, so that grouped queries, gated MLPs, other
widths and fp32 fit in; for GPT's layer in 16 bits with dropout they add up to the paper's ``s b h (34 + 5 a s / h)``.
With 1F1B stage ``s`` of ``S`` holds ``min(S - s, micro-batches)`` forward passes at once.

Not counted: the process itself and its libraries, communication buffers, workspaces, fragmentation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.shape import ModelShape, TrainingShape
from megatron_elas.spec.shards import SLOTS, VERSIONS

FP32 = 4
"""Bytes of an element of everything that is kept for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Of one worker, in bytes. On the CPU platform all of it is host memory."""

    parameters: int
    """Elements, not bytes."""
    weights: int
    gradients: int
    sums: int
    optimizer: int
    activations: int
    """An estimate; the others are exact but for padding."""
    own_copies: int
    """Host memory: of the own shard, or of its gradients."""
    backup_copies: int
    """Host memory: what is kept for wards."""
    recovery: int
    """Host memory beyond these copies while a recovery from the loss of a cell goes on."""

    @property
    def device(self) -> int:
        """What has to fit on the accelerator."""
        return self.weights + self.gradients + self.sums + self.optimizer + self.activations

    @property
    def host(self) -> int:
        """What elasticity keeps in host memory."""
        return self.own_copies + self.backup_copies

    @property
    def host_peak(self) -> int:
        """The most host memory that elasticity takes."""
        return self.host + self.recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """Of the workers of one node together, in bytes, where all of it is host memory."""

    training: int
    copies: int
    recovery: int
    """Beyond these copies while a recovery goes on."""

    @property
    def needed(self) -> int:
        """The most that they take at once."""
        return self.training + self.copies + self.recovery


def sum_memories(memories: Iterable[WorkerMemory]) -> NodeMemory:
    """What the workers of a node take together."""
    members = list(memories)
    return NodeMemory(
        training=sum(memory.device for memory in members),
        copies=sum(memory.host for memory in members),
        recovery=sum(memory.recovery for memory in members),
    )


def count_parameters(shape: ModelShape, stage: int, tensor_parallel: int) -> int:
    """Parameters of one lane of a stage. The first stage has the embedding, the last the final norm and the head."""
    last = len(shape.layers) - 1
    embedding = shape.vocab * shape.hidden // tensor_parallel
    total = shape.layers[stage] * layer_parameters(shape, tensor_parallel)
    if stage == 0:
        total += embedding + shape.positions * shape.hidden
    if stage == last:
        total += shape.norm_vectors * shape.hidden
        total += 0 if shape.tied and last == 0 else embedding
    return total


def layer_parameters(shape: ModelShape, tensor_parallel: int) -> int:
    """Parameters of one lane of a transformer layer."""
    hidden, queries = shape.hidden, shape.heads * shape.head_size
    projected = queries + 2 * shape.kv_heads * shape.head_size
    widened = (2 if shape.gated else 1) * shape.ffn
    split = hidden * projected + queries * hidden + hidden * widened + shape.ffn * hidden
    whole = shape.norm_vectors * (2 * hidden + (2 * shape.head_size if shape.qk_norm else 0))
    if shape.linear_bias:
        split += widened
        whole += 2 * hidden
    if shape.linear_bias or shape.qkv_bias:
        split += projected
    return split // tensor_parallel + whole


def total_parameters(shape: ModelShape) -> int:
    """Of the whole model, each once (a tied head is none of its own)."""
    per_stage = sum(count_parameters(shape, stage, 1) for stage in range(len(shape.layers)))
    copied = shape.tied and len(shape.layers) > 1
    return per_stage - (shape.vocab * shape.hidden if copied else 0)


def plan_memory(
    plan: ElasticPlan, job: JobSpec, shape: ModelShape, training: TrainingShape, snapshot: str
) -> dict[int, WorkerMemory]:
    """Memory of every worker of a job that starts with this plan.

    Args:
        plan: Of epoch 0.
        job: Its grid and batch.
        shape: Of the model.
        training: Of the run.
        snapshot: How copies are kept: "replay", "copy", or "off" (also for a run that is not elastic).
    """
    placement = plan.placement

    def shard(worker: int, lost: int) -> int:
        """Elements of the worker's shard when its stage has lost so many cells."""
        stage = placement.seat(worker).stage
        return _shard(shape, training, stage, job.tensor_parallel, len(placement.stages[stage]) - lost)

    memories = {}
    for worker in placement.workers:
        wards = plan.wards_of(worker)
        memories[worker] = estimate_memory(
            shape,
            training,
            stage=placement.seat(worker).stage,
            tensor_parallel=job.tensor_parallel,
            cells=len(placement.stages[placement.seat(worker).stage]),
            micro_batch_size=max(item.samples for item in plan.items_of(worker)),
            micro_batches=len(plan.items_of(worker)),
            snapshot=snapshot,
            wards=[shard(ward, 0) for ward in wards],
            later_wards=[shard(ward, 1) for ward in wards],
        )
    return memories


def estimate_memory(
    shape: ModelShape,
    training: TrainingShape,
    *,
    stage: int,
    tensor_parallel: int,
    cells: int,
    micro_batch_size: int,
    micro_batches: int,
    snapshot: str,
    wards: Iterable[int],
    later_wards: Iterable[int],
) -> WorkerMemory:
    """Memory of one worker of a stage.

    Args:
        shape: Of the model.
        training: Of the run.
        stage: Where the worker sits.
        tensor_parallel: Lanes per cell.
        cells: Of the stage.
        micro_batch_size: Samples in a micro-batch.
        micro_batches: That the cell runs in one step.
        snapshot: See ``plan_memory``.
        wards: Elements of the shard of each worker whose copies it keeps.
        later_wards: The same after their stage has lost a cell.
    """
    parameters = count_parameters(shape, stage, tensor_parallel)
    shard = _shard(shape, training, stage, tensor_parallel, cells)
    later = _shard(shape, training, stage, tensor_parallel, cells - 1)
    own = kept = recovery = 0
    if snapshot == "copy":
        own, kept = VERSIONS * _flat(shard), VERSIONS * sum(map(_flat, wards))
        recovery = _flat(later) + sum(map(_flat, later_wards))
    elif snapshot == "replay":
        own, kept = FP32 * shard, sum(_flat(ward) + FP32 * ward for ward in wards)
        recovery = _flat(shard) + _flat(later) + FP32 * later + sum(_flat(ward) + FP32 * ward for ward in later_wards)
    return WorkerMemory(
        parameters=parameters,
        weights=training.weight_bytes * parameters,
        gradients=training.gradient_bytes * parameters,
        sums=training.sum_bytes * parameters,
        optimizer=(8 if training.weight_bytes == 4 else 12) * shard,
        activations=estimate_activations(
            shape, training, stage, tensor_parallel, micro_batch_size=micro_batch_size, micro_batches=micro_batches
        ),
        own_copies=own,
        backup_copies=kept,
        recovery=recovery,
    )


def _flat(elements: int) -> int:
    """Bytes of master, moments and step of a shard."""
    return FP32 * (len(SLOTS) * elements + 1)


def _shard(shape: ModelShape, training: TrainingShape, stage: int, tensor_parallel: int, cells: int) -> int:
    """Elements that a worker owns of a stage with so many cells; none: the stage is lost, and its layers are moved."""
    if cells == 0:
        others = [number for number in range(len(shape.layers)) if number != stage]
        more = (_shard(shape, training, number, tensor_parallel, 1) for number in others)
        return _shard(shape, training, stage, tensor_parallel, 1) + max(more, default=0)
    parameters = count_parameters(shape, stage, tensor_parallel)
    return -(-parameters // cells) if training.sharded_optimizer else parameters


def estimate_activations(
    shape: ModelShape,
    training: TrainingShape,
    stage: int,
    tensor_parallel: int,
    *,
    micro_batch_size: int,
    micro_batches: int,
) -> int:
    """Bytes that a worker holds for backward passes when it holds most."""
    stages = len(shape.layers)
    tokens = micro_batch_size * shape.sequence
    lanes = tensor_parallel if training.sequence_parallel else 1
    layer = layer_activations(shape, training, tensor_parallel)
    recomputed = 0.0
    if training.recompute == "full":
        layer, recomputed = training.weight_bytes * shape.hidden / lanes, layer
    per_token = shape.layers[stage] * layer
    if stage == 0:
        per_token += 8 + (shape.hidden / lanes if training.hidden_dropout else 0)
    total = min(stages - stage, micro_batches) * per_token + recomputed
    if stage == stages - 1:
        # Input of the final norm, its output, and logits in fp32.
        total += 2 * training.weight_bytes * shape.hidden / lanes + 4 * shape.vocab / tensor_parallel
    return round(total * tokens)


def layer_activations(shape: ModelShape, training: TrainingShape, tensor_parallel: int) -> float:
    """Bytes per token that a lane keeps of one layer for its backward pass, without full recomputation."""
    element = training.weight_bytes
    lanes = tensor_parallel if training.sequence_parallel else 1
    queries = shape.heads * shape.head_size
    keys = queries if training.keeps_scores else shape.kv_heads * shape.head_size
    # Inputs and outputs of both norms; a byte per element for each of the two dropout masks.
    around = (4 * element + (2 if training.hidden_dropout else 0)) * shape.hidden / lanes
    # Queries, keys, values, and what the attention gives.
    attention = element * (2 * queries + 2 * keys)
    # What the activation takes and gives.
    mlp = element * ((3 if shape.gated else 2) * shape.ffn)
    scores = 0
    if training.keeps_scores and training.recompute != "selective":
        # The softmax; with dropout also its mask and what it gives.
        scores = shape.heads * shape.sequence * (element + ((1 + element) if training.attention_dropout else 0))
    return around + (attention + mlp + scores) / tensor_parallel
