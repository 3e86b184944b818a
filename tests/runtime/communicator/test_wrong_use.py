"""Operations that members do not agree on end with an error that says who called what, on every rank that waits."""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_elas.runtime.communicator import collectives
from megatron_elas.runtime.communicator.signatures import KINDS, explain, pack, unpack
from megatron_elas.runtime.transport.base import ProtocolError
from tests.runtime.communicator.test_epochs import check_sum, joined, make_barrier
from tests.runtime.workers import run_workers

SIZE = 3
HANGS_S = 15.0
"""What takes longer is cancelled, and fails."""
Body = Callable[[Any, int], Any]


def two_reductions(group: Any, rank: int) -> None:
    tensor = torch.ones(4, dtype=torch.int64 if rank == 1 else torch.float32)
    dist.all_reduce(tensor[:2] if rank == 1 else tensor, group=group)  # 16 bytes each


def other_operation(group: Any, rank: int) -> None:
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM, group=group)


def other_length(group: Any, rank: int) -> None:
    dist.all_reduce(torch.ones(100_000 + (rank == 0)), group=group)


def other_shares(group: Any, rank: int) -> None:
    length = 3 + (rank == 2)
    dist.all_gather_into_tensor(torch.ones(length * SIZE), torch.ones(length), group=group)


def other_root_of_broadcast(group: Any, rank: int) -> None:
    dist.broadcast(torch.ones(4), 1 if rank == 2 else 0, group=group)


def other_root_of_reduce(group: Any, rank: int) -> None:
    dist.reduce(torch.ones(4), rank, group=group)


def other_root_of_gather(group: Any, rank: int) -> None:
    root = min(rank, 1)
    dist.gather(torch.ones(4), [torch.ones(4)] * SIZE if rank == root else None, root, group=group)


def mixed_collectives(group: Any, rank: int) -> None:
    if rank == 0:
        dist.barrier(group=group)
    elif rank == 1:
        dist.all_reduce(torch.ones(4), group=group)
    else:
        dist.all_to_all_single(torch.ones(SIZE), torch.ones(SIZE), group=group)


def one_operation_less(group: Any, rank: int) -> None:
    for _ in range(3 - (rank == 1)):
        dist.all_reduce(torch.ones(4), group=group)
    dist.barrier(group=group)


def one_of_them_asynchronous(group: Any, rank: int) -> None:
    works = [dist.all_reduce(torch.ones(4 + (rank == 1)), group=group, async_op=True) for _ in range(2)]
    for work in works:
        work.wait()


def unequal_pieces(group: Any, rank: int) -> None:
    sends = [2, 2, 2]
    receives = [2, 2, 2] if rank else [2, 3, 2]
    dist.all_to_all_single(torch.ones(sum(receives)), torch.ones(6), receives, sends, group=group)
    dist.barrier(group=group)  # ranks 1 and 2 got all they wanted


def wrong_number_of_outputs_on_one(group: Any, rank: int) -> None:
    try:
        dist.all_gather([torch.ones(3)] * (SIZE - (rank == 1)), torch.ones(3), group=group)
    except ValueError as error:
        assert "it needs 3 outputs, one for each rank, got 2" in str(error)
    dist.barrier(group=group)


WRONG: dict[Body, tuple[str, ...]] = {
    two_reductions: ("all_reduce number", "of 4 x float32 with SUM", "of 2 x int64 with SUM"),
    other_operation: ("of 4 x float32 with SUM", "of 4 x float32 with MAX"),
    other_length: ("of 100000 x float32", "of 100001 x float32"),
    other_shares: ("all_gather", "of 9 x float32", "of 12 x float32"),
    other_root_of_broadcast: ("broadcast", "to rank 0", "to rank 1"),
    other_root_of_reduce: ("reduce", "from or to rank"),
    other_root_of_gather: ("gather", "to rank 0", "to rank 1"),
    mixed_collectives: (r"expected <(\w+) number .*got <(?!\1)\w+ number",),
    one_operation_less: ("all_reduce number", "barrier number"),
    one_of_them_asynchronous: ("of 4 x float32", "of 5 x float32"),
    unequal_pieces: ("all_to_all", "8 bytes", "12 bytes"),
    wrong_number_of_outputs_on_one: ("all_gather number", "barrier number"),
}
"""Body, and what each rank's error must say."""


@pytest.fixture(scope="module", params=["exchange", "tree"])
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank's call ended with, by body; an epoch for each, as a mix-up ends one."""
    ready = make_barrier(SIZE)
    exchange_members = SIZE if request.param == "exchange" else 1
    folder = tmp_path_factory.mktemp("links")

    def body(own: int) -> dict[str, str]:
        found = {}
        collectives.EXCHANGE_MEMBERS = exchange_members  # of this process
        with joined(own, SIZE, folder) as (transport, communicator):
            group = dist.new_group([0, 1, 2], group_desc="mixed up")
            for epoch, wrong in enumerate(WRONG, start=1):
                check_sum(group, [0, 1, 2], own)
                check_sum(None, [0, 1, 2], own)
                ready.wait()
                rescue = threading.Timer(HANGS_S, transport.cancel)
                rescue.start()
                try:
                    wrong(group, own)
                    found[wrong.__name__] = "it succeeded"
                except ProtocolError as error:
                    found[wrong.__name__] = str(error)
                except Exception:
                    found[wrong.__name__] = traceback.format_exc()
                rescue.cancel()
                ready.wait()
                transport.cancel()
                communicator.drain()
                ready.wait()
                transport.adopt(epoch, lost=())
            check_sum(group, [0, 1, 2], own)
        return found

    return run_workers(SIZE, body)


