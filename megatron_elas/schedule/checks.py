"""What must hold for a schedule to be run, each said in a sentence where it does not.

* Every sample is on every stage exactly once, so that every send has a receive and every gradient is counted once.
* A cell runs F once per item and B once after it; W, where backward is split, once after B.
* The orders can be carried out: with sends that never block, and with sends that wait for their receive, if receives
  are posted ``receives_ahead`` actions before they are needed.
* No cell holds more samples than its memory has room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_elas.schedule.actions import Action, Schedule
from megatron_elas.schedule.greedy import Limit
from megatron_elas.schedule.routes import Flow
from megatron_elas.schedule.timing import Program
from megatron_elas.spec.errors import BadUsage


class Fault(NamedTuple):
    """Something that must not be."""

    stage: int
    cell: int
    position: int
    """In the cell's order; its length: what is missing at the end."""
    text: str


def find_faults(schedule: Schedule, limits: Sequence[Limit] | None = None) -> tuple[Fault, ...]:
    """What is wrong with the orders of cells, one by one, in order. Without limits, memory is not looked at."""
    faults: list[Fault] = []
    for stage, cell in schedule.cells():
        faults += _faults_of_order(schedule, stage, cell)
        if limits is not None:
            faults += _faults_of_memory(schedule, stage, cell, limits[stage])
    return tuple(faults)


def check_schedule(schedule: Schedule, limits: Sequence[Limit] | None = None) -> None:
    """Raise BadUsage that names the first thing wrong; Deadlock when the orders wait for each other."""
    flow = Flow(schedule.items)
    for fault in find_faults(schedule, limits):
        raise BadUsage(f"stage {fault.stage}, cell {fault.cell}, position {fault.position}: {fault.text}")
    Program(schedule, flow)


def peak_samples(schedule: Schedule, stage: int, cell: int, kept_share: float = 0.0) -> float:
    """Most samples that a cell holds at once.

    Args:
        schedule: Whose order of the cell is followed.
        stage: Of the cell.
        cell: Within the stage.
        kept_share: What a sample between B and W counts, one between F and B counting 1.
    """
    return max(_held(schedule, stage, cell, kept_share), default=0.0)


def receives_ahead(schedule: Schedule) -> int:
    """How many actions ahead a cell has to post its receives when a send waits until its receive is posted.

    0: posting a pass's receives together with the sends of the pass before is enough, as the stock schedule does.

    Raises:
        Deadlock: Not even with sends that never block.
    """
    program = Program(schedule)
    longest = max((len(order) for cells in schedule.orders for order in cells), default=0)
    low, high = 0, longest
    while low < high:
        middle = (low + high) // 2
        if program.runs_with_receives_ahead(middle):
            high = middle
        else:
            low = middle + 1
    return low


def out_of_order(schedule: Schedule) -> tuple[tuple[Action, Action], ...]:
    """Pairs of actions of one cell whose results another cell takes in the opposite order.

    Transports that match messages by a tag do not care; one that hands them over in the order of sending has to receive
    the second one's early. Each pair is (sent first, taken first).
    """
    flow = Flow(schedule.items)
    place = {action: i for cells in schedule.orders for order in cells for i, action in enumerate(order)}
    pairs = []
    for stage, cell in schedule.cells():
        taken: dict[tuple[str, int], tuple[int, Action]] = {}
        for action in schedule.orders[stage][cell]:
            if action.kind == "W":
                continue
            item = flow.index[stage][action.item]
            for other, _ in flow.after[item] if action.kind == "F" else flow.before[item]:
                receiver = flow.cell_of[other]
                target = Action(flow.stage_of_cell[receiver], action.kind, flow.items[other].number)
                latest = taken.get((action.kind, receiver), (-1, action))
                if place[target] < latest[0]:
                    pairs.append((latest[1], action))
                else:
                    taken[action.kind, receiver] = place[target], action
    return tuple(pairs)


def _faults_of_order(schedule: Schedule, stage: int, cell: int) -> list[Fault]:
    faults = []
    numbers = {item.number for item in schedule.items[stage][cell]}
    done: set[tuple[str, int]] = set()
    order = schedule.orders[stage][cell]
    for position, action in enumerate(order):
        text = _fault_of_action(action, stage, numbers, done)
        if text:
            faults.append(Fault(stage, cell, position, f"{action} {text}"))
        done.add((action.kind, action.item))
    for number in sorted(numbers):
        for kind in ("F", "B"):
            if (kind, number) not in done:
                faults.append(Fault(stage, cell, len(order), f"{stage}{kind}{number} is never run: list it"))
    return faults


def _fault_of_action(action: Action, stage: int, numbers: set[int], done: set[tuple[str, int]]) -> str:
    if action.stage != stage or action.item not in numbers:
        return "is of an item that the cell does not have: list it where the item is"
    if (action.kind, action.item) in done:
        return "is listed twice: its gradient would be counted twice"
    if action.kind == "B" and ("F", action.item) not in done:
        return f"comes before {stage}F{action.item}: list the forward pass first"
    if action.kind == "W" and ("B", action.item) not in done:
        return f"comes before {stage}B{action.item}: list the input's gradient first"
    return ""


def _faults_of_memory(schedule: Schedule, stage: int, cell: int, limit: Limit) -> list[Fault]:
    for position, held in enumerate(_held(schedule, stage, cell, limit.kept_share)):
        if held > limit.samples + 1e-9:
            action = schedule.orders[stage][cell][position]
            text = f"{action} makes the cell hold {held:g} samples, and {limit.samples:g} fit: run a B or W before it"
            return [Fault(stage, cell, position, text)]
    return []


def _held(schedule: Schedule, stage: int, cell: int, kept_share: float) -> list[float]:
    """Samples in memory after every action of a cell."""
    samples = {item.number: item.samples for item in schedule.items[stage][cell]}
    order = schedule.orders[stage][cell]
    split = {action.item for action in order if action.kind == "W"}
    held = 0.0
    after = []
    for action in order:
        size = samples.get(action.item, 0)
        if action.kind == "F":
            held += size
        elif action.kind == "B":
            held -= size * (1 - kept_share if action.item in split else 1)
        else:
            held -= size * kept_share
        after.append(held)
    return after
