"""Checks elastic process groups on this host's accelerators, with torch and this checkout alone.

    PYTHONPATH=. python scripts/check_on_device.py

One process per device (1 to 8 GPUs or NPUs), in at most 3 minutes. Per capability a line: pass, fail, or not available
with the reason, what it cost in ms (the slowest worker's), and a last line with the sums. With one device, what can be
checked in a group of one is; then two processes are tried on it, which NCCL refuses today.

Exit status: 0 nothing failed; 1 something failed; 2 bad usage; 77 there is no accelerator here, so nothing was checked.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))  # this checkout, whatever else is installed

CHECKS = {
    "inner group made": 1,
    "all_reduce": 1,
    "reduce_scatter": 1,
    "all_gather": 1,
    "several as one": 1,
    "send and receive": 2,
    "sends and receives as one": 2,
    "asynchronous operations": 1,
    "abort with an operation in flight": 1,
    "abort under a hung peer": 2,
    "rebuild after an abort": 1,
    "other groups stay as they are": 1,
    "join": 2,
    "shrink after a death": 2,
    "other groups stay after a death": 3,
    "death during an operation": 3,
}
"""In the order in which they run, and the number of workers that each needs."""

PASS, FAIL, NOT_AVAILABLE = "pass", "fail", "not available"
NO_ACCELERATOR = 77
KINDS = ("cuda", "npu")
LONGEST = max(len(name) for name in CHECKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one capability."""

    name: str
    status: str
    ms: float | None = None
    detail: str = ""

    def __str__(self) -> str:
        cost = "" if self.ms is None else f"{self.ms:10.2f} ms"
        return f"{self.status:<14} {self.name:<{LONGEST}} {cost:>13}  {self.detail}".rstrip()


def main() -> int:
    """Run the checks."""
    options = read_options()
    kind, count, description = find_devices()
    if not count:
        print("check_on_device: this machine has no CUDA or NPU device that torch can use, so nothing was checked.")
        return NO_ACCELERATOR
    workers = min(count, options.devices)
    print(f"{workers} of {count} x {description}", flush=True)
    began_s = time.monotonic()
    outcomes = run(kind, list(range(workers)), options.limit_s)
    show(outcomes)
    if workers == 1:
        print("two processes on one device:", flush=True)
        left_s = options.limit_s - (time.monotonic() - began_s)
        together = share_device(run(kind, [0, 0], min(left_s, options.limit_s / 2)))
        show(together)
        outcomes += together
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in (PASS, FAIL, NOT_AVAILABLE)}
    sums = ", ".join(f"{number} {status}" for status, number in counts.items())
    print(f"check_on_device: {sums}, in {time.monotonic() - began_s:.0f} s on {workers} x {description}")
    return 1 if counts[FAIL] else 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--devices", type=int, default=8, help="use at most so many (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=150.0, help="give up after so long (default: %(default)s)")
    options = parser.parse_args()
    if not 1 <= options.devices <= 8 or options.limit_s <= 0:
        parser.error(f"--devices must be 1 to 8 and --limit-s above 0, got {options.devices} and {options.limit_s:g}")
    return options


def find_devices() -> tuple[str, int, str]:
    """Kind, number, and a description with versions, of the accelerators that torch can use."""
    import importlib.util

    import torch

    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        name = torch.cuda.get_device_name(0)
        return "cuda", torch.cuda.device_count(), f"{name}, torch {torch.__version__}, NCCL {nccl}"
    if importlib.util.find_spec("torch_npu") is not None:
        import torch_npu

        if torch.npu.is_available():
            name = torch.npu.get_device_name(0)
            versions = f"torch {torch.__version__}, torch-npu {torch_npu.__version__}"
            return "npu", torch.npu.device_count(), f"{name}, {versions}"
    return "", 0, ""


# ---------------------------------------------------------------- running


