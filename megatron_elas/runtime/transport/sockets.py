"""The transport over non-blocking stream sockets; ``frame`` has the wire format, an ``engine`` moves the bytes.

How links come about: see ``connections``.

Ending: ``cancel`` makes ``_wake`` readable, on which every wait polls. The first operation that fails in an epoch
poisons the transport: no later one may send frames, or peers would read them as answers to another operation. When it
failed because operations were mixed up, all peers of the channel and of those related to it are told, and tell theirs:
an objection reaches everybody who waits, directly or through others, for somebody who knows. A ``send``, which does not
listen, ends with the epoch.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_elas.runtime.transport.base import Part, ProtocolError
from megatron_elas.runtime.transport.connections import Connections
from megatron_elas.runtime.transport.engine import Call, Control, Objection
from megatron_elas.runtime.transport.engine_choice import choose_engine
from megatron_elas.runtime.transport.link import Link
from megatron_elas.runtime.transport.posts import PostSender
from megatron_elas.runtime.transport.program import Program
from megatron_elas.spec.errors import EpochChanged, PeerLost


class _Failure(NamedTuple):
    """What ended the epoch here. Not the exception itself: its traceback would keep the caller's tensors alive."""

    peer: int | None
    why: str
    objection: str | None = None
    """What peers are told when operations were mixed up."""


