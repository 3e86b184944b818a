"""Megatron's own DDP with overlapped communication, cut in the middle of a step; the checksum of parameters."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_elas.host.model import (
    bucket_groups_of,
    buffers_of,
    clear_communication,
    fit_buffers,
    gather_parameters,
    sum_gradients,
)
from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.spec.errors import EpochChanged
from tests.runtime.memberships import edit_to
from tests.runtime.workers import KILLED, introduce, run_workers

pytestmark = pytest.mark.process

WIDTH = 16


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    """Imported before workers are forked, because it takes seconds."""


class Layers(torch.nn.Module):
    """Three layers. What ``between`` does happens in a backward pass between those of the third and of the second."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.first = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.third = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.between: Callable[[], None] = lambda: None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(inputs))
        hidden.register_hook(lambda _: self.between())
        return self.third(hidden)


@contextmanager
def wrapped(worker: int, count: int, folder: Path) -> Iterator[tuple[Any, Communicator]]:
    """DDP over ``count`` replicas; a bucket holds the third and the second layer, another one the first."""
    from megatron_elas.platform import cpu

    cpu.install()
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    transport = introduce(worker, count, folder)
    communicator = Communicator(transport, range(count))
    communicator.register_backend()
    dist.init_process_group("elastic", store=dist.HashStore(), rank=worker, world_size=count)
    replicas = dist.new_group(list(range(count)))
    alone = [dist.new_group([at]) for at in range(count)][worker]
    roles = {"dp": replicas, "dp_cp": replicas, "tp": alone, "pp": alone, "ep": alone, "cp": alone}
    roles |= {"expt_dp": replicas, "intra_expt_dp": replicas, "intra_dp_cp": replicas, "intra_dist_opt": replicas}
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=2 * WIDTH**2
    )
    ddp = DistributedDataParallel(config, ddp_config, Layers(config), pg_collection=ProcessGroupCollection(**roles))
    sum_gradients([ddp])
    for parameter in ddp.module.parameters():
        parameter.data.fill_(1 / WIDTH)
    assert len(list(bucket_groups_of([ddp]))) == 2
    yield ddp, communicator
    transport.cancel()
    communicator.close()
    transport.close()


def begin(ddp: Any) -> None:
    """A step begins: parameters are gathered again, gradients are zero."""
    ddp.zero_grad_buffer()
    for group in bucket_groups_of([ddp]):
        group.param_gather_dispatched = False  # as the optimizer's step leaves it


def step(ddp: Any) -> None:
    begin(ddp)
    ddp(torch.ones(1, WIDTH)).sum().backward()
    ddp.finish_grad_sync()


def shares(ddp: Any) -> dict[str, float]:
    """Smallest and largest reduced gradient that this replica is given, and how many it is given."""
    found = []
    for buffer in buffers_of([ddp]):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            found.append(bucket.grad_data.chunk(group.size())[group.rank()])
    whole = torch.cat(found)
    return {"least": float(whole.min()), "most": float(whole.max()), "count": whole.numel()}


def new_epoch(communicator: Communicator, epoch: int, lost: tuple[int, ...] = ()) -> None:
    communicator.transport.cancel()
    communicator.drain()
    edit_to(communicator, epoch, [worker for worker in communicator.world if worker not in lost])


def cut_in_forward(ddp: Any, cancel: Callable[[], None]) -> None:
    """Gathers are on their way, and fail."""
    begin(ddp)
    cancel()
    ddp.start_param_sync()
    ddp(torch.ones(1, WIDTH))


def cut_in_reduction(ddp: Any, cancel: Callable[[], None]) -> None:
    """Reductions are on their way, and fail."""
    begin(ddp)
    ddp.module.between = cancel
    ddp(torch.ones(1, WIDTH)).sum().backward()
    ddp.finish_grad_sync()


def cut_in_backward(ddp: Any, cancel: Callable[[], None]) -> None:
    """Of one bucket some gradients are ready and others are not."""

    def stop() -> None:
        cancel()
        raise EpochChanged("cut short")

    begin(ddp)
    ddp.module.between = stop
    ddp(torch.ones(1, WIDTH)).sum().backward()


@pytest.mark.parametrize("steps_before", [0, 2], ids=["first-step", "later-step"])
@pytest.mark.parametrize("cut", [cut_in_forward, cut_in_reduction, cut_in_backward])
def test_a_step_cut_short_leaves_nothing_that_the_next_one_trips_over(
    cut: Callable[[Any, Callable[[], None]], None], steps_before: int, tmp_path: Path
) -> None:
    def body(own: int) -> list[dict[str, float]]:
        with wrapped(own, 1, tmp_path) as (ddp, communicator):
            for _ in range(steps_before):
                step(ddp)
            with pytest.raises(EpochChanged):
                cut(ddp, communicator.transport.cancel)
            ddp.module.between = lambda: None
            new_epoch(communicator, 1)
            clear_communication([ddp])
            ddp.start_param_sync(force_sync=True)
            results = []
            for _ in range(3):
                step(ddp)
                results.append(shares(ddp))
            return results

    (results,) = run_workers(1, body)
    assert results == [{"least": 1, "most": 1, "count": 3 * WIDTH**2}] * 3


@pytest.mark.parametrize(("count", "lost"), [(4, (0, 2)), (3, (0,))], ids=["other-slices", "less-padding"])
def test_buffers_fit_fewer_replicas_with_other_ranks(count: int, lost: tuple[int, ...], tmp_path: Path) -> None:
    ready = {parties: multiprocessing.get_context("fork").Barrier(parties, timeout=60) for parties in (2, count)}
    left = [worker for worker in range(count) if worker not in lost]

    def body(own: int) -> object:
        with wrapped(own, count, tmp_path) as (ddp, communicator):
            for _ in range(2):
                step(ddp)
            assert shares(ddp)["most"] in (count, 0), "a share may be all padding"
            ready[count].wait()
            if own in lost:
                return KILLED
            communicator.transport.cancel()
            ready[2].wait()
            new_epoch(communicator, 1, lost)
            clear_communication([ddp])
            fit_buffers([ddp])
            for bucket in ddp.buffers[0].buckets:
                bucket.param_data.fill_(-1)
                bucket.param_data.chunk(2)[left.index(own)].fill_(1 / WIDTH)
            step(ddp)
            ready[2].wait()
            return shares(ddp)

    half = {"least": 2, "most": 2, "count": 3 * WIDTH**2 // 2}
    assert run_workers(count, body) == [KILLED if worker in lost else half for worker in range(count)]


def test_buckets_are_gathered_in_which_a_named_parameter_is_and_no_others() -> None:
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in ("a", "b", "c", "d")})
    of = {name: layer.weight for name, layer in layers.items()}
    one, two, expert = (
        SimpleNamespace(buckets=[SimpleNamespace(params_list=[of[name] for name in names]) for names in buckets])
        for buckets in (["a", "b"], ["c"], ["d"])
    )
    gathered: list[Any] = []

    def start(group: Any, *, force_sync: bool) -> None:
        assert force_sync, "it is waited for"
        gathered.append(group)

    ddp = SimpleNamespace(
        module=layers, bucket_groups=[one, two], expert_parallel_bucket_groups=[expert],
        _start_bucket_group_param_sync=start,
    )  # fmt: skip
    for names, wanted in (({"b.weight"}, [one]), ({"c.weight", "d.weight"}, [two, expert]), ({"e.weight"}, [])):
        gathered.clear()
        gather_parameters([ddp], names)
        assert gathered == wanted
