"""Goodput under failures at published rates: our policy against others, from 96 devices to a million. Simulated.

    make bench-goodput
    make bench-goodput ARGS="--scales 96 100000"

Nothing is trained: steps take what the planner predicts on the profile of a job and a cluster, recoveries what
``configs/recovery`` says, failures come as ``configs/traces/llama3-405b.toml`` says. All three have assumed values; the
second table of every scale shows what becomes of the goodput when the main ones are others:

* ``base``: as the files have it;
* ``slow x10``: detecting, recovering and joining take ten times as long, for every policy but restart;
* ``equal``: every policy but restart recovers and joins as fast as ours, with what it loses by its steps alone left;
* ``flat``: without the tree of controllers that is assumed above 512 workers: each worker costs the one controller
  0.13 ms in every recovery, for every policy but restart;
* ``fast restart``: a restart, of whatever policy, takes a tenth of the time;
* ``failures x3``, ``repairs x10``: of devices and nodes, in another trace; at some scales only, to save time.

Columns: ``goodput`` is samples that count, relative to stock 1F1B on all devices that nothing disturbs; ``own`` the
same relative to the policy itself that nothing disturbs, ``-`` where losses make it faster: without one ``recycle`` is
stock 1F1B, as in its paper, whose split backward and staggered optimizers are for failures, so that its ``own`` tells
what failures cost it only where it trains without any most of the time. Recoveries are from a failure to the next
useful work. ``ours`` is the planner with all its freedom, and synchronous; ``ours, today`` has the freedom of a running
job's plan (``planner.plan``: samples to peers, 1F1B, nominal clocks; cells and layers move when a stage is
lost); ``ours, staggered`` lets every stage step its optimizer on its own, as ``recycle`` does; the runtime would need
an undo for it.

Lines ``RESULT name=value unit``: ``goodput@SCALE/POLICY`` (also ``ours-today``, ``ours-staggered``) and
``own@SCALE/POLICY``; ``goodput@SCALE/POLICY/VARIANT``;
``vs_POLICY@SCALE`` (ours over it; ``staggered_vs_recycle@SCALE``: both staggered); ``failures@SCALE``;
``simulated_s@SCALE``: processor seconds of all policies of the first table together; ``controller_ms@N``: processor
time of the controller's state machine for each of N workers, from a worker's end to the last one's recovery.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.results import print_result, print_table
from megatron_elas.control.messages import WorkerExited
from megatron_elas.control.states import Running
from megatron_elas.planner.situation import Situation
from megatron_elas.simulator.engine import simulate
from megatron_elas.simulator.failure_rates import DAY_S, Rates, generate
from megatron_elas.simulator.outcome import CAUSES, Outcome
from megatron_elas.simulator.rates import StepRates, today
from megatron_elas.simulator.recovery import Phase, RecoveryCosts, Sizes, load_recovery, load_restart
from megatron_elas.simulator.trace_files import load_trace
from megatron_elas.simulator.traces import Trace
from megatron_elas.spec.cluster import Cluster, load_cluster
from megatron_elas.spec.job_profile import JobProfile, load_job
from tests.control.jobs import Director, make_job

ROWS = ("ours", "ours, today", "ours, staggered", "elaswave", "recycle", "torchft", "oobleck", "restart")
CONTROLLER_S = 0.13e-3
"""Of one controller for each worker: ``controller_ms@512``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A job on a cluster, for some days."""

    job: str
    cluster: str
    days: float
    grid: tuple[int, int, int, int] | None = None
    """Tensor, pipeline, data parallel, micro-batches per row; None: the job's own."""
    failures: float = 1.0
    """Times as many as published."""
    other_traces: bool = True
    """Are simulated too."""

    def make(self) -> tuple[JobProfile, Cluster]:
        """The job on its grid."""
        job = load_job(self.job)
        if self.grid is not None:
            lanes, stages, rows, steps = self.grid
            job = job.with_grid(pipeline_parallel=stages, data_parallel=rows, num_microbatches=steps * rows)
            job = replace(job, spec=replace(job.spec, tensor_parallel=lanes))
        return job, load_cluster(self.cluster)


SCALES = {
    "96": Scale(job="llama2-34b", cluster="npu-96", days=365),
    "96x20": Scale(job="llama2-34b", cluster="npu-96", days=60, failures=20.0, other_traces=False),
    "100000": Scale(job="llama2-70b", cluster="npu-100k", days=14, grid=(8, 16, 781, 64)),
    "1000000": Scale(job="llama2-70b", cluster="npu-1m", days=7, grid=(8, 16, 7812, 64), other_traces=False),
}


