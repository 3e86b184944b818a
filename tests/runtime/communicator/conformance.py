"""Runs bodies on gloo and on the elastic backend, in the same forked ranks, and compares what they give.

A body is a function of (group, rank, size) that calls ``torch.distributed`` and returns tensors, plain values, or lists
of such. Ranks are forked once per size and run all bodies of a suite one after another, first on gloo.
"""

from __future__ import annotations

import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megatron_elas.runtime.communicator.communicator import Communicator
from tests.runtime.workers import introduce, run_workers

Body = Callable[[Any, int, int], Any]


class Case(NamedTuple):
    """A body and where it can run."""

    body: Body
    ours_only: bool = False
    """gloo refuses it, or takes it only in some versions of torch; the body checks its results itself."""
    least: int = 2
    """Smallest number of ranks."""
    rounds: bool = False
    """Its numbers are rounded, and gloo sums in another order."""


Suite = dict[str, Case]
Outcomes = dict[str, tuple[str, Any]]
"""By case: "returned" and the value, or "raised" and the traceback."""


def adder(suite: Suite) -> Callable[..., Callable[[Body], Body]]:
    """A decorator that adds a body to a suite, under the function's name."""

    def options(*, ours_only: bool = False, least: int = 2, rounds: bool = False) -> Callable[[Body], Body]:
        def add(body: Body) -> Body:
            suite[body.__name__.replace("_", " ")] = Case(body, ours_only, least, rounds)
            return body

        return add

    return options


def numbers(rank: int, length: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> Tensor:
    """0, 1, 2 or 3, differing by rank: sums are exact in every dtype."""
    return ((torch.arange(length) * 7 + rank * 5 + shift) % 4).to(dtype)


def is_gloo(group: Any) -> bool:
    return "gloo" in str(dist.get_backend(group))


def names_for(suite: Suite, size: int) -> list[str]:
    return [name for name, case in suite.items() if case.least <= size]


def run_suite(suite: Suite, size: int, timeout_s: float = 100) -> list[tuple[Outcomes, Outcomes]]:
    """Gloo's and our outcomes on each rank."""
    with tempfile.TemporaryDirectory() as folder:
        return run_workers(size, _rank, suite, size, Path(folder), timeout_s=timeout_s)


def _rank(rank: int, suite: Suite, size: int, folder: Path) -> tuple[Outcomes, Outcomes]:
    warnings.simplefilter("ignore")
    # DTensor remembers meshes by their shape, and a mesh names its groups: they need equal names on gloo and on ours,
    # whatever tests of this process have made before
    c10d._world.group_count = 0
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    theirs = _run(suite, rank, size, gloo=True)
    dist.destroy_process_group()
    c10d._world.group_count = 0
    transport = introduce(rank, size, folder)
    communicator = Communicator(transport, range(size))
    communicator.register_backend()
    dist.init_process_group("elastic", store=dist.HashStore(), rank=rank, world_size=size)
    ours = _run(suite, rank, size, gloo=False)
    if all(kind == "returned" for kind, _ in ours.values()):
        dist.barrier()
    communicator.close()
    transport.close()
    return theirs, ours


def _run(suite: Suite, rank: int, size: int, *, gloo: bool) -> Outcomes:
    group = dist.new_group(list(range(size)), group_desc="everybody")
    outcomes: Outcomes = {}
    for name in names_for(suite, size):
        if gloo and suite[name].ours_only:
            continue
        started = time.perf_counter()
        try:
            outcomes[name] = ("returned", suite[name].body(group, rank, size))
        except Exception:
            outcomes[name] = ("raised", traceback.format_exc())
            if not gloo:
                return outcomes  # the others of the group may be elsewhere
        finally:
            took_s = time.perf_counter() - started
            if took_s > 1 and rank == 0:
                print(f"{name} took {took_s:.1f} s on {'gloo' if gloo else 'ours'} at {size} ranks")
    return outcomes


def check(suite: Suite, name: str, outcomes: list[tuple[Outcomes, Outcomes]]) -> None:
    """Fail unless every rank's outcome is gloo's."""
    for rank, (theirs, ours) in enumerate(outcomes):
        assert name in ours, f"rank {rank} did not come to it: an earlier one failed"
        kind, value = ours[name]
        assert kind == "returned", f"rank {rank}: {value}"
        if not suite[name].ours_only:
            assert name in theirs, f"gloo, rank {rank}: did not come to it, an earlier one failed"
            assert theirs[name][0] == "returned", f"gloo, rank {rank}: {theirs[name][1]}"
            assert equal(value, theirs[name][1], suite[name].rounds), (
                f"rank {rank}: {value} is not gloo's {theirs[name][1]}"
            )


def equal(ours: Any, theirs: Any, rounds: bool = False) -> bool:
    if isinstance(ours, Tensor):
        if not isinstance(theirs, Tensor) or ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return False
        return torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5) if rounds else torch.equal(ours, theirs)
    if isinstance(ours, list | tuple):
        if not isinstance(theirs, list | tuple) or len(ours) != len(theirs):
            return False
        return all(equal(one, other, rounds) for one, other in zip(ours, theirs, strict=True))
    return bool(ours == theirs)
