"""What the arguments say about the faults of ``--elastic-inject``."""

from __future__ import annotations

from typing import Any

from megatron_elas.spec.faults import explain_unreachable, parse_fault
from megatron_elas.spec.job import JobSpec


def find_unreachable_faults(args: Any, job: JobSpec) -> tuple[str, ...]:
    """Sentences about faults that can never strike.

    Args:
        args: Validated; the faults can be read.
        job: That they describe.
    """
    faults = [parse_fault(text) for text in args.elastic_inject or ()]
    return tuple(explain_unreachable(faults, _count_steps(args), job.most_passes))


def _count_steps(args: Any) -> int | None:
    if args.train_iters is not None:
        return int(args.train_iters)
    # Megatron sets the number of steps later, when it has the sizes of batches, which are all the same here.
    return None if args.train_samples is None else int(args.train_samples // args.global_batch_size)
