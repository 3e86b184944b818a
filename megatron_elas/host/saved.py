"""Which checkpoints of this job are complete, and reading one of them into the model and optimizer that train."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron_elas.spec.errors import ElasticError, EpochChanged, StateInvalid, comes_of

_INDEX = (".metadata", "metadata.json")
"""What a checkpoint has besides the parts of the workers; written after those."""


class Checkpoints:
    """Remembers checkpoints that this worker knows to be complete: no disk is looked at to recover without one."""

    def __init__(self, args: Any) -> None:
        self._folders: dict[int, str] = {}
        """By iteration."""
        self._save: str | None = args.save
        self._whole = not args.no_save_optim
        if args.load is not None and args.iteration > 0 and not (args.finetune or args.no_load_optim):
            self._folders[int(args.iteration)] = args.load

    @property
    def newest(self) -> int | None:
        """Iteration of the newest one; None when there is none."""
        return max(self._folders, default=None)

    def note(self, iteration: int) -> None:
        """All workers have written this one in ``--save``, and one of them is past the barrier behind that."""
        assert self._save is not None
        if self._whole:
            self._folders[iteration] = self._save

    def find(self, iteration: int) -> str:
        """The folder, as for ``--load``. Another worker may know of one that this one does not.

        Raises:
            StateInvalid: It is not there, or not complete.
        """
        folder = self._folders.get(iteration, self._save)
        if folder is None:
            raise StateInvalid(
                f"the checkpoint of iteration {iteration} is known to another worker only: give --save to all of them"
            )
        place = Path(folder) / f"iter_{iteration:07d}"
        lacking = _find_lacking(place)
        if lacking:
            raise StateInvalid(
                f"the checkpoint {place} cannot take the state's place: it lacks {lacking}. Restart from the newest "
                f"complete one with --load"
            )
        return folder


def _find_lacking(place: Path) -> str:
    """What is not there of a checkpoint, or only in part; empty when it is whole."""
    from torch.distributed.checkpoint import FileSystemReader

    for name in _INDEX:
        if not (place / name).is_file():
            return name
    ends: dict[str, int] = {}
    for part in (FileSystemReader(str(place)).read_metadata().storage_data or {}).values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in sorted(ends.items()):
        if not (place / name).is_file():
            return name
        size = (place / name).stat().st_size
        if size < end:
            return f"the end of {name} ({size} of {end} bytes)"
    return ""


def load_into(model: Sequence[Any], optimizer: Any, scheduler: Any, folder: str, iteration: int) -> None:
    """Megatron's own loading, into objects in use; what training counts in its arguments stays as it is.

    Called by all seated workers.

    Raises:
        StateInvalid: It cannot be read.
        EpochChanged: The membership has ended meanwhile.
    """
    from megatron.training import get_args
    from megatron.training.checkpointing import load_checkpoint

    scheduler.num_steps = 0  # loading adds to it
    try:
        with _arguments(get_args(), folder, iteration):
            loaded, _ = load_checkpoint(list(model), optimizer, scheduler)
    except ElasticError:
        raise
    except (Exception, SystemExit, CheckpointException) as error:  # the last is derived from BaseException
        if comes_of(error, EpochChanged):
            raise EpochChanged(f"the membership ended while a checkpoint was read: {error}") from error
        raise StateInvalid(
            f"the checkpoint of iteration {iteration} in {folder} cannot be read ({type(error).__name__}: {error}): "
            f"restart from another one with --load"
        ) from error
    if loaded != iteration:
        raise StateInvalid(
            f"in {folder} Megatron has read the checkpoint of iteration {loaded}, wanted was {iteration}: restart with "
            f"--load"
        )


@contextlib.contextmanager
def _arguments(args: Any, folder: str, iteration: int) -> Iterator[None]:
    """Megatron's arguments as for resuming from this checkpoint; afterwards as they were."""
    before = dict(vars(args))
    args.load, args.ckpt_step, args.finetune, args.no_load_optim = folder, iteration, False, False
    args.pretrained_checkpoint, args.override_ckpt_iteration, args.exit_on_missing_checkpoint = None, None, False
    try:
        yield
    finally:
        for name in vars(args).keys() - before.keys():
            delattr(args, name)
        vars(args).update(before)
