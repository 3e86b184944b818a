"""What is trained in these tests, on which grid, and who is lost in which order."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.layout import Placement
from tests.fault.runs import LLAMA, TRAINING

AT = (2, 5, 8)
"""Steps in which the first, second and third worker is lost."""
SAVED = AT[-1] + 11
"""Steps before the checkpoint: 10 whole ones after the last loss."""
STEPS = SAVED + 4
PHASES = (
    "forward,microbatch=1", "optimizer", "backward,microbatch=0", "commit", "snapshot", "between",
    "forward,microbatch=0",
)  # fmt: skip
"""Where in the step the faults strike, taken in turn."""
RECOMPUTE = {
    "none": (),
    "full": ("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"),
    "selective": ("--recompute-granularity=selective",),
}
COUNTED = {
    "all": ("--mock-data",),
    "masked": ("--eod-mask-loss",),
    "per-token": ("--eod-mask-loss", "--calculate-per-token-loss"),
}
"""Which tokens count in the loss, and how; masks need documents to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A grid and a choice of features."""

    name: str
    tensor: int = 1
    pipeline: int
    data: int
    batch: int
    """Samples per step, in micro-batches of one."""
    style: str
    """"llama" or "gpt": LayerNorm, GELU, learned absolute positions, biases."""
    tied: bool
    """Whether the output layer is the embedding."""
    precision: str = "fp32"
    overlap: bool = False
    """Whether gradients are reduced and parameters gathered while passes run."""
    recompute: str = "none"
    counted: str = "all"
    clip: float = 1.0
    """Largest gradient norm."""
    layers: int = 4
    uneven: str = ""
    """Flags that give stages different numbers of layers."""
    hidden: int = 32
    more: tuple[str, ...] = field(default=())
    """Further flags."""
    every_role: bool = False
    """Whether each of its workers is lost first once."""

    @property
    def workers(self) -> int:
        """Processes of the job."""
        return self.tensor * self.pipeline * self.data

    @property
    def job(self) -> JobSpec:
        """What the controller knows of it, but for how layers are dealt to stages."""
        return JobSpec(
            tensor_parallel=self.tensor,
            pipeline_parallel=self.pipeline,
            data_parallel=self.data,
            micro_batch_size=1,
            num_microbatches=self.batch,
            stage_layers=(self.layers // self.pipeline,) * self.pipeline,
        )

    @property
    def placement(self) -> Placement:
        """Who sits where at first."""
        return Placement.initial(self.job)

    @property
    def relative(self) -> float:
        """How far losses may be from those of the undisturbed run.

        In bf16 a sum in another order, different in its last bits, now and then rounds a parameter or an activation to
        the other of its two neighbours, up to 2^-8 away. A loss is the mean over many of both: 1e-5 was seen.
        """
        return 1e-5 if self.precision == "fp32" else 1e-4

    @property
    def state_error(self) -> float:
        """The same for masters and moments, as a share of each parameter's largest entry; 1e-2 was seen in bf16."""
        return 1e-3 if self.precision == "fp32" else 5e-2

    @property
    def noise(self) -> tuple[str, ...]:
        """Ends of names of parameters whose state says nothing.

        A bias of the keys shifts all scores of a query alike, which softmax does not see: its gradient is nothing but
        rounding, and Adam scales that up to whole steps. In fp32 the rounding is below Adam's epsilon.
        """
        return ("linear_qkv.bias",) if self.precision == "bf16" else ()

    def model(self, documents: Path) -> tuple[str, ...]:
        """Model, data and training. ``documents``: prefix of a .bin/.idx pair with documents of few tokens."""
        flags = [f"--num-layers={self.layers}", f"--hidden-size={self.hidden}", f"--ffn-hidden-size={2 * self.hidden}"]
        flags += shlex.split("--num-attention-heads 4 --seq-length 32 --max-position-embeddings 32")
        flags += LLAMA if self.style == "llama" else ()
        flags += [] if self.tied else ["--untie-embeddings-and-output-weights"]
        flags += COUNTED[self.counted]
        flags += [f"--data-path={documents}", "--split=1,0,0"] if self.counted != "all" else []
        return (*flags, *TRAINING, f"--clip-grad={self.clip}")

    @property
    def flags(self) -> tuple[str, ...]:
        """Grid and features."""
        flags = [f"--tensor-model-parallel-size={self.tensor}", f"--pipeline-model-parallel-size={self.pipeline}"]
        flags += ["--bf16"] if self.precision == "bf16" else []
        flags += ["--overlap-grad-reduce", "--overlap-param-gather"] if self.overlap else []
        return (*flags, *RECOMPUTE[self.recompute], *shlex.split(self.uneven), *self.more)

    def faults(self, first: int) -> tuple[str, ...]:
        """Three losses, the first of them of worker ``first``, or as many as leave a cell of each stage.

        The next one is in the next stage that can spare a cell, and in another row and lane than the last.
        """
        placement = self.placement
        lost: list[int] = []
        seat = placement.seat(first)
        for number in range(len(AT)):
            stages = [(seat.stage + number + more) % self.pipeline for more in range(self.pipeline)]
            stage = next((s for s in stages if len(placement.stages[s]) > 1), None)
            if stage is None:
                break
            cells = placement.stages[stage]
            cell = cells[(seat.cell + number) % len(cells)]
            worker = cell.workers[(seat.lane + number) % self.tensor]
            lost.append(worker)
            placement = placement.without([worker])
        return tuple(
            f"kill:worker={worker}@step={step},phase={PHASES[(first + number) % len(PHASES)]}"
            for number, (worker, step) in enumerate(zip(lost, AT, strict=False))
        )