def draw(name: str, scale: Scale, cluster: Cluster, *, failures: float = 1.0, repairs: float = 1.0) -> Trace:
    """A trace at published rates, or at multiples of them."""
    rates = load_trace(name)
    assert isinstance(rates, Rates)
    factor = failures * scale.failures
    changed = tuple(
        replace(rate, per_day=rate.per_day * factor, repair_s=rate.repair_s * repairs) for rate in rates.failures
    )
    return generate(cluster, replace(rates, failures=changed), scale.days * DAY_S, seed=1)


Change = Callable[[RecoveryCosts], RecoveryCosts]


def slow(costs: RecoveryCosts) -> RecoveryCosts:
    """Ten times as slow; a restart as it is."""
    return costs.times(10) if costs.phases else costs


def equal(costs: RecoveryCosts) -> RecoveryCosts:
    """As fast as ours; a restart as it is."""
    own = load_recovery("ours")
    if not costs.phases:
        return costs
    return replace(costs, detect_s=own.detect_s, detect_node_s=own.detect_node_s, phases=own.phases, join=own.join)


def flat(costs: RecoveryCosts) -> RecoveryCosts:
    """One controller for all workers."""
    if not costs.phases:
        return costs
    first, join = costs.phases[0], costs.join[0]
    return replace(
        costs,
        phases=(replace(first, per_doubling_s=0.0, per_worker_s=CONTROLLER_S), *costs.phases[1:]),
        join=(replace(join, per_doubling_s=0.0, per_worker_s=CONTROLLER_S), *costs.join[1:]),
    )


def fast_restart(costs: RecoveryCosts) -> RecoveryCosts:
    """A tenth of a restart's time."""
    restart = costs.restart or load_restart()
    return replace(costs, restart=replace(restart, phases=tuple(phase.times(0.1) for phase in restart.phases)))


COSTS: dict[str, Change] = {"slow x10": slow, "equal": equal, "flat": flat, "fast restart": fast_restart}
TRACES = {"failures x3": {"failures": 3.0}, "repairs x10": {"repairs": 10.0}}


def policy_of(row: str) -> str:
    """The policy that a row is about."""
    return row.partition(",")[0]


def run_scale(name: str, scale: Scale, trace_name: str, variants: bool) -> None:
    """Both tables of a scale, and its RESULT lines."""
    job, cluster = scale.make()
    spec = job.spec
    trace = draw(trace_name, scale, cluster)
    print(
        f"\n{name}: {job.name}, TP{spec.tensor_parallel} x PP{spec.pipeline_parallel} x DP{spec.data_parallel}, "
        f"{spec.num_microbatches // spec.data_parallel} micro-batches of {spec.micro_batch_size} per row, "
        f"{cluster.name}; {scale.days:g} days of {trace.name}"
        f"{'' if scale.failures == 1 else f', failures x{scale.failures:g}'}: {len(trace.events)} failures, "
        f"{scale.days * 24 / max(1, len(trace.events)):.3g} h between them"
    )
    print_costs(name, job, cluster)
    begin = time.process_time()
    rates, outcomes = {}, {}
    for row in ROWS:
        policy = policy_of(row)
        rates[row] = StepRates(
            job,
            cluster,
            policy,
            staggered=row == "ours, staggered",
            step=today if row == "ours, today" else None,
        )
        outcomes[row] = simulate(job, cluster, trace, policy, rates=rates[row])
    seconds = time.process_time() - begin
    print_outcomes(outcomes)
    print_result(f"failures@{name}", len(trace.events), "failures", 0)
    for row, outcome in outcomes.items():
        print_result(f"goodput@{name}/{row.replace(', ', '-')}", outcome.goodput, "ratio", 4)
        print_result(f"own@{name}/{row.replace(', ', '-')}", outcome.own_goodput, "ratio", 4)
    for rival in ROWS:
        if rival == policy_of(rival) != "ours" and outcomes[rival].trained:
            print_result(f"vs_{rival}@{name}", outcomes["ours"].trained / outcomes[rival].trained, "ratio")
    both = outcomes["ours, staggered"].trained / outcomes["recycle"].trained
    print_result(f"staggered_vs_recycle@{name}", both, "ratio")
    print_result(f"simulated_s@{name}", seconds, "s", 1)
    if variants:
        run_variants(name, scale, trace_name, trace, rates, outcomes)


