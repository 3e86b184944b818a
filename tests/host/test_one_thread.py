"""Element-wise work is kept in one thread, and nothing else is."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from megatron_elas.host.one_thread import one_thread


@pytest.fixture
def threads() -> Iterator[int]:
    """Several for this thread, as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


def test_inside_there_is_one_thread_and_afterwards_as_many_as_before(threads: int) -> None:
    with one_thread():
        assert torch.get_num_threads() == 1
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads
    with pytest.raises(RuntimeError, match="in between"), one_thread():
        raise RuntimeError("in between")
    assert torch.get_num_threads() == threads


def test_other_threads_and_matrix_products_keep_theirs(threads: int) -> None:
    seen: list[int] = []

    def look() -> None:
        seen.append(torch.get_num_threads())
        inside.wait(20)
        seen.append(torch.get_num_threads())
        seen.append(
            "mkl_get_max_threads() : 4" in torch.__config__.parallel_info() or not torch.backends.mkl.is_available()
        )

    inside = threading.Event()
    other = threading.Thread(target=look)
    other.start()
    with one_thread():
        inside.set()
        other.join()
    assert seen[0] == seen[1] == threads
    assert seen[2]
