"""``elasrun --dry-run``: checks everything that can be checked without a worker, and says what would be started.

What Megatron thinks of the arguments only Megatron can say, and it is not imported here: the training entry is run
once, as worker 0 of a job of the size that was asked for, told to write down what it would train
(``spec.shape.RunFacts``) and to end. Its refusals are those of a real run, with its exit codes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from megatron_elas.cli.job_sheet import JobSheet, NodeWorker
from megatron_elas.cli.launch_flags import DRY_RUN_ENTRIES
from megatron_elas.control.launch_options import LaunchOptions, make_requests, make_shared_environ
from megatron_elas.control.messages import Welcome
from megatron_elas.platform.host_memory import read_available
from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.shape import RunFacts

FACTS_FILE = "facts.json"


def show_dry_run(options: LaunchOptions, environ: Mapping[str, str]) -> int:
    """Print what the line would start; gives the exit code, that of a run that is refused if it would be."""
    with tempfile.TemporaryDirectory(prefix="elas-") as folder:
        asked = _ask_entry(options, environ, Path(folder)) if _is_entry(options) else None
    if isinstance(asked, int):
        return asked
    print(JobSheet(options, place_workers(options, environ), asked, read_available()).describe(), flush=True)
    if asked is not None and asked.elastic and asked.elastic_refusal is not None:
        print(f"megatron_elas: {asked.elastic_refusal}", file=sys.stderr)
        return ExitCode.BAD_USAGE
    return ExitCode.FINISHED


def _is_entry(options: LaunchOptions) -> bool:
    return options.target.is_module and options.target.name in DRY_RUN_ENTRIES


def _ask_entry(options: LaunchOptions, environ: Mapping[str, str], folder: Path) -> RunFacts | int:
    """What the entry says, or the exit code with which it ended instead."""
    worker = make_requests(
        replace(options, node_rank=0),
        _welcome(options),
        options.controller_port,
        folder,
        make_shared_environ(options, environ),
    )[0]
    facts = folder / FACTS_FILE
    ran = subprocess.run(
        [sys.executable, "-m", options.target.name, *options.target.arguments, "--elastic-dry-run", str(facts)],
        env=worker.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if ran.returncode == 0 and facts.exists():
        return msgspec.json.decode(facts.read_bytes(), type=RunFacts)
    # It was asked for --help, or refused, or crashed: its words, without Megatron's chatter before a refusal.
    if ran.returncode in (ExitCode.FINISHED, ExitCode.CRASHED) or ran.returncode < 0:
        print(ran.stdout, end="", flush=True)
        print(ran.stderr, end="", file=sys.stderr)
    else:
        told = [line for line in ran.stderr.splitlines() if line.startswith("megatron_elas: ")]
        print("\n".join(told) or ran.stderr, file=sys.stderr)
    return ran.returncode if ran.returncode >= 0 else 128 - ran.returncode


def place_workers(options: LaunchOptions, environ: Mapping[str, str]) -> list[NodeWorker]:
    """All workers of the job, with the variables that the launchers set for them."""
    shared = make_shared_environ(options, environ)
    added = {name: value for name, value in shared.items() if name not in environ}
    return [
        NodeWorker(worker=request.worker, node=node, environ=request.environ)
        for node in range(options.nnodes)
        for request in make_requests(
            replace(options, node_rank=node), _welcome(options), options.controller_port, Path("."), added
        )
    ]


def _welcome(options: LaunchOptions) -> Welcome:
    return Welcome(master_address=options.master_address, master_port=options.master_port or 0, run_id=options.run_id)
