"""Random draws that depend on what they are for, and not on who makes them or what was drawn before.

A draw has coordinates: step, sample, layer, site, lane. Its key is 64 bits of them and of the job's seed:

    key = mix(mix(mix(mix(seed) ^ step) ^ sample) ^ (layer << 40 | site << 16 | (0 for all lanes alike, or lane + 1)))
    mix(x):  x += 0x9E3779B97F4A7C15;  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
             x = (x ^ x >> 27) * 0x94D049BB133111EB;  x ^ x >> 31                       (modulo 2^64)

* A *pass* is the forward pass of an item. Outside of one nothing is done otherwise than without streams.
* ``layer`` is the layer's number, from 1; 0 before the first, one more than there are behind the last.
* ``site`` counts the draws of a layer in a pass from 0.
* ``lane`` is the position among the tensor-parallel workers inside of Megatron's tracker, where lanes draw differently;
  None outside, where they must draw the same.

Dropout draws a mask per sample by its key (``runtime.dropout``). All other draws inside of the tracker come from a
generator that is seeded by key when the tracker is entered, and when a layer begins inside of it. Where an item has
several samples each of them has its own state of that generator, and what is drawn is cut along the samples
(``runtime.sample_draws``). So a sample gets what it would get alone.

The coordinates at any moment (``place``) are a value. Recomputation takes it along with the states of Megatron's
tracker (``host.random_seams``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from megatron_elas.runtime.dropout import Masked, draw_mask
from megatron_elas.runtime.sample_draws import SampleDraws, sample_dim

_ALL = 2**64 - 1


def mix(word: int) -> int:
    """64 bits from 64 bits, one to one."""
    word = (word + 0x9E3779B97F4A7C15) & _ALL
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _ALL
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _ALL
    return word ^ word >> 31


def sample_root(seed: int, step: int, sample: int) -> int:
    """What the keys of all draws of a sample in a step come from."""
    return mix(mix(mix(seed & _ALL) ^ step) ^ sample)


def seed64(root: int, layer: int, site: int, lane: int | None) -> int:
    """The key of a draw of a sample.

    Args:
        root: Of ``sample_root``.
        layer: Below 2^24.
        site: Below 2^24.
        lane: Below 2^16 - 1; None: all lanes draw the same.
    """
    return mix(root ^ (layer << 40 | site << 16 | (0 if lane is None else lane + 1)))


class Draw(NamedTuple):
    """Coordinates of what was drawn for one sample."""

    step: int
    sample: int
    """Counted over the whole run."""
    layer: int
    site: int
    lane: int | None
    """None: all lanes of the cell draw the same."""


class Pass(NamedTuple):
    """The forward pass of an item."""

    step: int
    samples: tuple[int, ...]
    """In the order in which they lie in the item's tensors."""
    roots: tuple[int, ...]
    """Of every sample."""


class Place(NamedTuple):
    """How far a pass has come. A value: it can be kept, and come back to."""

    pass_: Pass
    layer: int
    site: int
    lane: int | None
    tracked: tuple[int | torch.Tensor, ...] | None
    """Inside of the tracker: every sample's state of the generator, or the seed of one that has drawn nothing. Of a
    single sample the generator itself has it. None: outside."""


class Generator(Protocol):
    """The generator that draws without an own generator come from."""

    def get_state(self) -> torch.Tensor:
        """A copy."""

    def set_state(self, state: torch.Tensor) -> object:
        """Go on from there."""

    def manual_seed(self, seed: int) -> object:
        """Begin anew."""