def run_variants(
    name: str,
    scale: Scale,
    trace_name: str,
    trace: Trace,
    rates: dict[str, StepRates],
    outcomes: dict[str, Outcome],
) -> None:
    """Goodput of every policy under other assumptions."""
    traces = TRACES if scale.other_traces else {}
    results: list[tuple[str, float]] = []
    cells: dict[str, list[str]] = {row: [f"{outcome.goodput:.4f}"] for row, outcome in outcomes.items()}
    for row, own in rates.items():
        job, cluster, policy = own.job, own.cluster, own.policy
        costs = load_recovery(policy)
        found = {
            variant: simulate(job, cluster, trace, policy, recovery=change(costs), rates=own)
            for variant, change in COSTS.items()
        }
        for variant, factors in traces.items():
            found[variant] = simulate(job, cluster, draw(trace_name, scale, cluster, **factors), policy, rates=own)
        for variant, outcome in found.items():
            cells[row].append(f"{outcome.goodput:.4f}")
            where = f"goodput@{name}/{row.replace(', ', '-')}/{variant.replace(' ', '_')}"
            results.append((where, outcome.goodput))
    print_table(f"{name}: goodput under other assumptions", ["base", *COSTS, *traces], cells)
    print()
    for where, goodput in results:
        print_result(where, goodput, "ratio", 4)


def print_costs(name: str, job: JobProfile, cluster: Cluster) -> None:
    """Seconds that ``configs/recovery`` gives for this job, without work that is done again."""
    restart = load_restart()
    sizes = Sizes.of(Situation.of(job, cluster), cluster, restart.storage_bandwidth)

    def total(phases: tuple[Phase, ...]) -> str:
        return f"{sum(phase.seconds(sizes) for phase in phases):.2f}" if phases else "-"

    rows = {}
    for policy in dict.fromkeys(map(policy_of, ROWS)):
        costs = load_recovery(policy)
        rows[policy] = [
            f"{costs.detect_s:g}",
            f"{costs.detect_node_s:g}",
            total(costs.phases or restart.phases),
            total(costs.join),
        ]
    print_table(f"{name}: seconds", ["a device's end noticed", "a node's", "then recovered", "devices taken in"], rows)


def print_outcomes(outcomes: dict[str, Outcome]) -> None:
    """One line for each policy."""
    causes = [cause for cause in CAUSES if any(outcome.seconds_by_cause[cause] for outcome in outcomes.values())]
    columns = [
        "goodput",
        "own",
        "recoveries",
        "mean s",
        "worst s",
        "restarts",
        "joins",
        "dropped",
        "redone",
        "kJ/sample",
    ]
    rows = {}
    for row, outcome in outcomes.items():
        energy = outcome.energy_j
        rows[row] = [
            f"{outcome.goodput:.4f}",
            "-" if outcome.own_goodput > 1 else f"{outcome.own_goodput:.4f}",
            f"{outcome.recoveries}",
            f"{outcome.mean_recovery_s:.1f}",
            f"{outcome.worst_recovery_s:.0f}",
            f"{outcome.restarts}",
            f"{outcome.joins}",
            f"{outcome.dropped:.3g}",
            f"{outcome.redone:.3g}",
            "-" if energy is None or not outcome.trained else f"{energy / outcome.trained / 1e3:.2f}",
            *(f"{outcome.share(cause):.2%}" for cause in causes),
        ]
    print_table("", [*columns, *causes], rows)
    print()


def print_controller(workers: int) -> None:
    """What one controller takes for a lost worker, on plain values: no sockets, no other process."""
    director = Director(make_job(pipeline=4, data=workers // 4)).start()
    assert isinstance(director.state, Running)
    plan, others = director.state.plan, range(1, workers)
    begin = time.process_time()
    director.send(WorkerExited(worker=0, status=-9, at_s=0.0))
    director.settle(1, others, plan)
    director.recover(1, others)
    seconds = time.process_time() - begin
    assert isinstance(director.state, Running) and director.state.plan.epoch == 1
    print_result(f"controller_ms@{workers}", seconds / workers * 1e3, "ms")


def main() -> None:
    """Parse, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", nargs="+", choices=SCALES, default=list(SCALES))
    parser.add_argument("--trace", default="llama3-405b", help="rates of configs/traces (default: llama3-405b)")
    parser.add_argument("--no-variants", action="store_true", help="the first table of every scale only")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"Python {platform.python_version()} on {os.cpu_count()} x {platform.machine()}, load {load:.1f}")
    for workers in (32, 128, 512, 2048):
        print_controller(workers)
    for name in args.scales:
        run_scale(name, SCALES[name], args.trace, not args.no_variants)


if __name__ == "__main__":
    main()
