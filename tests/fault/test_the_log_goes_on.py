"""The worker that prints Megatron's lines and writes TensorBoard's scalars is lost: none is missing or double."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.runs import Run, assert_same_training, run_job

pytest.importorskip("tensorboard", reason="TensorBoard is not installed: pip install tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = [pytest.mark.process, pytest.mark.timeout(500)]

FLAGS = ("--pipeline-model-parallel-size=2", "--split=90,10,0", "--eval-interval=4", "--eval-iters=2")


def run_logged(folder: Path, faults: list[str]) -> Run:
    """A run that writes scalars to the folder ``board``."""
    return run_job(folder / "run", (*FLAGS, f"--tensorboard-dir={folder / 'board'}"), workers=4, faults=faults)


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every tag, in the order in which they were written."""
    events = EventAccumulator(str(folder / "board"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def calm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the undisturbed run was."""
    return tmp_path_factory.mktemp("calm")


@pytest.fixture(scope="module")
def calm(calm_folder: Path) -> Run:
    """The undisturbed run."""
    return run_logged(calm_folder, [])


@pytest.mark.parametrize(
    "faults",
    [
        ["kill:worker=3@step=6,phase=between"],
        pytest.param(["kill:worker=3@step=7,phase=evaluate"], marks=pytest.mark.slow),
        pytest.param(
            ["kill:worker=0@step=3,phase=between", "kill:worker=3@step=9,phase=commit"], marks=pytest.mark.slow
        ),
    ],
    ids=["before-its-line", "in-an-evaluation", "second-loss-in-a-commit"],
)
def test_lines_and_scalars_go_on_without_gap_or_repeat(
    faults: list[str], calm: Run, calm_folder: Path, tmp_path: Path
) -> None:
    run = run_logged(tmp_path, faults)
    assert run.fired == faults
    assert_same_training(run, calm)
    ours, theirs = read_scalars(tmp_path), read_scalars(calm_folder)
    assert ours.keys() == theirs.keys() and "lm loss validation" in ours
    for tag, values in theirs.items():
        assert [step for step, _ in ours[tag]] == [step for step, _ in values], tag
        assert [value for _, value in ours[tag]] == pytest.approx([value for _, value in values], rel=1e-4), tag
    assert [step for step, _ in ours["lm loss"]] == list(range(1, 17))