CONFIGURATIONS = (
    Configuration(
        name="pp2dp3", pipeline=2, data=3, batch=9, every_role=True, style="llama", tied=False, overlap=True,
        counted="per-token", clip=0.1, layers=7, uneven="--decoder-first-pipeline-num-layers=4",
    ),
    Configuration(
        name="dp4", pipeline=1, data=4, batch=8, every_role=True, style="gpt", tied=True, overlap=True,
        recompute="selective", counted="masked", clip=0.1,
    ),
    Configuration(
        name="pp3dp2", pipeline=3, data=2, batch=4, every_role=True, style="gpt", tied=False, recompute="selective",
        clip=0.1, layers=43, hidden=16, uneven="--pipeline-model-parallel-layout='Et*14|t*15|t*14L'",
    ),
    Configuration(
        name="pp4dp2", pipeline=4, data=2, batch=6, every_role=True, style="llama", tied=False, overlap=True,
        recompute="full", counted="masked", layers=30, hidden=16,
        uneven="--decoder-first-pipeline-num-layers=8 --decoder-last-pipeline-num-layers=8",
    ),
    Configuration(
        name="pp2dp4", pipeline=2, data=4, batch=8, every_role=True, style="gpt", tied=True, precision="bf16",
        overlap=True, recompute="selective", clip=0.1,
    ),
    Configuration(
        name="tp2pp2dp2", tensor=2, pipeline=2, data=2, batch=4, every_role=True, style="llama", tied=True,
        recompute="selective", counted="per-token",
    ),
    Configuration(
        name="tp2dp3-sequence-parallel", tensor=2, pipeline=1, data=3, batch=9, every_role=True, style="llama",
        tied=True, recompute="full", more=("--sequence-parallel",),
    ),
    Configuration(
        name="tp2pp2dp2-sequence-parallel", tensor=2, pipeline=2, data=2, batch=4, style="llama", tied=False,
        precision="bf16", overlap=True, recompute="full", counted="masked", more=("--sequence-parallel",),
    ),
    Configuration(
        name="pp2dp2-bf16-llama", pipeline=2, data=2, batch=4, style="llama", tied=True, precision="bf16", layers=7,
        uneven="--decoder-last-pipeline-num-layers=4",
    ),
    Configuration(
        name="pp2dp2-bf16-gpt", pipeline=2, data=2, batch=4, style="gpt", tied=False, precision="bf16",
        counted="per-token", clip=0.1,
    ),
    Configuration(
        name="pp2dp2-masked", pipeline=2, data=2, batch=6, style="gpt", tied=True, counted="masked",
        more=("--reset-position-ids",),
    ),
    Configuration(
        name="pp2dp2-per-token", pipeline=2, data=2, batch=6, style="gpt", tied=False, overlap=True, recompute="full",
        counted="per-token", clip=0.1,
    ),
)  # fmt: skip


def of_name(name: str) -> Configuration:
    """The configuration of that name."""
    return next(configuration for configuration in CONFIGURATIONS if configuration.name == name)


def roles(configurations: Iterable[Configuration]) -> list[tuple[Configuration, int]]:
    """Every worker of every grid."""
    return [(configuration, worker) for configuration in configurations for worker in range(configuration.workers)]