@pytest.mark.process
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_every_rank_learns_who_called_what(wrong: Body, errors: list[dict[str, str]]) -> None:
    epoch = list(WRONG).index(wrong)
    for rank, found in enumerate(errors):
        text = found[wrong.__name__]
        assert f"(mixed up) of workers [0, 1, 2], epoch {epoch}, at rank {rank}: " in text, text
        assert re.search(r"rank \d \(worker \d\)", text), text
        for words in WRONG[wrong]:
            assert re.search(words, text), f"{words!r} is not in: {text}"


@pytest.mark.process
def test_what_one_rank_alone_can_see_is_refused_there_and_the_group_goes_on(tmp_path: Path) -> None:
    def body(own: int) -> bool:
        with joined(own, 2, tmp_path):
            group = dist.group.WORLD
            cases: list[tuple[str, Callable[[], Any]]] = [
                ("it needs 2 outputs", lambda: dist.all_gather([torch.ones(3)], torch.ones(3))),
                ("the own output 4", lambda: group.allgather([[torch.ones(4)] * 2], [torch.ones(3)])),
                ("it needs 2 inputs", lambda: dist.reduce_scatter(torch.ones(3), [torch.ones(3)])),
                ("2 x 3 elements", lambda: dist.all_gather_into_tensor(torch.ones(7), torch.ones(3))),
                ("2 x 3 elements", lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(5))),
                ("3 rows cannot be split evenly", lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3))),
                (
                    r"split sizes \[1, 1\] do not fit 3 rows",
                    lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 1], [1, 2]),
                ),
                ("needs an integer or bool tensor", lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)),
                ("needs a floating-point tensor", lambda: dist.all_reduce(torch.ones(3).int(), dist.ReduceOp.AVG)),
                ("cannot be reduced", lambda: group.allreduce([torch.ones(3).to(torch.float8_e5m2)])),
                ("is on meta", lambda: dist.all_reduce(torch.ones(3, device="meta"))),
                ("rank 7 is not one of the ranks 0 to 1", lambda: group.send([torch.ones(3)], 7, 0)),
                ("group_name is needed", lambda: group.split_group([0])),
            ]
            for words, call in cases:
                with pytest.raises((ValueError, TypeError), match=words) as told:
                    call()
                assert f"group {group.group_name} (default_pg) of workers [0, 1]" in str(told.value)
            check_sum(None, [0, 1], own)
            outsider = dist.new_group([0])
            if own == 1:
                assert dist.all_reduce(torch.ones(3), group=outsider) is None
        return True

    assert all(run_workers(2, body))


@pytest.mark.process
def test_a_monitored_barrier_names_the_ranks_that_do_not_come(tmp_path: Path) -> None:
    ready = make_barrier(4)

    def body(own: int) -> str:
        with joined(own, 4, tmp_path):
            group = dist.new_group([3, 2, 1, 0], sort_ranks=False)
            group.monitored_barrier(timedelta(seconds=20))
            ready.wait()
            text = ""
            if own not in (0, 2):
                with pytest.raises((TimeoutError, ProtocolError)) as told:
                    group.monitored_barrier(timedelta(seconds=1.0), wait_all_ranks=True)
                text = str(told.value)
            ready.wait()
        return text

    texts = run_workers(4, body)
    assert "monitored_barrier in group" in texts[3]
    assert "waiting for ranks 3, 1 (workers 0, 2)" in texts[3]
    assert "rank 0 (worker 3)" in texts[1]


def test_signatures_come_back_from_tags() -> None:
    tag = pack("reduce", torch.bfloat16, 4, root=300, count=12_345) | 77
    assert tuple(unpack(tag)) == (77, "reduce", "bfloat16", "MAX", 300, 12_345, True)
    large = unpack(pack("all_reduce", torch.float32, 0, count=1 << 40))
    assert not large.exact
    assert pack("all_reduce", torch.float32, 0, count=1 << 40) != pack(
        "all_reduce", torch.float32, 0, count=(1 << 40) + 1
    )
    assert all(0 <= pack(kind, torch.uint8, 15, root=510, count=1 << 50) < 1 << 63 for kind in KINDS)
    assert unpack(1 << 63) is None
    assert explain(f"expected tag {tag:#x} here") == (
        "expected <reduce number 77 of 12345 x bfloat16 with MAX from or to rank 300> here"
    )
