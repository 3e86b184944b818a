"""What may be stale in this project's own objects, in torch.distributed, and in the process itself."""

from __future__ import annotations

import gc
import os
import select
import socket
import stat
import threading
from collections.abc import Iterator
from typing import Any

from tests.fault.stale import Check, Finding, Scene, attributes, module_variables

OURS = "megatron_elas"


def process_groups(scene: Scene) -> Iterator[Finding]:
    """Every group of ours that is alive is the communicator's and has the members, size and rank of the plan."""
    from megatron_elas.runtime.communicator.process_group import ElasticProcessGroup

    found = scene.of(ElasticProcessGroup)
    if len(found) < len(scene.groups):
        yield f"the walk saw {len(found)} groups, the communicator has {len(scene.groups)}: it is blind"
    for group in found:
        if not scene.knows(group):
            yield f"{group} is alive and not one of the communicator's groups"
            continue
        if not set(group.members) <= set(scene.seated):
            yield f"{group} has members {group.members}, seated are {scene.seated}"
        if tuple(group._team.members) != group.members or group._team.me != group.rank():
            yield f"{group} runs its collectives over {group._team.members} as {group._team.me}"
        if group.members[group.rank()] != scene.worker or group.size() != len(group.members):
            yield f"{group} says rank {group.rank()} of {group.size()}"
        mailbox = group._mailbox
        if mailbox._members != group.members or mailbox._me != group.rank():
            yield f"{group} has a mailbox for {mailbox._members} as {mailbox._me}"
        if extra := [rank for rank in mailbox.inboxes if rank >= group.size()]:
            yield f"{group} keeps inboxes of ranks {extra}, it has {group.size()}"
        if extra := [rank for rank in mailbox.outboxes if rank >= group.size()]:
            yield f"{group} keeps outboxes of ranks {extra}, it has {group.size()}"
        if group._coalesced is not None:
            yield f"{group} is still coalescing"
        if scene.interrupted:
            continue
        if group._runner.busy or group._runner._queue:
            yield f"{group} has operations in its queue"
        if mailbox.from_any:
            yield f"{group} has receives of any rank that nobody waited for"
        if waiting := [rank for rank, inbox in mailbox.inboxes.items() if inbox.waiting or inbox.thread]:
            yield f"{group} has receives of ranks {waiting} that nobody waited for"
        if sending := [rank for rank, outbox in mailbox.outboxes.items() if outbox.queue]:
            yield f"{group} has sends to ranks {sending} that nobody took"


