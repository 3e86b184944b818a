"""Megatron's and torch's own ways to draw and to recompute, with the streams of samples in force."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_elas.host import attachment, patching
from megatron_elas.runtime.random_streams import Draw, RandomStreams

S, B, H, HEADS = 6, 3, 8, 2
SAMPLES = [11, 12, 13]
IDS = (
    "elastic.dropout", "elastic.tracker-fork", "elastic.tracker-get-states",
    "elastic.tracker-set-states", "elastic.torch-checkpoint",
)  # fmt: skip


class Job:
    """What there is of a job: Megatron's tracker, our streams, and what they drew."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        self.lane = 0
        self.masks: dict[Draw, torch.Tensor] = {}
        self.again: list[Draw] = []
        self.renew()

    def renew(self) -> None:
        """Forget everything; as another process would begin."""
        from megatron_elas.host.random_seams import DeviceGenerator

        self.masks.clear()
        self.again.clear()
        self.streams = RandomStreams(1234, 4, DeviceGenerator())
        self.streams.observe = self._note
        attachment.detach()
        attachment.attach(SimpleNamespace(streams=self.streams))  # type: ignore[arg-type]

    def _note(self, draw: Draw, mask: torch.Tensor, recomputing: bool) -> None:
        if recomputing:
            self.again.append(draw)
            assert torch.equal(self.masks[draw], mask), f"another mask for {draw}"
        else:
            assert draw not in self.masks
            self.masks[draw] = mask.clone()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """With the CPU's generator in the place of the device's."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random

    from megatron_elas.host import elastic_seams

    for owner in (torch.cuda, torch.cuda.random):
        monkeypatch.setattr(owner, "get_rng_state", lambda device="cuda": torch.get_rng_state())
        monkeypatch.setattr(owner, "manual_seed", lambda seed: torch.random.default_generator.manual_seed(seed))
    monkeypatch.setattr(
        megatron_random, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    )
    before = torch.get_rng_state()
    with patching.apply([row for row in elastic_seams.ROWS if row.id in IDS]):
        tracker = megatron_random.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 5)
        tracker.add("data-parallel-rng", 6)
        monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER", tracker)
        monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
        made = Job(tracker)
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: made.lane)
        yield made
        attachment.detach()
    torch.set_rng_state(before)


def run_without(function: Callable[..., torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """No recomputation."""
    return function(values)


def run_in_megatron(function: Callable[..., torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """Megatron's, of whole layers and of attention."""
    from megatron.core.tensor_parallel.random import checkpoint

    return checkpoint(function, False, values)


