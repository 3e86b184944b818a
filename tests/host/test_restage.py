"""A living worker comes to hold other layers, another stage, another lane, or a part of another size."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_elas.spec.plan import ElasticPlan
from tests.host.restage_jobs import UNTIED, assert_same_training, make_plan, run_job

pytestmark = [pytest.mark.process, pytest.mark.slow]

PP2 = ("--pipeline-model-parallel-size=2", UNTIED)
PP4 = ("--pipeline-model-parallel-size=4", UNTIED)
TP2 = ("--tensor-model-parallel-size=2", *PP2)
TIED = ("--pipeline-model-parallel-size=2",)
LEARNING_RATES = ("--decoupled-lr=5e-4", "--decoupled-min-lr=5e-5")
"""Those of embedding and output layer, which stages in the middle have not."""
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")

ONE = make_plan(1, [[[1]]], [(0, 4)])
MIDDLE_IS_LAST = make_plan(1, [[[0]], [[1]], [[2]]], [(0, 2), (2, 3), (3, 4)])
THREE = make_plan(1, [[[0]], [[2]], [[3]]], [(0, 1), (1, 3), (3, 4)])
BACK_TO_FRONT = make_plan(1, [[[3]], [[2]]], [(0, 3), (3, 4)])
WIDER = make_plan(1, [[[0], [3]], [[2]]], [(0, 2), (2, 4)])
LAYER_TO_AND_FRO = {
    2: make_plan(1, [[[0]], [[1]]], [(0, 1), (1, 4)]),
    4: make_plan(2, [[[0]], [[1]]], [(0, 3), (3, 4)]),
}
LANES_MOVE_A_LAYER = {3: make_plan(1, [[[0, 1]], [[2, 3]]], [(0, 3), (3, 4)])}
CROSSED_CELL = make_plan(1, [[[2, 3], [7, 0]], [[4, 5]]], [(0, 2), (2, 4)])
"""Of the spares of two cells, in each other's lanes and one on another stage."""

CASES = [
    pytest.param(PP2, 2, {3: ONE}, id="2-stages-to-1"),
    pytest.param(TIED, 2, {3: ONE}, id="2-stages-to-1-tied"),
    pytest.param(PP4, 4, {2: THREE, 4: make_plan(2, [[[0]], [[3]]], [(0, 1), (1, 4)])}, id="4-stages-to-3-to-2"),
    pytest.param(PP4[:1], 4, {3: MIDDLE_IS_LAST}, id="middle-to-last-tied"),
    pytest.param((*PP4, *LEARNING_RATES), 4, {3: MIDDLE_IS_LAST}, id="groups-that-were-empty"),
    pytest.param(PP2, 4, {3: BACK_TO_FRONT}, id="a-stage-in-two-back-to-front"),
    pytest.param((*TIED, *OVERLAP, "--bf16"), 4, {3: BACK_TO_FRONT}, id="tied-overlap-bf16"),
    pytest.param(PP2, 2, LAYER_TO_AND_FRO, id="a-layer-moves-and-comes-back"),
    pytest.param((*TIED, *OVERLAP, "--bf16"), 2, LAYER_TO_AND_FRO, id="a-layer-moves-tied-overlap-bf16"),
    pytest.param((*TP2, "--sequence-parallel"), 4, LANES_MOVE_A_LAYER, id="a-layer-moves-of-both-lanes"),
    pytest.param(PP4, 4, {3: WIDER}, id="more-cells-than-there-is-room-for"),
    pytest.param((*PP2, *OVERLAP), 4, {3: make_plan(1, [[[0], [1]]], [(0, 4)])}, id="2-stages-of-2-to-1-of-2-overlap"),
    pytest.param(TP2, 8, {3: CROSSED_CELL}, id="spares-form-a-cell"),
    pytest.param((*TP2, "--sequence-parallel", "--bf16"), 8, {3: CROSSED_CELL}, id="spares-form-a-cell-sp-bf16"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    """Imported before workers are forked, because it takes seconds."""
    import megatron.training  # noqa: F401


def find_stale(attached: Any) -> dict[str, Any]:
    """What of Megatron's objects knows the model, the groups or the optimizer of before."""
    from tests.fault.stale import Scene
    from tests.fault.stale_megatron import CHECKS

    session = attached.session
    session.plan, session._host = attached.route.plan, attached.host
    session._pool = SimpleNamespace(_mirrors={})
    session._control = SimpleNamespace(latest_epoch=session.plan.epoch)
    layout = attached.host._access.layout()
    session._state = SimpleNamespace(store=SimpleNamespace(layout=layout), catalogue=session.catalogue)
    scene = Scene(attached)
    return {check.__name__: list(check(scene)) for check in CHECKS}


@pytest.mark.parametrize(("flags", "count", "plans"), CASES)
def test_training_goes_on_as_undisturbed(
    flags: tuple[str, ...], count: int, plans: dict[int, ElasticPlan], tmp_path: Path
) -> None:
    calm = run_job(tmp_path / "calm", flags, count)
    changed = run_job(tmp_path / "changed", flags, count, plans, look=find_stale)
    assert_same_training(changed, calm, plans)
    for number, worker in enumerate(changed):
        if number in plans[max(plans)].placement.workers:
            assert {name: found for name, found in worker.found.items() if found} == {}, f"worker {number}"
            assert len(worker.found) > 10


def test_a_model_of_a_scripts_own_function_is_made_again(tmp_path: Path) -> None:
    """With a configuration of its own for every model."""
    calm = run_job(tmp_path / "calm", TIED, 2)
    changed = run_job(tmp_path / "changed", TIED, 2, {3: ONE}, by_script=True)
    assert_same_training(changed, calm, {3: ONE})
