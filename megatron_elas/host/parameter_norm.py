"""The norm of all parameters that ``--log-params-norm`` prints, when stages may differ in their numbers of cells."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_elas.host.attachment import attachment
from megatron_elas.host.gradient_norm import exact_norm


def wrap_parameter_norm(original: Any) -> Any:
    """``calc_params_l2_norm`` as a joint activity, over all workers instead of along pipelines."""

    @functools.wraps(original)
    def calc_params_l2_norm(model: Any, force_create_fp32_copy: bool = False) -> float:
        attached = attachment()
        chunks = model if isinstance(model, list) else [model]

        def body() -> float:
            seat, placement = attached.route.seat, attached.route.plan.placement
            if attached.job.consistency == "bitwise":
                counted = [
                    data for data, sharded in _parameters(chunks, force_create_fp32_copy) if sharded or seat.cell == 0
                ]
                return exact_norm(counted)
            total = torch.zeros(1)
            for data, sharded in _parameters(chunks, force_create_fp32_copy):
                # A shard has one owner; a whole parameter is on every cell of the stage.
                total += data.float().square().sum() / (1 if sharded else len(placement.stages[seat.stage]))
            dist.all_reduce(total)
            return float(total.sqrt())

        # Who had no seat then has nothing to tell of that step.
        return attached.session.run_between(body, missed=lambda: math.nan)

    return calc_params_l2_norm


def _parameters(model: Sequence[Any], fp32_copy: bool) -> Iterator[tuple[torch.Tensor, bool]]:
    """What this worker has of each parameter that counts on its lane, and whether it is a shard (of its master)."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared
    from megatron.training import get_args

    half = get_args().bf16 and not fp32_copy
    for chunk in model:
        for param in chunk.parameters():
            if not (param_is_not_tensor_parallel_duplicate(param) and param_is_not_shared(param)):
                continue
            sharded = half and getattr(param, "main_param_sharded", False)
            data = param.main_param if half and hasattr(param, "main_param") else param.data
            if data is not None:  # None where this worker owns nothing of it
                yield data.detach(), sharded
