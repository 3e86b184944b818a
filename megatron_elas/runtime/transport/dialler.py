"""Opens missing links: all at once, on the thread that needs them, in one poll loop."""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections.abc import Collection

from megatron_elas.runtime.transport.dial import Dial
from megatron_elas.runtime.transport.handshake import Hello, HelloKind, NotAMember, Verdict
from megatron_elas.runtime.transport.link import Link
from megatron_elas.runtime.transport.link_table import Key, LinkTable
from megatron_elas.spec.errors import PeerLost

CONNECT_LIMIT_S = 5.0
"""A peer whose host does not accept a connection for so long is lost."""

ANSWER_LIMIT_S = 10.0
"""A peer that has accepted but does not answer for so long is lost, as one is that sends no heartbeat for so long."""

OFFER_AFTER_S = 0.01
"""For so long the lower side waits for the higher one to dial: in a collective both need the link at the same time, and
offers that cross dials made the first operations after an edit about twice as slow."""

AGAIN_S = 0.02
"""An offer that crossed the peer's own dial is made again when that dial has brought no link by then. A peer whose
dials bring none within both limits together is lost."""


class Dialler:
    """One call of ``Connections.open_all``. Its thread is the caller's."""

    def __init__(self, table: LinkTable, secret: bytes, wanted: Collection[Key], limit_s: float | None) -> None:
        self._table = table
        self._secret = secret
        self._links: dict[Key, Link] = {}
        self._began_s = time.monotonic()
        own = table.owner.worker
        self._missing = {key: self._began_s + OFFER_AFTER_S if own < key[0] else 0.0 for key in wanted}
        """Keys without a link, with the time from when on they may be dialled."""
        self._dials: dict[int, Dial] = {}
        self._claimed_s = self._began_s
        """When missing keys were last looked through: who was too early then is waited for, however late it is now."""
        self._first_s: dict[Key, float] = {}
        """When each key was dialled first."""
        self._limit_s = math.inf if limit_s is None else limit_s
        self._watched: dict[int, int] = {}
        self._poller = select.poll()

    def run(self, wake_fd: int) -> dict[Key, Link]:
        """Dial until nothing is missing.

        Args:
            wake_fd: Made readable when a link, an address or a loss has become known.

        Raises:
            EpochChanged, PeerLost: See ``Connections.open_all``.
        """
        table, owner = self._table, self._table.owner
        self._poller.register(owner.wake_fd, select.POLLIN)
        self._poller.register(wake_fd, select.POLLIN)
        try:
            while True:
                with table.changed:
                    _drain(wake_fd)
                    self._take_known()
                    if not self._missing:
                        return self._links
                    if owner.cancelled:
                        raise owner.refusal()
                    self._claim()
                for dial in [dial for dial in self._dials.values() if not dial.begun]:
                    self._advance(dial)
                if not self._missing:
                    continue
                ready = [fd for fd, _ in self._poller.poll(self._next_ms())]
                again = [fd for fd, dial in self._dials.items() if (dial.retry_s or math.inf) <= time.monotonic()]
                for fd in (*ready, *again):
                    if fd in self._dials:
                        self._advance(self._dials[fd])
                if self._missing:
                    self._check_limits()
        finally:
            for dial in self._dials.values():
                dial.close()
            table.unclaim([_key_of(dial) for dial in self._dials.values()])

    def _take_known(self) -> None:
        """Links that have come about otherwise. The caller holds the lock, as for ``_claim``."""
        known = self._table.links
        for key in [key for key in self._missing if key in known]:
            self._links[key] = known[key]
            del self._missing[key]
        for fd, dial in list(self._dials.items()):
            if _key_of(dial) in self._links:
                self._watch(dial, 0)
                del self._dials[fd]
                dial.close()
                self._table.unclaim([_key_of(dial)])

    def _claim(self) -> None:
        """Begin to dial what nobody dials yet."""
        table, owner = self._table, self._table.owner
        own = {_key_of(dial) for dial in self._dials.values()}
        now = self._claimed_s = time.monotonic()
        for key, begin_s in self._missing.items():
            peer, channel = key
            address = table.address_of(peer, channel)  # raises when the peer is lost
            if key in own or begin_s > now or not table.claim(key):
                continue
            kind = HelloKind.LINK if owner.worker > peer else HelloKind.OFFER
            hello = Hello(kind, owner.worker, peer, channel, owner.epoch)
            try:
                dial = Dial(address, hello, self._secret)
            except BaseException as error:
                table.unclaim([key])
                if not isinstance(error, OSError):  # ValueError: no address that can be dialled
                    raise
                raise PeerLost(peer, table.describe_failure(key, address, error.strerror or str(error))) from None
            self._dials[dial.socket.fileno()] = dial
            self._first_s.setdefault(key, dial.started_s)

    def _advance(self, dial: Dial) -> None:
        try:
            verdict = dial.advance()
        except (OSError, NotAMember) as error:
            raise self._lost(dial, (isinstance(error, OSError) and error.strerror) or str(error)) from None
        if verdict is None:
            self._watch(dial, dial.events)
            return
        self._watch(dial, 0)
        del self._dials[dial.socket.fileno()]
        key = _key_of(dial)
        if verdict is Verdict.TAKEN:
            self._links[key] = self._table.enrol(key, dial.socket)
            del self._missing[key]
        else:
            dial.close()
            self._table.unclaim([key])
            now = time.monotonic()
            self._missing[key] = now + AGAIN_S
            tried_s = now - self._first_s[key]
            if tried_s > CONNECT_LIMIT_S + ANSWER_LIMIT_S:  # what its own dial may take
                raise self._lost(dial, f"it says that it dials this worker, but made no link within {tried_s:.1f} s")

    def _watch(self, dial: Dial, events: int) -> None:
        """Poll its socket for these, or not at all: one that is not connected would always be ready."""
        fd = dial.socket.fileno()
        if events and self._watched.get(fd) != events:
            self._poller.register(fd, events)
            self._watched[fd] = events
        elif not events and self._watched.pop(fd, 0):
            self._poller.unregister(fd)

    def _check_limits(self) -> None:
        now = time.monotonic()
        for dial in self._dials.values():
            if self._limit_of(dial) <= now:
                began_s = dial.started_s if dial.connected_s is None else dial.connected_s
                state = "accepted no connection" if dial.connected_s is None else "was connected but did not answer"
                raise self._lost(dial, f"it {state} within {now - began_s:.1f} s")
        if self._began_s + self._limit_s <= now:
            # it was not even dialled: another thread does, or the peer promised to
            key = next(iter(self._missing))
            address = self._table.address_of(*key)
            why = f"there was no link after {now - self._began_s:.1f} s"
            raise PeerLost(key[0], self._table.describe_failure(key, address, why))

    def _limit_of(self, dial: Dial) -> float:
        """When the peer counts as lost, by ``time.monotonic()``."""
        if dial.connected_s is None:
            limit_s = dial.started_s + CONNECT_LIMIT_S
        else:
            limit_s = dial.connected_s + ANSWER_LIMIT_S
        return min(limit_s, self._began_s + self._limit_s)

    def _next_ms(self) -> int | None:
        """Until a dial is to be tried again, or given up."""
        now = time.monotonic()
        limits = [self._began_s + self._limit_s, *(s for s in self._missing.values() if s > self._claimed_s)]
        for dial in self._dials.values():
            limits.append(self._limit_of(dial) if dial.retry_s is None else dial.retry_s)
        first_s = min(limits)
        return None if math.isinf(first_s) else max(0, int((first_s - now) * 1e3) + 1)

    def _lost(self, dial: Dial, why: str) -> PeerLost:
        key = _key_of(dial)
        return PeerLost(key[0], self._table.describe_failure(key, dial.address, why))


def _key_of(dial: Dial) -> Key:
    return dial.hello.peer, dial.hello.channel


def _drain(waker: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(waker)
