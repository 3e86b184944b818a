"""Which checkpoints an elastic run loads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_elas.host.checkpoints import TRACKER, use_exchangeable_checkpoints
from megatron_elas.spec.errors import BadUsage


def arguments(**changes: Any) -> SimpleNamespace:
    values = {
        "load": None, "ckpt_step": None, "pretrained_checkpoint": None, "no_load_optim": False, "finetune": False,
        "exit_on_missing_checkpoint": True,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def test_saves_are_by_parameter() -> None:
    args = arguments()
    use_exchangeable_checkpoints(args)
    assert args.dist_ckpt_optim_fully_reshardable


def test_a_missing_checkpoint_that_is_to_end_the_job_is_bad_usage(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match=f"there is no checkpoint in --load {tmp_path}"):
        use_exchangeable_checkpoints(arguments(load=str(tmp_path)))


@pytest.mark.parametrize(
    "changes",
    [{"exit_on_missing_checkpoint": False}, {"pretrained_checkpoint": "elsewhere"}],
    ids=["random-weights-wanted", "another-to-begin-with"],
)
def test_a_missing_checkpoint_may_be_meant(changes: dict[str, Any], tmp_path: Path) -> None:
    use_exchangeable_checkpoints(arguments(load=str(tmp_path), **changes))


def test_a_release_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("release")
    use_exchangeable_checkpoints(arguments(load=str(tmp_path)))
