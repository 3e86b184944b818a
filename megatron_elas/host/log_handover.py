"""Megatron's log goes on without gap or repeat when the worker that writes it is lost.

Megatron prints its lines, and writes TensorBoard's scalars, on the last rank; every worker computes them. So each
worker keeps what it would have told since the last joint activity. The one that becomes the last rank tells
what its predecessor had not, which it reads from a small file that outlives a killed process.

Between two joint activities lies a *region*, numbered like the activity that follows. Lines are marked with their
region and their number in it. A worker that has entered an activity has told all of the region before it; a worker
that has passed an activity's barrier knows that of every other worker, so nothing older is kept.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

PLACES = 1 << 20
"""Lines that a region can have."""

_NUM_BYTES = 16


class Told(NamedTuple):
    """How far a worker's log has come."""

    line: int
    """Mark of the last line it printed: ``region * PLACES + number``, numbers from 1."""
    regions: int
    """Regions before this one are told completely, scalars too."""


def is_last_rank() -> bool:
    """Whether Megatron logs here now."""
    return dist.get_rank() == dist.get_world_size() - 1


class LogBoard:
    """A worker's ``Told``, in memory that is mapped to a file and so outlives the process. No system call to write."""

    def __init__(self, path: Path) -> None:
        with path.open("wb+") as file:
            file.truncate(_NUM_BYTES)
            self._map = mmap.mmap(file.fileno(), _NUM_BYTES)
        self._fields = memoryview(self._map).cast("q")

    def set_line(self, mark: int) -> None:
        """A line has left the process."""
        self._fields[0] = mark

    def set_regions(self, regions: int) -> None:
        """Everything before this region has."""
        self._fields[1] = regions

    def close(self) -> None:
        """Give the memory back; the file stays."""
        self._fields.release()
        self._map.close()


def read_board(path: Path) -> Told | None:
    """What a worker has told; None when it was on another node, so that its file is not here."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return Told(*memoryview(content).cast("q"))


class Log:
    """One per worker. Knows the lines and scalars that this worker would have told, were it the last rank."""

    def __init__(
        self,
        worker: int,
        folder: Path,
        find_region: Callable[[], int | None],
        is_last: Callable[[], bool] = is_last_rank,
    ) -> None:
        """Begin with nothing told.

        Args:
            worker: Own id.
            folder: For the workers' files; removed by others.
            find_region: The region that the training loop is in; None inside a joint activity.
            is_last: Whether this worker is the last rank now.
        """
        self._folder = folder
        self._find_region = find_region
        self._is_last = is_last
        self._board = LogBoard(self._path(worker))
        self._told = Told(0, 0)
        self._region, self._count = 0, 0
        self._regions = 0
        """Regions that this worker has left behind."""
        self._lines: list[tuple[int, str]] = []
        self._scalars: list[tuple[int, Callable[[Any], None]]] = []
        self._writer: Any = None
        self._open_writer: Callable[[], Any] | None = None

    def _path(self, worker: int) -> Path:
        return self._folder / f"w{worker}.told"

    # ------------------------------------------------------------ lines

    def tell(self, line: str) -> None:
        """Print the line if this is the last rank and it has not been printed; keep it otherwise."""
        region = self._find_region()
        if region is None:  # inside an activity, which is run again as a whole when it is cut short
            if self._is_last():
                print(line, flush=True)
            return
        if region != self._region:
            self._region, self._count = region, 0
        self._count += 1
        mark = region * PLACES + self._count
        if self._is_last():
            self._print(mark, line)
        else:
            self._lines.append((mark, line))

    def _print(self, mark: int, line: str) -> None:
        if mark > self._told.line and mark // PLACES >= self._told.regions:
            print(line, flush=True)
            self._told = self._told._replace(line=mark)
            self._board.set_line(mark)

    # ------------------------------------------------------------ scalars

    def take_writer(self, writer: Any, open_writer: Callable[[], Any]) -> LogWriter:
        """What Megatron is to use as its TensorBoard writer.

        Args:
            writer: The writer that Megatron made here; None where it made none.
            open_writer: Makes another one for the same folder.
        """
        self._writer, self._open_writer = writer, open_writer
        return LogWriter(self)

    def write(self, action: Callable[[Any], None]) -> None:
        """Do something with the writer when the region ends.

        Not now: TensorBoard's writer puts each scalar into its file by itself, and a worker lost in the middle of its
        log would leave some of them there, to be written again by the next one.
        """
        region = self._find_region()
        self._scalars.append((self._region if region is None else region, action))

    def _write_scalars(self, regions: int) -> None:
        """Bring what is kept to the file, up to this number of regions, having said so before.

        A worker that is lost in between, within a millisecond or two, leaves a gap and no repeat.
        """
        pending = [action for region, action in self._scalars if region >= self._told.regions]
        self._scalars.clear()
        self._told = self._told._replace(regions=max(regions, self._told.regions))
        self._board.set_regions(self._told.regions)
        if pending and self._writer is None:
            assert self._open_writer is not None
            self._writer = self._open_writer()
        for action in pending:
            action(self._writer)
        if self._writer is not None:
            self._writer.flush()

    # ------------------------------------------------------------ the training loop and recoveries

    def seal(self, region: int) -> None:
        """A joint activity begins: the region before it is told, and all of the ones before are known to be."""
        self._regions = region + 1
        if self._is_last():
            self._write_scalars(self._regions)
        self._lines = [(mark, line) for mark, line in self._lines if mark // PLACES >= region]
        self._scalars = [(number, action) for number, action in self._scalars if number >= region]

    def take_over(self, gone: Sequence[int], last: int) -> None:
        """The membership has changed: if this is the last rank now, tell what those who are gone had not.

        Args:
            gone: Workers without a seat, and the last rank until now, gone or not.
            last: The last rank's worker until now. If it was on another node and is gone, it is assumed to have told
                all: workers are rarely lost just before they log.
        """
        boards = {worker: read_board(self._path(worker)) for worker in gone}
        known = [board for board in boards.values() if board is not None]
        self._told = Told(*map(max, zip(self._told, *known, strict=True)))
        if last in gone and boards[last] is None:
            self._lines.clear()
            self._scalars.clear()
        if not self._is_last():
            return
        lines, self._lines = self._lines, []
        for mark, line in lines:
            self._print(mark, line)
        self._write_scalars(self._regions)

    def close(self, *, complete: bool = True) -> None:
        """End.

        Args:
            complete: Whether the loop came to the end of its region. If not, whoever takes over tells the region.
        """
        if complete and self._is_last():
            self._write_scalars(self._regions + 1)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._board.close()


class LogWriter:
    """Stands for ``torch.utils.tensorboard.SummaryWriter`` on every worker, as far as Megatron uses it."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def add_scalar(self, *args: Any, **kwargs: Any) -> None:
        """As SummaryWriter's."""
        self._log.write(lambda writer: writer.add_scalar(*args, **kwargs))

    def add_text(self, *args: Any, **kwargs: Any) -> None:
        """As SummaryWriter's."""
        self._log.write(lambda writer: writer.add_text(*args, **kwargs))

    def add_histogram(self, *args: Any, **kwargs: Any) -> None:
        """As SummaryWriter's."""
        self._log.write(lambda writer: writer.add_histogram(*args, **kwargs))

    def flush(self) -> None:
        """Does nothing: the log does it when a region ends."""

    def close(self) -> None:
        """Does nothing: the log closes the writer when the worker leaves the job."""
