"""A checkpoint is taken in place only if this job is known to have finished it, and if it is whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from megatron_elas.host.saved import Checkpoints
from megatron_elas.spec.errors import StateInvalid


def arguments(**changes: object) -> SimpleNamespace:
    before = {
        "save": None,
        "load": None,
        "iteration": 0,
        "finetune": False,
        "no_load_optim": False,
        "no_save_optim": False,
    }
    return SimpleNamespace(**(before | changes))


def write_checkpoint(folder: Path, iteration: int) -> Path:
    place = folder / f"iter_{iteration:07d}"
    place.mkdir(parents=True)
    save({"weights": torch.arange(1000.0)}, storage_writer=FileSystemWriter(str(place)), no_dist=True)
    (place / "metadata.json").write_text("{}")
    return place


def test_a_job_that_has_saved_nothing_and_loaded_nothing_has_no_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 8)  # of another job
    assert Checkpoints(arguments(save=str(tmp_path))).newest is None


def test_the_newest_that_was_finished_is_taken(tmp_path: Path) -> None:
    checkpoints = Checkpoints(arguments(save=str(tmp_path / "s"), load=str(tmp_path / "l"), iteration=4))
    write_checkpoint(tmp_path / "l", 4)
    assert (checkpoints.newest, checkpoints.find(4)) == (4, str(tmp_path / "l"))
    write_checkpoint(tmp_path / "s", 8)
    assert checkpoints.newest == 4
    checkpoints.note(8)
    assert (checkpoints.newest, checkpoints.find(8)) == (8, str(tmp_path / "s"))


@pytest.mark.parametrize("change", [{"finetune": True}, {"no_load_optim": True}, {"iteration": 0}])
def test_one_that_was_loaded_without_its_optimizer_is_no_state_of_this_job(
    change: dict[str, object], tmp_path: Path
) -> None:
    assert Checkpoints(arguments(**({"load": str(tmp_path), "iteration": 4} | change))).newest is None


def test_one_that_was_saved_without_its_optimizer_is_no_state_of_this_job(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "l", 4)
    checkpoints = Checkpoints(
        arguments(save=str(tmp_path / "s"), load=str(tmp_path / "l"), iteration=4, no_save_optim=True)
    )
    checkpoints.note(8)
    assert checkpoints.newest == 4


def test_another_worker_may_know_of_a_newer_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 8)
    assert Checkpoints(arguments(save=str(tmp_path))).find(8) == str(tmp_path)
    with pytest.raises(StateInvalid, match="iteration 8 is known to another worker only"):
        Checkpoints(arguments()).find(8)


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "__0_0.distcp"])
def test_one_that_lacks_a_file_is_refused(name: str, tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, 8) / name).unlink()
    with pytest.raises(StateInvalid, match=f"it lacks {name}"):
        Checkpoints(arguments(save=str(tmp_path))).find(8)


def test_one_with_half_a_file_is_refused(tmp_path: Path) -> None:
    part = write_checkpoint(tmp_path, 8) / "__0_0.distcp"
    data = part.read_bytes()
    part.write_bytes(data[:1000])
    with pytest.raises(StateInvalid, match=r"it lacks the end of __0_0.distcp \(1000 of \d+ bytes\)"):
        Checkpoints(arguments(save=str(tmp_path))).find(8)
