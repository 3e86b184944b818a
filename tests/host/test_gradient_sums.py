"""Sums of gradients in fixed point: what fits, what runs again, what is not a number, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_elas.host import gradient_sums
from megatron_elas.host.gradient_sums import GradientSums, PassesAgain
from megatron_elas.spec.catalogue import Catalogue, Parameter
from megatron_elas.spec.errors import StateInvalid
from megatron_elas.spec.exponents import UNKNOWN

SHAPES = {
    "embedding.word_embeddings.weight": (16, 8),
    "decoder.layers.0.mlp.weight": (8, 24),
    "output_layer.weight": (16, 8),
}
"""A model of one layer; its embedding is tied, and there are two of it as if it had two stages."""
EMBEDDING, LAYER, HEAD = SHAPES
BUCKET = 256
REPLICAS = 2


class Model(torch.nn.Module):
    """Stands for a DDP object, with a bucket of 256 elements for every parameter."""

    def __init__(self, rank: int = 0, **config: bool) -> None:
        super().__init__()
        self.module = torch.nn.Module()
        self.named = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        self.module.named_parameters = lambda: self.named.items()  # type: ignore[assignment, method-assign]
        gradients = torch.zeros(BUCKET * len(SHAPES))
        index, buckets, groups = {}, [], []
        defaults = {"overlap_grad_reduce": False, "check_for_nan_in_grad": False, "check_for_large_grads": False}
        for number, param in enumerate(self.named.values()):
            start = number * BUCKET
            index[param] = (start, start + param.numel(), number)
            param.main_grad = gradients[start : start + param.numel()].view(param.shape)  # type: ignore[attr-defined]
            bucket = Bucket(
                grad_data=gradients[start : start + BUCKET],
                offset=start,
                params_list=[param],
                param_to_index={param: (0, param.numel())},
            )
            buckets.append(bucket)
            group = Group(
                buckets=[bucket],
                ddp_config=SimpleNamespace(**(defaults | config)),
                intra_distributed_optimizer_instance_group=None,
                intra_distributed_optimizer_instance_size=REPLICAS,
                intra_distributed_optimizer_instance_rank=rank,
                grad_reduce_handle=None,
                is_first_batch=True,
            )
            groups.append(group)
        self.buffers = [Bucket(grad_data=gradients, buckets=buckets, param_index_map=index)]  # type: ignore[assignment]
        self.expert_parallel_buffers: list[Any] = []
        self.bucket_groups, self.expert_parallel_bucket_groups = groups, []


class Bucket(SimpleNamespace):
    __hash__ = object.__hash__


class Group(Bucket):
    checked: tuple[torch.Tensor, ...] = ()

    def check_grads(self, check_for_nan_or_inf: bool, check_for_large: bool) -> None:
        Group.checked = tuple(bucket.grad_data.norm(p=2) for bucket in self.buckets)


def catalogue() -> Catalogue:
    units = [(Parameter(name=name, count=shape[0] * shape[1], tied=name != LAYER),) for name, shape in SHAPES.items()]
    return Catalogue(units=tuple(units))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All collectives are this worker's own; they are noted."""
    calls: list[str] = []
    monkeypatch.setattr(gradient_sums.dist, "all_reduce", lambda board, op: calls.append("all_reduce"))
    monkeypatch.setattr(gradient_sums.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        gradient_sums.dist, "reduce_scatter_tensor", lambda own, total, **how: calls.append("reduce_scatter")
    )
    monkeypatch.setattr(gradient_sums, "_coalescing_manager", lambda group, async_ops: nullcontext())
    return calls


def make(model: Model, num_microbatches: int = 8) -> GradientSums:
    sums = GradientSums(num_microbatches)
    sums.follow([model], catalogue())
    return sums


