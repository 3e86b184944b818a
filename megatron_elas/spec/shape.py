"""What decides how much memory a training run takes: the model's sizes, and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_elas.spec.consistency import RandomStreams
from megatron_elas.spec.job import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a dense GPT or Llama, and how its layers are dealt to pipeline stages."""

    layers: tuple[int, ...]
    """Transformer layers of every stage."""
    hidden: int
    ffn: int
    """Width of the MLP, before gating doubles its first matrix."""
    heads: int
    kv_heads: int
    """Heads of keys and values; fewer than ``heads`` with grouped queries."""
    head_size: int
    vocab: int
    """Rows of the embedding, padding included."""
    positions: int
    """Learned positions; 0 for rotary ones or none."""
    sequence: int
    """Tokens in a sample."""
    norm_vectors: int
    """Of a normalization: 1 for RMSNorm, 2 for LayerNorm."""
    qk_norm: bool
    """Queries and keys are normalized."""
    gated: bool
    """The MLP has a gate (SwiGLU)."""
    linear_bias: bool
    qkv_bias: bool
    """Queries, keys and values have a bias, whether other matrices have one or not."""
    tied: bool
    """Embedding and head share their weights; with several stages each keeps its own copy of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingShape:
    """How the model is trained, as far as memory goes."""

    weight_bytes: int
    """Of one parameter: 2 or 4."""
    gradient_bytes: int
    """Of one gradient in Megatron's buffer: 2 or 4."""
    sharded_optimizer: bool
    sequence_parallel: bool
    recompute: str
    """"none", "selective" (the attention scores) or "full" (all but each layer's input)."""
    hidden_dropout: bool
    attention_dropout: bool
    keeps_scores: bool
    """Attention is not fused: scores of every pair of tokens are kept, and keys and values repeated for every head."""
    sum_bytes: int = 0
    """Of one sum of gradients in fixed point, reduced in place of Megatron's buffer: 8 at ``bitwise``, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the training entry says about a run that is not started."""

    platform: str
    """What workers of this machine compute on: cuda, npu or cpu."""
    added_flags: tuple[str, ...]
    """Words that the entry added to the command line because of the platform."""
    elastic: bool
    snapshot: str
    """How copies of optimizer state are kept: replay, copy or off; off for a run that is not elastic."""
    streams: RandomStreams
    """What dropout draws in an elastic run."""
    elastic_refusal: str | None
    """Why this machine would refuse --elastic, whether it was given or not."""
    unreachable_faults: tuple[str, ...]
    """Sentences about faults that can never strike (``spec.faults.explain_unreachable``)."""
    uncovered: tuple[str, ...]
    """Flags for which neither a grid nor memory can be told; then the three fields below are None."""
    job: JobSpec | None
    shape: ModelShape | None
    training: TrainingShape | None
