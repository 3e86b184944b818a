"""What Megatron divides a loss by does not depend on how many micro-batches the cell runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_elas.host import training_step
from megatron_elas.host.step_timer import StepTimer
from megatron_elas.host.training_step import wrap_forward_step


@pytest.mark.parametrize(("step", "told"), [(3, 12), (-1, 5)])
def test_a_loss_is_divided_by_the_micro_batches_of_the_whole_batch_in_training(
    step: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = SimpleNamespace(
        counter=SimpleNamespace(step=step),
        timer=StepTimer(0, lambda report: None),
        job=SimpleNamespace(num_microbatches=12),
        summed_rows=1,
    )
    monkeypatch.setattr(training_step, "attachment", lambda: attached)

    def original(
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        entry: Any,
        *,
        is_last_stage: bool,
    ) -> tuple[Any, ...]:
        return forward_step_func, data_iterator, model, num_microbatches, entry, is_last_stage

    wrapped = wrap_forward_step(original)
    assert wrapped("function", "data", "model", 5, "entry", is_last_stage=True)[3] == told
    assert wrapped("function", "data", "model", num_microbatches=5, entry="entry", is_last_stage=True)[3] == told
