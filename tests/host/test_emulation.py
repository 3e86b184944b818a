"""Megatron on emulated accelerators computes what it always computes, and takes the time of its layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_elas.host.emulation import OPTIONS, check_flags, settle_emulation
from megatron_elas.planner.cost_model import estimate_job
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import initial_plan, predict_step_s
from megatron_elas.planner.time_model import find_hardware, spread_layers
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.job_profile import load_job
from megatron_elas.spec.plan import ElasticPlan
from tests.host.restage_jobs import BATCH, UNTIED, Worker, losses, make_plan, run_job, states
from tests.schedule.plan_orders import make_orders, without_split

SPEED = 20
EMULATED = ("--elastic-emulate=npu-96", "--elastic-emulate-model=llama2-7b", f"--elastic-emulate-speed={SPEED}")
PP2 = ("--pipeline-model-parallel-size=2", UNTIED)
STEPS, CHANGE_AT = 4, 2
ONE = make_plan(1, [[[1]]], [(0, 4)])
WITHOUT_ONE = make_plan(1, [[[0], [1]], [[2]]], [(0, 3), (3, 4)])
RECOMPUTE = ("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1")
COST = spread_layers(estimate_job(load_job("llama2-7b"), find_hardware("npu-96", 8)), 4)
UNITS = {"embedding": (COST.embedding,), "layer": (COST.layers[1],), "head": (COST.head, COST.loss)}
TWO_LANES = make_plan(1, [[[0, 1], [2, 3]], [[4, 5]]], [(0, 3), (3, 4)])


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    """Imported before workers are forked, because it takes seconds."""
    import megatron.training  # noqa: F401


def predict(plans: Sequence[ElasticPlan | None], rows: int) -> float:
    """Seconds that all these steps take at least."""
    cluster = find_hardware("npu-96", 8)
    profile = load_job("llama2-7b")
    job = JobSpec(
        tensor_parallel=1,
        pipeline_parallel=2,
        data_parallel=rows,
        micro_batch_size=1,
        num_microbatches=BATCH,
        stage_layers=(2, 2),
    )
    cost = spread_layers(estimate_job(profile, cluster), 4)
    costs = replace(JobCosts.of(profile, cluster), cost=cost, link=cluster.inside)
    return sum(predict_step_s(job, plan or initial_plan(job, {}), costs) for plan in plans) / SPEED


def read_emulation(attached: Any) -> dict[str, Any]:
    """Operations of all steps but the first, by kind."""
    return {error.kind: (error.count, error.asked_s) for error in attached.emulation.device.errors.summarize()}


def elapsed_s(workers: Sequence[Worker], steps: int) -> float:
    """From the first worker's begin of the first step to the last one's end of the last."""
    return max(w.times[steps - 1][1] for w in workers if steps - 1 in w.times) - min(w.times[0][0] for w in workers)


def assert_equal(run: Sequence[Worker], calm: Sequence[Worker], steps: int) -> None:
    """Losses as printed, weights and moments to the last bit."""
    assert losses(run) == losses(calm) and len(losses(calm)) == steps
    ours, theirs = states(run), states(calm)
    assert ours.keys() == theirs.keys() and all(bool((ours[key] == theirs[key]).all()) for key in theirs)


@pytest.mark.process
def test_training_is_the_same_bit_for_bit_and_takes_at_least_the_modelled_time(tmp_path: Path) -> None:
    plans = {CHANGE_AT: ONE}
    calm = run_job(tmp_path / "calm", PP2, 2, plans, steps=3)
    run = run_job(tmp_path / "run", (*PP2, *EMULATED), 2, plans, steps=3, look=read_emulation)
    assert_equal(run, calm, 3)
    # Step 1 with two layers a stage, step 2 with all of them on one.
    found = run[1].found
    counts = {kind: count for kind, (count, _) in found.items()}
    assert counts == {
        "layer forward": (2 + 4) * BATCH,
        "layer backward": (2 + 4) * BATCH,
        "head forward": 2 * BATCH,
        "head backward": 2 * BATCH,
        "embedding forward": BATCH,
        "embedding backward": BATCH,
        "exchange": 2,
        "optimizer": 2,
    }
    assert found["layer backward"][1] == pytest.approx(2 * found["layer forward"][1], rel=0.02)
    assert elapsed_s(run, 3) >= predict([None, None, ONE], 1)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "workers", "plan"),
    [
        pytest.param(PP2, 4, WITHOUT_ONE, id="2-stages-of-2"),
        pytest.param((*PP2, *RECOMPUTE), 4, WITHOUT_ONE, id="recompute"),
        pytest.param(PP2[:1], 4, WITHOUT_ONE, id="tied"),
        pytest.param(
            (*PP2, "--tensor-model-parallel-size=2", "--sequence-parallel", "--bf16", "--overlap-grad-reduce"),
            8,
            TWO_LANES,
            id="tp2-sp-bf16",
        ),
    ],
)
def test_training_is_the_same_under_further_flags(
    flags: tuple[str, ...], workers: int, plan: ElasticPlan, tmp_path: Path
) -> None:
    plans = {CHANGE_AT: plan}
    calm = run_job(tmp_path / "calm", flags, workers, plans, steps=STEPS)
    run = run_job(tmp_path / "run", (*flags, *EMULATED), workers, plans, steps=STEPS, look=read_emulation)
    assert_equal(run, calm, STEPS)
    passes = {kind: count for kind, (count, _) in run[0].found.items()}
    again = 2 if RECOMPUTE[0] in flags else 1
    assert passes["layer forward"] == again * passes["layer backward"] == again * (2 * 4 + 2 * 3 * 4)
    assert elapsed_s(run, STEPS) >= predict([None, None, plan, plan], 2)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("flags", [PP2, (*PP2, *RECOMPUTE)], ids=["plain", "recompute"])
def test_a_split_backward_pass_takes_its_times_apart(flags: tuple[str, ...], tmp_path: Path) -> None:
    plan = make_plan(1, [[[0]], [[1]]], [(0, 2), (2, 4)])
    orders = make_orders(plan.items, "split")
    whole, split = (replace(plan, orders=orders_) for orders_ in (without_split(orders), orders))
    calm = run_job(tmp_path / "calm", flags, 2, {1: whole}, steps=3)
    run = run_job(tmp_path / "run", (*flags, *EMULATED), 2, {1: split}, steps=3, look=read_emulation)
    assert_equal(run, calm, 3)
    for worker, unit in ((0, "embedding"), (1, "head")):
        found = run[worker].found  # of steps 1 and 2
        for name, count in (("layer", 2 * 2 * BATCH), (unit, 2 * BATCH)):
            assert f"{name} backward" not in found
            assert found[f"{name} input_gradient"][0] == found[f"{name} weight_gradient"][0] == count
            units = UNITS[name]
            for kind in ("input_gradient", "weight_gradient"):
                asked_s = sum(getattr(own, kind).seconds(1) for own in units) / SPEED
                assert found[f"{name} {kind}"][1] == pytest.approx(asked_s, rel=1e-6)


def arguments(**changes: Any) -> SimpleNamespace:
    values = {"elastic_emulate": "npu-96", "world_size": 4, "use_distributed_optimizer": True}
    return SimpleNamespace(**(values | dict.fromkeys(OPTIONS.values()) | changes))


def test_nothing_is_emulated_without_the_flag() -> None:
    assert settle_emulation(arguments(elastic_emulate=None)) is None
    check_flags(arguments(elastic_emulate=None))


@pytest.mark.parametrize(("flag", "name"), OPTIONS.items())
def test_flags_that_say_more_need_the_first_one(flag: str, name: str) -> None:
    with pytest.raises(BadUsage, match=re.escape(f"{flag} needs --elastic-emulate")):
        check_flags(arguments(**{"elastic_emulate": None, name: "1"}))


@pytest.mark.parametrize(
    ("platform", "here", "changes", "text"),
    [
        ("cuda", "4", {}, "this machine has 'cuda': leave it out"),
        ("cpu", "2", {}, "here are 2 of 4: start the job with one node"),
        ("cpu", "4", {"num_experts": 8}, "does not cover --num-experts"),
        ("cpu", "4", {"use_distributed_optimizer": False}, "needs --use-distributed-optimizer"),
        ("cpu", "4", {"elastic_emulate": "abacus"}, "there is no 'abacus' in configs/devices"),
    ],
)
def test_runs_that_cannot_be_emulated_are_refused(
    platform: str, here: str, changes: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_elas.host.emulation.detect", lambda: platform)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    with pytest.raises(BadUsage, match=text):
        settle_emulation(arguments(**changes))
