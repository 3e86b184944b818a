"""Runs a job under ``elasrun`` and reads what it printed and recorded."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_elas.host.sample_log import read_samples
from tests.fault.warm_launcher import WarmLauncher

REPO = Path(__file__).resolve().parents[2]
RECORDER = Path(__file__).parent / "recorder.py"
ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \| consumed samples: +(\d+) .*? lm loss: ([0-9.E+-]+)")
LOSS_SCALE = re.compile(r"iteration +\d+/.*? loss scale: ([0-9.]+) .*? number of skipped iterations: +(\d+)")
GRADIENT_NORM = re.compile(r"iteration +\d+/.*? grad norm: ([0-9.]+)")
STEPS = 16
TRAINING = tuple(
    shlex.split(
        "--attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer --micro-batch-size 1 "
        "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 100 --weight-decay 0.1 --clip-grad 1.0 "
        "--tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1 --eval-interval 1000 --eval-iters 0 "
        "--num-workers 0"
    )
)
LLAMA = tuple(shlex.split("--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear"))
"""How a Llama differs from Megatron's GPT, apart from sizes."""
MODEL = (
    *shlex.split(
        "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention "
        "--num-query-groups 2 --seq-length 64 --max-position-embeddings 64 --untie-embeddings-and-output-weights "
        "--mock-data"
    ),
    *LLAMA,
    *TRAINING,
)
"""The model unless a test names another, its data and its training."""
PYTHON_PART = 3
"""Words of a command of ``launcher`` that come before the arguments of ``elasrun``."""
QUICK_TIMEOUTS = ("--heartbeat-interval-s=0.2", "--heartbeat-timeout-s=10", "--settle-timeout-s=20", "--grace-s=2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished job."""

    code: int
    output: str
    folder: Path
    left: tuple[str, ...] = ()
    """Processes that were there after the launcher had ended; seen by a warm launcher only."""

    @property
    def iterations(self) -> list[int]:
        """Numbers of Megatron's iteration lines, as printed."""
        return [int(number) for number, _, _ in ITERATION.findall(self.output)]

    @property
    def consumed(self) -> list[int]:
        """Consumed samples of the iteration lines."""
        return [int(samples) for _, samples, _ in ITERATION.findall(self.output)]

    @property
    def losses(self) -> list[float]:
        """Losses of the iteration lines."""
        return [float(loss) for _, _, loss in ITERATION.findall(self.output)]

    @property
    def gradient_norms(self) -> list[float]:
        """Norms of the gradients before clipping, of the iteration lines."""
        return [float(norm) for norm in GRADIENT_NORM.findall(self.output)]

    @property
    def loss_scales(self) -> list[tuple[float, bool]]:
        """Of the iteration lines: the scale of the next step's loss, and whether the step's update was left out."""
        return [(float(scale), bool(int(skipped))) for scale, skipped in LOSS_SCALE.findall(self.output)]

    @property
    def samples(self) -> dict[int, dict[int, list[int]]]:
        """Sample ids by step and stage."""
        return read_samples(str(self.folder / "samples"))

    def records(self, name: str) -> dict[int, dict[str, Any]]:
        """Records of that name, by worker."""
        return {int(path.suffixes[-2][1:]): torch.load(path) for path in sorted(self.folder.glob(f"{name}.*.pt"))}

    @property
    def recoveries(self) -> dict[int, set[int]]:
        """Workers that had a seat after each recovery, by epoch."""
        found = {}
        for block in re.split(r"---- recovered: epoch ", self.output)[1:]:
            seats = re.search(r"^now +(.*?)(?: \| spare: .*)?$", block, re.MULTILINE)
            assert seats is not None, block[:500]
            cells = re.findall(r"\[([\d,]+)\]", seats.group(1))
            found[int(block.split()[0])] = {int(worker) for cell in cells for worker in cell.split(",")}
        return found

    @property
    def fired(self) -> list[str]:
        """Faults that struck, as printed by the worker just before."""
        return re.findall(r"fault strikes: (\S+)", self.output)


def run_job(
    folder: Path,
    flags: Sequence[str],
    *,
    workers: int,
    faults: Sequence[str] = (),
    versions: Sequence[int] = (),
    model: Sequence[str] = MODEL,
    steps: int | None = STEPS,
    batch: int = 8,
    timeout_s: float = 250,
    launcher_flags: Sequence[str] = (),
    warm: WarmLauncher | None = None,
    environ: Mapping[str, str] | None = None,
) -> Run:
    """Train a small model on ``workers`` workers with --elastic; ``folder`` is made and filled.

    With ``steps=None`` the flags say how long. Layers stay where a loss leaves them, unless the flags say otherwise.
    ``warm`` launches the job in the place of a new Python; ``environ`` is added to the environment.
    """
    elastic = ["--elastic", "--elastic-migration=off", f"--elastic-sample-log={folder / 'samples'}"]
    for fault in faults:
        elastic += ["--elastic-inject", fault]
    command = [
        *launcher(workers), *launcher_flags, "--preload=megatron_elas.pretrain_gpt:preload", str(RECORDER), *model,
        *([] if steps is None else [f"--train-iters={steps}"]), f"--global-batch-size={batch}", *elastic, *flags,
    ]  # fmt: skip
    return run_command(command, folder, versions, timeout_s, warm, environ)


def run_stock(
    folder: Path,
    flags: Sequence[str],
    *,
    workers: int,
    model: Sequence[str] = MODEL,
    steps: int = STEPS,
    batch: int = 8,
    timeout_s: float = 250,
) -> Run:
    """The same without --elastic: stock Megatron on gloo."""
    command = [
        *launcher(workers), "-m", "megatron_elas.pretrain_gpt", *model, f"--train-iters={steps}",
        f"--global-batch-size={batch}", *flags,
    ]  # fmt: skip
    return run_command(command, folder, (), timeout_s)


def launcher(workers: int) -> list[str]:
    """``elasrun`` with short timeouts."""
    return [sys.executable, "-m", "megatron_elas.cli.elasrun", f"--nproc-per-node={workers}", *QUICK_TIMEOUTS]


def run_command(
    command: Sequence[str],
    folder: Path,
    versions: Sequence[int],
    timeout_s: float,
    warm: WarmLauncher | None = None,
    more: Mapping[str, str] | None = None,
) -> Run:
    """Run to the end and keep the output."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPO),
        "PYTHONWARNINGS": "ignore",
        "ELAS_TEST_OUT": str(folder),
        "ELAS_TEST_VERSIONS": ",".join(map(str, versions)),
        **(more or {}),
    }
    if warm is not None:
        ended = warm.run(command[PYTHON_PART:], environment, folder / "output", timeout_s)
        output = (folder / "output").read_text(errors="replace")
        assert not ended.out_of_time, f"not finished after {timeout_s} s:\n{output[-6000:]}"
        return Run(code=ended.code, output=output, folder=folder, left=tuple(ended.left))
    with subprocess.Popen(
        command, env=environment, cwd=REPO, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate(timeout=30)
            raise AssertionError(f"not finished after {timeout_s} s:\n{output[-6000:]}") from None
    return Run(code=process.returncode, output=output, folder=folder)


def assert_nothing_stale(run: Run) -> None:
    """After every recovery no live object of any worker with a seat knew a lost worker or an old epoch.

    Each looks right after the first step committed in an epoch, and the last ones once more at the end.
    """
    assert run.recoveries, "nobody was lost"
    for epoch, seated in run.recoveries.items():
        walks = run.records(f"walk.{epoch}")
        assert walks.keys() == seated, f"epoch {epoch}"
        for worker, walk in walks.items():
            assert walk["problems"] == [], f"epoch {epoch}, worker {worker}"
    records = run.records("final")
    assert records.keys() == seated
    for worker, record in records.items():
        assert record["problems"] == [], f"at the end, worker {worker}"
        assert len(record["reduced"]) > 5
        assert {name for name, (size, total) in record["reduced"].items() if size != total} == set()


def assemble(records: dict[int, dict[str, Any]]) -> dict[tuple[int, int, str], torch.Tensor]:
    """(stage, lane, parameter name) -> (3, numel): master, exp_avg, exp_avg_sq, put together from all shards.

    Asserts that every element has exactly one owner.
    """
    found: dict[tuple[int, int, str], list[tuple[int, int, torch.Tensor]]] = {}
    for record in records.values():
        for name, start, stop, values in record["pieces"]:
            found.setdefault((record["stage"], record["lane"], name), []).append((start, stop, values))
    whole = {}
    for key, pieces in found.items():
        pieces.sort(key=lambda piece: piece[0])
        ends = [stop for _, stop, _ in pieces]
        assert [start for start, _, _ in pieces] == [0, *ends[:-1]], f"{key} is not covered exactly once: {pieces}"
        whole[key] = torch.cat([values for _, _, values in pieces], dim=1)
    return whole


def assert_same_training(
    run: Run, calm: Run, *, relative: float = 1e-5, state: float = 1e-3, noise: Sequence[str] = ()
) -> None:
    """Iteration lines without gap or repeat, and losses, samples, optimizer state and masters of the undisturbed run.

    Losses to ``relative``: sums over micro-batches are associated differently once cells have left. Adam divides by
    the root of the second moment, so a wrong scale of the gradients shows in their norms only, and rounding shows most
    for parameters whose gradients are near zero: parameters and state are compared to ``state`` of each parameter's
    largest entry, which the loss of a single sample exceeds. Parameters whose names end with one of ``noise`` are left
    out of that.
    """
    assert (run.code, calm.code) == (0, 0), run.output[-6000:] if run.code else calm.output[-6000:]
    assert calm.iterations == list(range(1, len(calm.iterations) + 1)), f"undisturbed: lines {calm.iterations}"
    assert run.iterations == calm.iterations, f"lines {run.iterations}"
    assert run.consumed == calm.consumed, f"consumed {run.consumed}, undisturbed {calm.consumed}"
    assert run.samples == calm.samples, "other samples than in the undisturbed run"
    for step, (got, want) in enumerate(zip(run.losses, calm.losses, strict=True)):
        assert abs(got - want) <= relative * want, f"step {step}: loss {got}, undisturbed {want}"
    assert_same_norms(run.gradient_norms, calm.gradient_norms)
    ours, theirs = assemble(run.records("final")), assemble(calm.records("final"))
    assert ours.keys() == theirs.keys(), "other parameters than in the undisturbed run"
    for key, value in theirs.items():
        if key[-1].endswith(tuple(noise)):
            continue
        scale = value.abs().amax(dim=1, keepdim=True)
        error = ((ours[key] - value).abs() / scale.clamp(min=1e-30)).amax()
        assert error <= state, f"{key}: differs by {error:.1e} of its largest entry"


def assert_same_norms(norms: Sequence[float], calm: Sequence[float]) -> None:
    """Gradient norms as in the undisturbed run, to a hundredth: they are printed with three decimals."""
    assert len(norms) == len(calm) > 0, f"{len(norms)} gradient norms, undisturbed {len(calm)}"
    for step, (got, want) in enumerate(zip(norms, calm, strict=True)):
        assert abs(got - want) <= 1e-2 * want, f"step {step}: gradient norm {got}, undisturbed {want}"
