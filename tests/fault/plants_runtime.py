"""Stale objects of this project's runtime, of torch.distributed and of the process; see plants."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from tests.fault.plants import (
    Plant,
    alive,
    another_under_its_name,
    blank,
    closed_socket,
    entry,
    forgotten_descriptor,
    hung_up_socket,
    link,
    member,
    setting,
    strange_group,
    thread,
)
from tests.fault.stale import Scene

_NO_DESCRIPTOR = -1


def runtime_plants(scene: Scene) -> dict[str, Plant]:
    """By name. Needs a worker with a backup, in an epoch that began with a loss."""
    from torch.distributed import distributed_c10d as c10d

    from megatron_elas.host.attachment import Attachment
    from megatron_elas.host.optimizer import OptimizerFactory, ShardAccess
    from megatron_elas.host.pipeline import Route, RoutedPipeline
    from megatron_elas.host.schedule import PassCounter
    from megatron_elas.host.training import MegatronHost
    from megatron_elas.runtime.channels import SNAPSHOTS
    from megatron_elas.runtime.communicator.communicator import Communicator
    from megatron_elas.runtime.communicator.point_to_point import _Inbox
    from megatron_elas.runtime.communicator.process_group import ElasticProcessGroup
    from megatron_elas.runtime.executor import Executor
    from megatron_elas.runtime.replicator import Replicator
    from megatron_elas.runtime.restoring import make_store
    from megatron_elas.runtime.session import Session
    from megatron_elas.runtime.state import WorkerState
    from megatron_elas.runtime.store import Versions
    from megatron_elas.runtime.transport.sockets import SocketTransport, _Failure
    from megatron_elas.spec.errors import EpochChanged
    from megatron_elas.spec.moves import Move
    from megatron_elas.spec.report import RecoveryReport

    session, state, transport, communicator = scene.session, scene.session._state, scene.transport, scene.communicator
    world, tables, connections = scene.groups[0], c10d._world, transport._connections
    dead = min(scene.dead)
    peer = next(worker for worker in scene.seated if worker != scene.worker)
    group = next(group for group in scene.groups[1:] if group.size() == 1)
    store = state.store
    replicator = session._pool._replicator
    free = world.channel + (1 << 32)  # the world's point-to-point channel has no links

    def inbox() -> Any:
        waiting = _Inbox()
        waiting.waiting.append(SimpleNamespace())
        return waiting

    def full_queue() -> Any:
        rounds: queue.SimpleQueue[Any] = queue.SimpleQueue()
        rounds.put(None)
        return rounds

    @contextlib.contextmanager
    def frames() -> Iterator[None]:
        with link(scene, peer, free) as planted:
            planted.post(scene.epoch, 0, memoryview(bytes(16 << 20)))  # nobody reads it
            yield

    @contextlib.contextmanager
    def link_of_an_old_epoch() -> Iterator[None]:
        with link(scene, peer, free) as planted:
            planted.epoch = scene.epoch - 1
            yield

    @contextlib.contextmanager
    def posts_for_a_strange_link() -> Iterator[None]:
        with link(scene, dead, free, enrolled=False) as planted, entry(transport._posts._links, -1, planted):
            yield

    found = {
        "a group from before": Plant(
            "process_groups",
            "not one of the communicator's",
            lambda: alive(
                ElasticProcessGroup(communicator, transport, name="old", members=[scene.worker], channel=999)
            ),
        ),
        "a member that is gone": Plant(
            "process_groups", "seated are", lambda: setting(_members=(world, (*world.members, dead)))
        ),
        "a team from before": Plant(
            "process_groups",
            "runs its collectives over",
            lambda: setting(_team=(world, world._team._replace(members=(*world.members, dead)))),
        ),
        "a rank from before": Plant("process_groups", "says rank", lambda: setting(_me=(world, world._me - 1))),
        "an inbox of a rank that is gone": Plant(
            "process_groups", "keeps inboxes of ranks [9]", lambda: entry(world._mailbox.inboxes, 9, _Inbox())
        ),
        "a mailbox of members from before": Plant(
            "process_groups",
            "has a mailbox for",
            lambda: setting(_members=(world._mailbox, (*world.members, dead))),
        ),
        "a receive from any rank": Plant(
            "process_groups",
            "of any rank that nobody waited for",
            lambda: setting(from_any=(world._mailbox, [SimpleNamespace()])),
        ),
        "an open bundle of operations": Plant(
            "process_groups", "still coalescing", lambda: setting(_coalesced=(world, []))
        ),
        "a receive nobody waited for": Plant(
            "process_groups", "that nobody waited for", lambda: entry(world._mailbox.inboxes, 0, inbox())
        ),
        "a queued operation": Plant(
            "process_groups", "operations in its queue", lambda: setting(_in_flight=(world._runner, 1))
        ),
        "torch's pg_coalesce_state": Plant(
            "torch_groups", "entries", lambda: entry(tables.pg_coalesce_state, group, [])
        ),
        "torch's tags": Plant("torch_groups", "tags_to_pg", lambda: entry(tables.tags_to_pg, "old", [strange_group()])),
        "torch's global ranks": Plant(
            "torch_groups", "pg_group_ranks says", lambda: entry(tables.pg_group_ranks, group, {0: 0, 1: 1})
        ),
        "torch's own rank": Plant(
            "torch_groups", "torch says global rank", lambda: setting(_me=(world, world._me - 1))
        ),
        "torch's default group": Plant(
            "torch_groups", "the default group is", lambda: setting(_default_pg=(tables, strange_group()))
        ),
        "torch's registry of names": Plant(
            "torch_groups", "another group under the name", lambda: another_under_its_name(group)
        ),
        "the communicator's world": Plant(
            "torch_groups", "the communicator's world", lambda: setting(_world=(communicator, (*scene.seated, dead)))
        ),
        "a strange group in a partial function": Plant(
            "strange_groups", "is held by", lambda: alive(functools.partial(print, strange_group()))
        ),
        "a strange group in a module's global": Plant(
            "strange_groups", "tests_planted_group is", lambda: _global_group("tests_planted_group")
        ),
        "a strange group in a class": Plant(
            "strange_groups", "Route.planted is", lambda: setting(planted=(Route, strange_group()))
        ),
        "a link that was let go": Plant(
            "links", "not one of the transport's", lambda: link(scene, peer, free, enrolled=False)
        ),
        "a link to a dead worker": Plant("links", "a worker that is gone", lambda: link(scene, dead, SNAPSHOTS)),
        "a link without a group": Plant("links", "of no group", lambda: link(scene, peer, 0xABC)),
        "a link of an old epoch": Plant("links", f"is of epoch {scene.epoch - 1}", link_of_an_old_epoch),
        "a link whose peer hung up": Plant("links", "the peer hung up", lambda: link(scene, peer, free, hung_up=True)),
        "frames that were never sent": Plant("links", "bytes to send", frames),
        "the transport's epoch": Plant(
            "transport", "the transport is in epoch", lambda: setting(_epoch=(transport, scene.epoch - 1))
        ),
        "an address of a dead worker": Plant(
            "transport", "knows addresses", lambda: entry(connections._addresses, dead, "unix:/nowhere")
        ),
        "a dial to a dead worker": Plant(
            "transport", "dials workers", lambda: member(connections._dialling, (dead, 0))
        ),
        "a thread that waits for a link": Plant(
            "transport", "wait for links", lambda: member(connections._wakers, _NO_DESCRIPTOR)
        ),
        "a second transport": Plant("transport", "2 transports are alive", lambda: alive(blank(SocketTransport))),
        "a refusal": Plant("transport", "still refuses", lambda: setting(_failure=(transport, _Failure(dead, "gone")))),
        "posts for a link that was let go": Plant("transport", "posts wait for", posts_for_a_strange_link),
        "a closed socket": Plant("sockets", "a closed socket is held", closed_socket),
        "a socket whose peer hung up": Plant("sockets", "has hung up", hung_up_socket),
        "a socket that nothing owns": Plant("sockets", "no object owns", forgotten_descriptor),
        "a thread of a group from before": Plant(
            "threads", "belongs to nothing alive", lambda: thread("elastic-group-old")
        ),
        "a thread that is there twice": Plant("threads", "is there twice", lambda: thread("elas-replicator")),
        "copies of an old layout": Plant(
            "session", "layouts of epochs", lambda: entry(state.stores, scene.epoch - 1, (scene.plan, store))
        ),
        "copies under another plan": Plant(
            "session",
            "under another plan",
            lambda: entry(state.stores, scene.epoch, (dataclasses.replace(scene.plan, backups=()), store)),
        ),
        "copies for a dead backup": Plant(
            "session", f"copies go to workers ({dead},)", lambda: setting(backups=(store, (dead,)))
        ),
        "copies of a dead ward": Plant("session", "copies of workers", lambda: entry(store.wards, dead, store.own)),
        "the replicator's copies": Plant(
            "session",
            "another layout",
            lambda: setting(_latest=(replicator, SimpleNamespace(store=None, error=None))),
        ),
        "the replicator's error": Plant(
            "session",
            "the replicator holds RuntimeError",
            lambda: setting(_latest=(replicator, SimpleNamespace(store=store, error=RuntimeError("old")))),
        ),
        "the replicator's queue": Plant(
            "session", "rounds in its queue", lambda: setting(_rounds=(replicator, full_queue()))
        ),
        "replicas fitted before": Plant(
            "session", "are built for", lambda: setting(fitted=(state, (dead, scene.worker)))
        ),
        "an old capture": Plant("session", "captures of versions [-9]", lambda: entry(state.captures, -9, None)),
        "a dead worker among the living": Plant(
            "session", "among the living", lambda: setting(_living=(communicator, communicator._living | {dead}))
        ),
        "a report not sent": Plant(
            "session",
            "was not sent",
            lambda: setting(
                _open_report=(session, RecoveryReport(worker=scene.worker, epoch=scene.epoch, resume_step=0))
            ),
        ),
        "a pending error": Plant(
            "session", "an error is pending", lambda: setting(_pending=(communicator, EpochChanged("old")))
        ),
        "copies that were let go": Plant(
            "single_objects",
            "a ShardStore that is not the state's",
            lambda: alive(make_store(scene.session._state.catalogue, scene.plan, scene.worker, 1)),
        ),
        "buffers that were let go": Plant(
            "single_objects", "a Versions that is not the state's", lambda: alive(Versions(4))
        ),
        "a plan of an old epoch": Plant(
            "old_epochs", "a ElasticPlan of epoch 0", lambda: alive(dataclasses.replace(scene.plan, epoch=0))
        ),
        "a move of a dead worker's shard": Plant(
            "dead_workers",
            f"a Move has owner {dead}",
            lambda: alive(Move(owner=dead, source=peer, target=scene.worker, old_offset=0, new_offset=0, numel=1)),
        ),
        "an error of an old epoch": Plant("errors", "EpochChanged (old) is held", lambda: alive(EpochChanged("old"))),
    }
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "pg_coalesce_state"):
        found[f"a strange group in torch's {name}"] = Plant(
            "torch_groups", f"{name} holds", lambda name=name: entry(getattr(tables, name), strange_group(), {})
        )
    for kind in (
        Attachment, OptimizerFactory, ShardAccess, Route, RoutedPipeline, PassCounter, MegatronHost, Communicator,
        Executor, Replicator, Session, WorkerState,
    ):  # fmt: skip
        found[f"a second {kind.__name__}"] = Plant(
            "single_objects", f"2 objects of class {kind.__name__}", lambda kind=kind: alive(blank(kind))
        )
    return found


@contextlib.contextmanager
def _global_group(name: str) -> Iterator[None]:
    from megatron.core import utils

    with setting(**{name: (utils, strange_group())}):
        yield