def run_in_torch(function: Callable[..., torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """Torch's, as a script may call it."""
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, values, use_reentrant=False)  # type: ignore[no-any-return]


def run_in_torch_reentrant(function: Callable[..., torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """And the older one."""
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, values, use_reentrant=True)  # type: ignore[no-any-return]


RECOMPUTATIONS = (run_without, run_in_megatron, run_in_torch, run_in_torch_reentrant)


def draw_all(job: Job, values: torch.Tensor, *, noise: bool = True) -> torch.Tensor:
    """Dropout outside and inside of the tracker, and a user's noise there."""
    values = torch.nn.functional.dropout(values, 0.1) * 2
    with job.tracker.fork():
        values = torch.nn.Dropout(0.2)(values)
        if noise:
            values = values * (1 + torch.rand_like(values))
    return torch.nn.functional.dropout(values, 0.3)


def train(job: Job, run: Callable[..., torch.Tensor], samples: list[int], *, outside: bool) -> list[torch.Tensor]:
    """Outputs and gradients of a pass; ``outside``: with the tracker around it all, as with sequence parallelism."""
    values = torch.ones(S, len(samples), H).cumsum(0).requires_grad_()
    with job.streams.forward_pass(3, samples), job.tracker.fork() if outside else contextlib.nullcontext():
        with job.streams.layer(1):
            output = run(lambda x: draw_all(job, x), values)
        with job.streams.layer(2):
            output = run(lambda x: draw_all(job, x), output)
    output.sum().backward()
    assert job.streams.place is None
    return [output.detach(), values.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("run", RECOMPUTATIONS)
def test_recomputation_draws_what_was_drawn(run: Callable[..., torch.Tensor], outside: bool, job: Job) -> None:
    plain = train(job, run_without, SAMPLES, outside=outside)
    assert not job.again
    job.renew()
    found = train(job, run, SAMPLES, outside=outside)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, plain, strict=True))
    assert sorted(job.again) == sorted(job.masks) if run is not run_without else not job.again
    for position, sample in enumerate(SAMPLES):
        job.renew()
        alone = train(job, run, [sample], outside=outside)
        for ours, theirs in zip(alone, plain, strict=True):
            assert torch.equal(ours[:, 0], theirs[:, position])


def test_attention_that_is_recomputed_inside_of_layers_that_are(job: Job) -> None:
    def layer(values: torch.Tensor) -> torch.Tensor:
        return draw_all(job, run_in_megatron(lambda x: draw_all(job, x), values), noise=False)

    def run(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        values = torch.ones(S, B, H, requires_grad=True)
        with job.streams.forward_pass(0, SAMPLES), job.streams.layer(1):
            output = function(layer, values)
        output.sum().backward()
        assert values.grad is not None
        return values.grad

    plain = run(run_without)
    job.renew()
    assert torch.equal(run(run_in_megatron), plain)


def test_lanes_draw_differently_under_the_trackers_own_stream_only(job: Job) -> None:
    def run(lane: int, name: str) -> torch.Tensor:
        job.renew()
        job.lane = lane
        with job.streams.forward_pass(0, SAMPLES), job.tracker.fork(name):
            return torch.cat([torch.nn.functional.dropout(torch.ones(S, B, H), 0.5), torch.rand(S, B, H)])

    assert not torch.equal(run(0, "model-parallel-rng"), run(1, "model-parallel-rng"))
    assert torch.equal(run(0, "data-parallel-rng"), run(1, "data-parallel-rng"))


def test_compiled_dropout_asks_the_streams_too(job: Job) -> None:
    from megatron_elas.host.random_seams import wrap_fused_dropout

    def compiled(x_with_bias: Any, residual: Any, prob: float) -> Any:
        values, bias = x_with_bias
        return torch.dropout(values + bias, prob, True) + residual  # which asks nobody

    values, bias, residual = torch.ones(S, B, H), torch.full((H,), 0.5), torch.zeros(S, B, H)
    fused = wrap_fused_dropout(compiled)
    with job.streams.forward_pass(0, SAMPLES):
        output = fused((values, bias), residual, 0.5)
    assert [draw.sample for draw in job.masks] == SAMPLES
    masks = torch.stack(list(job.masks.values()), dim=1)
    assert torch.equal(output, masks * 1.5 * 2)
    torch.manual_seed(3)
    outside = fused((values, bias), residual, 0.5)
    torch.manual_seed(3)
    assert torch.equal(outside, compiled((values, bias), residual, 0.5))


@pytest.mark.parametrize("training", [False, True])
def test_outside_of_passes_and_in_evaluations_all_is_as_ever(training: bool, job: Job) -> None:
    torch.manual_seed(7)
    with contextlib.nullcontext() if training else job.streams.forward_pass(0, SAMPLES):
        dropped = torch.nn.functional.dropout(torch.ones(S, B, H), 0.5, training)
    torch.manual_seed(7)
    assert torch.equal(dropped, torch.dropout(torch.ones(S, B, H), 0.5, training))
    assert not job.masks


def test_the_tracker_goes_on_as_ever_between_passes_and_stands_still_in_them(job: Job) -> None:
    before = job.tracker.get_states()["model-parallel-rng"].clone()
    with job.streams.forward_pass(0, SAMPLES), job.tracker.fork():
        torch.rand(S, B, H)
    assert torch.equal(job.tracker.get_states()["model-parallel-rng"], before)
    with job.tracker.fork():
        first = torch.rand(9)
    assert not torch.equal(job.tracker.get_states()["model-parallel-rng"], before)
    assert torch.equal(first, torch.rand(9, generator=torch.Generator().manual_seed(5)))


def test_a_place_is_among_the_states_in_passes_only(job: Job) -> None:
    assert set(job.tracker.get_states()) == {"model-parallel-rng", "data-parallel-rng"}
    with job.streams.forward_pass(0, SAMPLES):
        states = job.tracker.get_states()
        assert len(states) == 3
    job.tracker.set_states(states)
    assert set(job.tracker.states_) == {"model-parallel-rng", "data-parallel-rng"}
    assert job.streams.place is not None
    job.tracker.set_states(job.tracker.states_)
    assert job.streams.place is None


def test_states_that_come_back_in_the_pass_that_they_are_of_are_no_recomputation(job: Job) -> None:
    with job.streams.forward_pass(0, SAMPLES):
        job.tracker.set_states(job.tracker.get_states())
        torch.nn.functional.dropout(torch.ones(S, B, H), 0.5)
    assert len(job.masks) == B and not job.again


def test_an_unknown_stream_is_refused_as_megatron_refuses_it(job: Job) -> None:
    unknown = pytest.raises(Exception, match="cuda rng state none is not added")
    with job.streams.forward_pass(0, SAMPLES), unknown, job.tracker.fork("none"):
        pass


def test_streams_of_megatron_are_left_to_it(job: Job) -> None:
    attachment.detach()
    attachment.attach(SimpleNamespace(streams=None))  # type: ignore[arg-type]
    torch.manual_seed(7)
    dropped = torch.nn.functional.dropout(torch.ones(S, B, H), 0.5)
    torch.manual_seed(7)
    assert torch.equal(dropped, torch.dropout(torch.ones(S, B, H), 0.5, True))
    assert set(job.tracker.get_states()) == {"model-parallel-rng", "data-parallel-rng"}
