"""Whether two runs of a job are equal to the last bit: losses, gradient norms, state by step, parameters.

Both are traced (``traces.py``). Compared are, by step, the exact loss and gradient norm that any worker told when the
step counted, and a print of every parameter's master and both moments before it, in every epoch in which it began;
and at the end every bit of these and of the parameters that forward passes use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch

from tests.fault.migrations import EMBEDDING, HEAD, assert_same_samples, whole_parameters, whole_state
from tests.fault.runs import Run
from tests.fault.traces import Step, read_trace

LINE = re.compile(r"iteration +(\d+)/ *\d+ \| consumed samples: +(\d+)")
"""Also of a step whose update is left out, in which no loss is told."""
VALIDATION = re.compile(r"(validation loss at iteration \d+[^|]*)\| lm loss value: ([0-9.E+-]+)")
LOSS = re.compile(r"lm loss: ([0-9.E+-]+)")
NORM = re.compile(r"grad norm: ([0-9.]+)")
PARAMETER_NORM = re.compile(r"params norm: ([0-9.]+)")
ZEROS = re.compile(r"num zeros: ([0-9.]+)")
SCALE = re.compile(r"loss scale: ([0-9.]+)")
SKIPPED = re.compile(r"number of skipped iterations: +(\d+)")
SLOTS = ("master", "exp_avg", "exp_avg_sq")


def assert_equal(run: Run, calm: Run) -> None:
    """Every bit is that of the undisturbed run; says what is the first that is not."""
    assert (run.code, calm.code) == (0, 0), run.output[-8000:] if run.code else calm.output[-8000:]
    _assert_same_training([run], calm)
    lines, calm_lines = (LINE.findall(each.output) for each in (run, calm))
    assert [int(number) for number, _ in calm_lines] == list(range(1, len(calm_lines) + 1)), calm_lines
    assert lines == calm_lines, f"iterations and samples told: {lines}"
    assert_same_samples(run, calm)
    assert run.losses == calm.losses and run.gradient_norms == calm.gradient_norms
    told, want = (sorted(VALIDATION.findall(each.output)) for each in (run, calm))  # in the order of workers
    assert told == want, f"evaluations: {told}, undisturbed {want}"
    for what in (PARAMETER_NORM, ZEROS, SCALE, SKIPPED):
        told, want = (what.findall(each.output) for each in (run, calm))
        assert told == want, f"{what.pattern}: {told}, undisturbed {want}"
    _assert_same_ends(run, calm)


def assert_lives_equal(lives: Sequence[Run], begins: Sequence[int], calm: Run) -> None:
    """The same for a job that was started several times, each time from the checkpoint of that iteration.

    What a life did in vain, because it ended before it was saved, is that of the undisturbed run too.
    """
    assert (lives[-1].code, calm.code) == (0, 0), lives[-1].output[-8000:] if lives[-1].code else calm.output[-8000:]
    _assert_same_training(lives, calm)
    expected = _read_lines(calm)
    assert list(expected) == list(range(1, len(expected) + 1)), f"undisturbed: lines {list(expected)}"
    for number, (life, begin) in enumerate(zip(lives, begins, strict=True)):
        lines = _read_lines(life)
        assert list(lines) == list(range(begin + 1, begin + 1 + len(lines))), f"life {number}: lines {list(lines)}"
        for iteration, told in lines.items():
            # A run's second line has the sums of its first two; its first one has no loss if its update is left out.
            left_out = {"lm loss", SKIPPED.pattern} if iteration == begin + 2 else set()
            left_out |= {"lm loss"} if iteration == begin + 1 and told.get(SKIPPED.pattern) != "0" else set()
            differing = {
                what for what in told.keys() | expected[iteration] if told.get(what) != expected[iteration].get(what)
            }
            differing -= left_out
            assert not differing, f"life {number}, iteration {iteration}: {told}, undisturbed {expected[iteration]}"
        reached = [*begins, len(expected)][number + 1]
        assert max(lines) >= reached - 1, (
            f"life {number} told of {list(lines)}, and the next one began behind {reached}"
        )
        for what, value in VALIDATION.findall(life.output):
            assert (what, value) in VALIDATION.findall(calm.output), f"life {number}: {what}: {value}"
        _assert_same_samples(life, range(begin, reached), calm)
    told = {what for life in lives for what, _ in VALIDATION.findall(life.output)}
    assert told == {what for what, _ in VALIDATION.findall(calm.output)}, f"evaluations told: {told}"
    _assert_same_ends(lives[-1], calm)


def _read_lines(run: Run) -> dict[int, dict[str, str]]:
    """What Megatron's lines say, by iteration; asserts that there is one of each."""
    found: dict[int, dict[str, str]] = {}
    for line in run.output.splitlines():
        if match := LINE.search(line):
            iteration = int(match.group(1))
            assert iteration not in found, f"two lines of iteration {iteration}"
            numbers = {what.pattern: what.search(line) for what in (NORM, PARAMETER_NORM, ZEROS, SCALE, SKIPPED)}
            numbers |= {"consumed": LINE.search(line), "lm loss": LOSS.search(line)}
            found[iteration] = {what: match.groups()[-1] for what, match in numbers.items() if match}
    return found


