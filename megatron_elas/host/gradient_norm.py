"""The norm of the gradients, the same bits for any cut and membership where the job is to be equal to the last bit."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_elas.host.attachment import attachment
from megatron_elas.runtime.exact_sums import read_sum, sum_squares


def wrap_gradient_norm(original: Any) -> Any:
    """``get_grad_norm_fp32`` that adds squares without regard to who owns what, at ``bitwise``."""

    @functools.wraps(original)
    def get_grad_norm_fp32(grads_for_norm: Any, norm_type: Any = 2, grad_stats_parallel_group: Any = None) -> Any:
        if attachment().job.consistency != "bitwise" or float(norm_type) == math.inf:  # a maximum has no order
            return original(grads_for_norm, norm_type, grad_stats_parallel_group)
        assert float(norm_type) == 2.0, f"only the 2-norm can be the same for any cut, asked for {norm_type}"
        gradients = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else grads_for_norm
        return exact_norm(gradients, grad_stats_parallel_group)

    return get_grad_norm_fp32


def exact_norm(tensors: Sequence[torch.Tensor], group: Any = None) -> float:
    """Of the tensors of all workers, each cut as ``sum_squares`` wants it; a number of single precision."""
    row = sum_squares(tensors, device=tensors[0].device if tensors else "cuda")
    dist.all_reduce(row, group=group)
    return float(torch.tensor(math.sqrt(read_sum(row)), dtype=torch.float32))
