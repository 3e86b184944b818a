"""What is streamed for a migration, and in how many steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_elas.spec.catalogue import Catalogue
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.remap import plan_remap
from megatron_elas.spec.streams import BYTES, SLOW_LINK, Stream, plan_streams
from tests.spec.test_catalogue import make_contents, make_plan

LAYER = 1030
"""Elements of a layer."""


def streams_of(before: ElasticPlan, after: ElasticPlan) -> tuple[Stream, ...]:
    catalogue = Catalogue.gathered(make_contents((5, 3), tied=False))
    holders = {worker: worker for worker in before.placement.workers}
    return plan_streams(catalogue, before, plan_remap(catalogue, before, after, holders))


def test_every_piece_of_a_moving_layer_goes_once_from_its_owner_to_who_needs_it() -> None:
    streams = streams_of(make_plan(2, 5, 3), make_plan(2, 3, 5))
    assert {(stream.owner, stream.target) for stream in streams} == {(0, 2), (1, 3)}
    sent = [(piece.name, piece.start, piece.stop) for stream in streams for piece in stream.layout.pieces]
    assert len(sent) == len(set(sent))
    assert sum(stop - start for _, start, stop in sent) == 2 * LAYER


@pytest.mark.parametrize(("layers_a_step", "steps"), [(None, 4), (0.5, 4), (1, 4), (2, 2), (3, 2), (4, 1), (100, 1)])
def test_as_many_layers_go_in_one_step_as_slow_links_bring_in_half_of_it(
    layers_a_step: float | None, steps: int
) -> None:
    before, after = make_plan(1, 5, 3), make_plan(1, 1, 7)
    if layers_a_step is not None:
        before = replace(before, predicted_s=2 * layers_a_step * LAYER * BYTES / SLOW_LINK * (1 + 1e-9))
    streams = streams_of(before, after)
    assert [stream.portion for stream in streams] == list(range(steps))
    names = [piece.name for stream in streams for piece in stream.layout.pieces]
    assert names == sorted(names, key=lambda name: name.split(".")[2]) and len(names) == 8


def test_who_sends_to_two_workers_shares_its_links() -> None:
    before, after = make_plan(1, 1, 6, 1), make_plan(1, 3, 2, 3)
    before = replace(before, predicted_s=2 * 2 * LAYER * BYTES / SLOW_LINK * (1 + 1e-9))
    streams = streams_of(before, after)
    assert [(stream.owner, stream.target, stream.portion) for stream in streams] == [
        (1, 0, 0), (1, 0, 1), (1, 2, 0), (1, 2, 1)
    ]  # fmt: skip