def _assert_same_samples(life: Run, steps: range, calm: Run) -> None:
    """Both ends of the pipeline had them in each of these steps."""
    ours, theirs = life.samples, calm.samples
    for step in steps:
        got, (want, *_) = list(ours[step].values()), theirs[step].values()
        assert all(ids == want for ids in got), f"step {step}: samples {got}, undisturbed {want}"


def _assert_same_training(lives: Sequence[Run], calm: Run) -> None:
    differences = [*_differing_states(lives, calm), *_differing_numbers(lives, calm)]
    # A state is that before its step, so it comes first.
    told = [text for _, text in sorted(differences, key=lambda each: each[0])]
    assert not told, "\n".join([f"{len(told)} differences, the first ones:", *told[:12]])


def _differing_states(lives: Sequence[Run], calm: Run) -> list[tuple[float, str]]:
    ours = {
        (life, epoch, version): prints
        for life, run in enumerate(lives)
        for (epoch, version), prints in read_trace(run.folder).whole_versions().items()
    }
    theirs = read_trace(calm.folder).whole_versions()
    known = {version: prints for (_, version), prints in theirs.items()}
    assert {version for _, version in theirs} == {version for *_, version in ours}, "steps whose state is known"
    found = []
    for (life, epoch, version), prints in sorted(ours.items(), key=lambda each: (each[0][2], each[0])):
        want = known[version]
        names = sorted(name for name in prints.keys() & want.keys() if prints[name] != want[name])
        names += sorted(name for name in prints.keys() ^ want.keys() if not name.endswith(f"/{HEAD}"))
        if names:
            first, *_ = names
            slots = [
                slot
                for slot, got, expected in zip(SLOTS, prints.get(first, ()), want.get(first, ()), strict=False)
                if got != expected
            ]
            where = f"epoch {epoch}" if len(lives) == 1 else f"life {life}, epoch {epoch}"
            text = f"state before step {version}, {where}: {len(names)} of {len(want)} parameters, first {first}"
            found.append((version, f"{text} ({', '.join(slots) or 'only one run has it'})"))
    return found


def _differing_numbers(lives: Sequence[Run], calm: Run) -> list[tuple[float, str]]:
    ours = _numbers([step for life in lives for step in read_trace(life.folder).steps])
    theirs = _numbers(read_trace(calm.folder).steps)
    found = []
    for step in sorted(ours.keys() | theirs.keys()):
        for name in ("loss", "norm"):
            got, want = ours.get(step, {}).get(name, set()), theirs.get(step, {}).get(name, set())
            if got != want or (name == "loss" and len(want) != 1) or len(want) > 1:
                found.append((step + 0.5, f"step {step}: {name} {_show(got)}, undisturbed {_show(want)}"))
    return found


def _numbers(steps: list[Step]) -> dict[int, dict[str, set[float]]]:
    """What was told by step: one number if all workers, in all epochs, tell the same."""
    told: dict[int, dict[str, set[float]]] = {}
    for step in steps:
        numbers = told.setdefault(step.step, {"loss": set(), "norm": set()})
        for name, value in (("loss", step.loss), ("norm", step.norm)):
            if value is not None:
                assert name == "norm" or math.isfinite(value), f"step {step.step}: {name} {value}"
                numbers[name].add(value)
    return told


def _show(values: set[float]) -> str:
    return " and ".join(f"{value!r} ({value.hex()})" for value in sorted(values)) or "untold"


def _assert_same_ends(run: Run, calm: Run) -> None:
    for what, ours, theirs in (
        ("state", whole_state(run), whole_state(calm)),
        ("weights", whole_parameters(run), whole_parameters(calm)),
    ):
        for state in (ours, theirs):  # a tied embedding has a copy where its ends are on two stages
            for lane, name in [key for key in state if key[1] == HEAD and (key[0], EMBEDDING) in state]:
                if state[lane, name].shape == state[lane, EMBEDDING].shape and _is_copy(state, lane):
                    del state[lane, name]
        assert ours.keys() == theirs.keys(), f"{what}: other parameters than in the undisturbed run"
        different = sorted(key for key in theirs if not torch.equal(ours[key], theirs[key]))
        assert not different, f"{what} at the end: {len(different)} of {len(theirs)} differ, first {different[0]}"


def _is_copy(state: dict[tuple[int, str], torch.Tensor], lane: int) -> bool:
    return torch.equal(state[lane, HEAD], state[lane, EMBEDDING])
