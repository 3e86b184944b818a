"""Training at ``--elastic-consistency bitwise`` whose layout changes has the bits of training whose layout does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_elas.spec.plan import ElasticPlan
from tests.host.restage_jobs import EMBEDDING, HEAD, Worker, assert_same_training, losses, make_plan, run_job, states
from tests.host.test_restage import (
    BACK_TO_FRONT,
    CROSSED_CELL,
    LANES_MOVE_A_LAYER,
    LAYER_TO_AND_FRO,
    MIDDLE_IS_LAST,
    ONE,
    OVERLAP,
    PP2,
    PP4,
    TIED,
    TP2,
    WIDER,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

BITWISE = ("--elastic-consistency=bitwise",)
TWO_TO_ONE = {3: make_plan(1, [[[0], [1]]], [(0, 4)])}

CASES = [
    pytest.param(PP2, 2, {3: ONE}, id="2-stages-to-1"),
    pytest.param(TIED, 2, {3: ONE}, id="2-stages-to-1-tied"),
    pytest.param((*TIED, "--bf16"), 2, {3: ONE}, id="2-stages-to-1-tied-bf16"),
    pytest.param(PP4[:1], 4, {3: MIDDLE_IS_LAST}, id="middle-to-last-tied"),
    pytest.param((*TIED, *OVERLAP, "--bf16"), 4, {3: BACK_TO_FRONT}, id="tied-overlap-bf16"),
    pytest.param((*TIED, *OVERLAP, "--bf16"), 2, LAYER_TO_AND_FRO, id="a-layer-moves-tied-overlap-bf16"),
    pytest.param((*TP2, "--sequence-parallel"), 4, LANES_MOVE_A_LAYER, id="a-layer-moves-of-both-lanes"),
    pytest.param(PP4, 4, {3: WIDER}, id="more-cells-than-there-is-room-for"),
    pytest.param((*TIED, *OVERLAP), 4, TWO_TO_ONE, id="2-stages-of-2-to-1-of-2-tied-overlap"),
    pytest.param((*TP2, "--sequence-parallel", "--bf16"), 8, {3: CROSSED_CELL}, id="spares-form-a-cell-sp-bf16"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    """Imported before workers are forked, because it takes seconds."""
    import megatron.training  # noqa: F401


def look(attached: Any) -> dict[str, Any]:
    """What the sums know after the last step."""
    return {"exponents": attached.sums.capture()}


def assert_same_bits(changed: list[Worker], calm: list[Worker]) -> None:
    """Losses as printed, and masters and moments by name."""
    assert losses(changed) == losses(calm)
    ours, theirs = states(changed), states(calm)
    twins = {key for key in theirs if key[1] == HEAD and (key[0], EMBEDDING) in ours and key not in ours}
    assert ours.keys() == theirs.keys() - twins
    differing = {name: int((ours[name] != theirs[name]).sum()) for name in ours}
    assert {name: count for name, count in differing.items() if count} == {}, "elements that differ"


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "count", "plans"), CASES)
def test_training_goes_on_with_the_same_bits(
    flags: tuple[str, ...], count: int, plans: dict[int, ElasticPlan], tmp_path: Path
) -> None:
    calm = run_job(tmp_path / "calm", (*flags, *BITWISE), count, look=look)
    changed = run_job(tmp_path / "changed", (*flags, *BITWISE), count, plans, look=look)
    assert_same_training(changed, calm, plans)
    assert_same_bits(changed, calm)
    known = [worker.found["exponents"] for worker in (*calm, *changed) if worker.found]
    assert all(exponents == known[0] for exponents in known), "workers disagree on the exponents"
    assert known[0].step == 6
    assert len(known[0].exponents) > 20
