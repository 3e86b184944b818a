"""What a sample draws depends on its coordinates alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_elas.runtime.random_streams import Draw, RandomStreams, sample_root, seed64
from megatron_elas.spec.errors import BadUsage

S, H, HEADS = 6, 8, 2
LAYERS = 3

Masks = dict[Draw, torch.Tensor]


@pytest.fixture(autouse=True)
def _generator() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def make_streams(seed: int = 1234) -> tuple[RandomStreams, Masks]:
    """Streams and the masks that they have drawn."""
    masks: Masks = {}

    def note(draw: Draw, mask: torch.Tensor, recomputing: bool) -> None:
        assert recomputing or draw not in masks
        assert draw not in masks or torch.equal(masks[draw], mask)
        masks[draw] = mask.clone()

    streams = RandomStreams(seed, LAYERS, torch.random.default_generator)
    streams.observe = note
    return streams, masks


def run_layer(streams: RandomStreams, number: int, samples: int, lane: int, noise: list[torch.Tensor]) -> None:
    """Draws as a layer of Megatron does, and noise of the user's own inside of the tracker."""
    with streams.layer(number):
        with streams.fork(lane):
            streams.dropout(torch.ones(samples, HEADS, S, S), 0.1)
            noise.append(torch.randn(S, samples, H))
            noise.append(torch.rand_like(noise[-1]))
        streams.dropout(torch.ones(S, samples, H), 0.2)


def run_model(
    streams: RandomStreams, samples: list[int], *, step: int = 4, lane: int = 0, layers: tuple[int, int] = (1, LAYERS)
) -> list[torch.Tensor]:
    """A pass over the layers [first, last]. Gives the noise."""
    noise: list[torch.Tensor] = []
    with streams.forward_pass(step, samples):
        if layers[0] == 1:
            streams.dropout(torch.ones(S, len(samples), H), 0.1)
        for number in range(layers[0], layers[1] + 1):
            run_layer(streams, number, len(samples), lane, noise)
        if layers[1] == LAYERS:
            streams.dropout(torch.ones(S, len(samples), H), 0.1)
    assert streams.place is None
    return noise


def test_masks_and_noise_of_a_sample_are_the_same_beside_any_neighbours() -> None:
    streams, together = make_streams()
    noise = run_model(streams, [40, 17, 23])
    for position, sample in enumerate([40, 17, 23]):
        streams, alone = make_streams()
        own = run_model(streams, [sample])
        assert alone.keys() == {draw for draw in together if draw.sample == sample}
        assert all(torch.equal(together[draw], mask) for draw, mask in alone.items())
        for ours, theirs in zip(own, noise, strict=True):
            assert torch.equal(ours[:, 0], theirs[:, position])
    drawn = {mask.numpy().tobytes() for mask in together.values()}
    assert len(drawn) == len(together) == 3 * (2 + 2 * LAYERS)
    assert len({part.numpy().tobytes() for part in noise}) == len(noise) == 2 * LAYERS


def test_masks_and_noise_are_the_same_on_any_stages() -> None:
    whole, masks = make_streams()
    noise = run_model(whole, [5, 6])
    parts, found = make_streams()
    own = run_model(parts, [5, 6], layers=(1, 2)) + run_model(parts, [5, 6], layers=(3, 3))
    assert found.keys() == masks.keys()
    assert all(torch.equal(found[draw], mask) for draw, mask in masks.items())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(own, noise, strict=True))


@pytest.mark.parametrize("samples", [[5], [5, 6]])
def test_layers_inside_of_the_tracker_are_the_same_on_any_stages(samples: list[int]) -> None:
    """As with sequence parallelism, where a stage's layers are all inside of it."""

    def run(layers: range) -> list[torch.Tensor]:
        noise = []
        with streams.forward_pass(4, samples), streams.fork(1):
            for number in layers:
                with streams.layer(number):
                    noise.append(streams.dropout(torch.ones(S, len(samples), H), 0.5))
                    noise.append(torch.rand(S, len(samples), H))
            if layers.stop == LAYERS + 1:
                noise.append(torch.rand(S, len(samples), H))
        return noise

    streams, _ = make_streams()
    whole = run(range(1, LAYERS + 1))
    streams, _ = make_streams()
    parts = run(range(1, 2)) + run(range(2, LAYERS + 1))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parts, whole, strict=True))
    assert len({part.numpy().tobytes() for part in whole}) == len(whole)


