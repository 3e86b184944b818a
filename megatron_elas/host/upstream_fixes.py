"""Slips of Megatron 0.19 that are fixed on every platform where they bite.

They belong to the wheel and to the path with torch's own AdamW (no Transformer Engine, no Apex), not to the CPU.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import queue
from collections.abc import Callable
from typing import Any

from megatron_elas.host.patching import Seam, wrap

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


def _build_compile_helpers(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers


def _build_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if _steps_are_in_groups() or len(self.optimizer.state) > 0:
            return original(self)
        # Before the first step there is no state to read the step from; it is 0 by definition.
        inner = {key: value for key, value in self.optimizer.state_dict().items() if key != "state"}
        for group in inner["param_groups"]:
            del group["params"]
            group["step"] = 0.0
        scaler = {"grad_scaler": self.grad_scaler.state_dict()} if self.grad_scaler else {}
        return {"optimizer": inner, **scaler}

    return state_dict


def _build_load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        result = original(self, state_dict)
        if not _steps_are_in_groups():
            for state in self.optimizer.state.values():
                state["step"] = state["step"].detach().clone()
        return result

    return load_state_dict


def _build_set_states(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        import torch

        if not _steps_are_in_groups():
            group, order = self.model_param_group_index_map[model_param]
            own_step = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]].get("step")
            if own_step is not None:
                tensors = {**tensors, "step": own_step.detach().clone()}
        # An fp32 parameter's shard is a view of the parameter itself, which autograd lets nobody write to.
        with torch.no_grad():
            return original(self, model_param, tensors)

    return _set_main_param_and_optimizer_states


def _steps_are_in_groups() -> bool:
    """Whether the optimizer keeps its step count per group, as the fused ones do, and not per parameter."""
    from megatron.core.optimizer import distrib_optimizer

    return bool(distrib_optimizer.HAVE_APEX_OR_TE)


def _build_results_queue(original: Callable[..., Any]) -> Callable[..., Any]:
    local_queue: queue.Queue[Any] = queue.Queue()

    @functools.wraps(original)
    def get_write_results_queue(mp_mode: str = "spawn") -> Any:
        from megatron.training.global_vars import get_args

        return original(mp_mode) if get_args().async_save else local_queue

    return get_write_results_queue


def _build_torch_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __new__(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        whole = copy.copy(config)
        whole.sequence_parallel = False
        norm = original(cls, whole, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return __new__


def wheel_lacks_makefile() -> bool:
    """Whether ``compile_helpers`` would run make where there is no Makefile, and end the job."""
    found = importlib.util.find_spec("megatron.core.datasets")
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    return bool(folders) and not any(os.path.exists(os.path.join(folder, "Makefile")) for folder in folders)


COMPILE_HELPERS = wrap(
    id="upstream.compile-helpers",
    symbol="megatron.core.datasets.utils:compile_helpers",
    signature="()",
    reason="the wheel has the built helpers but no Makefile, so the original ends the job; until the wheel has one",
    build=_build_compile_helpers,
)

ROWS: tuple[Seam, ...] = (
    COMPILE_HELPERS,
    wrap(
        id="upstream.adam-step-when-empty",
        symbol=f"{_OPTIMIZER}.state_dict",
        signature="(self)",
        reason="with torch's AdamW it asserts that state exists, so a checkpoint cannot be loaded into a new optimizer",
        build=_build_state_dict,
    ),
    wrap(
        id="upstream.adam-shared-step",
        symbol=f"{_OPTIMIZER}.load_state_dict",
        signature="(self, state_dict)",
        reason="gives all parameters one shared step tensor, which AdamW then advances once per parameter",
        build=_build_load_state_dict,
    ),
    wrap(
        id="upstream.adam-step-on-load",
        symbol=f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
        signature="(self, model_param, tensors)",
        reason="loads a dummy step or misses it, and writes to an fp32 leaf under autograd",
        build=_build_set_states,
    ),
    wrap(
        id="upstream.sync-save-queue",
        symbol="megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
        signature="(mp_mode='spawn')",
        reason="starts one more interpreter per rank also for a synchronous save, left over when the rank is killed",
        build=_build_results_queue,
    ),
    wrap(
        id="upstream.torch-norm-sequence-parallel",
        symbol="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        signature="(cls, config, hidden_size, eps=1e-05, persist_layer_norm=False, zero_centered_gamma=False, "
        "normalization='LayerNorm')",
        reason="refuses sequence parallelism, although only a mark on its parameters is missing",
        build=_build_torch_norm,
    ),
)
"""Slips of Megatron that are not about the CPU."""
