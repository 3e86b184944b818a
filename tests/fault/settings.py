"""Grids and flags of jobs that are struck, and what becomes of a job's grid with each loss.

``Outlook`` follows the planner: who has a seat, who is a spare, and whether the job can go on at all.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.spec.cluster import load_cluster
from megatron_elas.spec.errors import ExitCode, NoFeasiblePlan
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.job_profile import JobProfile
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.shape import ModelShape, TrainingShape
from tests.fault.runs import LLAMA, TRAINING

BY_PROFILE = ("--costs=profile",)
"""To the launcher: plans that follow from the grid and the model alone, and not from what steps took."""
RECOMPUTE = ("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A job."""

    tensor: int = 1
    pipeline: int
    data: int
    tied: bool = False
    bf16: bool = False
    overlap: bool = False
    clip: float = 1.0
    """0: gradients are not clipped, and their norm is not needed."""
    recompute: bool = False
    sequence_parallel: bool = False
    copy: bool = False
    """Whether backups get whole copies in every step, and not gradients."""
    replicas: int = 1
    """Backups of each worker."""
    batch: int = 0
    """Samples per step, in micro-batches of one; 0: two a row."""

    def __post_init__(self) -> None:
        if not self.batch:
            object.__setattr__(self, "batch", 2 * self.data)

    def __str__(self) -> str:
        names = ("tied", "bf16", "overlap", "recompute", "sequence_parallel", "copy")
        features = [name for name in names if getattr(self, name)]
        grid = f"tp{self.tensor}pp{self.pipeline}dp{self.data}".removeprefix("tp1")
        features += [f"replicas={self.replicas}"] if self.replicas > 1 else []
        return " ".join([grid, *features, f"clip={self.clip:g}", f"batch={self.batch}"])

    @property
    def workers(self) -> int:
        """Processes of the job."""
        return self.tensor * self.pipeline * self.data

    @property
    def job(self) -> JobSpec:
        """As the workers say it."""
        return JobSpec(
            tensor_parallel=self.tensor,
            pipeline_parallel=self.pipeline,
            data_parallel=self.data,
            micro_batch_size=1,
            num_microbatches=self.batch,
            stage_layers=(self.layers // self.pipeline,) * self.pipeline,
            snapshot_replicas=self.replicas,
            split_backward=True,
        )

    @cached_property
    def costs(self) -> JobCosts:
        """That the job plans with under ``BY_PROFILE``."""
        shape = ModelShape(
            layers=(self.layers // self.pipeline,) * self.pipeline,
            hidden=32,
            ffn=64,
            heads=4,
            kv_heads=2,
            head_size=8,
            vocab=256,
            positions=0,
            sequence=32,
            norm_vectors=1,
            qk_norm=False,
            gated=True,
            linear_bias=False,
            qkv_bias=False,
            tied=self.tied,
        )
        training = TrainingShape(
            weight_bytes=2 if self.bf16 else 4,
            gradient_bytes=4,
            sharded_optimizer=True,
            sequence_parallel=self.sequence_parallel,
            recompute="full" if self.recompute else "none",
            hidden_dropout=False,
            attention_dropout=False,
            keeps_scores=True,
        )
        profile = JobProfile(name="tiny", spec=self.job, shape=shape, training=training)
        return JobCosts.of(profile, load_cluster("cpu"))

    @property
    def layers(self) -> int:
        """A layer or two for each stage."""
        return max(2, self.pipeline)

    @property
    def model(self) -> tuple[str, ...]:
        """Model, data and training."""
        flags = shlex.split(
            f"--num-layers={self.layers} --hidden-size=32 --ffn-hidden-size=64 --num-attention-heads=4 "
            "--group-query-attention --num-query-groups=2 --seq-length=32 --max-position-embeddings=32 --mock-data"
        )
        flags += [] if self.tied else ["--untie-embeddings-and-output-weights"]
        return (*flags, *LLAMA, *TRAINING, f"--clip-grad={self.clip}")

    @property
    def flags(self) -> tuple[str, ...]:
        """Grid and features."""
        flags = [f"--tensor-model-parallel-size={self.tensor}", f"--pipeline-model-parallel-size={self.pipeline}"]
        flags += ["--bf16"] if self.bf16 else []
        flags += ["--overlap-grad-reduce", "--overlap-param-gather"] if self.overlap else []
        flags += RECOMPUTE if self.recompute else ()
        flags += ["--sequence-parallel"] if self.sequence_parallel else []
        flags += ["--elastic-snapshot=copy"] if self.copy else []
        flags += [f"--elastic-snapshot-replicas={self.replicas}"] if self.replicas > 1 else []
        return tuple(flags)

    @property
    def relative(self) -> float:
        """How far losses may be from the undisturbed run's; see ``tests/distributed/configurations.py``."""
        return 1e-4 if self.bf16 else 1e-5

    @property
    def state_error(self) -> float:
        """The same for masters and moments, as a share of each parameter's largest entry."""
        return 5e-2 if self.bf16 else 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class Outlook:
    """A job between two steps. What follows from one is made once: campaigns look at the same futures often."""

    setting: Setting
    plan: ElasticPlan
    """The last one that all had recovered under."""
    lost: tuple[int, ...] = ()
    """Since then: the recovery from them is under way."""

    @staticmethod
    @cache
    def of(setting: Setting) -> Outlook:
        """Before the first loss."""
        return Outlook(setting=setting, plan=initial_plan(setting.job, {}, setting.costs))

    @cached_property
    def next_plan(self) -> ElasticPlan:
        """The plan without those who are lost. Raises NoFeasiblePlan."""
        if not self.lost:
            return self.plan
        return replan(self.setting.job, self.plan, self.lost, self.plan.epoch + 1, {}, self.setting.costs)

    def without(self, worker: int) -> Outlook:
        """After one more loss, before anybody has recovered from it."""
        if worker not in self._futures:
            self._futures[worker] = replace(self, lost=(*self.lost, worker))
        return self._futures[worker]

    @cached_property
    def _futures(self) -> dict[int, Outlook]:
        return {}

    @cached_property
    def recovered(self) -> Outlook:
        """After a step under the new plan."""
        return Outlook(setting=self.setting, plan=self.next_plan)

    @cached_property
    def exit_code(self) -> ExitCode:
        """What the job ends with if nobody else is lost."""
        try:
            _ = self.next_plan
        except NoFeasiblePlan:
            return ExitCode.GAVE_UP
        return ExitCode.STATE_INVALID if self.orphans() else ExitCode.FINISHED

    def orphans(self) -> tuple[int, ...]:
        """Owners who are lost together with all who kept their copies."""
        seated = self.plan.placement.workers
        return tuple(w for w in self.lost if w in seated and not set(self.backups_of(w)) - set(self.lost))

    def backups_of(self, worker: int) -> tuple[int, ...]:
        """Who keep the worker's copies, nearest first."""
        return tuple(backup for owner, backup in self.plan.backups if owner == worker)

    @cached_property
    def seated(self) -> tuple[int, ...]:
        """Who will train."""
        return self.next_plan.placement.workers

    @property
    def spares(self) -> tuple[int, ...]:
        """Who will live without a seat."""
        return self.next_plan.placement.spares

    @cached_property
    def stages(self) -> Sequence[Sequence[int]]:
        """Who will train on each stage, first to last."""
        return [[w for cell in cells for w in cell.workers] for cells in self.next_plan.placement.stages]
