"""Lines of an audit are chained, and ranges are the same whoever has the elements."""

from __future__ import annotations

import pytest

from megatron_elas.spec.audit import (
    RANGES,
    SMALLEST_RANGE,
    PieceSums,
    StepLine,
    link,
    mask_place,
    pack,
    pack_floats,
    range_size,
    signed_size,
    unlink,
    unpack,
    unpack_floats,
)

LINE = StepLine(
    epoch=1,
    step=5,
    ends=("first",),
    samples={"40": "00ff"},
    masks={mask_place(40, 3, 1, None): "0a"},
    losses={"lm loss": (5.25).hex()},
    pieces=(
        PieceSums(
            name="weight",
            start=64,
            stop=130,
            count=256,
            sums={"gradients": pack([1, 2])},
            signed={"gradients": pack_floats([0.1] * 5)},
        ),
    ),
)


def test_a_step_is_read_as_it_was_written() -> None:
    assert StepLine.from_table(LINE.to_table()) == LINE
    end = StepLine(epoch=0, step=16, is_end=True)
    assert end.to_table() == {"epoch": 0, "step": 16, "end": True} and StepLine.from_table(end.to_table()) == end
    assert LINE.pieces[0].first_range == 1
    assert unpack(LINE.pieces[0].sums["gradients"]) == [1, 2]
    assert unpack_floats(LINE.pieces[0].signed["gradients"]) == (0.1,) * 5
    assert LINE.pieces[0].signed_ranges == range(4, 9), "of 16 elements each"
    assert unpack(pack([0, (1 << 64) - 1])) == [0, (1 << 64) - 1]
    assert mask_place(40, 3, 1, None) == "40/3/1/all" != mask_place(40, 3, 1, 0)


@pytest.mark.parametrize("count", [1, 64, 1024, 1025, 16384, 100_000, 1 << 30])
def test_a_tensor_has_few_ranges_and_small_ones_are_not_cut_to_crumbs(count: int) -> None:
    size = range_size(count)
    assert size >= SMALLEST_RANGE and size & (size - 1) == 0
    fine = signed_size(count)
    assert -(-count // fine) <= RANGES and fine & (fine - 1) == 0
    assert fine == size if count > 1024 else 2 * -(-count // fine) > RANGES or fine == 1
    assert -(-count // size) <= RANGES < 2 * -(-count // size) or size == SMALLEST_RANGE


def test_a_line_that_was_changed_moved_or_left_out_breaks_the_chain() -> None:
    tables = [{"audit": 1, "worker": 0}, {"epoch": 0}, {"epoch": 0, "step": 0}, {"epoch": 0, "step": 1}]
    lines, chain = [], ""
    for table in tables:
        line, chain = link(table, chain)
        lines.append(line)
    chain = ""
    for line, table in zip(lines, tables, strict=True):
        found, chain = unlink(line, chain)
        assert found == table
    _, first = unlink(lines[0], "whatever came before a run")
    with pytest.raises(ValueError, match="changed, or a line before it is missing"):
        unlink(lines[2], first)
    _, second = unlink(lines[1], first)
    with pytest.raises(ValueError, match="changed"):
        unlink(lines[2].replace('"step": 0', '"step": 7'), second)
    for strange in ("", "{}", "nonsense", lines[0][:-5]):
        with pytest.raises(ValueError, match=r"chain|changed"):
            unlink(strange, "")


def test_what_is_no_packed_checksum_is_refused() -> None:
    for text in ("abc", "x" * 16):
        for read in (unpack, unpack_floats):
            with pytest.raises(ValueError):
                read(text)
