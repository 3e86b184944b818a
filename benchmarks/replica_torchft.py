"""A replica of the data-parallel loop under torchft, and torchft's lighthouse, in the environment of torchft_venv.py.

    replica_torchft.py lighthouse FOLDER SETTINGS            writes its address into FOLDER/lighthouse
    replica_torchft.py replica FOLDER SETTINGS REPLICA STEP_S [TAIL_S ...]

SETTINGS is JSON of ``TorchftSettings``; what is null there is left to torchft. TAIL_S: what a step takes after its
all-reduce among 1, 2, ... replicas; nothing unless given.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from replica_loop import Diary, Network
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft._torchft import LighthouseServer


def serve_lighthouse(folder: Path, settings: dict[str, Any]) -> None:
    """Until somebody ends this process."""
    names = ("join_timeout_ms", "quorum_tick_ms", "heartbeat_timeout_ms")
    given = {name: settings[name] for name in names if settings[name] is not None}
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **given)
    port = server.address().rpartition(":")[2]
    written = folder / "lighthouse.new"
    written.write_text(f"http://127.0.0.1:{port}")
    written.rename(folder / "lighthouse")
    signal.pause()


def train(folder: Path, settings: dict[str, Any], replica: int, step_s: float, tails_s: Sequence[float]) -> None:
    """Train until somebody ends this process."""
    logging.disable(logging.CRITICAL)
    network = Network()
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeouts = {}
    if settings["timeout_s"] is not None:
        timeouts["timeout"] = timedelta(seconds=settings["timeout_s"])
    beat = {}
    if settings["heartbeat_interval_ms"] is not None:
        beat["heartbeat_interval"] = timedelta(milliseconds=settings["heartbeat_interval_ms"])

    def load(state: dict[str, Any]) -> None:
        network.weights.data.copy_(state["weights"])
        network.optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(**timeouts),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"weights": network.weights.detach(), "optimizer": network.optimizer.state_dict()},
        replica_id=f"replica{replica}",
        store_addr="127.0.0.1",
        store_port=kept.port,
        rank=0,
        world_size=1,
        lighthouse_addr=(folder / "lighthouse").read_text(),
        hostname="127.0.0.1",
        **timeouts,
        **beat,
    )
    optimizer = Optimizer(manager, network.optimizer)
    diary = Diary(folder, replica)
    diary.started()
    while True:
        before = manager.current_step()
        optimizer.zero_grad()  # asks for a quorum
        gradient = network.compute_gradient(before, replica, step_s)
        manager.allreduce(
            gradient
        ).wait()  # torchft's own hook for DDP does not outlive an error of gloo with torch 2.13
        if tails_s:
            time.sleep(tails_s[manager.num_participants() - 1])
        optimizer.step()
        if manager.current_step() > before:
            diary.committed(before, manager.num_participants())


if __name__ == "__main__":
    what, where, text, *others = sys.argv[1:]
    if what == "lighthouse":
        serve_lighthouse(Path(where), json.loads(text))
    else:
        train(Path(where), json.loads(text), int(others[0]), float(others[1]), [float(other) for other in others[2:]])
