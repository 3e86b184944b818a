"""A worker lost during an evaluation, a save, or between them: both happen all the same, whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fault.runs import Run, assert_nothing_stale, assert_same_training, run_job, run_stock

pytestmark = [pytest.mark.process, pytest.mark.timeout(500)]

GRID = ("--pipeline-model-parallel-size=2",)
EVALUATION = ("--split=90,10,0", "--eval-interval=4", "--eval-iters=2")
CHECKPOINTS = ("--ckpt-format=torch_dist", "--save-interval=4")
VALIDATION = re.compile(r"(validation loss at iteration \d+[^|]*)\| lm loss value: ([0-9.E+-]+)")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The undisturbed run, with evaluations and saves."""
    folder = tmp_path_factory.mktemp("calm")
    return run_job(folder / "run", (*GRID, *EVALUATION, *CHECKPOINTS, f"--save={folder / 'checkpoints'}"), workers=4)


def evaluations(run: Run) -> dict[str, float]:
    """Validation losses by what they are of."""
    found = VALIDATION.findall(run.output)
    assert len(dict(found)) == len(found), "an evaluation was printed twice"
    return {what: float(loss) for what, loss in found}


@pytest.mark.parametrize(
    ("worker", "phase"),
    [
        pytest.param(0, "evaluate,microbatch=5", id="first-worker-evaluate", marks=pytest.mark.slow),
        pytest.param(3, "evaluate,microbatch=5", id="logging-worker-evaluate"),
        pytest.param(0, "save", id="first-worker-save", marks=pytest.mark.slow),
        pytest.param(3, "save", id="logging-worker-save", marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_or_save_cut_short_is_done_again(worker: int, phase: str, calm: Run, tmp_path: Path) -> None:
    fault = f"kill:worker={worker}@step=7,phase={phase}"
    checkpoints = tmp_path / "checkpoints"
    flags = (*GRID, *EVALUATION, *CHECKPOINTS, f"--save={checkpoints}")
    run = run_job(tmp_path / "run", flags, workers=4, faults=[fault], versions=[8])
    assert run.fired == [fault]
    assert_same_training(run, calm)
    assert_nothing_stale(run)
    after = run.records("version.8.epoch.1")
    assert len(after) == 3 and all(record["trains"] for record in after.values()), "the next step does not train"
    ours, theirs = evaluations(run), evaluations(calm)
    assert ours.keys() == theirs.keys() and len(theirs) >= 4
    for what, loss in theirs.items():
        assert ours[what] == pytest.approx(loss, rel=1e-5), what
    assert sorted(folder.name for folder in checkpoints.glob("iter_*")) == [
        "iter_0000004", "iter_0000008", "iter_0000012", "iter_0000016",
    ]  # fmt: skip


def test_a_checkpoint_of_another_layout_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    stock = run_stock(
        tmp_path / "stock", (*GRID, "--ckpt-format=torch_dist", "--save-interval=2", f"--save={checkpoints}"),
        workers=4, steps=2,
    )  # fmt: skip
    assert stock.code == 0, stock.output[-6000:]
    run = run_job(tmp_path / "run", (*GRID, f"--load={checkpoints}"), workers=4)
    assert run.code == 2
    assert "save it once more from a stock run with --dist-ckpt-optim-fully-reshardable" in run.output
    assert "Traceback" not in run.output


def test_a_checkpoint_saved_after_a_loss_goes_on_in_stock_megatron(calm: Run, tmp_path: Path) -> None:
    fault = "kill:worker=2@step=9,phase=backward,microbatch=1"
    checkpoints = tmp_path / "checkpoints"
    flags = (*GRID, *EVALUATION, *CHECKPOINTS, f"--save={checkpoints}", "--exit-interval=12")
    run = run_job(tmp_path / "run", flags, workers=4, faults=[fault])
    assert run.fired == [fault] and run.code == 0, run.output[-6000:]
    assert run.iterations == list(range(1, 13))
    stock = run_stock(
        tmp_path / "stock", (*GRID, *EVALUATION, "--ckpt-format=torch_dist", f"--load={checkpoints}"), workers=4
    )
    assert stock.code == 0, stock.output[-6000:]
    assert stock.iterations == [13, 14, 15, 16]
    assert stock.consumed == calm.consumed[12:]
    # Megatron's log averages the first two losses of a run that was loaded, so the second line says nothing.
    for step in (0, 2, 3):
        assert stock.losses[step] == pytest.approx(calm.losses[12 + step], rel=1e-5)


def test_a_save_that_fails_on_one_worker_warns_and_training_goes_on(calm: Run, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    # Where worker 2 writes its part of the second checkpoint there is a folder.
    (checkpoints / "iter_0000008" / "__2_0.distcp").mkdir(parents=True)
    run = run_job(tmp_path / "run", (*GRID, *EVALUATION, *CHECKPOINTS, f"--save={checkpoints}"), workers=4)
    assert_same_training(run, calm)
    assert re.search(
        r"elasrun: worker 2 could not save the checkpoint of iteration 8 in --save .*: \w+Error: .*; training goes on",
        run.output,
    )
    assert "left out worker 2 could not save" in run.output
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "16"
    assert evaluations(run).keys() == evaluations(calm).keys()


@pytest.mark.slow
def test_a_job_whose_last_checkpoint_could_not_be_saved_says_so_at_its_end(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "iter_0000004").write_text("a file where the folder belongs")
    run = run_job(tmp_path / "run", (*GRID, *CHECKPOINTS, f"--save={checkpoints}"), workers=4, steps=4)
    assert run.code == 7, run.output[-6000:]
    assert run.iterations == [1, 2, 3, 4]
    assert "training is done, but its last checkpoint, of iteration 4, could not be saved" in run.output
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_a_checkpoint_whose_writing_was_cut_short_is_whole_when_it_is_saved_again(calm: Run, tmp_path: Path) -> None:
    # The others have written, and wait for the lost worker, which has not.
    faults = ["kill:worker=1@step=7,phase=save,microbatch=0", "kill:worker=3@step=8,phase=forward,microbatch=0"]
    checkpoints = tmp_path / "checkpoints"
    flags = (*GRID, *EVALUATION, *CHECKPOINTS, f"--save={checkpoints}", "--exit-interval=12")
    run = run_job(tmp_path / "run", flags, workers=4, faults=faults)
    assert run.fired == faults and run.code == 0, run.output[-6000:]
    stock = run_stock(
        tmp_path / "stock",
        (*GRID, *EVALUATION, "--ckpt-format=torch_dist", f"--load={checkpoints}", "--ckpt-step=8"),
        workers=4,
    )
    assert stock.code == 0, stock.output[-6000:]
    assert stock.iterations == list(range(9, 17))
    for step in (0, *range(2, 8)):
        assert stock.losses[step] == pytest.approx(calm.losses[8 + step], rel=1e-5)


@pytest.mark.slow
def test_a_failed_save_is_named_also_after_one_that_was_cut_short(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "iter_0000008" / "__2_0.distcp").mkdir(parents=True)
    fault = "kill:worker=1@step=3,phase=save,microbatch=0"
    flags = (*GRID, *CHECKPOINTS, f"--save={checkpoints}")
    run = run_job(tmp_path / "run", flags, workers=4, faults=[fault], steps=8)
    assert run.fired == [fault] and run.code == 7, run.output[-6000:]
    assert "could not save the checkpoint of iteration 8 in" in run.output
    assert "could not save the checkpoint of iteration 4" not in run.output
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "4"