class RandomStreams:
    """The streams of one worker."""

    def __init__(self, seed: int, num_layers: int, generator: Generator) -> None:
        """Of a model of so many layers; ``generator`` is what user code draws from."""
        self.seed = seed
        self.place: Place | None = None
        """Where the pass under way is; None: none is under way."""
        self.observe: Callable[[Draw, torch.Tensor, bool], None] | None = None
        """Called with every dropout mask: its coordinates; the mask of this sample, bool, True where an element stays,
        in the shape of the tensor without its dimension of samples (a view that is not to be changed, or kept without a
        copy); and whether it is drawn again, to recompute activations."""
        self._num_layers = num_layers
        self._generator = generator
        self.recomputing = False
        """The pass under way computes activations again."""
        self._checked = False
        """A pass is over, in which all that was drawn was looked at."""
        self._cutting: SampleDraws | None = None

    # ------------------------------------------------------------ passes and places

    @contextlib.contextmanager
    def forward_pass(self, step: int, samples: Sequence[int], layer: int = 0) -> Iterator[None]:
        """Inside is the forward pass of these samples, in this order; ``layer``: what its draws outside of layers count
        for, until the last layer is over.
        """
        roots = tuple(sample_root(self.seed, step, sample) for sample in samples)
        self.restore(Place(Pass(step, tuple(samples), roots), layer, 0, None, None))
        self.recomputing = False
        try:
            yield
            self._checked = True
        finally:
            self.restore(None)

    def restore(self, place: Place | None, *, recomputing: bool = False) -> None:
        """Go on from there."""
        self.place = place
        self.recomputing = recomputing and place is not None
        self._follow()

    @contextlib.contextmanager
    def at(self, place: Place | None) -> Iterator[None]:
        """Inside, go on from this place, to compute again what was computed from there; no pass is under way."""
        self.restore(place, recomputing=True)
        try:
            yield
        finally:
            self.restore(None)

    @contextlib.contextmanager
    def layer(self, number: int) -> Iterator[None]:
        """Inside is this layer, from 1."""
        if self.place is None:
            yield
            return
        self._enter_layer(number)
        yield
        if number == self._num_layers and self.place is not None:
            self._enter_layer(number + 1)

    def _enter_layer(self, number: int) -> None:
        assert self.place is not None
        self.place = self.place._replace(layer=number, site=0)
        if self.place.tracked is not None:
            self._seed()

    @contextlib.contextmanager
    def fork(self, lane: int | None) -> Iterator[None]:
        """Inside of Megatron's tracker; a pass is under way."""
        outside, state = self.place, self._generator.get_state()
        assert outside is not None
        self.place = outside._replace(lane=lane)
        self._seed()
        self._follow()
        try:
            yield
        finally:
            self._generator.set_state(state)
            inside = self.place
            if inside is not None:
                self.place = inside._replace(lane=outside.lane, tracked=outside.tracked)
            self._follow()

    # ------------------------------------------------------------ draws

    def dropout(self, values: torch.Tensor, probability: float) -> torch.Tensor:
        """Dropout in training; a pass is under way.

        Raises:
            BadUsage: It cannot be told which part of the tensor belongs to which sample.
        """
        place = self._next_site()
        mask = self._draw_masks(place, values, probability)
        scale = 0.0 if probability >= 1 else 1.0 / (1.0 - probability)
        return Masked.apply(values, mask, scale)  # type: ignore[no-any-return, no-untyped-call]

    def _draw_masks(self, place: Place, values: torch.Tensor, probability: float) -> torch.Tensor:
        samples = place.pass_.samples
        dim = sample_dim(values.shape, len(samples), "dropout")
        shape = [len(samples), *values.shape[:dim], *values.shape[dim + 1 :]]
        masks = torch.empty(shape, dtype=torch.bool, device=values.device)
        for mask, sample, root in zip(masks, samples, place.pass_.roots, strict=True):
            draw_mask(mask, seed64(root, place.layer, place.site, place.lane), probability)
            if self.observe is not None:
                draw = Draw(place.pass_.step, sample, place.layer, place.site, place.lane)
                self.observe(draw, mask, self.recomputing)
        return masks.movedim(0, dim).contiguous()

    def _next_site(self) -> Place:
        place = self.place
        assert place is not None, "no pass is under way"
        self.place = place._replace(site=place.site + 1)
        return place

    def _seed(self) -> None:
        """Begin the stream of draws that are not dropout's."""
        place = self._next_site()
        seeds = tuple(seed64(root, place.layer, place.site, place.lane) for root in place.pass_.roots)
        self.place = place._replace(site=place.site + 1, tracked=seeds)
        if len(seeds) == 1:
            self._generator.manual_seed(_signed(seeds[0]))

    # ------------------------------------------------------------ several samples

    def _follow(self) -> None:
        """Look at draws exactly where a place asks for it."""
        place = self.place
        wanted = place is not None and place.tracked is not None and (len(place.pass_.samples) > 1 or not self._checked)
        if wanted and self._cutting is None:
            self._cutting = SampleDraws(self._count_samples, self._turn)
            self._cutting.__enter__()
        elif not wanted and self._cutting is not None:
            cutting, self._cutting = self._cutting, None
            cutting.__exit__(None, None, None)

    def _count_samples(self) -> int:
        assert self.place is not None
        return len(self.place.pass_.samples)

    @contextlib.contextmanager
    def _turn(self, position: int) -> Iterator[None]:
        """Inside, the generator draws for the sample at this position of the item."""
        place = self.place
        assert place is not None and place.tracked is not None
        before, generator = place.tracked[position], self._generator
        if isinstance(before, int):
            generator.manual_seed(_signed(before))
        else:
            generator.set_state(before)
        yield
        after = (*place.tracked[:position], generator.get_state(), *place.tracked[position + 1 :])
        self.place = place._replace(tracked=after)


def _signed(seed: int) -> int:
    """As torch takes it."""
    return seed - 2**64 if seed >= 2**63 else seed
