"""Workers that disagree after a recovery do not go on."""

from __future__ import annotations

import pytest

from megatron_elas.planner.plan import initial_plan
from megatron_elas.runtime.executor import check_digests
from megatron_elas.spec.errors import StateInvalid
from megatron_elas.spec.job import JobSpec

PLAN = initial_plan(
    JobSpec(tensor_parallel=1, pipeline_parallel=2, data_parallel=2, micro_batch_size=1, num_microbatches=8), {}
)


def rows() -> list[list[int]]:
    """Stage, lane, resume step, consumed samples, hash, owned, total; of workers 0 to 3."""
    return [
        [0, 0, 5, 40, 11, 60, 100],
        [0, 0, 5, 40, 11, 40, 100],
        [1, 0, 5, 40, 22, 50, 90],
        [1, 0, 5, 40, 22, 40, 90],
    ]


def test_agreement_passes() -> None:
    check_digests(PLAN, rows())


@pytest.mark.parametrize(
    ("worker", "column", "value", "sentence"),
    [
        (2, 2, 6, "worker 2 is at resume step 6, worker 0 at 5"),
        (3, 3, 48, "worker 3 is at consumed samples 48, worker 0 at 40"),
        (1, 4, 12, "the parameters of stage 0 lane 0 differ between replicas"),
        (3, 5, 41, r"workers \[2, 3\] own the optimizer state of 91 elements of stage 1 lane 0, the stage has 90"),
    ],
    ids=["step", "samples", "parameters", "owners"],
)
def test_each_disagreement_is_found_and_said(worker: int, column: int, value: int, sentence: str) -> None:
    disagreeing = rows()
    disagreeing[worker][column] = value
    with pytest.raises(StateInvalid, match=sentence):
        check_digests(PLAN, disagreeing)
