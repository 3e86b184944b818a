"""``elas status``: where a job is."""

from __future__ import annotations

import argparse

from megatron_elas.cli.running_jobs import add_choice_of_job, ask_job
from megatron_elas.control.messages import StatusRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which job."""
    add_choice_of_job(parser)


def run(flags: argparse.Namespace) -> int:
    """Print what the controller says."""
    return ask_job(flags, StatusRequest(), separator="\n")
