"""What elasticity costs while nothing happens, and what a lost worker costs: ours against a restart.

    python benchmarks/recovery.py [--kills 5] [--turns 3] [--grids 2x2 2x4]

A grid PxD has P pipeline stages and D data-parallel rows. All figures of a grid come from one run of this program, the
variants taking turns, on this machine's CPU. Prints a table and lines ``RESULT name=value unit``:

    elastic_on_vs_stock@GRID     step time with --elastic / stock Megatron on gloo
    recovery_beyond_step_s@GRID  fault to the next committed step, less one normal step of the grid that is left
    recovery_vs_restart@GRID     work lost to a restart by torchrun from the last checkpoint / work lost to us
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parent.parent
STEPS = 40
WARM_UP = 8
"""Steps at the start that are not counted."""
FAULT_STEP = 15
SAVE_INTERVAL = 5
LINE = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([0-9.]+)")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Measure every grid."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5, help="kills per grid (default 5)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each variant for the step time (default 3)")
    parser.add_argument("--grids", nargs="+", default=["2x2", "2x4"], metavar="PxD")
    options = parser.parse_args()
    for grid in options.grids:
        stages, rows = map(int, grid.split("x"))
        with tempfile.TemporaryDirectory(prefix="elas-bench-") as folder:
            measure_grid(Path(folder), stages, rows, options.turns, options.kills)


def measure_grid(folder: Path, stages: int, rows: int, turns: int, kills: int) -> None:
    """All figures of one grid."""
    name = f"pp{stages}dp{rows}"
    flags = train_flags(stages, rows)
    workers = stages * rows
    stock, elastic = [], []
    for turn in range(turns):
        variants = [(stock, []), (elastic, ["--elastic"])]
        for times, more in variants if turn % 2 else reversed(variants):
            times.append(statistics.median(step_times_ms(run_elastic(workers, [*flags, *more]))))
    ratios = [ours / theirs for ours, theirs in zip(elastic, stock, strict=True)]
    print(f"{name}: ms per step, stock {format_all(stock)}, elastic {format_all(elastic)}")
    print(f"RESULT elastic_on_vs_stock@{name}={statistics.median(ratios):.3f} ratio", flush=True)

    tables, beyond_s = [], []
    for kill in range(kills):
        worker = (kill * 3 + 1) % workers
        log_dir = folder / f"{name}-kill{kill}"
        fault = f"kill:worker={worker}@step={FAULT_STEP},phase=forward,microbatch=1"
        lines = run_elastic(workers, [*flags, "--elastic", "--elastic-inject", fault], log_dir)
        phases = json.loads((log_dir / "events.jsonl").read_text().splitlines()[0])
        tables.append({key: value for key, value in phases.items() if isinstance(value, float) and key != "time_s"})
        normal_ms = statistics.median(step_times_ms(lines, FAULT_STEP + 3))
        beyond_s.append((phases["total"] - normal_ms) / 1e3)
    print(f"{name}: recovery in ms, median of {kills} kills, each of another worker")
    for phase in tables[0]:
        print(f"    {phase:>10}  {statistics.median(table[phase] for table in tables):8.1f}")
    ours_s = statistics.median(beyond_s)
    print(f"RESULT recovery_beyond_step_s@{name}={ours_s:.3f} s", flush=True)

    restarts_s = [
        lose_and_restart(folder / f"{name}-restart{turn}", workers, flags) for turn in range(max(1, turns - 1))
    ]
    restart_s = statistics.median(restarts_s)
    print(f"{name}: lost to a restart {format_all(restarts_s, 2)} s, to a recovery {format_all(beyond_s, 3)} s")
    print(f"RESULT recovery_vs_restart@{name}={restart_s / ours_s:.0f} ratio", flush=True)


def train_flags(stages: int, rows: int) -> list[str]:
    """A tiny Llama on mock data."""
    return [
        f"@{REPO / 'configs/llama/tiny.args'}", "--mock-data", "--tokenizer-type", "NullTokenizer",
        "--vocab-size", "512",
        "--pipeline-model-parallel-size", str(stages), "--global-batch-size", str(4 * rows),
        "--train-iters", str(STEPS),
    ]  # fmt: skip


def run_elastic(workers: int, flags: list[str], log_dir: Path | None = None) -> list[str]:
    """A whole job under elasrun; its lines, those of the workers' own logs too."""
    command = [sys.executable, "-m", "megatron_elas.cli.elasrun", "--nproc-per-node", str(workers)]
    if log_dir is not None:
        command += ["--log-dir", str(log_dir)]
    done = subprocess.run(
        [*command, "-m", "megatron_elas.pretrain_gpt", *flags],
        env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=300,
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{done.stdout[-3000:]}\na job failed with exit code {done.returncode}")
    logs = sorted(log_dir.glob("*.log")) if log_dir is not None else []
    return [*done.stdout.splitlines(), *(line for log in logs for line in log.read_text().splitlines())]


def step_times_ms(lines: list[str], after: int = WARM_UP) -> list[float]:
    """Of the steps after the given one."""
    return [float(match[2]) for line in lines if (match := LINE.search(line)) and int(match[1]) > after]


def lose_and_restart(folder: Path, workers: int, flags: list[str]) -> float:
    """Kill a worker of a stock job under torchrun, start the job again from its last checkpoint.

    Returns:
        Seconds from the kill to the end of the step that was under way, less the time that one step takes: what the
        loss has cost.
    """
    checkpoints = ["--save", str(folder), "--save-interval", str(SAVE_INTERVAL), "--ckpt-format", "torch_dist"]
    with Torchrun(workers, [*flags, *checkpoints]) as (first, lines):
        times = []
        for line in lines:
            if match := LINE.search(line):
                times.append(float(match[2]))
                if int(match[1]) == FAULT_STEP + SAVE_INTERVAL // 2:  # between two checkpoints
                    break
        killed_s = time.monotonic()
        victims = [p for p in psutil.Process(first.pid).children(recursive=True) if is_worker(p)]
        victims[-2].send_signal(signal.SIGKILL)
        for _ in lines:  # torchrun ends the other workers
            pass
    target = FAULT_STEP + SAVE_INTERVAL // 2 + 1
    with Torchrun(workers, [*flags, *checkpoints, "--load", str(folder)]) as (_, lines):
        for line in lines:
            if (match := LINE.search(line)) and int(match[1]) >= target:
                return time.monotonic() - killed_s - statistics.median(times) / 1e3
    sys.exit("the restarted job did not come to the step in which it was killed")


def is_worker(process: psutil.Process) -> bool:
    """Whether it trains (torchrun's other children do not)."""
    return "megatron_elas.pretrain_gpt" in process.cmdline() and "torch.distributed.run" not in process.cmdline()


class Torchrun:
    """A stock job under torchrun; gives the process and its lines, and ends it with all its workers."""

    def __init__(self, workers: int, flags: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}",
             "-m", "megatron_elas.pretrain_gpt", *flags],
            env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._limit = threading.Timer(300, self._process.kill)

    def __enter__(self) -> tuple[subprocess.Popen[str], Iterator[str]]:
        self._limit.start()
        assert self._process.stdout is not None
        return self._process, iter(self._process.stdout)

    def __exit__(self, *error: object) -> None:
        self._limit.cancel()
        if self._process.poll() is None:
            self._process.terminate()
        self._process.communicate()


def format_all(values: list[float], digits: int = 1) -> str:
    """``1.0/2.0/3.0``."""
    return "/".join(f"{value:.{digits}f}" for value in values)


if __name__ == "__main__":
    main()
