"""After a loss the batch is cut in other ways than before: jobs whose planner joins, cuts or divides micro-batches.

What a plan does depends on what passes take, so these jobs plan with the profile of a device on which another way of
dealing samples is best: where passes take long however many samples they have, a cell's items grow (reshape); where
they take a little, whole micro-batches move and the last ones are cut (mix); where they take nothing but for their
samples, micro-batches are divided on all stages. Which items the workers ran in the end is compared with that.

Most tokens of the data do not count, and no two samples need to have as many that do, so a micro-batch that is cut
or joined with another one is weighed wrongly by anything but its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.distributed.conftest import TIMEOUT_S
from tests.distributed.flag_sets import STEPS, FlagSet
from tests.distributed.test_flags import assert_same_columns, assert_same_evaluations
from tests.fault.runs import Run, assert_nothing_stale, assert_same_norms, assert_same_training, run_job, run_stock
from tests.fault.settings import BY_PROFILE

pytestmark = [pytest.mark.process, pytest.mark.timeout(3 * TIMEOUT_S)]

DEVICE = """
name = "made up"
peak_flops = {peak_flops}
efficiency = 0.6
memory_bytes = 64e9
usable_memory = 0.9
memory_bandwidth = 9e9
host_bandwidth = 9e9
layer_pass_s = {layer_pass_s}
"""
CLUSTER = """
name = "made up"
nodes = 1
devices_per_node = 16
device = "{device}"
host_memory_bytes = 64e9
nodes_per_domain = 1
inside = {{ bandwidth = 1e9, latency_s = 50e-6 }}
between = {{ bandwidth = 1e9, latency_s = 50e-6 }}
"""
PEAK_FLOPS = 1e8
"""So slow that samples take long beside everything but passes."""

Sizes = dict[int, list[list[int]]]
"""Of every stage: samples of the items of each of its cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job that ends with these items."""

    name: str
    layer_pass_s: float
    flags: FlagSet
    sizes: Sizes
    quick: bool = False


def flag_set(flags: str, *lost: int, tensor: int = 1, pipeline: int = 2, size: int, per_row: int) -> FlagSet:
    """Stages of three cells, micro-batches of ``size`` samples; up to two workers are lost."""
    faults = [f"kill:worker={worker}@step={2 + 2 * i},phase=backward,microbatch={i}" for i, worker in enumerate(lost)]
    return FlagSet(
        name="", counted="answers", tensor=tensor, pipeline=pipeline, data=3, batch=3 * size * per_row,
        flags=f"--micro-batch-size={size} {flags}", first=faults[0], second=faults[1] if len(faults) > 1 else "",
    )  # fmt: skip


LAZY = "--overlap-grad-reduce --overlap-param-gather"
MIXED = [[3, 3, 3, 3, 2], [3, 3, 3, 3, 1]]
JOINED = [[3, 3]] * 2
CASES = (
    Case(
        name="reshape-one-stage", quick=True, layer_pass_s=0.1, flags=flag_set("", 1, pipeline=1, size=2, per_row=2),
        sizes={0: JOINED},
    ),
    Case(
        name="reshape-first-stage", layer_pass_s=0.1, flags=flag_set("", 0, size=2, per_row=2),
        sizes={0: JOINED, 1: [[2, 2]] * 3},
    ),
    Case(name="reshape", layer_pass_s=0.1, flags=flag_set(LAZY, 0, 5, size=2, per_row=2), sizes={0: JOINED, 1: JOINED}),
    Case(
        name="reshape-per-token", layer_pass_s=0.1, flags=flag_set("--calculate-per-token-loss", 5, size=2, per_row=2),
        sizes={0: [[2, 2]] * 3, 1: JOINED},
    ),
    Case(
        name="reshape-sequence-parallel", layer_pass_s=0.1,
        flags=flag_set("--sequence-parallel", 11, tensor=2, size=2, per_row=2), sizes={0: [[2, 2]] * 3, 1: JOINED},
    ),
    Case(
        name="mix-first-stage", layer_pass_s=0.004, flags=flag_set("", 0, size=3, per_row=3),
        sizes={0: MIXED, 1: [[3, 3, 3]] * 3},
    ),
    Case(name="mix", layer_pass_s=0.004, flags=flag_set(LAZY, 0, 5, size=3, per_row=3), sizes={0: MIXED, 1: MIXED}),
    Case(
        name="mix-per-token", layer_pass_s=0.004, flags=flag_set("--calculate-per-token-loss", 0, 3, size=3, per_row=3),
        sizes={0: MIXED, 1: MIXED},
    ),
    Case(
        name="mix-sequence-parallel", layer_pass_s=0.002,
        flags=flag_set("--sequence-parallel", 1, tensor=2, size=3, per_row=3), sizes={0: MIXED, 1: [[3, 3, 3]] * 3},
    ),
    Case(
        name="divide", layer_pass_s=0.0, flags=flag_set("", 0, size=2, per_row=3),
        sizes={0: [[1] * 9] * 2, 1: [[1] * 6] * 3},
    ),
)  # fmt: skip


def train(case: Case, folder: Path, documents: Path, *faults: str, more: tuple[str, ...] = ()) -> Run:
    """The job, planning with the case's device."""
    folder.mkdir(parents=True)
    device, cluster = folder / "device.toml", folder / "cluster.toml"
    device.write_text(DEVICE.format(peak_flops=PEAK_FLOPS, layer_pass_s=case.layer_pass_s))
    cluster.write_text(CLUSTER.format(device=device))
    return run_job(
        folder, more, workers=case.flags.workers, faults=faults, steps=STEPS, batch=case.flags.batch,
        model=case.flags.command_line(documents), timeout_s=TIMEOUT_S,
        launcher_flags=(*BY_PROFILE, f"--cluster={cluster}"),
    )  # fmt: skip


