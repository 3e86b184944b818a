"""``elas doctor``: compares a Megatron with what is attached to it."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from megatron_elas.cli.patch import read_version
from megatron_elas.spec.errors import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which Megatron."""
    parser.add_argument("path", nargs="?", metavar="PATH", help="a checkout of Megatron-LM, to be checked instead")


def run(flags: argparse.Namespace) -> int:
    """Print what moved; 6 when something did."""
    if flags.path is not None:
        checkout = Path(flags.path).resolve()
        read_version(checkout)
        sys.path.insert(0, str(checkout))
    # Loaded here only: it imports torch and Megatron, which no other command needs.
    seams = importlib.import_module("megatron_elas.host.seams")
    findings = seams.check_all()
    for finding in findings:
        print(f"{finding.id}: {finding.problem}")
    if findings:
        return ExitCode.WRONG_VERSION
    print("everything that is attached to Megatron is where it should be")
    return ExitCode.FINISHED
