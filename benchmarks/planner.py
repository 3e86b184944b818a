"""Throughput after one and two losses: our planner against other policies, all under the same costs and timing.

    make bench-planner
    make bench-planner ARGS="--grids pp8dp2m32b2"

Predicted, on the profiles of a job and a device; nothing is trained. For every grid and loss a line of a table, then
lines ``RESULT name=value unit``:

* ``share@GRID/LOSS``: samples per second after the loss, relative to stock 1F1B without a loss and to the share of
  cells that are left; 1 is as good as the cells that are left;
* ``own@GRID/LOSS``: the same, relative to what ours predicts without a loss instead of stock 1F1B;
* ``quick@GRID/LOSS``: step time of the plan that is made while workers wait, relative to that of the thorough one,
  which all other figures are of; both timed exactly;
* ``vs_POLICY@GRID/LOSS``: samples per second of ours relative to that policy's; ``no plan`` where it cannot go on;
* ``share_min``, ``own_min``, ``vs_POLICY_min``: the least of all; ``quick_max``: the most;
  ``share_min@m>=4pp``: of grids with four micro-batches per stage and row, or more;
  ``vs_POLICY_min@paper``: of grids like those that ElasWave is about, two rows and a deep pipeline: ``PAPER_LIKE``;
* ``plan_ms@96``, ``plan_s@100000``: median processor time of a plan made while workers wait.

A grid is written ``pp8dp2m32b2``: stages, rows, micro-batches per row, samples in each.

ReCycle staggers its optimizers; the others, stock 1F1B, and all figures of ours but one are synchronous. That one is
``vs_recycle``, where both are staggered; ``sync_vs_recycle`` is ours, synchronous, against ReCycle, staggered.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import time
from collections import defaultdict
from dataclasses import replace

from megatron_elas.planner.policies import POLICIES, PolicyStep, ours, recycle, stock
from megatron_elas.planner.prediction import Predictor
from megatron_elas.planner.situation import Situation
from megatron_elas.planner.step_plan import QUICK, Effort, make_plan
from megatron_elas.schedule.timing import Deadlock
from megatron_elas.spec.cluster import Cluster, load_cluster
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.job_profile import JobProfile, load_job

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
COLUMNS = ("vs_recycle", "sync_vs_recycle", "vs_torchft", "vs_oobleck", "vs_elaswave", "vs_restart")
RIVALS = ("torchft", "oobleck", "elaswave", "restart")


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


class Table:
    """Prints a line per loss, and keeps what is least."""

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}
        self.owns: list[float] = []
        self.quicks: list[float] = []
        self.ratios: dict[str, dict[str, float]] = defaultdict(dict)
        self.results: list[str] = []
        titles = "".join(f"{name:>16}" for name in COLUMNS)
        print(f"{'grid':14}{'loss':12}{'share':>7}{'own':>7}{'quick':>8}{titles}  bound")

    def add(
        self,
        grid: str,
        loss: str,
        share: float,
        own: float,
        quick: float | None,
        ratios: dict[str, float | None],
        bound: str,
    ) -> None:
        """One loss."""
        name = f"{grid}/{loss}"
        columns = "".join(f"{_text(ratios[column]):>16}" for column in COLUMNS)
        print(f"{grid:14}{loss:12}{share:7.3f}{own:7.3f}{_text(quick):>8}{columns}  {bound}", flush=True)
        self.shares[name] = share
        self.owns.append(own)
        if quick is not None:
            self.quicks.append(quick)
        for what, value in (("share", share), ("own", own), ("quick", quick)):
            self.results.append(f"{what}@{name}={_text(value)} ratio")
        for rival, ratio in ratios.items():
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
    stages, _, steps, _ = read_grid(name.partition("/")[0])
    return steps >= 4 * stages


def compare(job: JobProfile, cluster: Cluster, grid: str, table: Table, effort: Effort) -> None:
    """All losses of a grid."""
    stages, rows, steps, size = read_grid(grid)
    on_grid = job.with_grid(
        pipeline_parallel=stages, data_parallel=rows, num_microbatches=steps * rows, micro_batch_size=size
    )
    begin = Situation.of(on_grid, cluster)
    whole, best = stock(begin), ours(begin, (), effort=effort)
    for loss, lost in list_losses(stages, rows).items():
        step = ours(begin, lost, effort=effort)
        left = begin.without(lost).surviving_share
        share, own = (step.samples_per_s / other.samples_per_s / left for other in (whole, best))
        theirs = recycle(begin, lost)
        ratios: dict[str, float | None] = {
            "vs_recycle": ours(begin, lost, staggered=True, effort=effort).samples_per_s / theirs.samples_per_s,
            "sync_vs_recycle": step.samples_per_s / theirs.samples_per_s,
        }
        for rival in RIVALS:
            try:
                ratios[f"vs_{rival}"] = step.samples_per_s / POLICIES[rival](begin, lost).samples_per_s
            except NoFeasiblePlan:
                ratios[f"vs_{rival}"] = None
        quick = quick_ratio(begin.without(lost), step)
        table.add(grid, loss, share, own, quick, ratios, bound_of(step, own))


def planning_s(situation: Situation, times: int) -> float:
    """Median processor time of a plan made while workers wait."""
    seconds = []
    for _ in range(times):
        begin = time.process_time()
        make_plan(situation, effort=QUICK)
        seconds.append(time.process_time() - begin)
    return statistics.median(seconds)


def print_planning_times() -> None:
    """For 96 and for 100,000 workers."""
    small = Situation.of(load_job("llama2-34b"), load_cluster("npu-96"), [(1, 2)])
    print(f"RESULT plan_ms@96={planning_s(small, 31) * 1e3:.1f} ms")
    many = load_job("llama2-70b").with_grid(pipeline_parallel=16, data_parallel=781, num_microbatches=781 * 64)
    large = Situation.of(many, load_cluster("npu-100k"), [(3, 5)])
    print(f"RESULT plan_s@100000={planning_s(large, 5):.2f} s")


def main() -> None:
    """Parse, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="*", default=list(GRIDS), metavar="GRID")
    parser.add_argument("--job", default="llama2-34b")
    parser.add_argument("--cluster", default="npu-96", help="its devices and links; more of them where a grid needs it")
    parser.add_argument("--tensor-parallel", type=int, default=8)
    parser.add_argument("--evaluations", type=int, default=120, help="orders that ours may time")
    args = parser.parse_args()
    job = load_job(args.job)
    job = replace(job, spec=replace(job.spec, tensor_parallel=args.tensor_parallel))
    print(f"{args.job}, TP{args.tensor_parallel}, {args.cluster}; Python {platform.python_version()} on {machine()}")
    table = Table()
    for grid in args.grids:
        effort = Effort(evaluations=args.evaluations, exact=True)
        compare(job, load_cluster(args.cluster), grid, table, effort)
    table.print_results()
    print_planning_times()


def machine() -> str:
    """Processors, and how busy they are."""
    return f"{os.cpu_count()} x {platform.machine()}, load {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
