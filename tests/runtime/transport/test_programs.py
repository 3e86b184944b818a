"""Whole collectives by ``run``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_elas.runtime.communicator.buffers import as_bytes
from megatron_elas.runtime.transport import engine_choice
from megatron_elas.runtime.transport.program import (
    SCRATCH,
    Copy,
    Program,
    Reduce,
    Region,
    Round,
    Transfer,
)
from megatron_elas.runtime.transport.sockets import SocketTransport
from megatron_elas.spec.errors import EpochChanged
from tests.runtime.transport.conftest import needs_library
from tests.runtime.transport.programs import TorchReducer, bruck, direct, ring, whole
from tests.runtime.transport.together import all_at_once, data, in_thread, room, transports

CHANNEL = 3

Build = Callable[[int, int, int, int, TorchReducer], Program]
SHAPES: dict[str, Build] = {
    "whole": lambda me, count, size, item, reducer: whole(me, count, size, reducer),
    "bruck": lambda me, count, size, item, reducer: bruck(me, count, size, reducer),
    "direct": lambda me, count, size, item, reducer: direct(me, count, size, item, reducer, 300_000),
    "direct in one slice": lambda me, count, size, item, reducer: direct(me, count, size, item, reducer, 1 << 30),
    "ring": ring,
}


def all_reduce(
    made: list[SocketTransport], build: Build, tensors: list[torch.Tensor], reducer: TorchReducer, times: int = 1
) -> None:
    count = len(made)
    programs = [build(at, count, tensor.nbytes, tensor.itemsize, reducer) for at, tensor in enumerate(tensors)]

    def repeat(at: int) -> None:
        for turn in range(times):
            made[at].run(CHANNEL, turn, programs[at], [as_bytes(tensors[at])])

    outcomes = all_at_once([lambda at=at: repeat(at) for at in range(count)])
    assert outcomes == [None] * count


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_an_all_reduce_gives_everybody_the_sum(tmp_path: Path, shape: str, count: int) -> None:
    reducer = TorchReducer("SUM", torch.int64)
    with transports(count, tmp_path) as made:
        for length in (1, 7, 1000, 20_001, 300_007):
            tensors = [torch.arange(length) * (at + 1) % 1009 for at in range(count)]
            expected = torch.stack(tensors).sum(0)
            all_reduce(made, SHAPES[shape], tensors, reducer)
            assert all(torch.equal(tensor, expected) for tensor in tensors)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("shape", ["whole", "direct", "direct in one slice"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reducing_while_receiving_keeps_the_order_of_the_sum(tmp_path: Path, shape: str, dtype: torch.dtype) -> None:
    count, length = 3, 500_009
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(length, generator=generator).to(dtype) for _ in range(count)]
    wide = [tensor.float() for tensor in tensors]
    expected = ((wide[0] + wide[1] + wide[2]) / 3).to(dtype)
    with transports(count, tmp_path) as made:
        all_reduce(made, SHAPES[shape], tensors, TorchReducer("AVG", dtype))
    for tensor in tensors:
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.usefixtures("engine")
def test_reductions_that_the_core_cannot_do_are_done_in_python(tmp_path: Path) -> None:
    reducer = TorchReducer("SUM", torch.int32, in_core=False)
    tensors = [torch.arange(50_000, dtype=torch.int32) + at for at in range(3)]
    expected = sum(tensor.clone() for tensor in tensors)
    with transports(3, tmp_path) as made:
        all_reduce(made, SHAPES["direct"], tensors, reducer)
    assert all(torch.equal(tensor, expected) for tensor in tensors)
    assert reducer.calls


@pytest.mark.usefixtures("engine")
def test_a_reducer_that_fails_ends_the_epoch(tmp_path: Path) -> None:
    class Broken(TorchReducer):
        def reduce(self, sources: object, target: object) -> None:
            raise ArithmeticError("no such sum")

    reducer = Broken("SUM", torch.int32, in_core=False)
    tensors = [torch.zeros(10, dtype=torch.int32) for _ in range(2)]
    with transports(2, tmp_path) as made:
        programs = [whole(at, 2, 40, reducer) for at in range(2)]
        outcomes = all_at_once(
            [lambda at=at: made[at].run(CHANNEL, 0, programs[at], [as_bytes(tensors[at])]) for at in range(2)]
        )
        assert [str(outcome) for outcome in outcomes] == ["no such sum"] * 2
        with pytest.raises(Exception, match="broken off by ArithmeticError"):
            made[0].run(CHANNEL, 1, programs[0], [as_bytes(tensors[0])])


@pytest.mark.usefixtures("engine")
def test_copies_scratch_memory_and_several_buffers(tmp_path: Path) -> None:
    size = 70_000
    held, brought = Region(SCRATCH, 5, size), Region(1, 0, size)

    def program(peer: int) -> Program:
        first = Round(then=(Copy(Region(0, 0, size), held),))
        return Program((first, Round((Transfer(peer, held),), (Transfer(peer, brought),))), size + 5)

    with transports(2, tmp_path) as made:
        rooms = [room(size), room(size)]
        outcomes = all_at_once(
            [lambda at=at: made[at].run(CHANNEL, 0, program(1 - at), [data(size, at), rooms[at]]) for at in range(2)]
        )
        assert outcomes == [None, None]
    assert rooms == [data(size, 1), data(size, 0)]


@needs_library
@pytest.mark.parametrize("what", ["reduction", "copy"])
def test_a_cancel_ends_a_long_computation(tmp_path: Path, what: str) -> None:
    size = 16 << 20
    source, target = Region(0, 0, size), Region(0, size, size)
    step = Reduce((source,) * 50, target) if what == "reduction" else Copy(source, target)
    program = Program((Round(then=(step,) * (1 if what == "reduction" else 50)),), 0, TorchReducer("SUM", torch.int8))
    buffer = room(2 * size)
    with transports(1, tmp_path) as (transport,):
        started = time.perf_counter()
        transport.run(CHANNEL, 0, program, [buffer])
        whole_s = time.perf_counter() - started
        took_s: list[float] = []
        for epoch in range(1, 11):  # on a loaded machine it may come too late
            running = in_thread(lambda: transport.run(CHANNEL, 1, program, [buffer]))
            time.sleep(whole_s / 20)
            started = time.perf_counter()
            transport.cancel()
            try:
                running()
            except EpochChanged:
                took_s.append(time.perf_counter() - started)
            transport.adopt(epoch, lost=())
            if took_s and took_s[-1] < whole_s / 2:
                break
        print(f"{[f'{value * 1e3:.2f}' for value in took_s]} ms of {whole_s * 1e3:.0f} ms")
        assert took_s and took_s[-1] < whole_s / 2


@needs_library
def test_programs_that_do_not_fit_are_refused_before_anything_moves(tmp_path: Path) -> None:
    """In Python a slice is cut short; in C it would be somebody else's memory."""
    reducer = TorchReducer("SUM", torch.int32)
    mine = Region(0, 0, 8)

    def one(*then: Reduce | Copy) -> Program:
        return Program((Round(then=then),), 0, reducer)

    with transports(1, tmp_path) as (transport,):
        cases = [
            (
                one(Copy(mine, Region(1, 0, 8))),
                [room(8), room(7)],
                ValueError,
                "buffer 1 has 7 bytes, the program uses 8",
            ),
            (one(Copy(mine, Region(1, 0, 8))), [room(8), data(8)], TypeError, "buffer 1 must be writable"),
            (one(Copy(mine, Region(SCRATCH, 0, 8))), [room(8)], ValueError, "8 bytes of scratch memory, it asks for 0"),
            (one(Copy(mine, Region(0, -8, 8))), [room(8)], ValueError, "no part of a buffer"),
            (one(Copy(mine, Region(1, 0, 4))), [room(8), room(8)], ValueError, "different sizes"),
            (one(Reduce((Region(0, 0, 6),) * 2, Region(0, 0, 6))), [room(8)], ValueError, "whole number of elements"),
        ]
        for epoch, (program, buffers, error, text) in enumerate(cases, start=1):
            with pytest.raises(error, match=text):
                transport.run(CHANNEL, 0, program, buffers)
            transport.cancel()
            transport.adopt(epoch, lost=())


def test_which_engine_is_used_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine_choice, "_said_in", set())
    monkeypatch.setenv("ELAS_NATIVE", "0")
    caplog.set_level(logging.INFO)
    with transports(2, tmp_path):
        assert caplog.messages == ["data plane: links in Python"]
