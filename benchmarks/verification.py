"""What the checks before resuming cost, by check, against copying the same bytes.

    python benchmarks/verification.py [--elements 16000000] [--turns 5]

One worker's part, in bfloat16: its weights, half of which it owns, and a copy of another worker's shard. All times are
from one run, in turns, of one thread. Prints a table in ms, and ``RESULT verify_PART_vs_copy=value ratio``: the time of
a part over that of copying the bytes that it reads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from results import format_all, print_result, print_table

from megatron_elas.planner.plan import initial_plan
from megatron_elas.runtime.verification.checks import find_failures
from megatron_elas.runtime.verification.inspection import (
    Counters,
    Inspection,
    count_uncast,
    flat_sums,
    inspect_piece,
    weight_sums,
)
from megatron_elas.runtime.verification.rows import Row
from megatron_elas.runtime.verification.verify import Copy, Evidence
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.shards import Piece, ShardLayout

WORKERS = 64


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=16_000_000, help="parameters of the stage and lane")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure(options.elements, options.turns)


def measure(elements: int, turns: int) -> dict[str, float]:
    """Time every part. Gives the ratios by part."""
    own = elements // 2
    flat = torch.randn(3 * own + 1, generator=torch.Generator().manual_seed(1))
    slots = flat[:-1].view(3, -1)
    weights = torch.cat([slots[0].bfloat16(), torch.zeros(elements - own, dtype=torch.bfloat16)])
    parts: dict[str, tuple[Callable[[], object], int]] = {
        "weights": (lambda: weight_sums({"w": weights}), weights.nbytes),
        "contents": (lambda: flat_sums(flat), flat.nbytes),
        "mirror": (lambda: flat_sums(flat), flat.nbytes),
        "cast": (lambda: count_uncast(slots[0], weights[:own]), slots[0].nbytes + own * 2),
    }
    source, target = torch.empty(flat.nbytes, dtype=torch.uint8), torch.empty(flat.nbytes, dtype=torch.uint8)
    times: dict[str, list[float]] = {name: [] for name in parts}
    ratios: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(turns + 1):
        for name, (run, num_bytes) in parts.items():
            spent = _time(run)
            copied = _time(lambda n=num_bytes: target[:n].copy_(source[:n]))  # type: ignore[misc]
            times[name].append(1e3 * spent)
            ratios[name].append(spent / copied)
    judged = [1e3 * _time(judge_rows()) for _ in range(turns)]
    rows = {name: [format_all(spent[1:])] for name, spent in times.items()}  # the first turn touches the memory
    rows[f"judging {WORKERS} rows"] = [format_all(judged)]
    print_table(f"{elements} elements, ms in {turns} turns", ["ms"], rows)
    medians = {name: statistics.median(values[1:]) for name, values in ratios.items()}
    for name, ratio in medians.items():
        print_result(f"verify_{name}_vs_copy", ratio, "ratio")
    return medians


def judge_rows() -> Callable[[], object]:
    """The six checks over the rows of many workers, without communication."""
    job = JobSpec(
        tensor_parallel=1, pipeline_parallel=WORKERS // 8, data_parallel=8, micro_batch_size=1, num_microbatches=64,
        stage_layers=(1,) * (WORKERS // 8),
    )  # fmt: skip
    plan = initial_plan(job, {})
    ones = torch.ones(4)
    sums = Inspection(
        parameters={"w": 4},
        weights=weight_sums({"w": ones}),
        pieces=[inspect_piece(Piece(name="w", start=0, stop=4), 0, [ones, ones, ones], ones)],
        counters=Counters(consumed_samples=1, schedule_samples=1, loss_scale=1, optimizer_steps=(1, 1), streams=1),
    )
    layout = ShardLayout(pieces=(Piece(name="w", start=0, stop=4),))
    rows = {}
    for worker in plan.placement.workers:
        copies = {ward: Copy(layout=layout, flat=torch.ones(13)) for ward in plan.wards_of(worker)}
        evidence = Evidence(worker=worker, version=1, inspection=sums, expected={"w": 4}, mirrors=copies)
        rows[worker] = Row.from_ints(plan, worker, evidence.row(plan).to_ints(plan))
    return lambda: find_failures(plan, rows)


def _time(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
