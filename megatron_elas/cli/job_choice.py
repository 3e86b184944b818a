"""What commands that run nothing ask for: a job of a profile, perhaps on another grid, a cluster, and policies."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_elas.planner.policies import POLICIES
from megatron_elas.spec.cluster import Cluster, load_cluster
from megatron_elas.spec.consistency import CONSISTENCY_LEVELS
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job_profile import JobProfile, load_job


def add_job(parser: Any) -> None:
    """The flags that ``read_job`` reads. ``parser`` is one of argparse, or a group of one."""
    parser.add_argument("--job", required=True, help="a profile of configs/jobs, or a .toml file")
    parser.add_argument("--cluster", required=True, help="a profile of configs/clusters, or a .toml file")
    parser.add_argument("--pp", type=int, metavar="P", help="pipeline stages, in place of the profile's")
    parser.add_argument("--dp", type=int, metavar="D", help="data-parallel rows, in place of the profile's")
    parser.add_argument("--micro-batches", type=int, metavar="M", help="in a global batch, over all rows")
    parser.add_argument("--micro-batch-size", type=int, metavar="B", help="samples in each")
    parser.add_argument(
        "--consistency",
        choices=CONSISTENCY_LEVELS,
        default="numerical",
        help="the job's --elastic-consistency; bitwise: micro-batches stay whole, and gradients are summed in fixed "
        "point (default: numerical)",
    )


def read_job(flags: argparse.Namespace) -> tuple[JobProfile, Cluster]:
    """The job on its grid, and the cluster.

    Raises:
        BadUsage: There is none, its numbers do not fit each other, or the cluster is too small.
    """
    cluster = load_cluster(flags.cluster)
    job = _on_grid(load_job(flags.job), flags).with_consistency(flags.consistency)
    if job.spec.world_size > cluster.num_devices:
        spec = job.spec
        raise BadUsage(
            f"{job.name} takes {spec.world_size} workers (tensor {spec.tensor_parallel} x pipeline "
            f"{spec.pipeline_parallel} x data {spec.data_parallel}), and {cluster.name} has {cluster.num_devices} "
            f"devices: choose a smaller grid with --pp and --dp, or a larger cluster"
        )
    return job, cluster


def _on_grid(job: JobProfile, flags: argparse.Namespace) -> JobProfile:
    given = (flags.pp, flags.dp, flags.micro_batches, flags.micro_batch_size)
    for name, value in zip(("--pp", "--dp", "--micro-batches", "--micro-batch-size"), given, strict=True):
        if value is not None and value < 1:
            raise BadUsage(f"{name} must be at least 1, got {value}")
    rows, batches = flags.dp or job.spec.data_parallel, flags.micro_batches or job.spec.num_microbatches
    if batches % rows:
        raise BadUsage(
            f"{batches} micro-batches do not divide by {rows} data-parallel rows: give --micro-batches a multiple of "
            f"{rows}, such as {-(-batches // rows) * rows}"
        )
    return job.with_grid(
        pipeline_parallel=flags.pp or job.spec.pipeline_parallel,
        data_parallel=rows,
        num_microbatches=batches,
        micro_batch_size=flags.micro_batch_size,
    )


def read_policies(text: str) -> list[str]:
    """Names from a list with commas, each once. Raises BadUsage when one is none."""
    names = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in names:
        if name not in POLICIES:
            raise BadUsage(f"--policy {text}: {name!r} is none: name some of {', '.join(POLICIES)}, with commas")
    return names
