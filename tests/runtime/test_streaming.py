"""What streams beside steps ends with its epoch: nothing that comes after a failure is begun."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megatron_elas.runtime.streaming import Streaming
from megatron_elas.spec.errors import EpochChanged
from megatron_elas.spec.shards import Piece, ShardLayout
from megatron_elas.spec.streams import Stream

PIECE = Piece(name="weight", start=0, stop=4)
TIMEOUT_S = 20.0


class CutTransport:
    """Its first exchange waits until it is cut; others would go out."""

    def __init__(self) -> None:
        self.begun, self.cut = threading.Event(), threading.Event()
        self.exchanges = 0

    def exchange(self, *args: object) -> None:
        self.exchanges += 1
        self.begun.set()
        assert self.cut.wait(TIMEOUT_S)
        raise EpochChanged("cut")


class Host:
    """Holds a shard of zeros."""

    def piece_reader(self, layout: ShardLayout) -> Callable[[torch.Tensor], None]:
        return torch.Tensor.zero_  # type: ignore[return-value]


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def stream_two_portions(transport: CutTransport, thread: ThreadPoolExecutor) -> Streaming:
    streams = [
        Stream(owner=0, target=1, portion=portion, layout=ShardLayout(pieces=(PIECE,)), offsets=(4 * portion,))
        for portion in range(2)
    ]
    host: Any = Host()
    return Streaming(0, streams, 5, transport, host, thread)  # type: ignore[arg-type]


def test_nothing_is_sent_after_an_exchange_that_was_cut(thread: ThreadPoolExecutor) -> None:
    transport = CutTransport()
    streaming = stream_two_portions(transport, thread)
    streaming.begin_step(5)
    assert transport.begun.wait(TIMEOUT_S)
    streaming.begin_step(6)
    transport.cut.set()
    with pytest.raises(EpochChanged):
        streaming.hand_over(6, torch.zeros(8))
    streaming.drain()
    thread.submit(lambda: None).result(TIMEOUT_S)  # whatever is left on the thread has run
    assert transport.exchanges == 1 and not streaming.complete
