"""Which cell has which seat of the job's grid. Seats are (stage, row); cells without a seat are idle."""

from __future__ import annotations

from collections import Counter
from heapq import nsmallest

Seat = tuple[int, int]


class Seats:
    """The grid, as far as it is not as it began: cell ``c`` begins at stage ``c // rows``, row ``c % rows``."""

    def __init__(self, stages: int, rows: int, num_cells: int) -> None:
        self.stages, self.rows = stages, rows
        self.idle = set(range(stages * rows, num_cells))
        """Whole cells without a seat."""
        self.missing: set[Seat] = set()
        """Seats without a cell."""
        self.missing_of_stage = [0] * stages
        self._missing_rows: list[set[int]] = [set() for _ in range(stages)]
        self.missing_of_row: Counter[int] = Counter()
        """Of rows that are not whole."""
        self._seat: dict[int, Seat | None] = {}
        self._cell: dict[Seat, int] = {}

    def seat_of(self, cell: int) -> Seat | None:
        """None when it has none."""
        if cell in self._seat:
            return self._seat[cell]
        return divmod(cell, self.rows) if cell < self.stages * self.rows else None

    def cell_at(self, seat: Seat) -> int | None:
        """None when it is missing."""
        if seat in self.missing:
            return None
        return self._cell.get(seat, seat[0] * self.rows + seat[1])

    @property
    def seated(self) -> int:
        """Cells with a seat."""
        return self.stages * self.rows - len(self.missing)

    def lose(self, cell: int) -> Seat | None:
        """A cell is gone; gives its seat."""
        self.idle.discard(cell)
        seat = self.seat_of(cell)
        self._seat[cell] = None
        if seat is not None:
            self._mark_missing(seat)
        return seat

    def stand_up(self, cell: int) -> Seat | None:
        """A cell loses its seat and is idle; gives the seat."""
        seat = self.lose(cell)
        self.idle.add(cell)
        return seat

    def add(self, cell: int) -> None:
        """A cell is there, idle."""
        self._seat[cell] = None
        self.idle.add(cell)

    def fill(self, *, by_row: bool, barred: frozenset[int] = frozenset()) -> list[tuple[int, Seat]]:
        """Idle cells take missing seats; gives who took which.

        Args:
            by_row: Rows that miss fewest first, so that rows become whole; only such that do. Else stages that miss
                most first.
            barred: Cells that stay idle.
        """
        free = sorted(self.idle - barred, reverse=True)
        taken: list[tuple[int, Seat]] = []
        if by_row:
            for count, row in nsmallest(len(free), ((count, row) for row, count in self.missing_of_row.items())):
                if count > len(free):
                    break
                taken += [(free.pop(), (stage, row)) for stage in range(self.stages) if (stage, row) in self.missing]
            for cell, seat in taken:
                self.sit(cell, seat)
        else:
            while free and self.missing:
                stage = self.missing_of_stage.index(max(self.missing_of_stage))
                taken.append((free.pop(), (stage, min(self._missing_rows[stage]))))
                self.sit(*taken[-1])
        return taken

    def pack_rows(self) -> None:
        """Cells of the last rows take the missing seats of the first ones: as few rows as can be are not whole."""
        donors = ((stage, row) for row in range(self.rows - 1, -1, -1) for stage in range(self.stages))
        for seat in sorted(self.missing, key=lambda seat: (seat[1], seat[0])):
            donor = next((other for other in donors if other not in self.missing), None)
            if donor is None or donor[1] <= seat[1]:
                return
            self._move(donor, seat)

    def spread(self) -> None:
        """Cells change their stage until all stages miss as many, or one more."""
        counts = self.missing_of_stage
        while max(counts) - min(counts) > 1:
            poor, rich = counts.index(max(counts)), counts.index(min(counts))
            row = next(row for row in range(self.rows) if row not in self._missing_rows[rich])
            self._move((rich, row), (poor, min(self._missing_rows[poor])))

    def sit(self, cell: int, seat: Seat) -> None:
        """An idle cell takes a missing seat."""
        self.idle.discard(cell)
        self._seat[cell] = seat
        self._cell[seat] = cell
        self.missing.remove(seat)
        stage, row = seat
        self._missing_rows[stage].remove(row)
        self.missing_of_stage[stage] -= 1
        self.missing_of_row[row] -= 1
        if not self.missing_of_row[row]:
            del self.missing_of_row[row]

    def _move(self, old: Seat, new: Seat) -> None:
        cell = self.cell_at(old)
        assert cell is not None
        self._mark_missing(old)
        self.sit(cell, new)

    def _mark_missing(self, seat: Seat) -> None:
        self._cell.pop(seat, None)
        self.missing.add(seat)
        self._missing_rows[seat[0]].add(seat[1])
        self.missing_of_stage[seat[0]] += 1
        self.missing_of_row[seat[1]] += 1
