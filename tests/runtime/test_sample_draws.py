"""What is drawn for several samples together is, for each of them, what it would get alone."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from megatron_elas.runtime.sample_draws import SampleDraws, sample_dim
from megatron_elas.spec.errors import BadUsage

S, B, H = 5, 3, 4
"""Tokens, samples, features."""

Draw = Callable[[int], torch.Tensor]
"""Of so many samples, in the shape (S, samples, H) unless said otherwise."""

DRAWS: dict[str, Draw] = {
    "rand": lambda b: torch.rand(S, b, H),
    "randn, many numbers": lambda b: torch.randn(S, b, 40),
    "randint": lambda b: torch.randint(0, 100, (S, b, H)),
    "rand_like": lambda b: torch.rand_like(torch.zeros(S, b, H)),
    "rand_like of a transposed tensor": lambda b: torch.rand_like(torch.zeros(b, S, H).transpose(0, 1)),
    "bernoulli": lambda b: torch.bernoulli(torch.full((S, b, H), 0.5)),
    "in place": lambda b: torch.empty(S, b, 40).normal_(),
    "in place, heads first": lambda b: torch.empty(b, 2, S, S).uniform_().movedim(0, 1),
    "normal": lambda b: torch.normal(torch.zeros(S, b, H), torch.ones(S, b, H)),
    "functional dropout": lambda b: torch.nn.functional.dropout(torch.ones(S, b, H), 0.5),
    "feature dropout": lambda b: torch.nn.functional.alpha_dropout(torch.ones(S, b, H), 0.5, training=True),
    "multinomial": lambda b: torch.multinomial(torch.ones(b, 20), 3).view(1, b, 3),
    "gumbel": lambda b: torch.nn.functional.gumbel_softmax(torch.zeros(S, b, H)),
}


class Samples:
    """Streams of so many samples, each seeded by its number, in the default generator."""

    def __init__(self, numbers: list[int]) -> None:
        self.states = [torch.Generator().manual_seed(number).get_state() for number in numbers]

    @contextlib.contextmanager
    def turn(self, position: int) -> Iterator[None]:
        torch.set_rng_state(self.states[position])
        yield
        self.states[position] = torch.get_rng_state()

    def draw(self, draw: Draw) -> list[torch.Tensor]:
        """Twice."""
        with SampleDraws(lambda: len(self.states), self.turn):
            return [draw(len(self.states)), draw(len(self.states))]


@pytest.fixture(autouse=True)
def _generator() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.mark.parametrize("name", DRAWS)
def test_a_sample_gets_what_it_would_get_alone(name: str) -> None:
    draw = DRAWS[name]
    together = Samples([7, 8, 9]).draw(draw)
    for position, number in enumerate([7, 8, 9]):
        torch.manual_seed(number)
        for drawn in together:
            assert torch.equal(drawn[:, position : position + 1], draw(1))
    assert not torch.equal(*together)


def test_gradients_go_through_what_is_cut() -> None:
    values = torch.ones(S, B, H, requires_grad=True)
    with SampleDraws(lambda: B, Samples([1, 2, 3]).turn):
        dropped = torch.nn.functional.dropout(values * 3, 0.5)
    dropped.sum().backward()
    assert torch.equal(values.grad, dropped.detach())  # type: ignore[arg-type]


def test_draws_from_a_generator_of_their_own_and_other_functions_are_left_alone() -> None:
    samples = Samples([1, 2, 3])
    before = [state.clone() for state in samples.states]
    with SampleDraws(lambda: B, samples.turn):
        own = torch.rand(2, generator=torch.Generator().manual_seed(5))
        assert torch.arange(7).sum() == 21
    assert torch.equal(own, torch.rand(2, generator=torch.Generator().manual_seed(5)))
    assert all(torch.equal(a, b) for a, b in zip(before, samples.states, strict=True))


@pytest.mark.parametrize(
    ("draw", "shape"),
    [
        (lambda: torch.rand(7), r"\[7\]"),
        (lambda: torch.rand(B, S, H), r"\[3, 5, 4\]"),
        (lambda: torch.randperm(B), r"\[\]"),
        (lambda: torch.empty(2, 2, S, S).normal_(), r"\[2, 2, 5, 5\]"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_remedy(draw: Callable[[], torch.Tensor], shape: str) -> None:
    with (
        SampleDraws(lambda: B, Samples([1, 2, 3]).turn),
        pytest.raises(BadUsage, match=rf"shape {shape} for an item of 3 samples: .* --elastic-rng megatron"),
    ):
        draw()


def test_samples_lie_where_megatron_has_them() -> None:
    assert [sample_dim(shape, B, "x") for shape in ((B, 2, S, S), (S, B, H), (B, H), (B,))] == [0, 1, 0, 0]


@pytest.mark.slow
def test_torchs_compiler_is_not_imported() -> None:
    source = (
        "import contextlib, sys, torch\n"
        "from megatron_elas.runtime.sample_draws import SampleDraws\n"
        "with SampleDraws(lambda: 1, lambda i: contextlib.nullcontext()):\n"
        "    torch.rand(4, 1, 4)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True)
