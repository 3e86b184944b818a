"""What each worker of a traced job says of every step, line by line, so that a killed worker's lines are there.

Two kinds of lines in ``trace.W``: *versions*, written before every run of a step, with a print of the worker's
optimizer shard; and *steps*, written when a step counts, with its exact loss and gradient norm and with what the worker
costs.

The print of a parameter is a sum over its elements of a hash of (index, bits), modulo 2^64, for master and both
moments. So the prints of its pieces add up to the same number however it is cut, and any changed bit changes it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Name = str
"""``LANE/PARAMETER``: the stage is where a parameter happens to be."""
Prints = dict[Name, tuple[int, ...]]
MASK = (1 << 64) - 1


def print_piece(start: int, values: Any) -> tuple[int, ...]:
    """Prints of a piece.

    Args:
        start: Index of its first element in the parameter.
        values: fp32 tensor (slots, elements).
    """
    bits = values.contiguous().numpy().view(np.uint32).astype(np.uint64)
    index = np.arange(start, start + bits.shape[1], dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = (index << np.uint64(32) | bits) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        return tuple(int(total) for total in mixed.sum(axis=1, dtype=np.uint64))


def add_prints(parts: Iterable[Prints]) -> Prints:
    """Of whole parameters, from those of their pieces."""
    total: Prints = {}
    for part in parts:
        for name, numbers in part.items():
            before = total.get(name, (0,) * len(numbers))
            total[name] = tuple((a + b) & MASK for a, b in zip(before, numbers, strict=True))
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The state before a run of a step on one worker."""

    epoch: int
    worker: int
    version: int
    seated: int
    """Workers with a seat in this epoch."""
    stages: int
    """Of this epoch."""
    optimizer_step: float
    prints: Prints


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that counts, on one worker."""

    epoch: int
    worker: int
    step: int
    loss: float | None
    """Exact; None where it is not known."""
    norm: float | None
    cost: dict[str, Any]
    """As ``take_footprint`` tells; with ``tensor_bytes`` after the first such step of an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Of a whole job."""

    versions: list[Version]
    steps: list[Step]

    def whole_versions(self) -> dict[tuple[int, int], Prints]:
        """(epoch, version) -> prints of the whole state, where every seated worker told its part."""
        parts: dict[tuple[int, int], dict[int, Version]] = {}
        for each in self.versions:
            parts.setdefault((each.epoch, each.version), {})[each.worker] = each
        return {
            key: add_prints(part.prints for part in told.values())
            for key, told in parts.items()
            if len(told) == next(iter(told.values())).seated
        }

    def fewest_stages(self) -> dict[int, int]:
        """By step, of the epochs in which it was begun."""
        stages: dict[int, int] = {}
        for each in self.versions:
            stages[each.version] = min(each.stages, stages.get(each.version, each.stages))
        return stages

    def losses(self) -> dict[int, float]:
        """By step, of the run with the highest epoch. Asserts that workers who know it agree."""
        known: dict[int, dict[int, set[float]]] = {}
        for step in self.steps:
            if step.loss is not None:
                known.setdefault(step.step, {}).setdefault(step.epoch, set()).add(step.loss)
        told = [values for epochs in known.values() for values in epochs.values()]
        assert all(len(values) == 1 for values in told), "workers tell different losses of a step"
        return {step: next(iter(epochs[max(epochs)])) for step, epochs in sorted(known.items())}


def read_trace(folder: Path) -> Trace:
    """All lines of all workers."""
    versions, steps = [], []
    for path in sorted(folder.glob("trace.*")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if "version" in record:
                record["prints"] = {name: tuple(numbers) for name, numbers in record["prints"].items()}
                versions.append(Version(**record))
            else:
                steps.append(Step(**record))
    return Trace(versions=versions, steps=steps)


class Tracer:
    """One worker's file."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._worker = worker
        self._file = (folder / f"trace.{worker}").open("w", buffering=1)
        self._steps: Counter[int] = Counter()

    def tell_version(self, plan: Any, version: int, record: dict[str, Any]) -> None:
        """``plan``: in force; ``record``: of ``recorder.shard``."""
        placement = plan.placement
        prints = add_prints(
            {f"{record['lane']}/{name}": print_piece(start, values)} for name, start, _, values in record["pieces"]
        )
        self._tell(
            epoch=plan.epoch, version=version, seated=len(placement.workers), stages=placement.num_stages,
            optimizer_step=record["step"], prints=prints,
        )  # fmt: skip

    def tell_step(self, step: int, outcome: Any, cost: dict[str, Any]) -> None:
        """``outcome``: of Megatron's ``train_step``."""
        losses, norm = outcome[0], outcome[5]
        loss = float(next(iter(losses.values()))) if losses else None
        epoch = cost["epoch"]
        self._steps[epoch] += 1
        if self._steps[epoch] == (1 if epoch else 2):  # the very first step makes what all later ones keep
            cost = cost | {"tensor_bytes": _tensor_bytes()}
        self._tell(epoch=epoch, step=step, loss=loss, norm=None if norm is None else float(norm), cost=cost)

    def _tell(self, **record: Any) -> None:
        self._file.write(json.dumps({"worker": self._worker, **record}) + "\n")


def _tensor_bytes() -> int:
    import gc

    from tests.fault.footprint import count_tensor_bytes

    return count_tensor_bytes(gc.get_objects())
