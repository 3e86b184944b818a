"""Puts loaders that follow the plan in the place of Megatron's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_elas.host.attachment import attachment
from megatron_elas.host.data import SeekableLoader
from megatron_elas.spec.items import CellItems

LOADER_SETTINGS = ("num_workers", "collate_fn", "pin_memory", "worker_init_fn", "generator")
"""Taken over from Megatron's loader. The loader itself is let go: its sampler knows a rank that may change."""


def wrap_dataset_builder(original: Any) -> Any:
    """``BlendedMegatronDatasetBuilder.__init__`` for data sets on every worker: the indices are mapped, not copied."""

    @functools.wraps(original)
    def __init__(self: Any, cls: Any, sizes: Any, is_built_on_rank: Any, config: Any) -> None:
        original(self, cls, sizes, lambda: True, config)

    return __init__


def wrap_data_loaders(original: Any) -> Any:
    """``build_train_valid_test_data_loaders`` with loaders that follow the plan."""

    @functools.wraps(original)
    def build_train_valid_test_data_loaders(build_train_valid_test_datasets_provider: Any) -> Any:
        from megatron.training import get_args

        attached, args = attachment(), get_args()
        # Without that mark Megatron asks the first lane only.
        provider = functools.partial(build_train_valid_test_datasets_provider)
        provider.is_distributed = True  # type: ignore[attr-defined]
        train, valid, test = original(provider)
        size, batch_size = args.eval_micro_batch_size, args.eval_global_batch_size

        def step_items() -> CellItems:
            return attached.route.step_items

        def eval_items() -> CellItems:
            return attached.route.evaluation_items(batch_size // size, size)

        def observe(samples: tuple[int, ...], batch: Any) -> None:
            attached.samples.extend(samples)
            if attached.audit is not None:
                attached.audit.observe_batch(samples, batch)

        attached.train_loader = _make_seekable(
            train, step_items, args.global_batch_size, args.consumed_train_samples, observe
        )
        if valid is not None:
            valid = [_make_seekable(v, eval_items, batch_size, args.consumed_valid_samples) for v in valid]
        test = _make_seekable(test, eval_items, batch_size, 0)
        return attached.train_loader, valid, test

    return build_train_valid_test_data_loaders


def _make_seekable(
    stock: Any,
    items: Callable[[], CellItems],
    batch_size: int,
    consumed: int,
    observe: Callable[[tuple[int, ...], Any], None] | None = None,
) -> SeekableLoader | None:
    """A loader over the same dataset that follows the plan; None for None."""
    if stock is None:
        return None
    dataset, settings = stock.dataset, {name: getattr(stock, name) for name in LOADER_SETTINGS}
    return SeekableLoader(
        dataset=dataset,
        batch_size=batch_size,
        consumed=consumed,
        items=items,
        make_loader=lambda sampler: torch.utils.data.DataLoader(dataset, batch_sampler=sampler, **settings),
        observe=observe,
    )
