"""Throughput after one and two losses: our planner against other policies, all under the same costs and timing.

    make bench-planner
    make bench-planner ARGS="--grids pp8dp2m32b2"
    make bench-planner ARGS=--times

Predicted, on the profiles of jobs and devices; nothing is trained. For every grid and loss a line of a table, then
lines ``RESULT name=value unit``:

* ``share@GRID/LOSS``: samples per second after the loss, relative to stock 1F1B without a loss and to the share of
  cells that are left; 1 is as good as the cells that are left;
* ``own@GRID/LOSS``: the same, relative to what ours predicts without a loss instead of stock 1F1B;
* ``quick@GRID/LOSS``: step time of the plan that is made while workers wait, relative to that of the thorough one,
  which all other figures are of; both timed exactly;
* ``job@GRID/LOSS``: samples per second of what a running job does after its migration (``planner.improve``), relative
  to ours, whose clocks may be raised besides; ``now@GRID/LOSS``: of what it does until then (``planner.plan``), layers
  being where they were; ``job_vs_recycle@GRID/LOSS`` and ``job_vs_torchft@GRID/LOSS``: of the former, relative to
  these policies. The job is one that can split its backward passes (``JobSpec.split_backward``);
* ``vs_POLICY@GRID/LOSS``: samples per second of ours relative to that policy's; ``no plan`` where it cannot go on;
* ``share_min``, ``own_min``, ``job_min``, ``now_min``, ``vs_POLICY_min``: the least of all; ``quick_max``: the most;
* ``improve_s``, ``improve_s_max``: median and most processor time of the search for a migration, over all losses;
  ``share_min@m>=4pp``: of grids with four micro-batches per stage and row, or more;
  ``vs_POLICY_min@paper``: of grids like those that ElasWave is about, two rows and a deep pipeline: ``PAPER_LIKE``;
* ``boost_time@GRID/LOSS/PLAN``, ``boost_energy``, ``slow_time``, ``slow_energy``: step time and energy of a step, with
  the clocks of the busiest stages raised, or of waiting stages lowered, relative to the nominal clock;
* ``plan_ms@96``, ``plan_s@100000``: median processor time of the planning thread, of a plan made while workers wait;
  ``plan_wall_ms@96``, ``plan_wall_s@100000``: by the clock on the wall, which other load on the machine makes longer;
* ``replan_ms@96``, ``replan_s@100000``, ``replan_wall_ms@96``, ``replan_wall_s@100000``: the same of all that the
  running job's planner does after the loss of a worker: what is planned, who sits where, items, warm-ups, backups, and
  the prediction;
* ``improve_s@96``, ``improve_s@100000``, ``improve_wall_s@96``, ``improve_wall_s@100000``: of the search for a
  migration that follows, beside training.

A grid is written ``pp8dp2m32b2``: stages, rows, micro-batches per row, samples in each. Those of the second job and
device are named after these: ``13b-h100.pp8dp2m32b2``.

ReCycle staggers its optimizers, so that a step's tail hides behind the next one's begin. All others are synchronous:
also ours, but in ``staggered_vs_recycle``, where both are staggered.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from megatron_elas.planner.clocks import Clocked
from megatron_elas.planner.finding import RUNTIME
from megatron_elas.planner.improve import improve
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.planner.policies import POLICIES, PolicyStep, ours, recycle, stock
from megatron_elas.planner.prediction import Predictor
from megatron_elas.planner.search import Freedom
from megatron_elas.planner.situation import Situation
from megatron_elas.planner.step_plan import QUICK, Effort, make_plan
from megatron_elas.schedule.timing import Deadlock
from megatron_elas.spec.cluster import Cluster, load_cluster
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.job_profile import JobProfile, load_job
from megatron_elas.spec.plan import ElasticPlan

GRIDS = (
    "pp4dp2m16b2",
    "pp4dp2m64b2",
    "pp4dp3m8b4",
    "pp4dp3m32b3",
    "pp4dp6m8b1",
    "pp4dp6m32b1",
    "pp8dp2m16b6",
    "pp8dp2m32b2",
    "pp8dp3m32b2",
    "pp8dp6m8b1",
    "pp8dp6m16b1",
    "pp12dp2m24b6",
    "pp12dp2m48b2",
    "pp12dp3m24b2",
    "pp12dp3m12b2",
    "pp12dp6m24b1",
)
PAPER_LIKE = ("pp8dp2m16b6", "pp8dp2m32b2", "pp12dp2m24b6", "pp12dp2m48b2")
OTHER_GRIDS = ("pp4dp3m16b4", "pp8dp2m16b6", "pp8dp2m32b2", "pp8dp6m16b1")
"""Of the second job and device."""
CLOCK_GRIDS = ("pp4dp3m32b3", "pp8dp2m32b2")
COLUMNS = ("vs_recycle", "staggered_vs_recycle", "vs_torchft", "vs_oobleck", "vs_elaswave", "vs_restart")
RIVALS = ("torchft", "oobleck", "elaswave", "restart")
JOB_RIVALS = ("recycle", "torchft")
"""That the running job is compared with as well."""


def read_grid(text: str) -> tuple[int, int, int, int]:
    """Stages, rows, micro-batches per row, samples of each."""
    found = re.fullmatch(r"pp(\d+)dp(\d+)m(\d+)b(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no grid: write one such as pp8dp2m32b2")
    stages, rows, steps, size = map(int, found.groups())
    return stages, rows, steps, size


def list_losses(stages: int, rows: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """Cells (stage, row) that are lost, by name. With two rows both losses are in one, so that a replica is left."""
    middle = stages // 2
    losses: dict[str, tuple[tuple[int, int], ...]] = {
        "first": ((0, 0),),
        "middle": ((middle, 0),),
        "last": ((stages - 1, 0),),
        "two_stages": ((0, 0), (middle, 0 if rows == 2 else 1)),
    }
    if rows > 2:
        losses["one_stage"] = ((middle, 0), (middle, 1))
    return losses


def bound_of(step: PolicyStep, own: float) -> str:
    """What stands between a plan and the share of cells that are left, of what it gives without a loss."""
    if own >= 1 or step.plan is None:
        return "-"
    busy = step.plan.nominal.timed.busy_s
    if max(busy) > 1.03 * sum(busy) / len(busy):
        return "whole layers and samples"
    return "filling the pipeline" if step.step_s < 1.02 * step.plan.prediction.bound_s else "order"


def quick_ratio(now: Situation, thorough: PolicyStep) -> float | None:
    """Step time of a quick plan over that of a thorough one; None where it does not fit when timed exactly."""
    candidate = make_plan(now, effort=QUICK).candidate
    try:
        found = Predictor(now, exact=True, staggered=False).predict(candidate, 8 if candidate.split else 2)
    except Deadlock:
        return None
    return found.step_s / thorough.step_s


class JobStep(NamedTuple):
    """What a running job does after a loss. Seconds; None: it does not fit the memory."""

    now_s: float | None
    """Of a step until layers have moved."""
    after_s: float | None
    """Of a step then."""
    search_s: float
    """Processor time of the search for what moves."""


def job_step(begin: Situation, lost: Sequence[tuple[int, int]]) -> JobStep:
    """A running job that can split its backward passes loses cells (stage, row), and nobody is spare."""
    layers = tuple(last - first for first, last in pairwise(begin.cuts))
    job = replace(begin.job, stage_layers=layers, split_backward=True)
    costs = JobCosts(cost=begin.cost, memory_bytes=begin.memory_bytes, link=begin.link)
    lanes = job.tensor_parallel
    gone = {(stage * job.data_parallel + row) * lanes + lane for stage, row in lost for lane in range(lanes)}
    domains = {worker: f"node{worker // 8}" for worker in range(job.world_size)}
    now = replan(job, initial_plan(job, domains, costs), gone, 1, domains, costs)
    began_s = time.thread_time()
    after = improve(job, now, 2, domains, costs)
    search_s = time.thread_time() - began_s
    return JobStep(*(None if plan.over_memory else plan.predicted_s for plan in (now, after or now)), search_s)


class Line(NamedTuple):
    """What is said of a loss. None: there is no such plan."""

    share: float
    own: float
    quick: float | None
    now: float | None
    job: float | None
    improve_s: float
    ratios: dict[str, float | None]
    bound: str


class Table:
    """Prints a line per loss, and keeps what is least."""

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}
        self.owns: list[float] = []
        self.quicks: list[float] = []
        self.jobs: dict[str, list[float]] = {"now": [], "job": []}
        self.searches_s: list[float] = []
        self.ratios: dict[str, dict[str, float]] = defaultdict(dict)
        self.results: list[str] = []

    def begin(self, title: str) -> None:
        """A job's losses follow."""
        titles = "".join(f"{name.replace('staggered', 'stag'):>16}" for name in COLUMNS)
        print(f"\n{title}\n{'grid':22}{'loss':12}{'share':>7}{'own':>7}{'quick':>8}{'now':>8}{'job':>8}{titles}  bound")

    def add(self, name: str, line: Line) -> None:
        """One loss."""
        grid, _, loss = name.partition("/")
        columns = "".join(f"{_text(line.ratios[column]):>16}" for column in COLUMNS)
        quick, now, job = _text(line.quick), _text(line.now), _text(line.job)
        print(
            f"{grid:22}{loss:12}{line.share:7.3f}{line.own:7.3f}{quick:>8}{now:>8}{job:>8}{columns}  {line.bound}",
            flush=True,
        )
        self.shares[name] = line.share
        self.owns.append(line.own)
        if line.quick is not None:
            self.quicks.append(line.quick)
        self.searches_s.append(line.improve_s)
        for what, value in (("now", line.now), ("job", line.job)):
            if value is not None:
                self.jobs[what].append(value)
        columns = {"share": line.share, "own": line.own, "quick": line.quick, "now": line.now, "job": line.job}
        for what, value in columns.items():
            self.results.append(f"{what}@{name}={_text(value)} ratio")
        for rival in JOB_RIVALS:
            ratio = line.ratios[f"vs_{rival}"]
            if line.job is not None and ratio is not None:
                line.ratios[f"job_vs_{rival}"] = line.job * ratio
        for rival, ratio in line.ratios.items():
            self.results.append(f"{rival}@{name}={_text(ratio)} ratio")
            if ratio is not None:
                self.ratios[rival][name] = ratio

    def print_results(self) -> None:
        """All RESULT lines."""
        print()
        for line in self.results:
            print(f"RESULT {line}")
        print(f"RESULT share_min={min(self.shares.values()):.3f} ratio")
        print(f"RESULT own_min={min(self.owns):.3f} ratio")
        print(f"RESULT quick_max={max(self.quicks, default=1.0):.3f} ratio")
        for what, values in self.jobs.items():
            print(f"RESULT {what}_min={min(values, default=1.0):.3f} ratio")
        print(f"RESULT improve_s={statistics.median(self.searches_s):.2f} s")
        print(f"RESULT improve_s_max={max(self.searches_s):.2f} s")
        many = [share for name, share in self.shares.items() if _is_long(name)]
        if many:
            print(f"RESULT share_min@m>=4pp={min(many):.3f} ratio")
        for rival, ratios in self.ratios.items():
            print(f"RESULT {rival}_min={min(ratios.values()):.3f} ratio")
            paper = [ratio for name, ratio in ratios.items() if name.partition("/")[0] in PAPER_LIKE]
            if paper:
                print(f"RESULT {rival}_min@paper={min(paper):.3f} ratio", flush=True)


