"""``elas rebalance``: has a running job look for a better plan, or take the layers that are given."""

from __future__ import annotations

import argparse

from megatron_elas.cli.running_jobs import PLANNING_TIMEOUT_S, add_choice_of_job, ask_job
from megatron_elas.control.messages import RebalanceRequest
from megatron_elas.spec.errors import BadUsage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The layers, and which job."""
    parser.add_argument(
        "--layers",
        metavar="N,N,...",
        help="transformer layers of every stage, the first one first; default: as steps get shortest",
    )
    add_choice_of_job(parser)


def run(flags: argparse.Namespace) -> int:
    """Have the controller plan; it answers when there is a plan, or none that is better."""
    layers = None if flags.layers is None else read_layers("--layers", flags.layers)
    return ask_job(flags, RebalanceRequest(layers=layers), " ", PLANNING_TIMEOUT_S)


def read_layers(flag: str, text: str) -> tuple[int, ...]:
    """One number per stage. Raises BadUsage."""
    counts = text.split(",")
    if not all(count.isascii() and count.isdigit() for count in counts):
        raise BadUsage(f"{flag} must be a number of layers for each stage, such as 8,7,8,9, got '{text}'")
    return tuple(map(int, counts))