def torch_groups(scene: Scene) -> Iterator[Finding]:
    """c10d's tables hold our groups, all of them, and the plan's ranks; its default group is our first."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    world = c10d._world
    tables = {
        name: getattr(world, name)
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "pg_coalesce_state")
    }
    for name, table in tables.items():
        for group in list(table):
            if isinstance(group, dist.ProcessGroup) and not scene.knows(group):
                yield f"c10d's {name} holds {group}"
    for tag, groups in world.tags_to_pg.items():
        for group in groups:
            if isinstance(group, dist.ProcessGroup) and not scene.knows(group):
                yield f"c10d's tags_to_pg[{tag!r}] holds {group}"
    if world.pg_coalesce_state:
        yield f"c10d's pg_coalesce_state has {len(world.pg_coalesce_state)} entries"
    if world.default_pg is not scene.groups[0] or dist.GroupMember.WORLD is not scene.groups[0]:
        yield f"the default group is {world.default_pg}"
    if (dist.get_rank(), dist.get_world_size()) != (scene.rank_of[scene.worker], len(scene.seated)):
        yield f"torch says global rank {dist.get_rank()} of {dist.get_world_size()}"
    if scene.communicator.world != scene.seated:
        yield f"the communicator's world is {scene.communicator.world}, seated are {scene.seated}"
    for group in scene.groups:
        ranks = [scene.rank_of.get(worker, -1) for worker in group.members]
        table = dict(world.pg_group_ranks.get(group, {}))
        if table != {rank: position for position, rank in enumerate(ranks)}:
            yield f"c10d's pg_group_ranks says {table} of {group}, whose global ranks are {ranks}"
        elif dist.get_process_group_ranks(group) != ranks:
            yield f"torch says ranks {dist.get_process_group_ranks(group)} of {group}, whose global ranks are {ranks}"
        if c10d._resolve_process_group(group.group_name) is not group:
            yield f"torch finds another group under the name of {group}"


def strange_groups(scene: Scene) -> Iterator[Finding]:
    """Nothing at all holds a process group that is not one of ours: no module, closure, list, class or global."""
    import torch.distributed as dist

    holders = scene.objects
    seen: set[int] = set()
    while holders:
        referents = gc.get_referents(*holders)
        for held in referents:
            if isinstance(held, dist.ProcessGroup) and not scene.knows(held) and id(held) not in seen:
                seen.add(id(held))
                names = {type(holder).__qualname__ for holder in holders if _refers(holder, held)}
                yield f"{held} is held by {', '.join(sorted(names))}"
        # The collector does not track tuples and dicts of things it does not track, such as torch's own groups.
        holders = [thing for thing in referents if isinstance(thing, tuple | dict) and not gc.is_tracked(thing)]
    for name, value in module_variables("megatron", "torch.distributed", OURS):
        if isinstance(value, dist.ProcessGroup) and not scene.knows(value):
            yield f"{name} is {value}"


def _refers(holder: Any, held: Any) -> bool:
    return any(referent is held for referent in gc.get_referents(holder))


def links(scene: Scene) -> Iterator[Finding]:
    """Links lead to living workers, are of this epoch, belong to the transport, and have a use."""
    from megatron_elas.host.groups import is_view
    from megatron_elas.runtime.communicator.channels import FIRST_FREE, POINT_TO_POINT
    from megatron_elas.runtime.transport.link import Link

    transport = scene.transport
    current = set(map(id, transport._links.values()))
    if len(scene.of(Link)) < len(current):
        yield f"the walk saw {len(scene.of(Link))} links, the transport has {len(current)}: it is blind"
    peers_on: dict[int, set[int]] = {}
    for group in scene.groups:
        # Until the first edit a chain is the same for all its members.
        if scene.epoch and is_view(group, scene.attached.initial):
            continue
        for channel in (group.channel, group.channel + POINT_TO_POINT):
            peers_on.setdefault(channel, set()).update(group.members)
    for link in scene.of(Link):
        name = f"the link to worker {link.peer} on channel {link.channel:#x}"
        if id(link) not in current:
            yield f"{name} is alive and not one of the transport's"
            continue
        if link.peer not in scene.alive:
            yield f"{name} leads to a worker that is gone"
        elif link.channel < FIRST_FREE and link.peer not in peers_on.get(link.channel, ()):
            yield f"{name} is of no group: no operation will use it again"
        if link.epoch != transport.epoch:
            yield f"{name} is of epoch {link.epoch}"
        if scene.interrupted:
            continue
        # A drained worker leaves in the middle of an epoch; its links are closed at the begin of the next one.
        if (link.lost is not None or link.hung_up()) and link.peer not in scene.plan.placement.spares:
            yield f"{name} is broken: {link.lost or 'the peer hung up'}"
        if link.queued:
            yield f"{name} has {link.queued} bytes to send"


def transport(scene: Scene) -> Iterator[Finding]:
    """The transport is in the plan's epoch, knows where the living are, and dials and posts to nobody else."""
    from megatron_elas.runtime.transport.sockets import SocketTransport

    ours = scene.transport
    if ours.epoch != scene.epoch:
        yield f"the transport is in epoch {ours.epoch}, the plan is of epoch {scene.epoch}"
    if gone := sorted(set(ours._connections._addresses) - scene.alive):
        yield f"the transport knows addresses of workers {gone}"
    # _lost names the dead on purpose: a connection that was under way when they died is refused by it.
    if gone := sorted(peer for peer, _ in ours._connections._dialling if peer not in scene.alive):
        yield f"the transport dials workers {gone}"
    if ours._connections._wakers and not scene.interrupted:
        yield f"{len(ours._connections._wakers)} threads are said to wait for links"
    if len(scene.of(SocketTransport)) != 1:
        yield f"{len(scene.of(SocketTransport))} transports are alive"
    if scene.interrupted:
        return
    if ours._failure is not None:
        yield f"the transport still refuses: {ours._failure.why}"
    for link in ours._posts._links.values():
        if link not in ours._links.values():
            yield f"posts wait for a link to worker {link.peer} that is not one of the transport's"


