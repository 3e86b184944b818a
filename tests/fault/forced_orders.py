"""Plans with orders, whatever the planner gave: every worker adds the same ones to every plan that it is sent.

ELAS_TEST_ORDERS is one of the kinds of ``tests/schedule/plan_orders.py``, or ``none``: then orders are taken away.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from megatron_elas.control import messages
from megatron_elas.spec.plan import ElasticPlan
from tests.schedule.plan_orders import make_orders


def install() -> None:
    """Called before the worker joins."""
    kind: Any = os.environ.get("ELAS_TEST_ORDERS")
    if not kind:
        return
    original = messages.unpack_plan

    def unpack_plan(text: Any) -> ElasticPlan:
        plan = original(text)
        return replace(plan, orders=() if kind == "none" else make_orders(plan.items, kind))

    messages.unpack_plan = unpack_plan
