"""``elas inject``: strikes a worker of a running job."""

from __future__ import annotations

import argparse

from megatron_elas.cli.running_jobs import add_choice_of_job, ask_job
from megatron_elas.control.messages import InjectRequest
from megatron_elas.spec.faults import GRAMMAR, parse_fault


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The fault, and which job."""
    parser.add_argument("fault", help=GRAMMAR)
    add_choice_of_job(parser)


def run(flags: argparse.Namespace) -> int:
    """Have the controller tell the worker."""
    return ask_job(flags, InjectRequest(fault=str(parse_fault(flags.fault))), separator=" ")