def sockets(scene: Scene) -> Iterator[Finding]:
    """No closed socket is held, no socket's peer has hung up, and every socket of the process has an owner."""
    owners = {}
    spares = scene.plan.placement.spares
    to_spares = {link.sock.fileno() for link in scene.transport._links.values() if link.peer in spares}
    for sock in scene.of(socket.socket):
        if sock.fileno() < 0:
            yield f"a closed socket is held by {_holders_of(sock, scene)}"
            continue
        owners[sock.fileno()] = sock
        if not scene.interrupted and sock.fileno() not in to_spares and _hung_up(sock):
            yield f"the peer of socket {sock.fileno()} ({sock.getsockname() or 'unnamed'}) has hung up"
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
        except OSError:  # listdir's own descriptor
            continue
        if is_socket and fd > 2 and fd not in owners:
            yield f"descriptor {fd} is a socket that no object owns"


def _hung_up(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    return any(events & select.POLLRDHUP for _, events in poller.poll(0))


def _holders_of(thing: Any, scene: Scene) -> str:
    names = set()
    for holder in gc.get_referrers(thing):
        if id(holder) in scene.identities:  # the walk's own lists and frames are not among them
            names.add(type(holder).__qualname__ + (f" of {code.co_qualname}" if (code := _code_of(holder)) else ""))
        elif isinstance(holder, dict):  # an object's, made when the walk asked for it
            owners = [owner for owner in gc.get_referrers(holder) if getattr(owner, "__dict__", None) is holder]
            names.update(type(owner).__qualname__ for owner in owners)
    return ", ".join(sorted(names)) or "nothing that can be seen"


def _code_of(holder: Any) -> Any:
    """What a frame runs; None for anything else."""
    return getattr(holder, "f_code", None)


def threads(scene: Scene) -> Iterator[Finding]:
    """Threads of groups are those of living groups; all others of ours are there once."""
    expected = {f"elastic-group-{group.group_name}" for group in scene.groups}
    expected |= {f"elastic-{what}-{scene.worker}" for what in ("accept", "posts")}
    expected |= {"elas-replicator", "elas-follower_0", "elas-migrating_0", "elas-link", "elas-heartbeat"}
    seen: set[str] = set()
    for thread in threading.enumerate():
        if not thread.name.startswith(("elastic-", "elas-")):
            continue
        if thread.name not in expected:
            yield f"thread {thread.name} belongs to nothing alive"
        if thread.name in seen:
            yield f"thread {thread.name} is there twice"
        seen.add(thread.name)


def session(scene: Scene) -> Iterator[Finding]:
    """State, executor, replicator and communicator hold what the plan in force says, and nothing that is pending."""
    from megatron_elas.runtime.state import Fit

    ours, state = scene.session, scene.session._state
    if set(state.stores) != {scene.epoch}:
        yield f"copies of the layouts of epochs {sorted(state.stores)} are kept"
    elif (store := state.stores[scene.epoch][1]) is not None:
        if state.stores[scene.epoch][0] is not scene.plan:
            yield "the copies are kept under another plan"
        if store.backups != scene.plan.backups_of(scene.worker):
            yield f"copies go to workers {store.backups}, the plan says {scene.plan.backups_of(scene.worker)}"
        if tuple(store.wards) != scene.plan.wards_of(scene.worker):
            yield f"copies of workers {tuple(store.wards)} are kept, the plan says {scene.plan.wards_of(scene.worker)}"
        if ours._pool._replicator._latest is not None and ours._pool._replicator._latest.store is not store:
            yield "the replicator holds copies of another layout"
    if state.fitted != (fit := Fit.of(scene.plan, scene.worker)):
        yield f"model, buffers and optimizer are built for {state.fitted}, the plan asks for {fit}"
    if old := sorted(version for version in state.captures if not ours.next_step - 2 <= version <= ours.next_step):
        yield f"captures of versions {old} are kept, the next step is {ours.next_step}"
    if gone := sorted(scene.communicator._living - scene.alive):
        yield f"the communicator counts workers {gone} among the living"
    if ours._open_report is not None:
        yield f"the report of epoch {ours._open_report.epoch} was not sent"
    if scene.interrupted:
        return
    if scene.communicator.pending_error is not None:
        yield f"an error is pending: {scene.communicator.pending_error}"
    if any(kept is not state.stores[scene.epoch][1] for kept, _ in ours._pool._mirrors.values()):
        yield "the pool follows copies of another layout"
    if ours._pool._replicator._latest is not None and ours._pool._replicator._latest.error is not None:
        yield f"the replicator holds {ours._pool._replicator._latest.error!r}"
    if not ours._pool._replicator._rounds.empty():
        yield "the replicator has rounds in its queue"


def single_objects(scene: Scene) -> Iterator[Finding]:
    """Of what there is one per worker, there is one: a second one would be left over from an earlier epoch."""
    from megatron_elas.host.attachment import Attachment
    from megatron_elas.host.optimizer import OptimizerFactory, ShardAccess
    from megatron_elas.host.pipeline import Route, RoutedPipeline
    from megatron_elas.host.schedule import PassCounter
    from megatron_elas.host.training import MegatronHost
    from megatron_elas.runtime.communicator.communicator import Communicator
    from megatron_elas.runtime.executor import Executor
    from megatron_elas.runtime.replicator import Replicator
    from megatron_elas.runtime.session import Session
    from megatron_elas.runtime.state import WorkerState
    from megatron_elas.runtime.store import ShardStore, Versions

    for kind in (
        Attachment, OptimizerFactory, ShardAccess, Route, RoutedPipeline, PassCounter, MegatronHost, Communicator,
        Executor, Replicator, Session, WorkerState,
    ):  # fmt: skip
        if (count := len(scene.of(kind))) != 1:
            yield f"{count} objects of class {kind.__name__} are alive"
    stores = [store for _, store in scene.session._state.stores.values() if store is not None]
    versions = [v for store in stores for v in (store.own, *store.wards.values())]
    for kind, known in ((ShardStore, stores), (Versions, versions)):
        for thing in scene.of(kind):
            if not any(thing is other for other in known):
                yield f"a {kind.__name__} that is not the state's is held by {_holders_of(thing, scene)}"


def old_epochs(scene: Scene) -> Iterator[Finding]:
    """No object of ours that says which epoch it is of is of an earlier one; plans above all.

    The order to go over to another plan is of a later one. The newest announcement of a loss is kept when a migration
    has led to a later one, for which there is none.
    """
    control = scene.session._control
    coming = scene.epoch if control.migration is None else control.migration.plan.epoch
    for thing in scene.of_package(OURS):
        epoch = attributes(thing).get("epoch")
        if isinstance(epoch, int) and epoch != scene.epoch and not (epoch > scene.epoch and scene.interrupted):
            if scene.epoch < epoch <= coming:
                continue
            if type(thing).__name__ == "Quiesce" and epoch == control.latest_epoch:
                continue
            yield f"a {type(thing).__name__} of epoch {epoch} is held by {_holders_of(thing, scene)}"


WORKER_ATTRIBUTES = frozenset({"peer", "worker", "owner", "backup", "source", "target", "ward"})
RECORDS_OF_LOSSES = frozenset({"WorkerLost", "Fault"})
"""Their purpose is to name the dead."""


def dead_workers(scene: Scene) -> Iterator[Finding]:
    """No object of ours names a dead worker, but for the announcement of its loss."""
    for thing in scene.of_package(OURS):
        if type(thing).__name__ in RECORDS_OF_LOSSES:
            continue
        for name, value in attributes(thing).items():
            if name.lstrip("_") in WORKER_ATTRIBUTES and isinstance(value, int) and value in scene.dead:
                yield f"a {type(thing).__name__} has {name} {value}"


def errors(scene: Scene) -> Iterator[Finding]:
    """No membership error is kept: its traceback holds the tensors of a cancelled step."""
    from megatron_elas.spec.errors import EpochChanged

    if scene.interrupted:
        return
    for error in scene.of(EpochChanged):
        yield f"{type(error).__name__} ({error}) is held by {_holders_of(error, scene)}"


CHECKS: tuple[Check, ...] = (
    process_groups, torch_groups, strange_groups, links, transport, sockets, threads, session, single_objects,
    old_epochs, dead_workers, errors,
)  # fmt: skip
