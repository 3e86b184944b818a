"""The training entry's side of ``elasrun --dry-run``: what a run would be, written down and not started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from megatron.training import arguments

from megatron_elas.host.audit import check_audit
from megatron_elas.host.fault_script import find_unreachable_faults
from megatron_elas.host.requirements import check_elastic_arguments, describe_job
from megatron_elas.host.shape import describe_model, describe_training, find_uncovered, layers_of_stages
from megatron_elas.platform.detect import PlatformName
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.shape import RunFacts

WRITERS = {"tensorboard_dir": None, "wandb_project": "", "enable_one_logger": False}
"""Attribute of args -> the value with which Megatron opens no writer."""


def keep_writers_closed() -> None:
    """Have Megatron complete arguments without making files of TensorBoard or runs of W&B. For the whole process."""
    complete = arguments.set_global_variables

    def set_global_variables(args: argparse.Namespace) -> None:
        for name, value in WRITERS.items():
            setattr(args, name, value)
        complete(args)

    arguments.set_global_variables = set_global_variables


def find_elastic_refusal(args: argparse.Namespace, platform: PlatformName) -> str | None:
    """Why --elastic would be refused here, whether it was given or not."""
    try:
        check_elastic_arguments(args, platform)
        check_audit(args.elastic_audit, os.environ.get("ELAS_LOG_DIR"))
    except BadUsage as error:
        return str(error)
    return None


def write_facts(
    path: str,
    args: argparse.Namespace,
    config: Any,
    platform: PlatformName,
    added: Sequence[str],
    elastic_refusal: str | None,
) -> None:
    """Write ``RunFacts`` as JSON.

    Args:
        path: Of the file.
        args: Validated.
        config: The TransformerConfig made of them.
        platform: Of this machine.
        added: Words that were added to the command line for it.
        elastic_refusal: See ``find_elastic_refusal``.
    """
    uncovered = find_uncovered(args)
    job = None if uncovered else describe_job(args, layers_of_stages(args, config))
    runs_elastic = args.elastic and elastic_refusal is None
    facts = RunFacts(
        platform=platform,
        added_flags=tuple(added),
        elastic=args.elastic,
        snapshot=args.elastic_snapshot if args.elastic else "off",
        streams=args.elastic_rng,
        elastic_refusal=elastic_refusal,
        unreachable_faults=find_unreachable_faults(args, job) if runs_elastic and job is not None else (),
        uncovered=uncovered,
        job=job,
        shape=None if uncovered else describe_model(args, config),
        training=None if uncovered else describe_training(args, added),
    )
    Path(path).write_bytes(msgspec.json.encode(facts))
