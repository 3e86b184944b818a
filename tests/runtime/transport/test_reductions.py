"""The C core's reductions against torch's, bit for bit."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch.distributed import ReduceOp

from megatron_elas.runtime.communicator.buffers import as_bytes
from megatron_elas.runtime.communicator.reduction import Reduction
from megatron_elas.runtime.transport.native_link import address_of, library
from megatron_elas.runtime.transport.program import item_bytes, native_codes
from tests.runtime.transport.conftest import needs_library

pytestmark = needs_library

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
OPERATIONS = ("SUM", "AVG", "MAX", "MIN", "PRODUCT")
CASES = [
    (operation, dtype)
    for operation, dtype in itertools.product(OPERATIONS, FLOATS + INTEGERS)
    if operation != "AVG" or dtype.is_floating_point
]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def codes_of(operation: str, dtype: torch.dtype) -> tuple[int, int]:
    codes = native_codes(operation, str(dtype).removeprefix("torch."))
    assert codes is not None
    return codes


def reduce_native(operation: str, shards: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    core = library()
    assert core is not None
    pointers = (ctypes.c_void_p * len(shards))(*(address_of(as_bytes(shard)) for shard in shards))
    core.elas_reduce(*codes_of(operation, out.dtype), pointers, len(shards), address_of(as_bytes(out)), out.numel())


def check(operation: str, shards: list[torch.Tensor]) -> None:
    """Native and torch's results have the same bits, but for the payloads of NaNs."""
    dtype = shards[0].dtype
    expected, got = torch.empty_like(shards[0]), torch.empty_like(shards[0])
    reduce_native(operation, shards, got)
    if expected.numel():
        Reduction(getattr(ReduceOp, operation), dtype).reduce([as_bytes(s) for s in shards], as_bytes(expected))
    if dtype.is_floating_point:
        nans = expected.isnan()
        assert torch.equal(got.isnan(), nans)
        got, expected = got[~nans], expected[~nans]
        if operation in ("MAX", "MIN"):  # torch's choice among zeros depends on the place in the tensor
            assert torch.equal(got, expected)
            return
    assert torch.equal(got.view(BITS[dtype.itemsize]), expected.view(BITS[dtype.itemsize]))


def random(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Any bits at all: infinities, NaNs, subnormals and zeros are among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def usual(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    if not dtype.is_floating_point:
        return random(dtype, count, seed)
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("operation", "dtype"), CASES, ids=str)
def test_every_length_and_number_of_sources(operation: str, dtype: torch.dtype) -> None:
    for count in [*range(70), 1023, 1024, 1025, 4099]:
        for sources in (2, 3, 5):
            check(operation, [usual(dtype, count, seed * 977 + count) for seed in range(sources)])


@pytest.mark.parametrize(("operation", "dtype"), CASES, ids=str)
def test_all_kinds_of_values(operation: str, dtype: torch.dtype) -> None:
    check(operation, [random(dtype, 200_003, seed) for seed in range(2)])
    check(operation, [random(dtype, 50_001, seed) for seed in range(7)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_float_is_widened_and_rounded_as_torch_does(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    for other in (0.0, 1.0, -1.0, 3.1e-5, 65504.0, 6e-8, float("inf"), float("-inf"), float("nan")):
        for operation in OPERATIONS:
            check(operation, [every, torch.full_like(every, other)])
            check(operation, [torch.full_like(every, other), every, every.flip(0)])


@pytest.mark.parametrize(("operation", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_target_may_be_a_source(operation: str, dtype: torch.dtype, at: int) -> None:
    shards = [usual(dtype, 5000, seed) for seed in range(3)]
    expected = torch.empty_like(shards[0])
    reduce_native(operation, shards, expected)
    reduce_native(operation, shards, shards[at])
    assert torch.equal(shards[at].view(torch.uint8), expected.view(torch.uint8))


def test_what_the_core_cannot_do_has_no_codes() -> None:
    assert native_codes("BAND", "int32") is None
    assert native_codes("SUM", "bool") is None
    assert native_codes("AVG", "int64") is None
    for dtype in FLOATS + INTEGERS:
        assert item_bytes(codes_of("SUM", dtype)[1]) == dtype.itemsize
