"""Stale objects of every kind, planted in a living worker one at a time, to see that the walk names each."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from tests.fault.stale import Scene

_MISSING = object()


@contextlib.contextmanager
def setting(**changes: tuple[Any, Any]) -> Iterator[None]:
    """Give attributes other values: ``setting(name=(object, value))``."""
    before = {name: getattr(thing, name, _MISSING) for name, (thing, _) in changes.items()}
    for name, (thing, value) in changes.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, (thing, _) in changes.items():
            if before[name] is _MISSING:
                delattr(thing, name)
            else:
                setattr(thing, name, before[name])


@contextlib.contextmanager
def entry(table: Any, key: Any, value: Any) -> Iterator[None]:
    """Put a value into a dict, or another one into a list."""
    before = table[key] if isinstance(table, list) else table.get(key, _MISSING)
    table[key] = value
    try:
        yield
    finally:
        if before is _MISSING:
            del table[key]
        else:
            table[key] = before


@contextlib.contextmanager
def member(collection: Any, thing: Any) -> Iterator[None]:
    """Put something into a set, list or queue from which it can be taken again."""
    add, remove = ("add", "discard") if isinstance(collection, set) else ("append", "remove")
    getattr(collection, add)(thing)
    try:
        yield
    finally:
        getattr(collection, remove)(thing)


@contextlib.contextmanager
def alive(*things: Any) -> Iterator[None]:
    """Hold something, as a forgotten variable would."""
    yield
    del things


def blank(kind: type, **attributes: Any) -> Any:
    """An object of that class that was never initialised, with these attributes."""
    thing = kind.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(thing, name, value)
    return thing


def strange_group() -> Any:
    """A process group that is not ours."""
    import torch.distributed as dist

    return dist.ProcessGroup(0, 1)


@contextlib.contextmanager
def link(scene: Scene, peer: int, channel: int, *, enrolled: bool = True, hung_up: bool = False) -> Iterator[Any]:
    """A link on a socket pair, among the transport's when ``enrolled``."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    planted = scene.transport._engine.link(peer, channel, ours, scene.epoch)
    if hung_up:
        theirs.close()
    links = scene.transport._links
    if enrolled:
        assert (peer, channel) not in links
        links[peer, channel] = planted
    try:
        yield planted
    finally:
        links.pop((peer, channel), None) if enrolled else None
        ours.close()
        theirs.close()


@contextlib.contextmanager
def thread(name: str) -> Iterator[None]:
    """A thread of that name, waiting."""
    over = threading.Event()
    planted = threading.Thread(target=over.wait, name=name, daemon=True)
    planted.start()
    try:
        yield
    finally:
        over.set()
        planted.join()


@contextlib.contextmanager
def closed_socket() -> Iterator[None]:
    """One that somebody still holds."""
    held = socket.socket()
    held.close()
    yield


@contextlib.contextmanager
def hung_up_socket() -> Iterator[None]:
    """One whose other end was closed."""
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        yield


@contextlib.contextmanager
def forgotten_descriptor() -> Iterator[None]:
    """A socket that only the operating system knows."""
    ours, theirs = socket.socketpair()
    theirs.close()
    fd = ours.detach()
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def another_under_its_name(group: Any) -> Iterator[None]:
    """The registry of torch gives another group."""
    import torch._C._distributed_c10d as native

    other = strange_group()  # the registry does not keep it alive
    native._unregister_process_group(group.group_name)
    native._register_process_group(group.group_name, other)
    try:
        yield
    finally:
        native._unregister_process_group(group.group_name)
        native._register_process_group(group.group_name, group)


class Plant(NamedTuple):
    """One stale thing."""

    check: str
    """Which must find it."""
    says: str
    """Part of the finding."""
    plant: Callable[[], AbstractContextManager[Any]]
