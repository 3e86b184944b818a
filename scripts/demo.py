"""``make demo``: a real Megatron job loses a worker in the middle of a step and goes on.

Trains a small Llama on the text of Python's own standard library, on this machine's CPU: 4 workers,
two pipeline stages, two data-parallel rows. In the second of two runs a worker of the last stage is killed
during a forward pass. At the end both runs are compared: the loss and the sample ids of every step.

Exit status 0 when they agree, 1 when they do not, 6 without the Python and packages needed, else that of the step
that failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, whatever else is installed

from megatron_elas.prerequisites import exit_without_prerequisites

REPO = Path(__file__).resolve().parent.parent
PREREQUISITES = ("torch", "megatron", "numpy", "msgspec", "psutil", "websockets", "sentencepiece")
LINE = re.compile(r"iteration +(\d+)/.*lm loss: ([0-9.E+-]+)")
EVENT = re.compile(
    r"fault strikes|elasrun:|---- (recovered|migrated)|-{80}$|[\d. ]+\(worker \d"
    r"|(lost|before|now|resumed|moved|chosen|ms|beside|step) {2,}\S|switched before"
)
"""The launcher's words, and the blocks that tell of recoveries and migrations."""
PACKAGES = ("asyncio", "concurrent", "email", "html", "http", "importlib", "json", "logging", "unittest", "xml")
"""Of the standard library: some MB of text that is on every machine."""
TOLERANCE = 1e-5
"""Relative, per step. Sums are associated differently once workers have left; in fp32 that is rounding."""


def main() -> int:
    """Run the demonstration."""
    exit_without_prerequisites(*PREREQUISITES)
    from megatron_elas.host.sample_log import read_samples

    options = read_options()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="elas-demo-") as folder:
        work = Path(folder)
        data = prepare_text(work)
        say(f"1. {options.steps} steps, undisturbed")
        calm = train(work, "calm", data, options, [])
        fault = f"kill:worker={options.worker}@step={options.at},phase=forward,microbatch=1"
        say(f"2. the same again, and worker {options.worker} gets SIGKILL in the forward pass of step {options.at}")
        struck = train(work, "struck", data, options, ["--elastic-inject", fault])
        say("3. compared")
        agree = compare(calm, struck, read_samples(str(work / "calm")), read_samples(str(work / "struck")))
    print(f"\nThe demonstration took {time.monotonic() - began_s:.0f} s.")
    return 0 if agree else 1


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="steps to train (default 20)")
    parser.add_argument("--at", type=int, default=8, help="step in which the worker is killed (default 8)")
    parser.add_argument("--worker", type=int, default=3, choices=range(4), help="which worker is killed (default 3)")
    options = parser.parse_args()
    if not 0 <= options.at < options.steps:
        parser.error(f"--at {options.at} must be a step, from 0 to --steps - 1 = {options.steps - 1}")
    return options


def say(text: str) -> None:
    """A headline."""
    print(f"\n==== {text}", flush=True)


def prepare_text(work: Path) -> list[str]:
    """Tokenize the standard library's sources; gives the flags that train on them."""
    library = Path(sysconfig.get_paths()["stdlib"])
    say(f"0. text for training: Python's own sources in {library}")
    prefix = work / "text"
    folders = [str(library / name) for name in PACKAGES if (library / name).is_dir()]
    run(
        [sys.executable, str(REPO / "scripts/prepare_data.py"), *folders, "--ending", ".py", "--max-mb", "4",
         "--vocab-size", "1000", "--output", str(prefix)]
    )  # fmt: skip
    return [f"@{prefix}.args"]


def train(work: Path, name: str, data: list[str], options: argparse.Namespace, more: list[str]) -> dict[int, float]:
    """One run of 4 workers. Shows its lines and gives the loss of every step."""
    command = [
        sys.executable, "-m", "megatron_elas.cli.elasrun", "--nproc-per-node", "4", "-m", "megatron_elas.pretrain_gpt",
        f"@{REPO / 'configs/llama/tiny.args'}", *data, "--split", "100,0,0",
        "--pipeline-model-parallel-size", "2", "--train-iters", str(options.steps), "--elastic",
        "--elastic-sample-log", str(work / name), *more,
    ]  # fmt: skip
    losses = {}
    for line in run(command):
        if match := LINE.search(line):
            losses[int(match[1])] = float(match[2])
    return losses


def run(command: list[str]) -> list[str]:
    """Run a command, show what matters of its output, and give all of it. Ends the demonstration if it fails."""
    # On a machine with an accelerator too: elasticity runs on CPUs today.
    environment = {"MEGATRON_ELAS_PLATFORM": "cpu", **os.environ, "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "ignore"}
    lines = []
    with subprocess.Popen(
        command, env=environment, cwd=REPO, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if is_news(line):
                print("  " + line.rstrip(), flush=True)
    if process.returncode != 0:
        sys.stdout.writelines(lines[-30:])
        print(f"failed with exit code {process.returncode}: {shlex.join(command)}")
        sys.exit(process.returncode)
    return lines


def is_news(line: str) -> bool:
    """Whether a line belongs on the demonstration's screen; Megatron prints some hundred at start."""
    return bool(LINE.search(line) or EVENT.match(line))


def compare(
    calm: dict[int, float],
    struck: dict[int, float],
    calm_samples: dict[int, dict[int, list[int]]],
    struck_samples: dict[int, dict[int, list[int]]],
) -> bool:
    """Print the two runs beside each other; gives whether they agree."""
    print(f"  {'step':>4}  {'undisturbed':>12}  {'worker lost':>12}  {'difference':>10}  samples")
    agree = calm.keys() == struck.keys() and len(calm_samples) == len(calm)
    for iteration in sorted(calm):
        if iteration not in struck:
            print(f"  {iteration - 1:4}  {calm[iteration]:12.6f}  {'missing':>12}")
            continue
        difference = abs(struck[iteration] - calm[iteration]) / calm[iteration]
        same = calm_samples[iteration - 1] == struck_samples.get(iteration - 1)
        agree = agree and difference <= TOLERANCE and same
        ids = calm_samples[iteration - 1][0]
        print(
            f"  {iteration - 1:4}  {calm[iteration]:12.6f}  {struck[iteration]:12.6f}  {difference:10.1e}  "
            f"{ids[0]}-{ids[-1]} {'same' if same else 'DIFFERENT'}"
        )
    print(
        "\n  "
        + (
            f"Every step has the same samples, and the same loss to {TOLERANCE:g} relative."
            if agree
            else "THE RUNS DIFFER."
        )
    )
    return agree


if __name__ == "__main__":
    sys.exit(main())
