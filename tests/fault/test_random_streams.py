"""With dropout, training goes on after losses, drains and migrations as if nothing had happened: mask for mask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fault.masks import merge
from tests.fault.runs import MODEL, Run, run_job, run_stock

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

WITH_DROPOUT = tuple(word if i == 0 or MODEL[i - 1][-8:] != "-dropout" else "0.1" for i, word in enumerate(MODEL))
AT = 3
STEPS = 10
BATCH = 8
LOSS = f"kill:worker=3@step={AT},phase=backward,microbatch=1"
TWO, FOUR = "--pipeline-model-parallel-size=2", "--pipeline-model-parallel-size=4"
FULL = ("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1")
SELECTIVE = "--recompute-granularity=selective"
SEQUENCE = "--sequence-parallel"
LAYERS, DRAWS = 4, 3
"""Of the model; a layer drops attention scores and two outputs. So does the embedding once, before the first layer."""


def train(folder: Path, flags: Sequence[str], workers: int, faults: Sequence[str] = (), **more: object) -> Run:
    """A run that records its masks; the faults have struck."""
    environ = {"ELAS_TEST_MASKS": "1", **more.pop("environ", {})}  # type: ignore[dict-item]
    run = run_job(
        folder, flags, workers=workers, faults=faults, model=WITH_DROPOUT, steps=STEPS, environ=environ, timeout_s=200,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip
    assert run.code == 0, run.output[-6000:]
    assert sorted(run.fired) == sorted(faults), run.output[-6000:]
    return run


def assert_same_masks(run: Run, calm: Run) -> None:
    """Every mask of the undisturbed run, but for those that only lost workers knew of."""
    ours, theirs = merge(run.records("masks")), merge(calm.records("masks"))
    assert ours.keys() <= theirs.keys()
    assert {draw: mask for draw, mask in theirs.items() if draw in ours} == ours
    late = {draw for draw in theirs if draw[0] > AT}
    assert late <= ours.keys()
    assert len(late) == (STEPS - AT - 1) * BATCH * (1 + LAYERS * DRAWS)
    assert len(set(theirs.values())) > 0.99 * len(theirs)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One worker has everything."""
    return train(tmp_path_factory.mktemp("calm") / "run", [], 1)


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Megatron gives every stage initial weights of its own: losses are those of as many stages only."""
    return train(tmp_path_factory.mktemp("two-stages") / "run", [TWO], 2)


@pytest.mark.parametrize(
    ("flags", "workers", "faults"),
    [
        pytest.param([TWO], 4, [LOSS], id="a-loss"),
        pytest.param([TWO, *FULL], 4, [LOSS], id="a-loss-and-full-recomputation"),
        pytest.param([SELECTIVE], 2, [], id="two-replicas-and-selective-recomputation"),
        pytest.param([FOUR, SELECTIVE], 4, [], id="four-stages"),
        pytest.param(["--micro-batch-size=4"], 2, [], id="four-samples-side-by-side"),
        pytest.param(["--micro-batch-size=2"], 4, [f"kill:worker=1@step={AT},phase=forward,microbatch=0"], id="halves"),
    ],
)
def test_masks_and_losses_are_those_of_one_worker_alone(
    flags: Sequence[str], workers: int, faults: Sequence[str], calm: Run, two_stages: Run, tmp_path: Path
) -> None:
    run = train(tmp_path / "run", flags, workers, faults)
    assert_same_masks(run, calm)
    same = two_stages if TWO in flags else calm
    assert run.consumed == same.consumed
    if FOUR not in flags:
        assert run.losses == pytest.approx(same.losses, rel=1e-5)


def test_layers_that_move_and_backward_passes_that_are_split_change_no_mask(
    calm: Run, two_stages: Run, tmp_path: Path
) -> None:
    environ = {"ELAS_TEST_ASK": f"{AT} rebalance 1,3", "ELAS_TEST_ORDERS": "split"}
    run = train(tmp_path / "run", [TWO, "--elastic-migration=async"], 4, environ=environ)
    assert (tmp_path / "run" / "asked.0").read_text().startswith("yes: "), run.output[-6000:]
    assert len({draw[2] for record in stage_masks(run, 0) for draw in record if draw[0] == STEPS - 1}) == 1 + 1
    assert_same_masks(run, calm)
    assert run.losses == pytest.approx(two_stages.losses, rel=1e-5)


def stage_masks(run: Run, stage: int) -> list[dict[tuple[object, ...], int]]:
    """Of every worker that sits in this stage at the end."""
    seats = {worker: record["stage"] for worker, record in run.records("final").items()}
    return [record["masks"] for worker, record in run.records("masks").items() if seats[worker] == stage]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_lanes_draw_differently_where_megatron_has_them_do_so(
    sequence_parallel: bool, calm: Run, tmp_path: Path
) -> None:
    flags = ["--tensor-model-parallel-size=2", TWO]
    flags += [SEQUENCE] if sequence_parallel else []
    own = train(tmp_path / "own", flags, 4)
    run = train(tmp_path / "run", [*flags, *FULL], 8, [f"kill:worker=5@step={AT},phase=backward,microbatch=1"])
    ours, theirs = merge(own.records("masks")), merge(run.records("masks"))
    assert {draw: mask for draw, mask in ours.items() if draw in theirs} == theirs
    assert {draw for draw in ours if draw[0] > AT} <= theirs.keys()
    assert sum(record["again"] for record in run.records("masks").values()) > 0
    assert run.losses == pytest.approx(own.losses, rel=1e-5)
    sites = {(draw[2], draw[4]) for draw in ours}
    if sequence_parallel:
        assert {lane for _, lane in sites} == {0, 1}
    else:
        assert {lane for layer, lane in sites} == {None, 0, 1}
        alike = {draw: mask for draw, mask in ours.items() if draw[4] is None}
        alone = merge(calm.records("masks"))
        assert alike == {draw: mask for draw, mask in alone.items() if draw in alike}
    apart = [(draw, mask) for draw, mask in ours.items() if draw[4] == 0]
    assert apart and all(ours[(*draw[:4], 1)] != mask for draw, mask in apart)


def test_streams_of_a_checkpoint_go_on_in_another_layout_and_with_another_seed(
    calm: Run, two_stages: Run, tmp_path: Path
) -> None:
    saving = ["--ckpt-format=torch_dist", "--save-interval=5", f"--save={tmp_path / 'checkpoints'}"]
    saved = train(tmp_path / "saved", [TWO, *saving, "--exit-interval=5"], 4)
    assert len(saved.losses) == 5
    loading = f"--load={tmp_path / 'checkpoints'}"
    second = train(tmp_path / "second", [loading], 2)
    first, following, *later = two_stages.losses[5:]
    # Megatron's second line after a load is the mean of two steps.
    assert second.losses == pytest.approx([first, (first + following) / 2, *later], rel=1e-5)
    reseeded = train(tmp_path / "reseeded", [loading, "--seed=99"], 1)  # which shuffles the data otherwise, too
    assert "the random streams of the checkpoint go on, of seed 1234, not 99" in reseeded.output
    theirs = {draw: mask for draw, mask in merge(calm.records("masks")).items() if draw[0] >= 5}
    assert merge(second.records("masks")) == merge(reseeded.records("masks")) == theirs


def test_streams_of_megatron_are_stock_megatrons(tmp_path: Path) -> None:
    flags = [TWO]
    stock = run_stock(tmp_path / "stock", flags, workers=4, model=WITH_DROPOUT, steps=STEPS)
    run = train(tmp_path / "run", [*flags, "--elastic-rng=megatron", "--elastic-consistency=statistical"], 4)
    assert stock.code == 0, stock.output[-6000:]
    assert run.losses == pytest.approx(stock.losses, rel=1e-6)
    assert run.records("masks") == {}
