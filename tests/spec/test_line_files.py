"""A file of lines goes on behind the last whole one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_elas.spec.line_files import append_line, open_for_lines


@pytest.mark.parametrize("tail", [b"", b"half a line", b"x" * 200_000])
def test_a_line_that_an_earlier_run_did_not_finish_is_taken_away(tail: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for whole in (b"", b"one\n", b"one\n" + b"y" * 100_000 + b"\n"):
        path.write_bytes(whole + tail)
        descriptor = open_for_lines(path)
        append_line(descriptor, b"next")
        os.close(descriptor)
        assert path.read_bytes() == whole + b"next\n"
