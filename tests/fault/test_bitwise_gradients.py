"""Gradients summed in fixed point keep a run's bits through losses, checkpoints and other layouts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.fault.conftest import GRID
from tests.fault.runs import MODEL, Run, assemble, run_job

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS, AT = 10, 4
"""In each run, and before the step of the event."""
TIED = tuple(flag for flag in MODEL if flag != "--untie-embeddings-and-output-weights")
BITWISE = ("--elastic-consistency=bitwise",)
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
FLAGS = (*GRID, *BITWISE)
HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
AGAIN = re.compile(r"step (\d+): its passes run again")


def state(run: Run) -> dict[tuple[int, str], torch.Tensor]:
    """(lane, global name) -> master and moments."""
    return {(lane, name): value for (_, lane, name), value in assemble(run.records("final")).items()}


def assert_same_bits(run: Run, calm: Run, *, loaded: bool = False) -> None:
    """Lines from the first one of ``run`` on, and the state at the end.

    Megatron's log averages the first two losses of a run that was ``loaded``, so the second line says nothing.
    """
    assert (run.code, calm.code) == (0, 0), run.output[-8000:] if run.code else calm.output[-8000:]
    assert run.iterations == calm.iterations[-len(run.iterations) :]
    losses, expected = list(run.losses), calm.losses[-len(run.losses) :]
    if loaded:
        del losses[1], expected[1]
    assert losses == expected
    assert run.gradient_norms == calm.gradient_norms[-len(run.losses) :]
    ours, theirs = state(run), state(calm)
    copies = {key for key in ours.keys() ^ theirs.keys() if key[1] == HEAD and (key[0], EMBEDDING) in ours}
    assert ours.keys() - copies == theirs.keys() - copies
    differing = [key for key in ours.keys() & theirs.keys() if not torch.equal(ours[key], theirs[key])]
    assert differing == [], f"{len(differing)} of {len(ours)} parameters differ"


def run_again(run: Run) -> set[int]:
    """Steps whose passes ran again, but for the first one of a job, whose exponents are not known."""
    return {int(step) for step in AGAIN.findall(run.output)}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The undisturbed run."""
    return run_job(tmp_path_factory.mktemp("calm") / "run", FLAGS, workers=4, model=TIED, steps=STEPS, timeout_s=300)


@pytest.mark.parametrize(
    ("worker", "place", "more"),
    [
        pytest.param(1, f"step={AT},phase=backward,microbatch=2", (), id="first-stage-backward"),
        pytest.param(3, f"step={AT},phase=norm", OVERLAP, id="last-stage-norm-overlap"),
        pytest.param(2, f"step={AT},phase=optimizer", (), id="last-stage-optimizer"),
        pytest.param(0, "step=1,phase=reduce", OVERLAP, id="first-stage-reduce-early"),
    ],
)
def test_a_killed_worker_changes_no_bit(
    worker: int, place: str, more: tuple[str, ...], calm: Run, tmp_path: Path
) -> None:
    fault = f"kill:worker={worker}@{place}"
    run = run_job(tmp_path / "run", (*FLAGS, *more), workers=4, model=TIED, steps=STEPS, faults=[fault], timeout_s=300)
    assert run.fired == [fault], run.output[-8000:]
    assert_same_bits(run, calm)
    assert run_again(run) == set()


def test_a_checkpoint_goes_on_in_another_layout_with_the_same_bits(calm: Run, tmp_path: Path) -> None:
    """Saved by four workers on two stages; loaded by two on one stage, where the tied embedding is used twice."""
    saving = ("--ckpt-format=torch_dist", f"--save={tmp_path / 'saved'}", f"--save-interval={AT}", "--exit-interval=4")
    first = run_job(tmp_path / "first", (*FLAGS, *saving), workers=4, model=TIED, steps=STEPS, timeout_s=300)
    assert first.code == 0, first.output[-8000:]
    loading = ("--ckpt-format=torch_dist", f"--load={tmp_path / 'saved'}", *BITWISE)
    run = run_job(tmp_path / "run", loading, workers=2, model=TIED, steps=STEPS, timeout_s=300)
    assert run.iterations == list(range(AT + 1, STEPS + 1))
    assert_same_bits(run, calm, loaded=True)
    assert run_again(run) == set()


def test_a_checkpoint_that_takes_the_states_place_has_the_exponents(tmp_path: Path) -> None:
    """Of a lost owner there is no copy, so the survivors go back to the checkpoint."""
    flags = (
        *FLAGS, "--elastic-snapshot=off", "--ckpt-format=torch_dist", "--save-interval=3", "--eval-iters=0",
    )  # fmt: skip
    calm = run_job(
        tmp_path / "calm", (*flags, f"--save={tmp_path / 'a'}"), workers=4, model=TIED, steps=STEPS, timeout_s=300
    )
    fault = f"kill:worker=1@step={AT},phase=backward,microbatch=1"
    run = run_job(
        tmp_path / "run", (*flags, f"--save={tmp_path / 'b'}"), workers=4, model=TIED, steps=STEPS, faults=[fault],
        timeout_s=300,
    )  # fmt: skip
    assert run.fired == [fault], run.output[-8000:]
    assert_same_bits(run, calm)
    assert run_again(run) == set()
