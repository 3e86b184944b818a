"""A job that is not running: its grid and its model, from ``configs/jobs``, for planning and simulating."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megatron_elas.spec.consistency import ConsistencyLevel, sum_bytes
from megatron_elas.spec.emulation import EmulatedTime
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.shape import ModelShape, TrainingShape
from megatron_elas.spec.tables import build, find_table, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProfile:
    """What the cost of a job follows from, besides the device."""

    name: str
    spec: JobSpec
    shape: ModelShape
    training: TrainingShape
    emulated: EmulatedTime | None = None
    """None: the job takes its own time."""

    @property
    def num_layers(self) -> int:
        """Transformer layers of the whole model."""
        return sum(self.shape.layers)

    def with_grid(
        self, *, pipeline_parallel: int, data_parallel: int, num_microbatches: int, micro_batch_size: int | None = None
    ) -> JobProfile:
        """The same model on another grid; layers are dealt to stages as evenly as whole layers can be."""
        spec = replace(
            self.spec,
            pipeline_parallel=pipeline_parallel,
            data_parallel=data_parallel,
            num_microbatches=num_microbatches,
            micro_batch_size=micro_batch_size or self.spec.micro_batch_size,
        )
        return replace(
            self, spec=spec, shape=replace(self.shape, layers=deal_layers(self.num_layers, pipeline_parallel))
        )

    def with_consistency(self, level: ConsistencyLevel) -> JobProfile:
        """The same job at a level of consistency."""
        return replace(
            self,
            spec=replace(self.spec, consistency=level),
            training=replace(self.training, sum_bytes=sum_bytes(level)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """What a file of ``configs/jobs`` says."""

    model: str
    """File of Megatron's flags, seen from this file's folder."""
    vocab: int
    """Rows of the embedding; a launch line says it through the data."""
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    micro_batch_size: int
    num_microbatches: int
    """In one global batch, over all rows."""
    recompute: str = "none"


def load_job(name: str) -> JobProfile:
    """A job by the name of its profile in ``configs/jobs``, or by a file's path.

    Raises:
        BadUsage: There is none, or it cannot be used.
    """
    path = find_table("jobs", name)
    file = build(_File, read_table(path), str(path))
    flags = _read_flags(path.parent / file.model)
    spec = JobSpec(
        tensor_parallel=file.tensor_parallel,
        pipeline_parallel=file.pipeline_parallel,
        data_parallel=file.data_parallel,
        micro_batch_size=file.micro_batch_size,
        num_microbatches=file.num_microbatches,
        fp16="fp16" in flags,
    )
    return JobProfile(
        name=path.stem,
        spec=spec,
        shape=_shape(flags, file.vocab, spec.pipeline_parallel),
        training=_training(flags, file.recompute),
    )


def deal_layers(num_layers: int, stages: int) -> tuple[int, ...]:
    """Layers of every stage; the first stages have one more where they do not divide.

    Raises:
        BadUsage: Fewer layers than stages.
    """
    if num_layers < stages:
        raise BadUsage(
            f"{num_layers} layers are too few for {stages} stages: choose a pipeline of at most {num_layers}"
        )
    small, larger = divmod(num_layers, stages)
    return tuple(small + (stage < larger) for stage in range(stages))


class _Flags:
    """Flags of a file of Megatron arguments: dense Llamas only."""

    def __init__(self, path: Path, values: dict[str, str]) -> None:
        self._path = path
        self._values = values

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def number(self, name: str, default: int | None = None) -> int:
        """Raises BadUsage when it is missing and has no default."""
        text = self._values.get(name)
        if text is None and default is not None:
            return default
        if text is None or not text.isdigit():
            raise BadUsage(f"{self._path}: --{name} is {text!r}: give it a whole number")
        return int(text)

    def word(self, name: str, default: str) -> str:
        """What follows the flag."""
        return self._values.get(name, default)


def _read_flags(path: Path) -> _Flags:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise BadUsage(f"{path} cannot be read ({error.strerror}): name another file of flags") from error
    values: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition("#")[0].strip().partition(" ")
        if name.startswith("--"):
            values[name[2:]] = value.strip()
    return _Flags(path, values)


def _shape(flags: _Flags, vocab: int, stages: int) -> ModelShape:
    hidden, heads = flags.number("hidden-size"), flags.number("num-attention-heads")
    return ModelShape(
        layers=deal_layers(flags.number("num-layers"), stages),
        hidden=hidden,
        ffn=flags.number("ffn-hidden-size", 4 * hidden),
        heads=heads,
        kv_heads=flags.number("num-query-groups", heads),
        head_size=flags.number("kv-channels", hidden // heads),
        vocab=vocab,
        positions=0 if flags.word("position-embedding-type", "") == "rope" else flags.number("max-position-embeddings"),
        sequence=flags.number("seq-length"),
        norm_vectors=1 if flags.word("normalization", "LayerNorm") == "RMSNorm" else 2,
        qk_norm="qk-layernorm" in flags,
        gated="swiglu" in flags,
        linear_bias="disable-bias-linear" not in flags,
        qkv_bias="add-qkv-bias" in flags,
        tied="untie-embeddings-and-output-weights" not in flags,
    )


def _training(flags: _Flags, recompute: str) -> TrainingShape:
    if recompute not in {"none", "selective", "full"}:
        raise BadUsage(f"recompute is {recompute!r}: write none, selective or full")
    return TrainingShape(
        weight_bytes=2 if "bf16" in flags or "fp16" in flags else 4,
        gradient_bytes=4,
        sharded_optimizer="use-distributed-optimizer" in flags,
        sequence_parallel="sequence-parallel" in flags,
        recompute=recompute,
        hidden_dropout=float(flags.word("hidden-dropout", "0.1")) > 0,
        attention_dropout=float(flags.word("attention-dropout", "0.1")) > 0,
        keeps_scores=False,
    )
