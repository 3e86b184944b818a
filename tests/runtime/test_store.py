"""Two versions of every shard are kept, and only complete ones are given out."""

from __future__ import annotations

import pytest

from megatron_elas.runtime.store import ShardStore, Versions
from megatron_elas.spec.shards import Piece, ShardLayout

LAYOUT = ShardLayout(pieces=(Piece(name="a", start=2, stop=5), Piece(name="b", start=0, stop=4)))


def filled(versions: Versions, version: int) -> None:
    versions.begin(version).fill_(version)
    versions.complete(version)


def test_a_version_that_is_being_written_is_not_held() -> None:
    versions = Versions(4)
    filled(versions, 6)
    versions.begin(7)
    assert versions.held == (6,)
    with pytest.raises(KeyError, match="version 7 is not held"):
        versions.get(7)


def test_a_new_version_takes_the_place_of_the_one_before_the_last() -> None:
    versions = Versions(4)
    for version in (5, 6, 7):
        filled(versions, version)
    assert versions.held == (6, 7)
    assert versions.get(6).tolist() == [6.0] * 4


def test_buffers_are_allocated_once() -> None:
    versions = Versions(4)
    first = versions.begin(0).data_ptr()
    assert versions.begin(2).data_ptr() == first != versions.begin(1).data_ptr()


def test_steps_that_will_be_run_again_are_forgotten_everywhere() -> None:
    store = ShardStore(layout=LAYOUT, backups=[1], wards={1: LAYOUT})
    for versions in (store.own, store.wards[1]):
        filled(versions, 7)
        filled(versions, 8)
    store.forget_after(7)
    assert store.holding(0, 8).kept == (7,)
    assert store.holding(0, 8).wards == {1: (7,)}


def test_a_layout_says_where_pieces_lie_and_how_much_memory_two_versions_take() -> None:
    assert (LAYOUT.numel, LAYOUT.flat_numel, LAYOUT.offsets()) == (7, 22, (0, 3))
    assert ShardStore(layout=LAYOUT, backups=[], wards={}).num_bytes == 2 * 22 * 4
