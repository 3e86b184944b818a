"""The norm of gradients does not depend on who owns what of them, where the job is to be equal to the last bit."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_elas.host import gradient_norm
from megatron_elas.host.gradient_norm import wrap_gradient_norm
from megatron_elas.runtime.exact_sums import sum_squares
from megatron_elas.spec.buckets import CUT
from megatron_elas.spec.consistency import ConsistencyLevel

GRADIENT = torch.randn(40 * CUT + 5, generator=torch.Generator().manual_seed(1)) * 1e3


def attach(monkeypatch: pytest.MonkeyPatch, level: ConsistencyLevel, others: list[torch.Tensor]) -> None:
    """Be in a job of this level; ``others``: what the other workers own."""
    monkeypatch.setattr(gradient_norm, "attachment", lambda: SimpleNamespace(job=SimpleNamespace(consistency=level)))

    def all_reduce(row: torch.Tensor, group: object) -> None:
        assert group == "world"
        row += sum_squares(others)

    monkeypatch.setattr(gradient_norm.dist, "all_reduce", all_reduce)


def original(gradients: Any, norm_type: Any = 2, grad_stats_parallel_group: Any = None) -> str:
    return f"Megatron's, {norm_type}"


@pytest.mark.parametrize("edges", [(), (1,), (39,), (2, 17, 40)])
def test_any_cut_gives_the_same_norm(edges: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    mine, *others = GRADIENT.tensor_split([edge * CUT for edge in edges])
    attach(monkeypatch, "bitwise", others)
    norm = wrap_gradient_norm(original)([mine], grad_stats_parallel_group="world")
    assert norm == float(torch.linalg.vector_norm(GRADIENT.double()).float())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_of_what_is_not_finite_is_not_finite(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    attach(monkeypatch, "bitwise", [torch.tensor([value])])
    norm = wrap_gradient_norm(original)([GRADIENT], 2.0, "world")
    assert math.isnan(norm) if math.isnan(value) else norm == math.inf


def test_megatrons_own_is_used_at_other_levels_and_for_the_largest_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    attach(monkeypatch, "numerical", [])
    assert wrap_gradient_norm(original)([GRADIENT]) == "Megatron's, 2"
    attach(monkeypatch, "bitwise", [])
    assert wrap_gradient_norm(original)([GRADIENT], math.inf) == f"Megatron's, {math.inf}"
    with pytest.raises(AssertionError, match="asked for 3"):
        wrap_gradient_norm(original)([GRADIENT], 3)
