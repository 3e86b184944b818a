"""Workers are lost one after the other, 3 steps apart, on all grids and with all features.

Grids: P 2 x D 3, D 4, P 3 x D 2, P 4 x D 2, P 2 x D 4, T 2 x P 2 x D 2, T 2 x D 3 and T 2 x P 2 x D 2 with sequence
parallelism, P 2 x D 2. On all but the last two each worker (every stage, cell and lane) is lost first once; in every
run a second one follows, in the next stage, and a third where the grid has a cell to spare.

Features are not multiplied out: ``FACTORS`` names them, and every two values of different factors meet in some
configuration (``test_every_two_features_meet``), almost all of them in fp32, where losses are compared most closely.
The number of layers that does not divide is 7 over 2, 30 over 4 or 43 over 3; the batch that does not divide is 9 over
2 cells or 8 over 3. Masks are those of documents that end within a sample. A tight clip is one that clips every step.

``make test`` runs the configurations in ``QUICK``, with one order of losses each.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_elas.planner.plan import initial_plan, replan
from tests.distributed.configurations import CONFIGURATIONS, SAVED, STEPS, Configuration, roles
from tests.distributed.conftest import TIMEOUT_S, Train
from tests.fault.runs import Run, assert_nothing_stale, assert_same_norms, assert_same_training, run_stock

process = [pytest.mark.process, pytest.mark.timeout(2 * TIMEOUT_S)]
QUICK = ("pp2dp3", "tp2pp2dp2", "pp2dp2-bf16-llama")
FACTORS: dict[str, Callable[[Configuration], object]] = {
    "style": lambda c: c.style,
    "tied": lambda c: c.tied,
    "precision": lambda c: c.precision,
    "overlap": lambda c: c.overlap,
    "recompute": lambda c: c.recompute,
    "counted": lambda c: c.counted,
    "tight clip": lambda c: c.clip < 1,
    "layers do not divide": lambda c: c.layers % c.pipeline != 0,
    "batch does not divide": lambda c: any(c.batch % cells for cells in range(1, c.data)),
}


def named(configuration: Configuration, first: int | None = None) -> object:
    """A parameter of a test, slow unless the configuration is a quick one and no role is asked for."""
    marks = [] if first is None and configuration.name in QUICK else [pytest.mark.slow]
    values = (configuration,) if first is None else (configuration, first)
    label = configuration.name if first is None else f"{configuration.name}-worker{first}"
    return pytest.param(*values, id=label, marks=[*process, *marks])


def assert_lost_and_gone_on(configuration: Configuration, run: Run, first: int, calm: Run) -> None:
    """All faults of that order struck, and training went on as if they had not."""
    faults = configuration.faults(first)
    assert run.fired == list(faults), run.output[-6000:]
    assert_same_training(
        run, calm, relative=configuration.relative, state=configuration.state_error, noise=configuration.noise
    )
    assert len(calm.losses) == STEPS
    lost = [int(fault.partition("=")[2].partition("@")[0]) for fault in faults]
    plan = initial_plan(configuration.job, {})
    for epoch, worker in enumerate(lost, start=1):
        plan = replan(configuration.job, plan, [worker], epoch, {})
    left = plan.placement
    assert run.records("final").keys() == set(left.workers)
    assert_nothing_stale(run)
    now = re.findall(r"^now +(.*)", run.output, re.MULTILINE)[-1]
    seated = [int(worker) for cell in re.findall(r"\[([\d,]+)\]", now) for worker in cell.split(",")]
    assert sorted(seated) == sorted(left.workers), now


def test_every_two_features_meet() -> None:
    for (one, get_one), (other, get_other) in itertools.combinations(FACTORS.items(), 2):
        met = {(get_one(c), get_other(c)) for c in CONFIGURATIONS}
        possible = set(itertools.product(map(get_one, CONFIGURATIONS), map(get_other, CONFIGURATIONS)))
        if (one, other) == ("layers do not divide", "batch does not divide"):
            possible -= {(True, True)} - met
        assert met == possible, f"{one} and {other}"


@pytest.mark.parametrize("configuration", [named(c) for c in CONFIGURATIONS])
def test_losing_workers_one_after_the_other_does_not_change_training(
    configuration: Configuration, undisturbed: Callable[..., Run], struck: Callable[..., tuple[Run, Path]]
) -> None:
    calm = undisturbed(configuration)
    run, _ = struck(configuration)
    assert_lost_and_gone_on(configuration, run, configuration.workers - 1, calm)
    if configuration.clip < 1:
        assert min(calm.gradient_norms) > configuration.clip, "nothing was clipped"


@pytest.mark.parametrize("configuration", [named(c) for c in CONFIGURATIONS])
def test_a_checkpoint_saved_after_the_losses_goes_on_in_stock_megatron(
    configuration: Configuration,
    undisturbed: Callable[..., Run],
    struck: Callable[..., tuple[Run, Path]],
    documents: Path,
    tmp_path: Path,
) -> None:
    calm = undisturbed(configuration)
    _, checkpoints = struck(configuration)
    stock = run_stock(
        tmp_path / "stock",
        (*configuration.flags, "--ckpt-format=torch_dist", f"--load={checkpoints}", f"--ckpt-step={SAVED}"),
        workers=configuration.workers, steps=STEPS, batch=configuration.batch,
        model=configuration.model(documents), timeout_s=TIMEOUT_S,
    )  # fmt: skip
    assert stock.code == 0, stock.output[-6000:]
    assert stock.iterations == list(range(SAVED + 1, STEPS + 1))
    assert stock.consumed == calm.consumed[SAVED:]
    assert_same_norms(stock.gradient_norms, calm.gradient_norms[SAVED:])
    # Megatron's log averages the first two losses of a run that was loaded, so the second line says nothing.
    for step in (0, *range(2, STEPS - SAVED)):
        assert stock.losses[step] == pytest.approx(calm.losses[SAVED + step], rel=configuration.relative), step


@pytest.mark.parametrize(
    ("configuration", "first"),
    [named(c, worker) for c, worker in roles(c for c in CONFIGURATIONS if c.every_role) if worker < c.workers - 1],
)
def test_any_worker_may_be_the_first_to_be_lost(
    configuration: Configuration, first: int, undisturbed: Callable[..., Run], train: Train, tmp_path: Path
) -> None:
    run = train(configuration, tmp_path / "run", configuration.faults(first))
    assert_lost_and_gone_on(configuration, run, first, undisturbed(configuration))
