"""An Ethernet switch in this process, between network namespaces: it can cut, delay and lose.

The kernel's netem would do the last two, where it is compiled in. TUN/TAP is where containers and virtual machines are.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from collections import Counter

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
"""From <linux/if_tun.h>."""
LONGEST_FRAME = 65536
BURST = 64
"""Frames taken from a port before the next one has its turn."""


def mac_of(port: int) -> bytes:
    """Locally administered, one per port."""
    return bytes((2, 0, 0, 0, 0, port + 1))


class Switch:
    """Forwards frames on a thread. Faults may be changed at any time, from any thread."""

    def __init__(self, seed: int = 1) -> None:
        self.delay_s = 0.0
        """Of every frame."""
        self.loss = 0.0
        """Probability that a frame is lost."""
        self.counts: Counter[str] = Counter()
        """Frames ``passed``, ``cut``, ``lost`` and ``delayed``."""
        self._cut: frozenset[int] = frozenset()
        self._random = random.Random(seed)
        self._ports: list[int] = []
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._epoll = select.epoll()
        self._wake, self._woken = os.pipe()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._forward, name="switch")

    def add_port(self, name: str) -> int:
        """Make the interface ``name`` in this process's namespace, plugged in; it may be moved. Gives the port.

        Raises OSError where that is not allowed.
        """
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
        except OSError:
            os.close(tap)
            raise
        self._ports.append(tap)
        self._epoll.register(tap, select.EPOLLIN)
        return len(self._ports) - 1

    def start(self) -> None:
        """Begin to forward, when all ports are there."""
        self._thread.start()

    def cut(self, *ports: int) -> None:
        """From now on nothing passes to or from these ports, and no others are cut."""
        self._cut = frozenset(ports)

    def close(self) -> None:
        """End; the interfaces vanish."""
        os.write(self._woken, b"x")
        if self._thread.ident is not None:
            self._thread.join()
        for fd in (*self._ports, self._wake, self._woken):
            os.close(fd)
        self._epoll.close()

    # ------------------------------------------------------------ the thread

    def _forward(self) -> None:
        by_fd = {fd: port for port, fd in enumerate(self._ports)}
        by_mac = {mac_of(port): port for port in by_fd.values()}
        while True:
            for fd, _ in self._epoll.poll(self._next_s()):
                if fd == self._wake:
                    return
                self._take(by_fd[fd], by_mac)
            self._deliver_due()

    def _next_s(self) -> float:
        return max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else -1

    def _take(self, port: int, by_mac: dict[bytes, int]) -> None:
        for _ in range(BURST):
            try:
                frame = os.read(self._ports[port], LONGEST_FRAME)
            except OSError:  # none left, or the interface is down
                return
            to = by_mac.get(frame[:6])
            for other in range(len(self._ports)) if to is None else (to,):
                if other != port:
                    self._pass(port, other, frame)

    def _pass(self, port: int, other: int, frame: bytes) -> None:
        if self._cut & {port, other}:
            self.counts["cut"] += 1
        elif self.loss and self._random.random() < self.loss:
            self.counts["lost"] += 1
        elif self.delay_s:
            self.counts["delayed"] += 1
            heapq.heappush(self._waiting, (time.monotonic() + self.delay_s, next(self._numbers), other, frame))
        else:
            self._deliver(other, frame)

    def _deliver_due(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, _, port, frame = heapq.heappop(self._waiting)
            if port in self._cut:
                self.counts["cut"] += 1
            else:
                self._deliver(port, frame)

    def _deliver(self, port: int, frame: bytes) -> None:
        try:
            os.write(self._ports[port], frame)
            self.counts["passed"] += 1
        except OSError:  # the interface is down, or its queue full: then a switch loses frames too
            self.counts["lost"] += 1