def gradients(seed: int, size: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def run_passes(sums: GradientSums, model: Model, step: int, parts: Sequence[dict[str, torch.Tensor]]) -> None:
    """The passes of a step, once, up to its gradients."""
    sums.begin(step, epoch=0)
    sums.clear(model)
    for part in parts:
        for name, gradient in part.items():
            sums.add(model.named[name], gradient)
    sums.settle()
    for group in model.bucket_groups:
        sums.reduce(group)
        sums.convert(group)


def run_step(sums: GradientSums, model: Model, step: int, parts: Sequence[dict[str, torch.Tensor]]) -> int:
    """As ``train_step``. Gives how often the passes ran."""
    captured = sums.capture()
    for runs in range(1, 10):
        try:
            run_passes(sums, model, step, parts)
        except PassesAgain as again:
            sums.restore(captured)
            sums.retry(again)
        else:
            return runs
    raise AssertionError("no end")


def owned(model: Model) -> dict[str, torch.Tensor]:
    """What this worker owns of every gradient."""
    half = BUCKET // REPLICAS
    rank = model.bucket_groups[0].intra_distributed_optimizer_instance_rank
    return {
        name: param.main_grad.detach().reshape(-1)[rank * half : (rank + 1) * half].clone()  # type: ignore[attr-defined]
        for name, param in model.named.items()
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_are_the_sums_whatever_their_order(alone: list[str], rank: int) -> None:
    parts = [gradients(seed, size=10.0**-seed) for seed in range(5)]
    results = []
    for order in (parts, parts[::-1], parts[2:] + parts[:2]):
        model = Model(rank)
        sums = make(model)
        assert run_step(sums, model, 7, order) == 2, "exponents are found out in the first step"
        assert run_step(sums, model, 8, order) == 1
        results.append(owned(model))
    for name in SHAPES:
        exact = sum(part[name].double() for part in parts).reshape(-1)
        want = exact[rank * 128 : (rank + 1) * 128]  # type: ignore[index]
        assert torch.allclose(results[0][name].double(), want, rtol=2**-22, atol=1e-9)
        assert torch.equal(results[0][name], results[1][name])
        assert torch.equal(results[0][name], results[2][name])
    assert results[0][LAYER].abs().sum() > 0


def test_both_ends_of_a_tied_embedding_have_one_exponent(alone: list[str]) -> None:
    model = Model()
    sums = make(model)
    part = gradients(1)
    part[HEAD] *= 1000
    run_step(sums, model, 0, [part])
    step, saved = sums.to_save(1)
    assert step == 1
    assert saved[EMBEDDING] == saved[HEAD] < saved[LAYER]


@pytest.mark.parametrize(("size", "runs"), [(2.0**6, 1), (2.0**12, 2), (2.0**-8, 1), (2.0**-16, 2), (0.0, 1)])
def test_passes_run_again_when_gradients_are_far_from_those_of_the_step_before(
    alone: list[str], size: float, runs: int
) -> None:
    model = Model()
    sums = make(model)
    run_step(sums, model, 0, [gradients(0), gradients(1)])
    parts = [gradients(0), gradients(1)]
    for part in parts:
        part[LAYER] *= size
    assert run_step(sums, model, 1, parts) == runs
    want = parts[0][LAYER].double() + parts[1][LAYER].double()
    assert torch.allclose(owned(model)[LAYER].double(), want.reshape(-1)[:128], rtol=2**-22, atol=size * 2**-26)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen_and_not_learned(alone: list[str], value: float) -> None:
    model = Model()
    sums = make(model)
    run_step(sums, model, 0, [gradients(0)])
    _, before = sums.to_save(1)
    bad = gradients(1)
    bad[LAYER][0, 3] = value
    bad[EMBEDDING] *= 1e9
    assert run_step(sums, model, 1, [gradients(2), bad]) == 1
    found = owned(model)
    assert found[LAYER].isnan().all()
    assert found[EMBEDDING].isnan().all(), "its sum overflowed"
    assert sums.to_save(2) == (2, before)
    assert run_step(sums, model, 2, [gradients(3)]) == 1
    assert owned(model)[LAYER].isfinite().all()


def test_gradients_that_are_others_when_the_passes_run_again_end_the_job(alone: list[str]) -> None:
    model = Model()
    sums = make(model)
    captured = sums.capture()
    with pytest.raises(StateInvalid, match="not deterministic"):
        for attempt in range(10):
            try:
                run_passes(sums, model, 0, [gradients(0, size=1000.0 ** (attempt % 2 + 1))])
            except PassesAgain as again:
                sums.restore(captured)
                sums.retry(again)


def test_a_step_run_again_uses_the_exponents_that_it_had(alone: list[str]) -> None:
    model = Model()
    sums = make(model)
    run_step(sums, model, 0, [gradients(0)])
    captured = sums.capture()
    run_step(sums, model, 1, [gradients(1, size=20.0)])
    used = sums._exponents
    run_step(sums, model, 2, [gradients(2)])
    sums.restore(captured)
    run_step(sums, model, 1, [gradients(1, size=20.0)])
    assert sums._exponents == used


def test_exponents_of_another_step_are_not_known_and_a_checkpoints_are(alone: list[str]) -> None:
    model = Model()
    sums = make(model)
    run_step(sums, model, 4, [gradients(0)])
    saved = sums.to_save(5)
    sums.begin(6, epoch=0)
    assert set(sums._exponents) == {UNKNOWN}

    other = make(Model())
    other.load(saved)
    other.begin(5, epoch=3)
    assert other._exponents == sums._next.exponents
    late = make(Model())
    late.load(saved)
    late.begin(6, epoch=3)
    assert set(late._exponents) == {UNKNOWN}
    late.load(None)
    late.begin(7, epoch=3)
    assert set(late._exponents) == {UNKNOWN}


def test_a_step_after_a_return_to_a_checkpoint_may_run_again(alone: list[str]) -> None:
    model = Model()
    sums = make(model)
    run_step(sums, model, 4, [gradients(0)])
    saved = sums.to_save(5)
    run_step(sums, model, 5, [gradients(1)])
    used = sums._exponents
    run_step(sums, model, 6, [gradients(2)])
    sums.load(saved)
    captured = sums.capture()
    run_passes(sums, model, 5, [gradients(1)])
    sums.restore(captured)
    run_passes(sums, model, 5, [gradients(1)])
    assert sums._exponents == used


def test_a_checkpoint_read_before_the_model_is_known(alone: list[str]) -> None:
    model = Model()
    sums = make(model)
    run_step(sums, model, 4, [gradients(0)])
    early = GradientSums(8)
    early.load(sums.to_save(5))
    early.follow([Model()], catalogue())
    assert early.capture() == sums.capture()


def test_who_comes_late_is_told(monkeypatch: pytest.MonkeyPatch, alone: list[str]) -> None:
    model = Model()
    sums = make(model)
    run_step(sums, model, 0, [gradients(0)])
    known = sums._next.exponents

    def others_know(board: torch.Tensor, op: Any) -> None:
        torch.maximum(board, torch.tensor(known, dtype=board.dtype), out=board)

    monkeypatch.setattr(gradient_sums.dist, "all_reduce", others_know)
    late = make(Model())
    late.begin(1, epoch=2)
    assert late._exponents == known
    monkeypatch.setattr(gradient_sums.dist, "all_reduce", lambda board, op: pytest.fail("once per epoch"))
    late.begin(1, epoch=2)


@pytest.mark.parametrize("free", [False, True])
def test_totals_follow_buffers_that_are_cut_otherwise(alone: list[str], free: bool) -> None:
    model = Model()
    sums = make(model)
    run_step(sums, model, 0, [gradients(0)])
    before = vars(model.buffers[0])[gradient_sums.TOTALS]  # type: ignore[index]
    sums.forget_places(free=free)
    assert (gradient_sums.TOTALS in vars(model.buffers[0])) == (not free)  # type: ignore[index]
    run_step(sums, model, 1, [gradients(0)])
    after = vars(model.buffers[0])[gradient_sums.TOTALS]  # type: ignore[index]
    assert (after is before) == (not free)
    model.buffers = None  # type: ignore[assignment]
    del vars(model)["buffers"]
    sums.forget_places(free=True)  # of a model that is being made


@pytest.mark.parametrize(
    ("config", "spoil", "expected"),
    [
        ({"check_for_nan_in_grad": True}, lambda part: None, lambda norm: bool(norm.isfinite())),
        ({"check_for_nan_in_grad": True}, lambda part: part[HEAD].fill_(torch.nan), lambda norm: bool(norm.isnan())),
        ({"check_for_nan_in_grad": True}, lambda part: part[HEAD].fill_(torch.inf), lambda norm: bool(norm.isinf())),
        (
            {"check_for_large_grads": True},
            lambda part: None,
            lambda norm: abs(float(norm) - float(gradients(5)[HEAD].norm())) < 1e-4,
        ),
    ],
    ids=["calm", "nan", "inf", "large"],
)
def test_megatrons_checks_look_at_the_sums(
    alone: list[str],
    config: dict[str, bool],
    spoil: Callable[[dict[str, torch.Tensor]], Any],
    expected: Callable[[torch.Tensor], bool],
) -> None:
    model = Model(**config)
    sums = make(model)
    run_step(sums, model, 0, [gradients(0)])
    part = gradients(5)
    spoil(part)
    run_passes(sums, model, 1, [part])
    assert len(Group.checked) == 1
    assert expected(Group.checked[0])


def test_a_reduction_begins_once_in_the_first_step(alone: list[str]) -> None:
    model = Model(overlap_grad_reduce=True)
    sums = make(model)
    sums.begin(0, epoch=0)
    sums.clear(model)
    group = model.bucket_groups[0]
    sums.reduce(group)
    group.grad_reduce_handle = object()
    began = alone.count("reduce_scatter")
    sums.reduce(group)
    assert alone.count("reduce_scatter") == began == 1
    group.is_first_batch = False
    with pytest.raises(AssertionError, match="under way"):
        sums.reduce(group)
