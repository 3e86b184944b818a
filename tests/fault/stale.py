"""A walk over everything that lives in a worker, for what knows a worker that is gone or an epoch that is over.

Called between two steps, when a step has been committed under the plan in force. It holds its breath: nothing is
exchanged with other workers, so each may walk when it likes.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

Finding = str
"""What is stale, where, and what it should be."""


class Scene:
    """What the checks look at, gathered once."""

    def __init__(self, attached: Any) -> None:
        self.attached = attached
        self.session = attached.session
        self.host = attached.host
        self.communicator = attached.communicator
        self.transport = attached.communicator.transport
        self.worker: int = attached.worker
        self.plan = attached.session.plan
        self.epoch: int = self.plan.epoch
        self.seated: tuple[int, ...] = self.plan.placement.workers
        self.alive = {*self.seated, *self.plan.placement.spares}
        self.dead = set(range(attached.job.world_size)) - self.alive
        self.rank_of = {worker: rank for rank, worker in enumerate(self.seated)}
        self.groups: list[Any] = attached.communicator.groups
        gc.collect()
        self.objects = gc.get_objects()
        """Without what the starter froze before the fork: modules and classes, which are looked at by name."""
        self._by_type: dict[type, list[Any]] = {}
        for thing in self.objects:
            self._by_type.setdefault(type(thing), []).append(thing)

    @functools.cached_property
    def identities(self) -> set[int]:
        """Of all live objects."""
        return set(map(id, self.objects))

    @property
    def interrupted(self) -> bool:
        """Whether the next membership change has begun already, so that communication is in no quiet state."""
        return bool(self.transport.cancelled or self.session._control.latest_epoch > self.epoch)

    def of(self, *kinds: type) -> list[Any]:
        """Live objects of these classes and those derived from them."""
        return [thing for known, things in self._by_type.items() if issubclass(known, kinds) for thing in things]

    def of_package(self, *packages: str) -> list[Any]:
        """Live objects of the classes that these packages define."""
        return [
            thing
            for known, things in self._by_type.items()
            if known.__module__.partition(".")[0] in packages
            for thing in things
        ]

    def knows(self, group: Any) -> bool:
        """Whether it is one of the communicator's groups."""
        return any(group is known for known in self.groups)


Check = Callable[[Scene], Iterator[Finding]]


def find_stale(scene: Scene) -> list[Finding]:
    """All findings of all checks, each with the name of its check in front. Empty when nothing is stale."""
    from tests.fault import stale_megatron, stale_runtime

    return [
        f"{check.__name__}: {finding}"
        for check in (*stale_runtime.CHECKS, *stale_megatron.CHECKS)
        for finding in _run(check, scene)
    ]


def _run(check: Check, scene: Scene) -> Iterator[Finding]:
    """Its findings. One that trips over what it looks at has found something: an error here would be a lost worker."""
    try:
        yield from check(scene)
    except Exception as error:
        yield f"it could not go on: {error!r}"


def attributes(thing: Any) -> dict[str, Any]:
    """Its attributes, with those in slots. Properties are not asked."""
    found = dict(getattr(thing, "__dict__", {}))
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                found[name] = getattr(thing, name)
    return found


def module_variables(*packages: str) -> Iterator[tuple[str, Any]]:
    """("module.name", value) of all loaded modules of these packages, and of their classes' own attributes."""
    for module_name, module in list(sys.modules.items()):
        if module is None or not any(f"{module_name}.".startswith(f"{package}.") for package in packages):
            continue
        for name, value in list(vars(module).items()):
            yield f"{module_name}.{name}", value
            if isinstance(value, type) and value.__module__ == module_name:
                yield from ((f"{module_name}.{name}.{own}", held) for own, held in list(vars(value).items()))