def run(kind: str, devices: list[int], limit_s: float) -> list[Outcome]:
    """Run all checks with a worker per entry of ``devices``.

    Args:
        kind: "cuda", "npu", or "module:function" that makes a platform, as the tests do.
        devices: Index of each worker's device.
        limit_s: Workers that are not done then are ended.
    """
    with tempfile.TemporaryDirectory(prefix="elas-check-") as folder:
        program = [sys.executable, str(REPO / "scripts" / "device_checks.py"), kind, folder, str(len(devices))]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])}
        workers = []
        for worker, device in enumerate(devices):
            with (Path(folder) / f"output-{worker}").open("w") as output:
                workers.append(
                    subprocess.Popen(
                        [*program, str(worker), str(device)], stdout=output, stderr=subprocess.STDOUT, env=environment
                    )
                )
        ended = wait(workers, limit_s)
        return collect(Path(folder), len(devices), ended)


def wait(workers: list[subprocess.Popen[bytes]], limit_s: float, grace_s: float = 10.0) -> list[str]:
    """Wait for all, and end those that remain when the time is up or another one has failed a while ago.

    Returns:
        How each ended, in words; empty where all is well. A worker that kills itself as a check has it is well.
    """
    deadline_s = time.monotonic() + limit_s
    failed = False
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline_s:
        if not failed and any(worker.poll() not in (None, 0, -signal.SIGKILL) for worker in workers):
            failed = True
            deadline_s = min(deadline_s, time.monotonic() + grace_s)
        time.sleep(0.05)
    endings = []
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
            endings.append("was still at it and was ended" if failed else f"was not done within {limit_s:.0f} s")
        else:
            well = worker.returncode in (0, -signal.SIGKILL)
            endings.append("" if well else f"ended with {worker.returncode}")
    return endings


def collect(folder: Path, workers: int, endings: list[str]) -> list[Outcome]:
    """One outcome per check, from what the workers wrote."""
    told: dict[str, dict[int, Outcome]] = {}
    for worker in range(workers):
        file = folder / f"results-{worker}"
        for line in file.read_text().splitlines() if file.exists() else ():
            outcome = Outcome(**json.loads(line))
            told.setdefault(outcome.name, {})[worker] = outcome
    outcomes: list[Outcome] = []
    broken = False
    for name, needed in CHECKS.items():
        if workers < needed:
            outcomes.append(Outcome(name=name, status=NOT_AVAILABLE, detail=f"needs {needed} devices"))
        elif broken:
            outcomes.append(Outcome(name=name, status=NOT_AVAILABLE, detail="a check before it failed"))
        else:
            outcomes.append(join(name, told.get(name, {}), folder, endings))
            broken = outcomes[-1].status == FAIL and "went on" not in outcomes[-1].detail
    return outcomes


def join(name: str, parts: dict[int, Outcome], folder: Path, endings: list[str]) -> Outcome:
    """The workers' outcomes of one check as one. Those who are no part of it say nothing."""
    for status in (FAIL, NOT_AVAILABLE):
        for worker, part in sorted(parts.items()):
            if part.status == status:
                return Outcome(name=name, status=status, ms=part.ms, detail=f"worker {worker}: {part.detail}")
    if not parts or any(endings):
        late = next((worker for worker, ending in enumerate(endings) if ending and worker not in parts), None)
        if late is not None:
            return Outcome(name=name, status=FAIL, detail=f"worker {late} {endings[late]}: {last_words(folder, late)}")
        if not parts:
            return Outcome(name=name, status=FAIL, detail="nobody came to it")
    slowest = max(parts.values(), key=lambda part: part.ms or 0.0)
    return Outcome(name=name, status=PASS, ms=slowest.ms, detail=slowest.detail)


def last_words(folder: Path, worker: int) -> str:
    """The last line that a worker wrote."""
    lines = (folder / f"output-{worker}").read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it wrote nothing"


def share_device(outcomes: list[Outcome]) -> list[Outcome]:
    """What two processes on one device mean: if no group can be made of them, that is no failure."""
    first = outcomes[0]
    if first.status != FAIL:
        return outcomes
    return [Outcome(name=first.name, status=NOT_AVAILABLE, detail=f"the library refuses it: {first.detail}")]


def show(outcomes: list[Outcome]) -> None:
    """Print the table."""
    for outcome in outcomes:
        print(outcome, flush=True)


if __name__ == "__main__":
    sys.exit(main())
