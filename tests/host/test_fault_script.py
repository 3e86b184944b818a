"""Which faults of --elastic-inject can never strike, by the arguments of the run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_elas.host.fault_script import find_unreachable_faults
from megatron_elas.spec.job import JobSpec

JOB = JobSpec(tensor_parallel=1, pipeline_parallel=1, data_parallel=2, micro_batch_size=2, num_microbatches=4)


@pytest.mark.parametrize(
    ("iterations", "samples", "reachable"), [(10, None, 9), (None, 87, 9), (None, None, 9999), (None, 88, 10)]
)
def test_steps_are_counted_by_iterations_or_samples(
    iterations: int | None, samples: int | None, reachable: int
) -> None:
    def told(step: int) -> tuple[str, ...]:
        fault = f"kill:worker=1@step={step},phase=commit"
        args = SimpleNamespace(
            elastic_inject=[fault], train_iters=iterations, train_samples=samples, global_batch_size=8
        )
        return find_unreachable_faults(args, JOB)

    assert told(reachable) == ()
    assert bool(told(reachable + 1)) == (iterations is not None or samples is not None)


def test_micro_batches_may_be_cut_down_to_samples_unless_they_stay_whole() -> None:
    assert JOB.most_passes == 8
    whole = JobSpec(
        tensor_parallel=1, pipeline_parallel=1, data_parallel=2, micro_batch_size=2, num_microbatches=4,
        consistency="bitwise",
    )  # fmt: skip
    assert whole.most_passes == 4