def sizes_of(run: Run) -> Sizes:
    """Samples of the items that every cell runs at the end."""
    found: dict[int, dict[int, list[int]]] = {}
    for record in run.records("final").values():
        found.setdefault(record["stage"], {})[record["cell"]] = record["items"]
    return {stage: [cells[cell] for cell in sorted(cells)] for stage, cells in found.items()}


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name, marks=() if c.quick else pytest.mark.slow) for c in CASES])
def test_micro_batches_that_are_cut_and_joined_train_as_whole_ones_do(
    case: Case, documents: Path, tmp_path: Path
) -> None:
    faults = tuple(filter(None, (case.flags.first, case.flags.second)))
    calm = train(case, tmp_path / "calm", documents)
    run = train(case, tmp_path / "run", documents, *faults)
    assert run.fired == list(faults), run.output[-6000:]
    assert sizes_of(run) == case.sizes
    assert {len(cells) for cells in sizes_of(calm).values()} == {3}
    assert_same_training(run, calm)
    assert len(run.losses) == STEPS and calm.losses[0] != calm.losses[-1]
    assert_nothing_stale(run)
    assert_same_evaluations(run, calm, 1e-5)
    assert_same_columns(run, calm, 1e-5)


@pytest.mark.slow
def test_a_checkpoint_saved_under_cut_micro_batches_goes_on_in_stock_megatron(documents: Path, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "mix")
    # Of data in which all tokens count: stock Megatron keeps the first sample's padding for all others.
    case = replace(case, flags=replace(case.flags, counted="mock"))
    saved, checkpoints = 6, tmp_path / "checkpoints"
    saving = ("--ckpt-format=torch_dist", f"--save={checkpoints}", f"--save-interval={saved}")
    calm = train(case, tmp_path / "calm", documents)
    faults = (case.flags.first, case.flags.second)
    run = train(case, tmp_path / "run", documents, *faults, more=saving)
    assert run.fired == list(faults), run.output[-6000:]
    assert sizes_of(run) == case.sizes
    stock = run_stock(
        tmp_path / "stock", ("--ckpt-format=torch_dist", f"--load={checkpoints}", f"--ckpt-step={saved}"),
        workers=case.flags.workers, steps=STEPS, batch=case.flags.batch, model=case.flags.command_line(documents),
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    assert stock.code == 0, stock.output[-6000:]
    assert stock.iterations == list(range(saved + 1, STEPS + 1))
    assert stock.consumed == calm.consumed[saved:]
    assert_same_norms(stock.gradient_norms, calm.gradient_norms[saved:])
    # Megatron's log averages the first two losses of a run that was loaded, so the second line says nothing.
    assert stock.losses[0] == pytest.approx(calm.losses[saved], rel=1e-5)
