"""What Megatron itself needs to train on the CPU platform, beyond the stand-in for ``torch.cuda``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_elas.host.patching import Seam, replace, wrap


def _set_rng_state(new_state: Any, device: Any = -1, graph_safe: bool = False) -> None:
    """Set the state of the one generator there is."""
    import torch

    torch.random.default_generator.set_state(new_state)


def _build_data_loader(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
        import torch
        from megatron.training.global_vars import get_args

        loader = original(dataset, consumed_samples)
        if isinstance(loader, torch.utils.data.DataLoader):
            loader.generator = torch.Generator().manual_seed(get_args().seed)
            loader.pin_memory = False
        return loader

    return build_pretraining_data_loader


ROWS: tuple[Seam, ...] = (
    replace(
        id="cpu.rng-state",
        symbol="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        signature="(new_state, device=-1, graph_safe=False)",
        reason="queues the change until CUDA is initialised, so that on the CPU the state would never be set",
        source_sha256="b179c9d95438b61c1d9b58e8e13cc6534f2ae2f870d991c42438de53829ed398",
        new=_set_rng_state,
    ),
    wrap(
        id="cpu.data-loader-generator",
        symbol="megatron.training.datasets.data_samplers:build_pretraining_data_loader",
        signature="(dataset, consumed_samples)",
        reason="takes its seed from the CPU generator on TP rank 0 only; here that is also the dropout generator, "
        "which must stay equal on all TP ranks",
        build=_build_data_loader,
    ),
)
"""Only applied on the CPU platform."""
