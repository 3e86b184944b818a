"""What dropout costs whose masks depend on samples, beside Megatron's own.

    python benchmarks/random_streams.py [--cases alone lanes] [--steps 60] [--hidden 256] [--sequence 256]

A small Llama with dropout of 0.1 after attention scores, attention, MLP and embedding. In one job steps take turns: one
with ``--elastic-rng resharded``, one with Megatron's streams. Cases:

    alone      one worker, micro-batches of one sample
    samples    one worker, micro-batches of four
    recompute  one worker, all layers recomputed
    lanes      two workers with tensor and sequence parallelism
    both       the same with micro-batches of four: every operation inside of Megatron's tracker is looked at

Prints ``RESULT rng_cost@CASE=value ratio``: the median step time with resharded streams by that with Megatron's, and
``RESULT rng_cost=value ratio``, that of the first case.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from pathlib import Path

from results import print_result
from training_jobs import Grid, Model, run_elastic, train_flags

WARM_UP = 6
LANES = ["--tensor-model-parallel-size=2", "--sequence-parallel"]
CASES: dict[str, tuple[int, list[str]]] = {
    "alone": (1, []),
    "samples": (1, ["--micro-batch-size=4"]),
    "recompute": (1, ["--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"]),
    "lanes": (2, LANES),
    "both": (2, [*LANES, "--micro-batch-size=4"]),
}
"""Name -> workers, flags."""
LINE = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([0-9.]+)")


def measure_case(folder: Path, name: str, model: Model, sequence: int, steps: int) -> float:
    """Step time with resharded streams / with Megatron's."""
    workers, more = CASES[name]
    flags = [
        *train_flags(model, Grid(stages=1, rows=workers), 2 * steps, 4), "--attention-dropout=0.1",
        "--hidden-dropout=0.1", f"--seq-length={sequence}", f"--max-position-embeddings={sequence}", "--elastic", *more,
    ]  # fmt: skip
    run = run_elastic(workers, flags, folder / name, measured=True, environ={"ELAS_BENCH_STREAMS": "alternate"})
    times: tuple[list[float], list[float]] = ([], [])
    for number, time_ms in (found.groups() for line in run.lines if (found := LINE.search(line))):
        if int(number) > WARM_UP:
            times[int(number) % 2].append(float(time_ms))
    megatron, resharded = map(statistics.median, times)
    print(f"{name}: ms per step, megatron {megatron:.1f}, resharded {resharded:.1f}, {len(times[0])} steps each")
    print_result(f"rng_cost@{name}", resharded / megatron, "ratio")
    return resharded / megatron


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--steps", type=int, default=60, help="of each kind (default 60)")
    parser.add_argument("--hidden", type=int, default=256, help="size of the model (default 256)")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a sample (default 256)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elas-bench-") as folder:
        costs = [
            measure_case(Path(folder), name, Model(hidden=options.hidden), options.sequence, options.steps)
            for name in options.cases
        ]
    print_result("rng_cost", costs[0], "ratio")


if __name__ == "__main__":
    main()
