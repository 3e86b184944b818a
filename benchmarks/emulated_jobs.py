"""Training jobs on emulated accelerators that lose workers: how they are started, and what they measured of steps.

The processes train a tiny model of as many layers as the one whose time they take; each layer takes that one's time.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from training_jobs import REPO, Grid, Run, run_elastic

from megatron_elas.planner.cost_model import estimate_job
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import initial_plan, predict_step_s
from megatron_elas.planner.situation import Situation
from megatron_elas.planner.time_model import find_hardware, spread_layers, stage_tails
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.job_profile import deal_layers, load_job
from megatron_elas.spec.step_report import StepReport, read_step_reports

NICE = -15
"""Of a benchmark that emulates, if it may: operations are late when their process gets no processor."""
AUTOGROUP, AUTOGROUP_ENABLED = Path("/proc/self/autogroup"), Path("/proc/sys/kernel/sched_autogroup_enabled")
TOO_SLOW = "computed its tiny tensors"
"""In the warning of a worker whose device was slower than it should have been."""
JOB_LIMIT_S = 1500.0


@contextlib.contextmanager
def claimed_processors() -> Iterator[str]:
    """Run before other processes of the machine, if that is permitted; gives what was reached, for people.

    Where the kernel shares processors among sessions first (autogroups), the session of this process needs a higher
    share too; it is given back at the end.
    """
    before = _session_nice()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        if before is not None:
            AUTOGROUP.write_text(str(NICE))
    session = _session_nice()
    try:
        yield f"at nice {os.getpriority(os.PRIO_PROCESS, 0)}" + ("" if session is None else f", session {session}")
    finally:
        if session != before:
            AUTOGROUP.write_text(str(before))


def _session_nice() -> int | None:
    """Of the session among others; None where sessions are not told apart."""
    with contextlib.suppress(OSError, ValueError):
        if AUTOGROUP_ENABLED.read_text().strip() == "1":
            return int(AUTOGROUP.read_text().split()[-1])
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job."""

    grid: Grid
    model: str
    """Profile of configs/jobs, with its tensor parallelism inside its devices' times."""
    hardware: str
    row_batches: int
    """Micro-batches of a row."""
    size: int
    """Samples of a micro-batch."""
    speed: float = 1.0
    """How much faster than real devices the emulated ones are."""
    hidden: int = 16
    """Of the tiny model. With few, most of its state is embeddings, and little of it layers."""

    @property
    def layers(self) -> int:
        """Of the model whose time is taken, and of the tiny one."""
        return load_job(self.model).num_layers

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.row_batches * self.grid.rows * self.size

    def flags(self, steps: int) -> list[str]:
        """For ``megatron_elas.pretrain_gpt``. The tiny model is as small as it can be: its real work must not show."""
        return [
            f"@{REPO / 'configs/llama/tiny.args'}", "--mock-data", "--tokenizer-type", "NullTokenizer",
            "--vocab-size", "512", "--num-layers", str(self.layers), "--hidden-size", str(self.hidden),
            "--ffn-hidden-size", str(2 * self.hidden),
            "--num-attention-heads", "1", "--num-query-groups", "1", "--position-embedding-type", "none",
            "--seq-length", "8", "--max-position-embeddings", "8",
            "--pipeline-model-parallel-size", str(self.grid.stages), "--micro-batch-size", str(self.size),
            "--global-batch-size", str(self.batch), "--train-iters", str(steps), "--elastic",
            "--elastic-emulate", self.hardware, "--elastic-emulate-model", self.model,
            "--elastic-emulate-speed", str(self.speed),
        ]  # fmt: skip

    def job(self) -> JobSpec:
        """As the controller sees it."""
        return JobSpec(
            tensor_parallel=1,
            pipeline_parallel=self.grid.stages,
            data_parallel=self.grid.rows,
            micro_batch_size=self.size,
            num_microbatches=self.row_batches * self.grid.rows,
            stage_layers=deal_layers(self.layers, self.grid.stages),
        )

    def costs(self) -> JobCosts:
        """Of the real devices."""
        cluster, profile = find_hardware(self.hardware, self.grid.workers), load_job(self.model)
        link = cluster.inside if self.grid.workers <= cluster.devices_per_node else cluster.between
        cost = spread_layers(estimate_job(profile, cluster), self.layers)
        return replace(JobCosts.of(profile, cluster), cost=cost, link=link, clock=None)

    def situation(self) -> Situation:
        """Of the job as it begins, for the planner's policies."""
        job, costs = self.job(), self.costs()
        return Situation(
            job=job,
            cost=costs.cost,
            cuts=(0, *(stop for _, stop in job.launch_layers)),
            rows=(tuple(range(self.grid.rows)),) * self.grid.stages,
            memory_bytes=costs.memory_bytes,
            link=costs.link,
        )

    def step_s(self) -> float:
        """Predicted, without a loss, as it passes on this machine."""
        job, costs = self.job(), self.costs()
        return predict_step_s(job, initial_plan(job, {}), costs) / self.speed

    def tail_s(self, rows: int) -> float:
        """Of a step among so many rows: what follows the last gradient, as it passes on this machine."""
        job, costs = self.job(), self.costs()
        cuts, stages = (0, *(stop for _, stop in job.launch_layers)), self.grid.stages
        tails = stage_tails(costs.cost, cuts, [costs.link] * stages, [rows] * stages)
        return max(tail.seconds for tail in tails) / self.speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that the job has finished, over all workers."""

    epoch: int
    step: int
    seconds: float
    """Median over the workers."""
    ended_s: float
    """By the wall clock; of the last worker."""
    predicted_s: float
    """What the epoch's plan said."""
    is_steady: bool
    """Neither the first one under its plan, nor one that was begun before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Steps of a job in steady state between two losses: under the newest plan before the second one."""

    epoch: int
    steps: tuple[Step, ...]
    """At least one."""

    @property
    def step_s(self) -> float:
        """Median."""
        return statistics.median(step.seconds for step in self.steps)

    @property
    def predicted_s(self) -> float:
        """What the plan said."""
        return self.steps[-1].predicted_s

    @property
    def spread(self) -> float:
        """From the shortest to the longest step, relative to the median."""
        times = [step.seconds for step in self.steps]
        return (max(times) - min(times)) / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a job did."""

    steps: tuple[Step, ...]
    """In the order in which they ended."""
    events: tuple[dict[str, Any], ...]
    """Of events.jsonl."""
    slow: tuple[str, ...]
    """Warnings of workers that were too slow for their devices."""

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind, such as ``recovery``."""
        return [event for event in self.events if event["event"] == kind]

    def step_s_in(self, epoch: int) -> float:
        """Median of the steady steps under the plan of this epoch; what was predicted where there are none."""
        steps = [step for step in self.steps if step.epoch == epoch]
        steady = [step.seconds for step in steps if step.is_steady]
        return statistics.median(steady or [step.predicted_s for step in steps])

    def stretches(self, losses: Sequence[int]) -> list[Stretch]:
        """The steady steps before the first loss, and after each.

        Args:
            losses: Steps in which workers were lost, ascending.

        Raises:
            SystemExit: There are none: more steps are needed.
        """
        bounds = [0, *losses, sys.maxsize]
        return [self._stretch(first, last) for first, last in pairwise(bounds)]

    def _stretch(self, first: int, last: int) -> Stretch:
        inside = [step for step in self.steps if first <= step.step < last]
        epoch = max((step.epoch for step in inside), default=-1)
        steady = tuple(step for step in inside if step.epoch == epoch and step.is_steady)
        if not steady:
            sys.exit(
                f"no steady step from step {first} on, in the last epoch ({epoch}): the job needs more steps there"
            )
        return Stretch(epoch=epoch, steps=steady)


