"""Checkpoints that do not depend on how optimizer state is laid out in buckets.

Megatron's default keeps optimizer state bucket by bucket ("dp_reshardable"). With --elastic every layer is a
bucket, so such a checkpoint could not be exchanged with a stock run. The fully reshardable format goes by
parameter and can.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_elas.spec.errors import BadUsage

TRACKER = "latest_checkpointed_iteration.txt"
"""Names the newest checkpoint of a folder."""


def use_exchangeable_checkpoints(args: Any) -> None:
    """Save in the fully reshardable format, and refuse to load another one.

    Raises:
        BadUsage: The checkpoint in ``--load`` keeps optimizer state by buckets; or there is none, and that was to
            end the job, which Megatron would do with status 0.
    """
    args.dist_ckpt_optim_fully_reshardable = True
    if args.exit_on_missing_checkpoint and args.load is not None and _is_empty(args):
        raise BadUsage(
            f"there is no checkpoint in --load {args.load}: mend the path, or leave out --exit-on-missing-checkpoint "
            f"to begin with random weights"
        )
    folder = _find_checkpoint(args)
    if folder is None or args.no_load_optim or args.finetune:
        return
    from megatron.core import dist_checkpointing

    metadata = dist_checkpointing.load_content_metadata(str(folder)) or {}
    kind = metadata.get("distrib_optim_sharding_type")
    if kind is not None and not kind.startswith("fully_"):
        raise BadUsage(
            f"the checkpoint {folder} keeps optimizer state by buckets ({kind}), and with --elastic buckets are laid "
            f"out differently: save it once more from a stock run with --dist-ckpt-optim-fully-reshardable, or load "
            f"it with --no-load-optim"
        )


def _is_empty(args: Any) -> bool:
    """Whether nothing would be loaded."""
    tracker = Path(args.load) / TRACKER
    return args.ckpt_step is None and args.pretrained_checkpoint is None and not tracker.is_file()


def _find_checkpoint(args: Any) -> Path | None:
    """The folder that ``--load`` will read; None when there is none."""
    if args.load is None:
        return None
    iteration = args.ckpt_step
    if iteration is None:
        tracker = Path(args.load) / TRACKER
        if not tracker.is_file() or not tracker.read_text().strip().isdigit():
            return None
        iteration = int(tracker.read_text())
    folder = Path(args.load) / f"iter_{iteration:07d}"
    return folder if folder.is_dir() else None
