"""A replica of the data-parallel loop as a worker of an elastic job, under the real session, controller and agent.

Started by ``replicas.py`` through elasrun. Every replica has the whole state. As the session wants owners, each owns a
slice of it: of the network's weights and of AdamW's two moments.

    replica_elastic.py FOLDER STEP_S
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from replica_loop import Diary, Network

from megatron_elas.control.environment import WorkerEnvironment
from megatron_elas.control.link import ControlLink
from megatron_elas.control.messages import Hello
from megatron_elas.control.port import LinkPort
from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.runtime.communicator.membership import DEFAULT_GROUP, GroupMembers
from megatron_elas.runtime.session import Session
from megatron_elas.runtime.transport.sockets import SocketTransport
from megatron_elas.runtime.verification.inspection import UNKNOWN, Counters, Inspection, inspect_piece, weight_sums
from megatron_elas.spec.catalogue import Catalogue, Parameter, StageContents
from megatron_elas.spec.errors import StateInvalid
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.shards import Piece

LIMIT_S = 600.0


def preload() -> None:
    """Import all that a worker needs, also what AdamW imports in its first step: no heartbeat leaves meanwhile."""
    network = Network()
    network.weights.grad = torch.zeros_like(network.weights)
    network.optimizer.step()


class Replica:
    """Implements ``runtime.ports.Host``."""

    def __init__(self, worker: int, plan: ElasticPlan) -> None:
        self._worker = worker
        self._plan = plan
        self._step = 0
        self.network = Network()
        state = self.network.optimizer.state[self.network.weights]
        state["step"] = torch.zeros(())
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(self.network.weights)
        self._count = state["step"]
        self._slots = (self.network.weights.detach(), state["exp_avg"], state["exp_avg_sq"])

    def run_step(self, step: int, session: Session, step_s: float) -> int:
        """Train on one batch; gives how many took part."""
        gradient = self.network.compute_gradient(step, self._worker, step_s)
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        session.mark_dirty()
        self.network.optimizer.step()
        self._step = step + 1
        return dist.get_world_size()

    def _slice(self) -> slice:
        return self._slice_of(self._worker)

    def _slice_of(self, worker: int) -> slice:
        pieces = self._catalogue.layout(self._plan, worker).pieces  # none where there is nothing to own but padding
        return slice(pieces[0].start, pieces[0].stop) if pieces else slice(0, 0)

    @property
    def _catalogue(self) -> Catalogue:
        return Catalogue.gathered([self.describe_parameters()])

    # ------------------------------------------------------------ runtime.ports.Host

    def describe_parameters(self) -> StageContents:
        """See Host: the weights are a layer between ends that have nothing."""
        weights = Parameter(name="weights", count=self.network.weights.numel())
        return StageContents(stage=0, units={0: (), 1: (weights,), 2: ()})

    def take_catalogue(self, catalogue: Catalogue) -> None:
        """See Host. There is one stage only."""

    def read_shard(self, flat: torch.Tensor) -> None:
        """See Host."""
        torch.cat([*(slot[self._slice()] for slot in self._slots), self._count.view(1)], out=flat)

    def write_shard(self, flat: torch.Tensor) -> None:
        """See Host."""
        for slot, values in zip(self._slots, flat[:-1].chunk(len(self._slots)), strict=True):
            slot[self._slice()] = values
        self._count.copy_(flat[-1])

    def plan_groups(self, plan: ElasticPlan) -> dict[str, GroupMembers]:
        """See Host."""
        return {DEFAULT_GROUP: GroupMembers(members=plan.placement.workers)}

    def follow_groups(self, plan: ElasticPlan) -> None:
        """See Host."""
        self._plan = plan

    def rebuild(self, plan: ElasticPlan) -> None:
        """See Host. Everything has its place already."""

    def begin_activity(self, activity: int) -> None:
        """See Host."""

    def clear_step(self) -> None:
        """See Host."""

    def sync_parameters(self) -> None:
        """See Host: weights and moments, all slots in one gather."""
        slices = [self._slice_of(worker) for worker in self._plan.placement.workers]
        own = self._slice()
        mine = torch.zeros(len(self._slots), slices[0].stop)
        for at, slot in enumerate(self._slots):
            mine[at, : own.stop - own.start] = slot[own]
        gathered = torch.empty(len(slices), *mine.shape)
        dist.all_gather_into_tensor(gathered, mine)
        for part, slots in zip(slices, gathered, strict=True):
            for slot, values in zip(self._slots, slots, strict=True):
                slot[part] = values[: part.stop - part.start]

    def capture(self) -> object:
        """See Host."""
        return self._step

    def rewind(self, captured: object) -> None:
        """See Host."""
        assert isinstance(captured, int)
        self._step = captured

    def catch_up(self, step: int) -> None:
        """See Host."""
        self._step = step

    def read_history(self) -> list[int]:
        """See Host. Nothing does."""
        return []

    def write_history(self, history: Sequence[int]) -> None:
        """See Host."""

    def missed_step(self, step: int) -> object:
        """See Host."""
        return None

    @property
    def checkpoint(self) -> int | None:
        """See Host. There are none."""
        return None

    def load_checkpoint(self, step: int) -> None:
        """See Host."""
        raise StateInvalid("there are no checkpoints")

    def inspect(self) -> Inspection:
        """See Host."""
        own = self._slice()
        piece = Piece(name="weights", start=own.start, stop=own.stop)
        return Inspection(
            parameters={piece.name: self.network.weights.numel()},
            weights=weight_sums({piece.name: self._slots[0]}),
            pieces=(inspect_piece(piece, 0, [slot[own] for slot in self._slots], self._slots[0][own]),),
            counters=Counters(
                consumed_samples=self._step,
                schedule_samples=0,
                loss_scale=0,
                optimizer_steps=(UNKNOWN, UNKNOWN),
                streams=0,
            ),
        )


def main(folder: Path, step_s: float) -> None:
    """Join the job and train until somebody ends this process."""
    environment = WorkerEnvironment.from_environ(os.environ)
    worker, workers = environment.worker, int(os.environ["WORLD_SIZE"])
    transport = SocketTransport(worker, f"unix:{environment.run_dir}/w{worker}.sock", environment.token)
    job = JobSpec(
        tensor_parallel=1, pipeline_parallel=1, data_parallel=workers, micro_batch_size=1, num_microbatches=workers
    )
    hello = Hello(
        worker=worker, pid=os.getpid(), host=socket.gethostname(), domain=environment.domain,
        address=transport.address, job=job,
    )  # fmt: skip
    link = ControlLink(
        environment.controller, environment.token, hello, environment.heartbeat_s,
        lambda quiesce: transport.cancel(), lambda fault: None,
    )  # fmt: skip
    start = link.wait_start(LIMIT_S)
    transport.set_addresses(start.addresses)
    communicator = Communicator(transport, range(workers))
    communicator.register_backend()
    dist.init_process_group("elastic", store=dist.HashStore(), rank=worker, world_size=workers)
    port = LinkPort(worker, link, LIMIT_S)
    session = Session(worker, start.plan, transport, communicator, port, lambda *place: None)
    replica = Replica(worker, start.plan)
    session.attach(replica, 0)
    diary = Diary(folder, worker)
    diary.started()
    step = 0
    while True:
        took_part = session.run_step(step, lambda number: replica.run_step(number, session, step_s))
        diary.committed(step, took_part)
        step += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
