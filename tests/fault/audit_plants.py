"""Small faults that make a run part from another one, for ``elas diff`` to find.

ELAS_TEST_PART is one of these; when it strikes, ``part.WORKER`` in the folder ELAS_TEST_OUT says where.

* ``gradient:worker=W@step=S``: the lowest bit of one element of W's reduced gradients is flipped.
* ``mask:sample=N,layer=L@step=S``: one element of the first dropout mask of layer L (from 1) for the sample is flipped,
  wherever it is drawn.
* ``order:sample=N@step=S``: samples N and N + 1 are read in each other's place.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ELEMENT = 7
"""That is flipped."""
SITES = 4
"""Of a layer, among which its first mask is."""


def install(out: Path) -> None:
    """Plant what the environment asks for."""
    asked = os.environ.get("ELAS_TEST_PART")
    if not asked:
        return
    kind, _, where = asked.partition(":")
    place = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", where)}
    {"gradient": _plant_gradient, "mask": _plant_mask, "order": _plant_order}[kind](out, place)


def _tell(out: Path, text: str) -> None:
    from megatron_elas.host.attachment import attachment

    (out / f"part.{attachment().worker}").write_text(text)


def _plant_gradient(out: Path, place: dict[str, int]) -> None:
    import torch

    from megatron_elas.host.attachment import attachment
    from megatron_elas.runtime.session import Session

    exchange = Session.exchange_gradients

    def exchange_gradients(session: Any) -> None:
        attached = attachment()
        if (attached.worker, attached.counter.step) == (place["worker"], place["step"]):
            piece, _, values = next(iter(attached.host._access.tensors()))
            values["gradients"].view(torch.int32)[ELEMENT] ^= 1
            _tell(out, f"{piece.name} {piece.start + ELEMENT}")
        exchange(session)

    Session.exchange_gradients = exchange_gradients  # type: ignore[method-assign]


def _plant_mask(out: Path, place: dict[str, int]) -> None:
    from megatron_elas.host.attachment import attachment
    from megatron_elas.runtime import random_streams

    draw = random_streams.draw_mask
    chosen: list[int] = []

    def draw_mask(mask: Any, seed: int, probability: float) -> None:
        draw(mask, seed, probability)
        root = random_streams.sample_root(attachment().streams.seed, place["step"], place["sample"])
        keys = [random_streams.seed64(root, place["layer"], site, lane) for site in range(SITES) for lane in (None, 0)]
        if seed in keys and not chosen:
            chosen.append(seed)
        if seed in chosen:  # again when activations are recomputed
            mask.view(-1)[-1] ^= True  # of attention, the last token looking at itself: it counts
            _tell(out, f"{tuple(mask.shape)}")

    random_streams.draw_mask = draw_mask


def _plant_order(out: Path, place: dict[str, int]) -> None:
    from megatron_elas.host import data
    from megatron_elas.host.attachment import attachment

    draw = data._PlanSampler.__iter__
    others = {place["sample"]: place["sample"] + 1, place["sample"] + 1: place["sample"]}

    def draw_swapped(sampler: Any) -> Any:
        for samples in draw(sampler):
            if others.keys() & set(samples) and attachment().counter.step == place["step"]:
                _tell(out, str(samples))
                yield [others.get(sample, sample) for sample in samples]
            else:
                yield samples

    data._PlanSampler.__iter__ = draw_swapped  # type: ignore[method-assign]
