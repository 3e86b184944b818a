"""``elas drain``: has workers of a running job leave, after the others took over what they hold."""

from __future__ import annotations

import argparse

from megatron_elas.cli.running_jobs import LEAVING_TIMEOUT_S, PLANNING_TIMEOUT_S, add_choice_of_job, ask_job
from megatron_elas.control.messages import DrainRequest
from megatron_elas.spec.errors import BadUsage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The workers, and which job."""
    parser.add_argument("workers", nargs="+", metavar="WORKER", help="id of a worker, as elas status shows it")
    parser.add_argument(
        "--no-wait", dest="wait", action="store_false", help="answer as soon as there is a plan without them"
    )
    add_choice_of_job(parser)


def run(flags: argparse.Namespace) -> int:
    """Have the controller plan without them; it answers when they hold nothing that is needed, and end."""
    request = DrainRequest(workers=read_workers(flags.workers), wait=flags.wait)
    return ask_job(flags, request, " ", LEAVING_TIMEOUT_S if flags.wait else PLANNING_TIMEOUT_S)


def read_workers(words: list[str]) -> tuple[int, ...]:
    """Their ids, ascending. Raises BadUsage."""
    for word in words:
        if not (word.isascii() and word.isdigit()):
            raise BadUsage(f"WORKER must be the number of a worker, from 0 up, got '{word}'")
    return tuple(sorted({int(word) for word in words}))
