"""What a worker costs: handles, threads, memory and live objects, to see that losses leave nothing behind."""

from __future__ import annotations

import collections
import os
import threading
import time
from typing import Any

import psutil

from tests.fault.descriptors import LINK, find_new, list_descriptors

FREE_CHANNELS = ("snapshots", "migration", "pipeline", "tied gradients")
"""That are no group's: a link to every other worker each, at most."""

COUNTED = (
    "ElasticProcessGroup", "Link", "ShardStore", "Versions", "ElasticPlan", "Placement", "DistributedOptimizer",
    "DistributedDataParallel", "_ParamAndGradBuffer", "_ParamAndGradBucketGroup", "ProcessGroupCollection",
    "SeekableLoader", "_PlanSampler", "QueuedWork", "Thread", "socket", "Parameter", "frame", "traceback",
)  # fmt: skip
"""Classes whose live objects are counted, by name."""


LASTING_S = 5.0
"""A descriptor that is there for so long after a step stays."""


def take_lasting_footprint(attached: Any, before: dict[str, Any] | None) -> dict[str, Any]:
    """As ``take_footprint``, when what other threads have open for a moment only is closed, or has become a link.

    For example, when a step was finished in a recovery, links are dialled, and are accepted, for the state that moves
    beside the next one. What stays is told, after ``LASTING_S``.

    Args:
        attached: Of this process.
        before: What this gave after the step before.
    """
    deadline = time.monotonic() + LASTING_S
    while True:
        now = take_footprint(attached)
        if before is None or not find_new(before["descriptors"], now["descriptors"]) or time.monotonic() > deadline:
            return now
        time.sleep(0.01)


def take_footprint(attached: Any) -> dict[str, Any]:
    """Cheap: what the operating system and the transport count."""
    from torch.distributed import distributed_c10d as c10d

    transport = attached.communicator.transport
    process = psutil.Process()
    links = transport._links.copy()
    channels: dict[int, int] = collections.Counter(channel for _, channel in links)
    descriptors = list_descriptors({link.sock.fileno(): _name_link(link) for link in links.values()})
    others = len(attached.session.plan.placement.workers) - 1
    used = {group.channel for group in attached.communicator.groups if group.size() > 1}
    return {
        "pid": os.getpid(),
        "epoch": attached.session.plan.epoch,
        "groups": len(attached.communicator.groups),
        "c10d": {name: len(getattr(c10d._world, name)) for name in ("pg_map", "pg_names", "pg_group_ranks")},
        "links": len(links),
        "links_by_channel": dict(channels),
        "others": others,
        "most_links": others * (len(used) + len(FREE_CHANNELS)),
        "fds": len(descriptors),
        "descriptors": descriptors,
        "threads": threading.active_count(),
        "os_threads": process.num_threads(),
        "rss": process.memory_info().rss,
        "children": len(process.children()),
    }


def _name_link(link: Any) -> str:
    return f"{LINK}{link.peer} of channel {link.channel}"


def count_objects(objects: list[Any]) -> dict[str, int]:
    """Live objects of the classes in COUNTED, and all of them together."""
    counts = collections.Counter(type(thing).__name__ for thing in objects)
    return {name: counts.get(name, 0) for name in COUNTED} | {"all": len(objects)}


def count_tensor_bytes(objects: list[Any]) -> int:
    """Bytes of all storages that tensors refer to, each once."""
    import torch

    storages = {}
    for thing in objects:
        if issubclass(type(thing), torch.Tensor):  # not isinstance, which asks a dead weak proxy for its class
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def ancestors() -> list[dict[str, Any]]:
    """The launcher's processes above this worker: the starter, and the one that elasrun runs in."""
    found = []
    for process in psutil.Process().parents():
        command = process.cmdline()
        module = next((word for word in command if word.startswith("megatron_elas.")), None)
        if module is None:
            break
        found.append(
            {
                "pid": process.pid,
                "what": module,
                "fds": process.num_fds(),
                "threads": process.num_threads(),
                "rss": process.memory_info().rss,
            }
        )
    return found
