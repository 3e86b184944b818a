"""Training jobs of the benchmarks: a small Llama on mock data, under elasrun or torchrun, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
MEASURED_WORKER = Path(__file__).resolve().parent / "measured_worker.py"
MEASURED_MARK = "measured: "
"""Begins the lines in which a measured worker says what it saw."""
JOB_LIMIT_S = 300
GRACE_S = 15
"""From asking a process to end until it is killed."""
LINE = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([0-9.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The tiny Llama of configs/llama/tiny.args, or one of another size."""

    layers: int = 4
    hidden: int = 64

    def flags(self) -> list[str]:
        """For Megatron."""
        return [
            f"@{REPO / 'configs/llama/tiny.args'}", "--mock-data", "--tokenizer-type", "NullTokenizer",
            "--vocab-size", "512", "--num-layers", str(self.layers), "--hidden-size", str(self.hidden),
            "--ffn-hidden-size", str(2 * self.hidden),
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Pipeline stages and data-parallel rows."""

    stages: int
    rows: int

    @staticmethod
    def parse(text: str) -> Grid:
        """``PxD``."""
        stages, rows = map(int, text.split("x"))
        return Grid(stages=stages, rows=rows)

    @property
    def workers(self) -> int:
        """In all."""
        return self.stages * self.rows

    def __str__(self) -> str:
        return f"pp{self.stages}dp{self.rows}"


def train_flags(model: Model, grid: Grid, steps: int, batch: int | None = None) -> list[str]:
    """For ``megatron_elas.pretrain_gpt``; the batch is four micro-batches a row unless given."""
    return [
        *model.flags(),
        "--pipeline-model-parallel-size", str(grid.stages),
        "--global-batch-size", str(batch or 4 * grid.rows),
        "--train-iters", str(steps),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a job that ended well has left."""

    lines: list[str]
    """Of the workers and the launcher."""
    events: list[dict[str, Any]]
    """Recoveries, as in events.jsonl."""
    log_dir: Path
    """Where elasrun has written what the job did."""

    def step_times_ms(self, after: int) -> list[float]:
        """Of the iterations after the given one."""
        return step_times_ms(self.lines, after)

    def measured(self) -> list[dict[str, Any]]:
        """What measured workers have said."""
        return [json.loads(line.removeprefix(MEASURED_MARK)) for line in self.lines if line.startswith(MEASURED_MARK)]


def run_elastic(
    workers: int,
    flags: Sequence[str],
    log_dir: Path,
    *,
    measured: bool = False,
    script: Path | None = None,
    preload: bool = False,
    environ: Mapping[str, str] | None = None,
    launcher_flags: Sequence[str] = (),
    limit_s: float = JOB_LIMIT_S,
) -> Run:
    """A whole job under elasrun; ends the program when the job fails.

    Args:
        workers: Processes.
        flags: For the training script.
        log_dir: Made by elasrun.
        measured: Run ``measured_worker.py``, which measures and prints, in the place of ``megatron_elas.pretrain_gpt``.
        script: Run this in the place of ``megatron_elas.pretrain_gpt``.
        preload: Fork the workers, which is faster with many; measured ones always are.
        environ: Additions to the environment.
        launcher_flags: For elasrun.
        limit_s: For the whole job.
    """
    if measured:
        script = MEASURED_WORKER
    target = ["-m", "megatron_elas.pretrain_gpt"] if script is None else [str(script)]
    if measured or preload:
        target = ["--preload", "megatron_elas.pretrain_gpt:preload", *target]
    command = [sys.executable, "-m", "megatron_elas.cli.elasrun", "--nproc-per-node", str(workers)]
    process = subprocess.Popen(
        [*command, *launcher_flags, "--log-dir", str(log_dir), *target, *flags],
        env={**ENVIRONMENT, **(environ or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with ended_gently(process):
        told, _ = process.communicate(timeout=limit_s)
    logs = [line for log in sorted(log_dir.glob("*.log")) for line in log.read_text().splitlines()]
    if process.returncode != 0:
        sys.exit("\n".join([*logs[-40:], told[-3000:], f"a job failed with exit code {process.returncode}"]))
    events = log_dir / "events.jsonl"
    return Run(
        lines=[*told.splitlines(), *logs],
        events=[event for event in map(json.loads, events.read_text().splitlines()) if event["event"] == "recovery"],
        log_dir=log_dir,
    )


@contextlib.contextmanager
def ended_gently(process: subprocess.Popen[Any]) -> Iterator[None]:
    """When the body ends, however it does, so does the process: asked to (elasrun then clears up), or killed."""
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)  # a stopped one would not hear
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def step_times_ms(lines: Sequence[str], after: int) -> list[float]:
    """Of the iterations after the given one, from Megatron's log."""
    return [float(match[2]) for line in lines if (match := LINE.search(line)) and int(match[1]) > after]


class Torchrun:
    """A stock job under torchrun; gives the process and its lines, and ends it with all its workers."""

    def __init__(self, workers: int, flags: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}",
             "-m", "megatron_elas.pretrain_gpt", *flags],
            env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._limit = threading.Timer(JOB_LIMIT_S, self._process.kill)

    def __enter__(self) -> tuple[subprocess.Popen[str], Iterator[str]]:
        self._limit.start()
        assert self._process.stdout is not None
        return self._process, iter(self._process.stdout)

    def __exit__(self, *error: object) -> None:
        self._limit.cancel()
        if self._process.poll() is None:
            self._process.terminate()
        self._process.communicate()