class SocketTransport:
    """Implements ``base.Transport``. Make it after forking: it has threads.

    Different threads may use it at the same time for different (peer, channel) pairs.
    """

    def __init__(self, worker: int, listen: str, token: str) -> None:
        """Listen and start accepting.

        Args:
            worker: Own worker id.
            listen: ``unix:/path`` (the file must not exist) or ``tcp:host:port``; port 0 picks a free one, and the
                host must be one that peers can dial.
            token: Secret of the job; peers with another one are refused.

        Raises:
            ValueError: The address cannot work.
            OSError: It is taken.
        """
        self._worker = worker
        self._epoch = 0
        self._cancelled = False
        self._closed = False
        self._failure: _Failure | None = None
        self._control = Control(self.refusal)
        self._engine = choose_engine(self._control)
        self._wake = self._control.wake
        self._posts = PostSender(f"elastic-posts-{worker}", self._poison)
        try:
            self._connections = Connections(self, listen, token)
        except BaseException:
            self._posts.close()
            self._control.close()
            raise
        self._related_to: Callable[[int], Collection[int]] = lambda _: ()
        self._links = self._connections.links
        self._changed = self._connections.changed

    # ------------------------------------------------------------------ state

    @property
    def worker(self) -> int:
        """Own worker id."""
        return self._worker

    @property
    def address(self) -> str:
        """Where peers dial this worker."""
        return self._connections.address

    @property
    def epoch(self) -> int:
        """Epoch that frames carry now."""
        return self._epoch

    @property
    def cancelled(self) -> bool:
        """True between ``cancel`` and ``adopt``."""
        return self._cancelled

    def set_addresses(self, addresses: Mapping[int, str]) -> None:
        """Say where the living are. A lost worker that is among them lives again, from the next epoch on."""
        self._connections.set_addresses(addresses)

    @property
    def wake_fd(self) -> int:
        """Readable while cancelled."""
        return self._wake

    def make_link(self, peer: int, channel: int, sock: socket.socket) -> Link:
        """Wrap a connected, non-blocking socket."""
        return self._engine.link(peer, channel, sock, self._epoch)

    # ------------------------------------------------------------------ operations

    def exchange(
        self,
        channel: int,
        tag: int,
        sends: Sequence[Part],
        receives: Sequence[Part],
        limit_s: float | None = None,
    ) -> None:
        """See ``base.Transport``."""
        if self._cancelled or self._failure is not None:
            raise self.refusal()
        used: list[Link] = []
        begun = False
        try:
            call = Call.begin(channel, self._epoch, tag, limit_s)
            parts = (*sends, *receives)
            outgoing = [(self._link(peer, channel, parts), buffer) for peer, buffer in sends]
            used += [link for link, _ in outgoing]
            incoming = [(self._link(peer, channel, parts), buffer) for peer, buffer in receives]
            if any(buffer.readonly and buffer.nbytes for _, buffer in incoming):
                raise TypeError("a buffer that receives must be writable")
            begun = True
            self._engine.exchange(call, outgoing, incoming)
        except BaseException as error:
            if begun or not isinstance(error, TypeError | ValueError):  # these are the caller's: nothing has moved yet
                self._break_off(channel, used, error)
            raise

    def run(
        self,
        channel: int,
        tag: int,
        program: Program,
        buffers: Sequence[memoryview],
        limit_s: float | None = None,
    ) -> None:
        """See ``base.Transport``."""
        if self._cancelled or self._failure is not None:
            raise self.refusal()
        try:
            call = Call.begin(channel, self._epoch, tag, limit_s)

            def link_to(peer: int) -> Link:
                return self._link(peer, channel, (part for turn in program.rounds for part in (*turn[0], *turn[1])))

            self._engine.run(call, program, link_to, buffers)
        except BaseException as error:
            used = [link for key, link in self._links.copy().items() if key[1] == channel]
            self._break_off(channel, used, error)
            raise

    def send(self, channel: int, tag: int, part: Part) -> None:
        """See ``base.Transport``."""
        if self._cancelled or self._failure is not None:
            raise self.refusal()
        peer, buffer = part
        used: list[Link] = []
        try:
            used.append(self._link(peer, channel))
            call = Call.begin(channel, self._epoch, tag, None, listens=False)
            self._engine.exchange(call, [(used[0], buffer)], [])
        except BaseException as error:
            failure = self._failure
            if failure and failure.objection and isinstance(error, EpochChanged) and not self._cancelled:
                self._object(used, failure.objection)  # again: the engine may have dropped the first one
                raise Objection(failure.objection) from None
            if used or not isinstance(error, TypeError | ValueError):
                self._break_off(channel, used, error)
            raise

    def post(self, channel: int, tag: int, part: Part) -> None:
        """See ``base.Transport``. What peers do not receive stays in this worker's memory."""
        if self._cancelled or self._failure is not None:
            raise self.refusal()
        peer, buffer = part
        try:
            link = self._link(peer, channel)
            if not link.post(self._epoch, tag, buffer):
                self._posts.watch(link)
        except EpochChanged as error:
            self._poison(error)
            raise

    def _link(self, peer: int, channel: int, others: Iterable[tuple[int, Any]] = ()) -> Link:
        """The link to ``peer``; when it is missing, those to the peers of ``others`` are made at the same time."""
        link = self._links.get((peer, channel))
        if link is None:
            keys = {(peer, channel), *((other, channel) for other, _ in others)}
            link = self._connections.open_all(keys)[peer, channel]
        return link

    # ------------------------------------------------------------------ failing

    def cancel(self) -> None:
        """End every operation now; thread-safe, returns at once, may be called again."""
        self._cancelled = True
        self._control.cancelled.value = 1
        with self._changed:
            if not self._closed:
                self._cancelled = True  # an adopt may have come between
                self._control.cancel()
            self._changed.notify_all()

    def _poison(self, error: BaseException, objection: str | None = None) -> bool:
        """End the epoch for this worker. True when it had not ended yet."""
        with self._changed:
            if self._failure is not None:
                return False
            self._failure = _Failure(error.peer if isinstance(error, PeerLost) else None, str(error), objection)
            if not self._closed:
                self._control.end()
            return True

    def refusal(self) -> EpochChanged:
        """The error of an operation that may not run: of the kind that ended the epoch."""
        failure = self._failure
        if failure is None:
            return EpochChanged(f"epoch {self._epoch} was cancelled on worker {self._worker}")
        why = f"epoch {self._epoch} ended on worker {self._worker}: {failure.why}"
        return EpochChanged(why) if failure.peer is None else PeerLost(failure.peer, why)

    def _break_off(self, channel: int, used: Iterable[Link], error: BaseException) -> None:
        """An operation has failed: end the epoch, let go of its buffers; tell peers when operations were mixed up."""
        if not isinstance(error, ProtocolError):
            # Also those that the engine has cut already: a signal may have come just before.
            for link in used:
                link.cut()
            known = isinstance(error, EpochChanged | TimeoutError)
            self._poison(error if known else EpochChanged(f"an operation was broken off by {error!r}"))
            return
        text = str(error) if isinstance(error, Objection) else f"worker {self._worker} noticed: {error}"
        if self._poison(error, text):
            channels = {channel, *self._related_to(channel)}
            with self._changed:
                links = [link for link in self._links.values() if link.channel in channels]
            self._object(links, text)

    def _object(self, links: Iterable[Link], text: str) -> None:
        for link in links:
            if not link.object(self._epoch, text):
                self._posts.watch(link)

    def adopt(self, epoch: int, *, lost: Collection[int]) -> None:
        """Enter a new epoch.

        All living peers must have cancelled or failed in the old epoch before: the zeros that complete a cut frame
        would be data to a peer that still takes part in it. The session's protocol (everybody settles, then the plan
        is sent) sees to that.

        Raises:
            ValueError: The epoch is not a newer one.
        """
        if epoch <= self._epoch:
            raise ValueError(f"epoch {epoch} cannot be adopted after {self._epoch}: epochs only grow")
        with self._changed:
            self._connections.adopt(epoch, lost)
            self._epoch = epoch
            self._engine.forget()
            self._failure = None
            self._cancelled = False
            self._control.reset()

    def open_links(self, wanted: Collection[tuple[int, int]], limit_s: float | None = None) -> None:
        """See ``base.Transport``."""
        try:
            self._connections.open_all(wanted, limit_s)
        except EpochChanged as error:
            self._poison(error)
            raise

    def name_channels(self, name_of: Callable[[int], str]) -> None:
        """See ``base.Transport``."""
        self._connections.name_channel = name_of

    def relate_channels(self, related_to: Callable[[int], Collection[int]]) -> None:
        """See ``base.Transport``."""
        self._related_to = related_to

    def keep_links(self, is_used: Callable[[int, int], bool]) -> None:
        """See ``base.Transport``."""
        self._engine.forget()
        self._connections.keep(is_used)

    def close(self) -> None:
        """Close links and listener, remove the socket file, end threads. Posts not yet sent are dropped."""
        with self._changed:
            if self._closed:
                return
        self.cancel()
        with self._changed:
            self._closed = True
        self._connections.close()
        self._posts.close()
        self._control.close()
