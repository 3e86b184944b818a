"""A plan is the same after it was sent, and what stages have alike is sent once."""

from __future__ import annotations

from dataclasses import fields, replace

import msgspec
import pytest

from megatron_elas.control.messages import MAX_MESSAGE_BYTES, BadMessage, Recover, Start, decode_to_worker, encode
from megatron_elas.control.plan_text import PlanText, pack_plan, unpack_plan
from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan, Settlement


def plans_of(rows: int, per_row: int, *, lanes: int = 1, stages: int = 8) -> tuple[ElasticPlan, ElasticPlan]:
    """Before and after the loss of worker 0."""
    job = JobSpec(
        tensor_parallel=lanes,
        pipeline_parallel=stages,
        data_parallel=rows,
        micro_batch_size=2,
        num_microbatches=rows * per_row,
    )
    domains = {worker: f"node{worker // 8}" for worker in range(job.world_size)}
    first = initial_plan(job, domains)
    return first, replan(job, first, {0}, 1, domains)


def test_a_plan_stays_as_it_is() -> None:
    for plan in plans_of(4, 4):
        full = replace(plan, predicted_s=1.5, over_memory=True)
        text = msgspec.json.encode(pack_plan(full))
        assert unpack_plan(msgspec.json.decode(text, type=PlanText)) == full
    assert set(PlanText.__struct_fields__) == {field.name for field in fields(ElasticPlan)} | {"deals", "cells"}


def test_stages_that_are_dealt_alike_share_their_items_on_either_side() -> None:
    first, plan = plans_of(4, 4)
    # Also where the sender has read it itself, so that equal items are not one object.
    apart = replace(plan, items=tuple(tuple(list(cells)) for cells in plan.items))
    for sent in (plan, apart):
        message = decode_to_worker(encode(Start(plan=sent, addresses={})))
        assert isinstance(message, Start) and message.plan == plan
        assert len(set(map(id, message.plan.items))) == 2
    settlement = Settlement(base_epoch=0, resume_step=1, lead_activity=0)
    recover = Recover(plan=plan, settlement=settlement, base=first, addresses={1: "a"}, plan_s=0.5)
    assert decode_to_worker(encode(recover)) == recover
    assert decode_to_worker(encode(msgspec.structs.replace(recover, base=None))).base is None  # type: ignore[union-attr]


def test_a_deal_that_is_not_there_is_refused() -> None:
    text = encode(Start(plan=plans_of(2, 2)[1], addresses={}))
    assert '"items":[0,1,1,1,1,1,1,1]' in text
    for wrong in ("2", "-1"):
        with pytest.raises(BadMessage, match="stages have the deals"):
            decode_to_worker(text.replace('"items":[0,1', f'"items":[0,{wrong}'))


def test_messages_grow_so_slowly_that_a_hundred_thousand_workers_fit() -> None:
    sizes = []
    for rows in (16, 32):
        first, plan = plans_of(rows, 64, lanes=8, stages=16)
        settlement = Settlement(base_epoch=0, resume_step=1, lead_activity=0)
        addresses = {worker: f"tcp:10.10.{worker // 250}.{worker % 250}:40123" for worker in range(rows * 16 * 8)}
        message = Recover(plan=plan, settlement=settlement, base=first, addresses=addresses, plan_s=0.5)
        sizes.append(len(encode(message)))
    of_row = (sizes[1] - sizes[0]) / 16
    assert of_row * 100_000 / (16 * 8) < MAX_MESSAGE_BYTES / 4
