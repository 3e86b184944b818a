"""What items have of logical micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.spec.items import Item, micro_batch, whole_micro_batches


@st.composite
def items(draw: st.DrawFn) -> Item:
    """Ascending ranges that do not touch."""
    ranges, start = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=4)):
        start += gap + (1 if ranges else 0)
        ranges.append((start, start + length))
        start += length
    return Item(draw(st.integers(0, 9)), tuple(ranges))


@pytest.mark.parametrize(
    ("ranges", "parts"),
    [
        (((4, 6),), ((2, 0, 2),)),
        (((5, 6),), ((2, 0, 1),)),
        (((3, 6),), ((1, 0, 1), (2, 1, 3))),
        (((1, 6),), ((0, 0, 1), (1, 1, 3), (2, 3, 5))),
        (((0, 1), (3, 4)), ((0, 0, 1), (1, 1, 2))),
    ],
)
def test_parts_by_hand(ranges: tuple[tuple[int, int], ...], parts: tuple[tuple[int, int, int], ...]) -> None:
    assert Item(0, ranges).parts(2) == parts


def test_two_ranges_of_one_micro_batch_are_one_part() -> None:
    assert Item(0, ((4, 5), (6, 9))).parts(4) == ((1, 0, 3), (2, 3, 4))


@given(item=items(), size=st.integers(1, 7))
def test_parts_are_the_items_samples_micro_batch_by_micro_batch(item: Item, size: int) -> None:
    samples = [sample for start, stop in item.ranges for sample in range(start, stop)]
    assert item.samples == len(samples)
    parts = item.parts(size)
    assert [start for _, start, _ in parts] == [0, *(stop for _, _, stop in parts[:-1])]
    assert parts[-1][2] == len(samples)
    numbers = [number for number, _, _ in parts]
    assert numbers == sorted(set(numbers))
    for number, start, stop in parts:
        assert {sample // size for sample in samples[start:stop]} == {number}


@given(item=items(), size=st.integers(1, 7))
def test_an_item_is_whole_where_it_has_just_what_a_micro_batch_has(item: Item, size: int) -> None:
    samples = [sample for start, stop in item.ranges for sample in range(start, stop)]
    number = samples[0] // size
    assert item.is_whole(size) == (samples == list(range(number * size, (number + 1) * size)))
    if item.is_whole(size):
        assert item.parts(size) == ((number, 0, size),)


def test_whole_micro_batches() -> None:
    (one, other), (last,) = whole_micro_batches([(0, 2), (1,)], 3)
    assert (one, other, last) == (Item(0, ((0, 3),)), Item(2, ((6, 9),)), Item(1, ((3, 6),)))
    assert micro_batch(2, 3) == other and all(item.is_whole(3) for item in (one, other, last))
    assert not one.is_whole(1)
