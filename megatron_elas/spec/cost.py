"""What a job's layers cost in time and memory on one device: the numbers that plans are made of.

A **pass** is one of three: forward (F), input gradient (B), weight gradient (W). Backward as stock Megatron runs it
is B and W in one. Everything is of one lane (one device of a cell), tensor parallelism being inside the numbers.

A **unit** is what is never split between stages: the embedding, a transformer layer, the head (with the final norm),
the loss. The first stage has the embedding, the last one the head and the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from megatron_elas.spec.device import require_not_negative
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.tables import build, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Time of one pass through one unit, as a function of the samples in it and of the clock.

    ``samples * (max(compute_s / clock, memory_s) + steady_s) + fixed_s``
    """

    compute_s: float = 0.0
    """Per sample at the nominal clock; goes down as the clock goes up."""
    memory_s: float = 0.0
    """Per sample: memory traffic of the same operations. It runs beside the computing, and the longer one counts."""
    steady_s: float = 0.0
    """Per sample: element-wise operations and collectives inside the cell. They do not depend on the clock."""
    fixed_s: float = 0.0
    """Per pass, however many samples: launches and gaps."""

    def __post_init__(self) -> None:
        require_not_negative(self, "compute_s", "memory_s", "steady_s", "fixed_s")

    def sample_s(self, clock: float = 1.0) -> float:
        """Seconds that each sample adds."""
        return max(self.compute_s / clock, self.memory_s) + self.steady_s

    def seconds(self, samples: float, clock: float = 1.0) -> float:
        """Seconds of a pass."""
        return samples * self.sample_s(clock) + self.fixed_s

    def scaled(self, factor: float) -> Work:
        """All of it, longer by a factor."""
        return Work(
            compute_s=self.compute_s * factor,
            memory_s=self.memory_s * factor,
            steady_s=self.steady_s * factor,
            fixed_s=self.fixed_s * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """One unit."""

    forward: Work
    input_gradient: Work
    weight_gradient: Work
    parameters: int
    """Of one lane."""
    activation_bytes: float
    """Per sample, kept from F to B (where B is not split: to the end of backward)."""
    kept_bytes: float = 0.0
    """Per sample, kept from B to W where backward is split: inputs of the matrices and gradients of their outputs."""
    working_bytes: float = 0.0
    """Per sample, needed only while a pass runs through the unit."""
    optimizer_s: float = 0.0
    """One step of the optimizer over all of ``parameters``; the cells of a stage share it."""

    def __post_init__(self) -> None:
        require_not_negative(self, "parameters", "activation_bytes", "kept_bytes", "working_bytes", "optimizer_s")

    @property
    def full_backward_s(self) -> float:
        """Seconds of one sample's whole backward pass at the nominal clock."""
        return self.input_gradient.seconds(1) + self.weight_gradient.seconds(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Time of one pass through a whole stage at some clock: ``samples * sample_s + fixed_s``."""

    sample_s: float
    fixed_s: float = 0.0

    def seconds(self, samples: float) -> float:
        """Of a pass with this many samples."""
        return samples * self.sample_s + self.fixed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The three passes of a stage on a cell at its clock. Backward that is not split takes both gradients' time."""

    forward: PassTime
    input_gradient: PassTime
    weight_gradient: PassTime

    @property
    def sample_s(self) -> float:
        """Seconds that a sample adds to the step of its cell."""
        return self.forward.sample_s + self.input_gradient.sample_s + self.weight_gradient.sample_s

    @property
    def fixed_s(self) -> float:
        """Seconds that an item adds to the step of its cell, beside those of its samples."""
        return self.forward.fixed_s + self.input_gradient.fixed_s + self.weight_gradient.fixed_s


BYTES = ("boundary_bytes", "weight_bytes", "gradient_bytes", "optimizer_bytes", "copy_bytes", "sum_bytes")
"""Fields of ``JobCost``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCost:
    """All units of a model, and the bytes that go with a parameter.

    Layers ``[first, last)`` make a stage; methods add the embedding where ``first`` is 0, head and loss where
    ``last`` is the number of layers.
    """

    embedding: UnitCost
    layers: tuple[UnitCost, ...]
    head: UnitCost
    loss: UnitCost
    boundary_bytes: int
    """Per sample, that a lane sends to the next stage; the gradient that comes back is as large."""
    weight_bytes: int
    """Per parameter."""
    gradient_bytes: int
    """Per parameter."""
    optimizer_bytes: int
    """Per parameter, on the device."""
    optimizer_sharded: bool = True
    """The cells of a stage share the optimizer's state; else each has all of it."""
    copy_bytes: int = 0
    """Per parameter that a worker owns or backs up, in host memory."""
    sum_bytes: int = 0
    """Per parameter, of sums in fixed point that are kept beside the gradients, and reduced in place of them."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise BadUsage("layers is empty: a job has at least one layer")
        require_not_negative(self, *BYTES)

    @property
    def num_layers(self) -> int:
        """Transformer layers of the whole model."""
        return len(self.layers)

    @property
    def whole_bytes(self) -> int:
        """Per parameter, on every device of its stage and lane."""
        return self.weight_bytes + self.gradient_bytes + self.sum_bytes

    @property
    def reduced_bytes(self) -> int:
        """Per parameter, that is summed over the cells of a stage."""
        return self.sum_bytes or self.gradient_bytes

    def units(self, first: int, last: int) -> tuple[UnitCost, ...]:
        """The units of the stage that holds layers ``[first, last)``, in order."""
        if not 0 <= first <= last <= len(self.layers):
            raise BadUsage(f"layers [{first}, {last}) are not within the model's {len(self.layers)}")
        before = (self.embedding,) if first == 0 else ()
        after = (self.head, self.loss) if last == len(self.layers) else ()
        return (*before, *self.layers[first:last], *after)

    def stage_times(self, first: int, last: int, clock: float = 1.0) -> StageTimes:
        """The passes of the stage that holds layers ``[first, last)``, at this clock."""
        units = self.units(first, last)
        return StageTimes(
            forward=_add([unit.forward for unit in units], clock),
            input_gradient=_add([unit.input_gradient for unit in units], clock),
            weight_gradient=_add([unit.weight_gradient for unit in units], clock),
        )

    def optimizer_s(self, first: int, last: int, cells: int) -> float:
        """Seconds of the optimizer's step on a stage of this many cells."""
        share = cells if self.optimizer_sharded else 1
        return sum(unit.optimizer_s for unit in self.units(first, last)) / share

    def parameters(self, first: int, last: int) -> int:
        """Of one lane of a stage."""
        return sum(unit.parameters for unit in self.units(first, last))

    def state_bytes(self, first: int, last: int, cells: int) -> int:
        """Weights, gradients and optimizer on a device of a stage of this many cells."""
        count = self.parameters(first, last)
        share = cells if self.optimizer_sharded else 1
        return count * self.whole_bytes + -(-count // share) * self.optimizer_bytes

    def activation_bytes(self, first: int, last: int) -> float:
        """Per sample that is between F and B on the stage."""
        return sum(unit.activation_bytes for unit in self.units(first, last))

    def kept_bytes(self, first: int, last: int) -> float:
        """Per sample that is between B and W on the stage."""
        return sum(unit.kept_bytes for unit in self.units(first, last))

    def working_bytes(self, first: int, last: int) -> float:
        """Per sample of the pass that runs: that of the unit that needs most."""
        return max((unit.working_bytes for unit in self.units(first, last)), default=0.0)

    def device_bytes(
        self, first: int, last: int, *, cells: int, in_flight: float, deferred: float = 0.0, largest_item: float = 1.0
    ) -> int:
        """Memory of a device when it holds most.

        Args:
            first: Of the stage's layers.
            last: One past the last of them.
            cells: Of the stage.
            in_flight: Samples between F and B at once.
            deferred: Samples between B and W at once.
            largest_item: Samples of the largest pass.
        """
        return self.state_bytes(first, last, cells) + round(
            in_flight * self.activation_bytes(first, last)
            + deferred * self.kept_bytes(first, last)
            + largest_item * self.working_bytes(first, last)
        )

    def samples_that_fit(self, first: int, last: int, *, cells: int, memory_bytes: int, largest_item: float) -> float:
        """How many samples may be in flight at once; below 1 when not even one may."""
        free = memory_bytes - self.state_bytes(first, last, cells) - largest_item * self.working_bytes(first, last)
        each = self.activation_bytes(first, last)
        return free / each if each else (float("inf") if free >= 0 else 0.0)

    def kept_share(self, first: int, last: int) -> float:
        """Bytes of a sample between B and W, as a share of its bytes between F and B."""
        each = self.activation_bytes(first, last)
        return self.kept_bytes(first, last) / each if each else 0.0


class CostSums:
    """Running sums over a cost's layers at one clock: what ``JobCost`` says of a stage, in constant time.

    For a planner that asks for every ``[first, last)``.
    """

    def __init__(self, cost: JobCost, clock: float = 1.0) -> None:
        # Layers are often one and the same object.
        rows = {id(unit): _row(unit, clock) for unit in {id(unit): unit for unit in cost.layers}.values()}
        self._sums: list[list[float]]
        # Equal layers give the same sums whether they are one object or not.
        if len(set(rows.values())) == 1:
            row = rows[id(cost.layers[0])]
            self._sums = [[each * count for count in range(len(cost.layers) + 1)] for each in row]
        else:
            columns = zip(*[rows[id(unit)] for unit in cost.layers], strict=True)
            self._sums = [list(accumulate(column, initial=0.0)) for column in columns]
        self._embedding = _row(cost.embedding, clock)
        self._after = [a + b for a, b in zip(_row(cost.head, clock), _row(cost.loss, clock), strict=True)]
        self._num_layers = cost.num_layers

    def layers(self, samples: float, items: float, optimizer: float) -> list[float]:
        """Seconds of the first ``j`` layers, by ``j``, in a step of this many samples, items and optimizer's steps."""
        sums = self._sums
        return [
            samples * (a + c + e) + items * (b + d + f) + optimizer * g
            for a, b, c, d, e, f, g in zip(*sums[:7], strict=True)
        ]

    def outer(self, samples: float, items: float, optimizer: float) -> tuple[float, float]:
        """Likewise of the embedding, and of head and loss."""
        embedding, after = (
            samples * (a + c + e) + items * (b + d + f) + optimizer * g
            for a, b, c, d, e, f, g in (self._embedding[:7], self._after[:7])
        )
        return embedding, after

    def step_s(self, first: int, last: int, samples: float, items: float) -> float:
        """Seconds that a cell computes in a step of this many samples in this many items."""
        total = self._total
        each = total(0, first, last) + total(2, first, last) + total(4, first, last)
        return samples * each + items * (total(1, first, last) + total(3, first, last) + total(5, first, last))

    def stage_times(self, first: int, last: int) -> StageTimes:
        """The passes of a stage."""
        total = self._total
        return StageTimes(
            forward=PassTime(sample_s=total(0, first, last), fixed_s=total(1, first, last)),
            input_gradient=PassTime(sample_s=total(2, first, last), fixed_s=total(3, first, last)),
            weight_gradient=PassTime(sample_s=total(4, first, last), fixed_s=total(5, first, last)),
        )

    def optimizer_s(self, first: int, last: int) -> float:
        """Seconds of the optimizer's step over all parameters of the stage; its cells share it when sharded."""
        return self._total(6, first, last)

    def parameters(self, first: int, last: int) -> float:
        """Of one lane of the stage."""
        return self._total(7, first, last)

    def activation_bytes(self, first: int, last: int) -> float:
        """Per sample that is between F and B."""
        return self._total(8, first, last)

    def kept_bytes(self, first: int, last: int) -> float:
        """Per sample that is between B and W."""
        return self._total(9, first, last)

    def _total(self, column: int, first: int, last: int) -> float:
        sums = self._sums[column]
        total = sums[last] - sums[first]
        if first == 0:
            total += self._embedding[column]
        if last == self._num_layers:
            total += self._after[column]
        return total


def _row(unit: UnitCost, clock: float) -> tuple[float, ...]:
    passes = (unit.forward, unit.input_gradient, unit.weight_gradient)
    times = [seconds for work in passes for seconds in (work.sample_s(clock), work.fixed_s)]
    return (*times, unit.optimizer_s, float(unit.parameters), unit.activation_bytes, unit.kept_bytes)


def load_cost(path: Path) -> JobCost:
    """A cost that was measured and saved as JSON: ``json.dumps(as_table(cost))``.

    Raises:
        BadUsage: The file cannot be read or does not fit.
    """
    return build(JobCost, read_table(path), str(path))


def _add(passes: Sequence[Work], clock: float) -> PassTime:
    return PassTime(sample_s=sum(work.sample_s(clock) for work in passes), fixed_s=sum(work.fixed_s for work in passes))