def test_layers_count_from_one_with_the_ends_of_the_model_around_them() -> None:
    streams, masks = make_streams()
    run_model(streams, [5])
    places = [(draw.layer, draw.site, draw.lane) for draw in masks]
    assert places[0] == (0, 0, None)
    assert places[-1] == (LAYERS + 1, 0, None)
    assert [place[0] for place in places[1:-1]] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("lane", [0, 1])
def test_lanes_differ_inside_of_the_tracker_only(lane: int) -> None:
    streams, first = make_streams()
    noise = run_model(streams, [5], lane=0)
    streams, second = make_streams()
    other = run_model(streams, [5], lane=lane)
    for draw, mask in second.items():
        if draw.lane is None:
            assert torch.equal(mask, first[draw])
        else:
            assert torch.equal(mask, first[draw._replace(lane=0)]) == (lane == 0)
    assert all(torch.equal(a, b) == (lane == 0) for a, b in zip(noise, other, strict=True))


def test_every_coordinate_and_the_seed_make_another_key() -> None:
    keys = {
        seed64(sample_root(seed, step, sample), layer, site, lane)
        for seed, step, sample, layer, site, lane in itertools.product(
            (0, 1, 1234), range(3), range(4), range(4), range(4), (None, 0, 1)
        )
    }
    assert len(keys) == 3 * 3 * 4 * 4 * 4 * 3
    assert all(0 <= key < 2**64 for key in keys)


def test_keys_are_what_they_were_in_earlier_releases() -> None:
    assert seed64(sample_root(1234, 7, 1_000_000_007), 12, 2, None) == 13826218750661902799
    assert seed64(sample_root(1234, 7, 1_000_000_007), 12, 2, 1) == 4058680104412767684


@pytest.mark.parametrize("samples", [[3], [3, 9]])
def test_a_place_can_be_come_back_to(samples: list[int]) -> None:
    streams, _ = make_streams()
    kept: list[tuple[Any, torch.Tensor]] = []

    def draw() -> torch.Tensor:
        values = torch.ones(S, len(samples), H)
        return torch.cat([streams.dropout(values, 0.5), torch.rand_like(values)])

    def run() -> Iterator[torch.Tensor]:
        with streams.fork(1):
            for number in (1, 2):
                with streams.layer(number):
                    kept.append((streams.place, torch.get_rng_state()))  # as a recomputation keeps both
                    yield draw()
                    yield draw()

    with streams.forward_pass(0, samples):
        drawn = list(run())
    for i in (1, 0):
        place, state = kept[i]
        torch.set_rng_state(state)
        with streams.at(place):
            assert torch.equal(draw(), drawn[2 * i])
            assert torch.equal(draw(), drawn[2 * i + 1])
        assert streams.place is None


def test_outside_of_what_is_forked_the_generator_goes_on_as_if_nothing_had_been_drawn() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    streams, _ = make_streams()
    run_model(streams, [1, 2])
    run_model(streams, [3])
    assert torch.equal(torch.rand(4), expected)


def test_a_pass_that_is_cut_short_leaves_nothing_behind() -> None:
    streams, _ = make_streams()
    with pytest.raises(KeyboardInterrupt), streams.forward_pass(0, [1, 2]), streams.fork(0), streams.layer(1):
        raise KeyboardInterrupt
    assert streams.place is None
    assert torch.rand(7).shape == (7,), "no draw is cut any more"


def test_what_cannot_be_told_apart_is_refused_in_the_first_pass_whatever_its_samples() -> None:
    streams, _ = make_streams()
    refused = pytest.raises(BadUsage, match=r"dropout of shape \[12, 8\] for an item of 1 sample: ")
    with refused, streams.forward_pass(0, [1]):
        streams.dropout(torch.ones(12, H), 0.1)
    refused = pytest.raises(BadUsage, match=r"randn.* of shape \[12, 8\] for an item of 1 sample: ")
    with refused, streams.forward_pass(0, [1]), streams.fork(0):
        torch.randn(12, H)


def test_nothing_stays_with_probability_one_and_the_gradient_is_zero() -> None:
    streams, _ = make_streams()
    values = torch.ones(S, 1, H, requires_grad=True)
    with streams.forward_pass(0, [1]):
        dropped = streams.dropout(values, 1.0)
    dropped.sum().backward()
    assert torch.equal(dropped, torch.zeros(S, 1, H))
    assert torch.equal(values.grad, torch.zeros(S, 1, H))  # type: ignore[arg-type]