def run_losses(
    case: Case, folder: Path, steps: int, faults: Sequence[str], flags: Sequence[str] = (), launcher: Sequence[str] = ()
) -> Course:
    """Train, and lose workers; ends the program when the job fails, or a fault did not strike.

    Args:
        case: The job.
        folder: For its logs; made here.
        steps: In all.
        faults: Of ``--elastic-inject``.
        flags: More for the training script.
        launcher: More for elasrun.
    """
    injected = [f"--elastic-inject={fault}" for fault in faults]
    run = run_elastic(
        case.grid.workers,
        [*case.flags(steps), *injected, "--elastic-emulate-log", str(folder / "errors"), *flags],
        folder,
        preload=True,
        launcher_flags=["--costs", "profile", *launcher],
        limit_s=JOB_LIMIT_S,
    )
    fired = [line.partition("fault strikes: ")[2] for line in run.lines if "fault strikes: " in line]
    if sorted(fired) != sorted(faults):
        sys.exit(f"{folder.name}: these faults were to strike: {', '.join(faults)}; these did: {', '.join(fired)}")
    return read_course(run)


def read_course(run: Run) -> Course:
    """Of a job that is over."""
    events = map(json.loads, (run.log_dir / "events.jsonl").read_text().splitlines())
    return Course(
        steps=tuple(gather_steps(read_step_reports(run.log_dir / "steps.jsonl"))),
        events=tuple(events),
        slow=tuple(line for line in run.lines if TOO_SLOW in line),
    )


def gather_steps(reports: Sequence[StepReport]) -> Iterator[Step]:
    """Of the workers' reports, in the order in which steps ended; those without an end or a prediction are left out."""
    told: dict[tuple[int, int], list[StepReport]] = defaultdict(list)
    for report in reports:
        if report.ended_s is not None and report.predicted_s is not None:
            told[report.epoch, report.step].append(report)
    for (epoch, step), own in sorted(told.items(), key=lambda item: max(report.ended_s or 0 for report in item[1])):
        yield Step(
            epoch=epoch,
            step=step,
            seconds=statistics.median(report.step_s for report in own),
            ended_s=max(report.ended_s or 0 for report in own),
            predicted_s=own[-1].predicted_s or 0,
            is_steady=not any(report.first or report.again for report in own),
        )