def _text(ratio: float | None) -> str:
    return "no plan" if ratio is None else f"{ratio:.3f}"


def _is_long(name: str) -> bool:
    stages, _, steps, _ = read_grid(name.partition("/")[0].rpartition(".")[2])
    return steps >= 4 * stages


def situation_of(job: JobProfile, cluster: Cluster, grid: str) -> Situation:
    """A job on a grid, at its begin."""
    stages, rows, steps, size = read_grid(grid)
    on_grid = job.with_grid(
        pipeline_parallel=stages, data_parallel=rows, num_microbatches=steps * rows, micro_batch_size=size
    )
    return Situation.of(on_grid, cluster)


def losses_of(grid: str) -> dict[str, tuple[tuple[int, int], ...]]:
    """As ``list_losses``."""
    stages, rows, _, _ = read_grid(grid)
    return list_losses(stages, rows)


def compare(begin: Situation, grid: str, table: Table, effort: Effort, *, prefix: str = "") -> None:
    """All losses of a grid."""
    whole, best = stock(begin), ours(begin, (), effort=effort)
    less = replace(effort, evaluations=effort.evaluations // 3)
    for loss, lost in losses_of(grid).items():
        step = ours(begin, lost, effort=effort)
        now = begin.without(lost)
        share, own = (step.samples_per_s / other.samples_per_s / now.surviving_share for other in (whole, best))
        theirs = recycle(begin, lost)
        seeds = (step.candidate,) if step.candidate else ()
        staggered = make_plan(now, Freedom(staggered=True), less, seeds)
        ratios: dict[str, float | None] = {
            "vs_recycle": step.samples_per_s / theirs.samples_per_s,
            "staggered_vs_recycle": theirs.step_s / staggered.step_s,
        }
        for rival in RIVALS:
            try:
                ratios[f"vs_{rival}"] = step.samples_per_s / POLICIES[rival](begin, lost).samples_per_s
            except NoFeasiblePlan:
                ratios[f"vs_{rival}"] = None
        job = job_step(begin, lost)
        now_ratio, job_ratio = (seconds and step.step_s / seconds for seconds in (job.now_s, job.after_s))
        line = Line(share, own, quick_ratio(now, step), now_ratio, job_ratio, job.search_s, ratios, bound_of(step, own))
        table.add(f"{prefix}{grid}/{loss}", line)


def print_clocks(name: str, job: JobProfile, cluster: Cluster, effort: Effort) -> list[str]:
    """Time and energy of both uses of clocks, for our plan and for the one that the running job carries out today."""
    print(f"\nClocks, {name}: {describe_clock(cluster)}")
    titles = "".join(
        f"{title:>14}" for title in ("step_s", "kJ", "boost_time", "boost_energy", "slow_time", "slow_energy")
    )
    print(f"{'grid':14}{'loss':12}{'plan':6}{titles}  clocks boosted; slowed")
    results = []
    for grid in CLOCK_GRIDS:
        for loss, lost in losses_of(grid).items():
            now = situation_of(job, cluster, grid).without(lost)
            for kind, freedom in (("ours", None), ("job", RUNTIME)):
                plan = make_plan(now, freedom, effort)
                plain = plan.nominal
                columns = {
                    "boost_time": plan.boosted.timed.step_s / plain.timed.step_s,
                    "boost_energy": _energy(plan.boosted) / _energy(plain),
                    "slow_time": plan.slowed.timed.step_s / plain.timed.step_s,
                    "slow_energy": _energy(plan.slowed) / _energy(plain),
                }
                text = "".join(
                    f"{value:14.3f}" for value in (plain.timed.step_s, _energy(plain) / 1e3, *columns.values())
                )
                clocks = "; ".join(" ".join(f"{c:.2f}" for c in own.clocks) for own in (plan.boosted, plan.slowed))
                print(f"{grid:14}{loss:12}{kind:6}{text}  {clocks}", flush=True)
                results += [f"{what}@{grid}/{loss}/{kind}={value:.3f} ratio" for what, value in columns.items()]
    return results


def describe_clock(cluster: Cluster) -> str:
    """Its range."""
    clock = cluster.device.clock
    return "not settable" if clock is None else f"{clock.lowest:g} to {clock.highest:g} of nominal"


def _energy(clocked: Clocked) -> float:
    return clocked.timed.energy_j or float("nan")


def planning_s(plan: Callable[[], object], times: int) -> tuple[float, float]:
    """Median time of a plan: of the thread on a processor, and on the wall."""
    on_processor, on_wall = [], []
    for _ in range(times):
        begin, begin_wall = time.thread_time(), time.perf_counter()
        plan()
        on_processor.append(time.thread_time() - begin)
        on_wall.append(time.perf_counter() - begin_wall)
    return statistics.median(on_processor), statistics.median(on_wall)


class Planning(NamedTuple):
    """What the running job's planner does when a worker is lost."""

    replan: Callable[[], ElasticPlan]
    """While workers wait."""
    improve: Callable[[], ElasticPlan | None]
    """Beside training."""


def planning_of(profile: JobProfile, cluster: Cluster, lost: tuple[int, int]) -> Planning:
    """After a worker of a cell (stage, row); nodes are of eight workers."""
    job = replace(profile.spec, stage_layers=profile.shape.layers, split_backward=True)
    costs = JobCosts.of(profile, cluster)
    domains = {worker: f"node{worker // 8}" for worker in range(job.world_size)}
    stage, row = lost
    worker = (stage * job.data_parallel + row) * job.tensor_parallel
    again = partial(replan, job, initial_plan(job, domains, costs), {worker}, 1, domains, costs)
    return Planning(again, partial(improve, job, again(), 2, domains, costs))


def print_planning_times() -> None:
    """For 96 and for 100,000 workers."""
    few = load_job("llama2-34b"), load_cluster("npu-96"), (1, 2)
    many = (
        load_job("llama2-70b").with_grid(pipeline_parallel=16, data_parallel=781, num_microbatches=781 * 64),
        load_cluster("npu-100k"),
        (3, 5),
    )
    for (job, cluster, lost), size, unit, per_s, times in ((few, 96, "ms", 1e3, 41), (many, 100_000, "s", 1.0, 5)):
        plan = partial(make_plan, Situation.of(job, cluster, [lost]), effort=QUICK)
        running = planning_of(job, cluster, lost)
        for name, what in (("plan", plan), ("replan", running.replan)):
            used, passed = planning_s(what, times)
            print(f"RESULT {name}_{unit}@{size}={used * per_s:.2f} {unit}")
            print(f"RESULT {name}_wall_{unit}@{size}={passed * per_s:.2f} {unit}", flush=True)
        used, passed = planning_s(running.improve, 3)
        print(f"RESULT improve_s@{size}={used:.2f} s")
        print(f"RESULT improve_wall_s@{size}={passed:.2f} s", flush=True)


def main() -> None:
    """Parse, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="*", default=list(GRIDS), metavar="GRID")
    parser.add_argument("--job", default="llama2-34b")
    parser.add_argument("--cluster", default="npu-96", help="its devices and links; more of them where a grid needs it")
    parser.add_argument("--tensor-parallel", type=int, default=8)
    parser.add_argument("--evaluations", type=int, default=120, help="orders that ours may time")
    parser.add_argument("--short", action="store_true", help="the first job only, and no clocks")
    parser.add_argument("--times", action="store_true", help="only how long planning takes")
    args = parser.parse_args()
    effort = Effort(evaluations=args.evaluations, exact=True)
    print(f"Python {platform.python_version()} on {machine()}")
    if args.times:
        print_planning_times()
        return
    table, results = Table(), list[str]()
    job, cluster = load_lanes(args.job, args.tensor_parallel), load_cluster(args.cluster)
    table.begin(f"{args.job}, TP{args.tensor_parallel}, {args.cluster}")
    for grid in args.grids:
        compare(situation_of(job, cluster, grid), grid, table, effort)
    if not args.short:
        other, gpus = load_lanes("llama2-13b", 4), load_cluster("gpu-96")
        table.begin("13b-h100: llama2-13b, TP4, gpu-96 (H100)")
        for grid in OTHER_GRIDS:
            compare(situation_of(other, gpus, grid), grid, table, effort, prefix="13b-h100.")
        results = print_clocks("llama2-34b, TP8, gpu-96 (H100)", load_lanes("llama2-34b", 8), gpus, effort)
    table.print_results()
    for line in results:
        print(f"RESULT {line}")
    print_planning_times()
    print(f"{time.process_time():.0f} s of one core; load {os.getloadavg()[0]:.1f} at the end")


def load_lanes(name: str, tensor_parallel: int) -> JobProfile:
    """A job with so many lanes."""
    job = load_job(name)
    return replace(job, spec=replace(job.spec, tensor_parallel=tensor_parallel))


def machine() -> str:
    """Processors, and how busy they are."""
    return f"{os.cpu_count()} x {platform.machine()}, load {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
