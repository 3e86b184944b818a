"""Layers move from stage to stage while everybody lives, again and again, and training is bit for bit what it was.

Cells and items stay, and without clipping nothing is summed up over stages, so no bit may change: neither of masters
and moments nor of parameters and losses. What is asked for is asked by a worker before a step (``asker.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.migrations import (
    Job,
    answers,
    assert_layers_once,
    assert_nothing_stale,
    assert_same_bits,
    assert_same_training,
    events,
    splits,
)
from tests.fault.runs import Run, assert_same_norms, run_stock
from tests.fault.warm_launcher import WarmLauncher

pytestmark = [pytest.mark.process, pytest.mark.timeout(700)]

TWO = Job(layers=(4, 3), data=2)
THREE = Job(layers=(14, 15, 14), steps=20)
FOUR = Job(layers=(8, 7, 7, 8), steps=22)
SEQUENCES: dict[str, tuple[Job, tuple[tuple[int, ...], ...]]] = {
    "7-over-2": (replace(TWO, steps=22), ((3, 4), (1, 6), (4, 3))),
    "43-over-3": (THREE, ((15, 14, 14), (13, 15, 15), (14, 15, 14))),
    "30-over-4": (FOUR, ((7, 8, 7, 8), (9, 6, 8, 7), (8, 7, 7, 8))),
}
"""Jobs, and the layers that their stages get one after the other."""
VALIDATION = re.compile(r"(validation loss at iteration \d+[^|]*)\| lm loss value: ([0-9.E+-]+)")


def asked(sequence: tuple[tuple[int, ...], ...], first: int = 1) -> list[str]:
    """As ``asker.py`` reads it, one as soon as the one before is over."""
    return [f"{first} rebalance {','.join(map(str, layers))}" for layers in sequence]


def assert_moved(run: Run, sequence: tuple[tuple[int, ...], ...], mode: str) -> None:
    """The layers went where they were asked to go, in that way, and are each in one place at the end."""
    assert [answer.partition(":")[0] for answer in answers(run)] == ["yes"] * len(sequence), answers(run)
    assert splits(run) == list(sequence)
    assert_layers_once(run, sequence[-1])
    for event in events(run, "migration"):
        assert (event["streamed_steps"] > 0) == (mode == "async"), event
        assert (event["moved_bytes"] > 0) == (mode == "blocking"), event
        assert event["reported"] == sorted(run.records("final")), event
    assert "Traceback" not in run.output


@pytest.mark.parametrize("mode", ["async", pytest.param("blocking", marks=pytest.mark.slow)])
def test_layers_that_move_and_come_back_change_no_bit(
    mode: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    sequence = ((3, 4), (4, 3))
    run = TWO.run(tmp_path / "run", warm, *asked(sequence), mode=mode)
    assert_moved(run, sequence, mode)
    assert_same_bits(run, undisturbed(TWO))
    assert_nothing_stale(run)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "blocking"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_of_migrations_changes_no_bit(
    name: str, mode: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    job, sequence = SEQUENCES[name]
    run = job.run(tmp_path / "run", warm, *asked(sequence), mode=mode)
    assert_moved(run, sequence, mode)
    assert_same_bits(run, undisturbed(job))
    assert_nothing_stale(run)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "blocking"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_with_clipping_losses_are_the_same_to_rounding(
    name: str, mode: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    """The norm is a sum over all shards, which are others: its last bit may change, and with it everything."""
    job, sequence = SEQUENCES[name]
    job = replace(job, clip=0.1)
    run = job.run(tmp_path / "run", warm, *asked(sequence), mode=mode)
    assert_moved(run, sequence, mode)
    assert min(run.gradient_norms) > job.clip, "nothing was clipped"
    assert_same_training(run, undisturbed(job))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "blocking"])
def test_the_launcher_orders_migrations_when_steps_are_reached(
    mode: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    job = replace(TWO, steps=40)
    run = job.run(
        tmp_path / "run", warm, mode=mode,
        launcher_flags=("--costs=profile", "--heartbeat-interval-s=0.05", "--rebalance=4:3,4", "--rebalance=10:5,2"),
    )  # fmt: skip
    assert splits(run) == [(3, 4), (5, 2)]
    first, second = (event["resume_step"] for event in events(run, "migration"))
    assert first > 4 and max(first, 10) < second
    assert_layers_once(run, (5, 2))
    assert_same_bits(run, undisturbed(job))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "blocking"])
def test_evaluations_and_checkpoints_are_the_same_and_go_on_in_stock_megatron(
    mode: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    job, sequence, saved, saves = TWO, ((3, 4), (5, 2)), 12, tmp_path / "saves"
    evaluation = ("--split=90,10,0", "--eval-interval=4", "--eval-iters=1")
    saving = ("--ckpt-format=torch_dist", "--save-interval=4", f"--save={saves}")
    run = job.run(tmp_path / "run", warm, *asked(sequence), mode=mode, flags=(*evaluation, *saving))
    calm = undisturbed(job, *evaluation)
    assert_moved(run, sequence, mode)
    assert all(event["resume_step"] < saved for event in events(run, "migration"))
    assert_same_bits(run, calm)
    assert len(VALIDATION.findall(calm.output)) >= 4
    assert VALIDATION.findall(run.output) == VALIDATION.findall(calm.output)
    stock = run_stock(
        tmp_path / "stock", (*job.flags, *evaluation, f"--load={saves}", f"--ckpt-step={saved}", *saving[:1]),
        workers=job.workers, model=job.model, steps=job.steps, batch=job.batch,
    )  # fmt: skip
    assert stock.code == 0, stock.output[-8000:]
    assert stock.iterations == list(range(saved + 1, job.steps + 1))
    assert stock.consumed == calm.consumed[saved:]
    assert_same_norms(stock.gradient_norms, calm.gradient_norms[saved:])
    # Megatron's log averages the first two losses of a run that was loaded, so the second line says nothing.
    for step in (0, 2, 3):
        assert stock.losses[step] == pytest.approx(calm.losses[saved + step], rel=1e-6)


@pytest.mark.slow
def test_an_elastic_job_loads_the_checkpoint_of_another_split_and_moves_layers_too(
    undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    job, saves = TWO, tmp_path / "saves"
    saving = ("--ckpt-format=torch_dist", "--save-interval=8", f"--save={saves}", "--exit-interval=8")
    first = job.run(tmp_path / "first", warm, *asked(((2, 5),)), flags=saving)
    assert splits(first) == [(2, 5)] and first.code == 0, first.output[-8000:]
    run = job.run(tmp_path / "run", warm, *asked(((5, 2),), 9), flags=("--ckpt-format=torch_dist", f"--load={saves}"))
    calm = undisturbed(job)
    assert run.code == 0, run.output[-8000:]
    assert run.iterations == list(range(9, 17)) and splits(run) == [(5, 2)]
    assert_layers_once(run, (5, 2))
    for step in (0, *range(2, 8)):
        assert run.losses[step] == pytest.approx(calm.losses[8 + step], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ("rebalance 3,3", "do not fit 2 stages with 7 layers in all, which are 4,3 now"),
        ("rebalance 3,2,2", "do not fit 2 stages"),
        ("rebalance 7,0", "give one number, 1 or more, for each stage"),
        ("rebalance 4,3", "going over to epoch 1"),
        ("drain 4", "worker 4 is not one of 0 to 3"),
        ("drain 0 1 2 3", "nobody would be left"),
    ],
)
def test_what_cannot_be_had_is_refused_in_a_sentence_and_training_goes_on(
    request_: str, says: str, undisturbed: Callable[..., Run], warm: WarmLauncher, tmp_path: Path
) -> None:
    run = TWO.run(tmp_path / "run", warm, f"2 {request_}")
    (answer,) = answers(run)
    assert says in answer and answer.startswith("yes" if "going over" in says else "no"), answer
    assert_same_bits(run, undisturbed(TWO))
