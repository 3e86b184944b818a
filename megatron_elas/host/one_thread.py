"""Element-wise work on the CPU in one thread, so that nothing but the tensor says where vectors end."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch's operations that this thread asks for are not divided among several.

    With several threads torch cuts a large tensor into as many parts, wherever that falls, and each part has elements
    left over at its end that a vectorised kernel may round differently. Other threads, and matrix products in them,
    go on with as many as they have.
    """
    count = torch.get_num_threads()
    if count == 1:
        yield
        return
    set_count = _setter()
    set_count(1)
    try:
        yield
    finally:
        set_count(count)


@functools.cache
def _setter() -> Callable[[int], object]:
    # torch.set_num_threads sets MKL's threads too, and those for all threads of the process.
    try:
        function = ctypes.CDLL(None).omp_set_num_threads
    except AttributeError:  # torch is built without OpenMP, or keeps it to itself
        return torch.set_num_threads
    function.argtypes, function.restype = [ctypes.c_int], None
    return function  # type: ignore[no-any-return]
