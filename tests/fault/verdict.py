"""Whether a struck job trained as the undisturbed one did, and what it left behind.

Compared bit for bit, for every worker:

* before the first loss: each step's loss and gradient norm, and each step's optimizer shard (masters, moments, count);
* after the first loss: the whole state that training goes on from, which is the one that the undisturbed run has
  before that step;
* after every further loss: that state with the one that was there before the loss, where the step had begun already;
* everywhere: sample ids, counts of samples, learning rates, printed line by line.

Sums over micro-batches are associated differently once cells have left. So later losses are compared to ``relative``,
norms a hundred times wider, masters and moments at the end to ``state_error`` of each parameter's largest entry.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

from tests.fault.descriptors import Descriptors, find_new, others
from tests.fault.runs import Run, assemble
from tests.fault.settings import Setting
from tests.fault.traces import Step, Trace, read_trace

LEARNING_RATE = re.compile(r"iteration +\d+/.*? learning rate: ([0-9.E+-]+)")
VALIDATION = re.compile(r"(validation loss at iteration \d+[^|]*)\| lm loss value: ([0-9.E+-]+)")
HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
RSS_TOLERANCE_BYTES = 8 << 20
"""Growth from one recovery to the next beyond that of a worker's tensors."""
RSS_TOTAL_BYTES = 16 << 20
"""The same from the first recovery to the last."""


@dataclass(kw_only=True)
class Verdict:
    """What is wrong with a run. Empty and 0 when nothing is."""

    steps: int = 0
    """Steps that counted and were compared."""
    samples_lost: int = 0
    samples_doubled: int = 0
    wrong_bits: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Everything else: exit code, faults that did not strike, lines missing or told twice."""

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.samples_lost or self.samples_doubled or self.wrong_bits or self.leaks or self.problems)

    def __str__(self) -> str:
        lines = [f"samples lost: {self.samples_lost}"] if self.samples_lost else []
        lines += [f"samples doubled: {self.samples_doubled}"] if self.samples_doubled else []
        for title, texts in (("wrong bits", self.wrong_bits), ("leak", self.leaks), ("problem", self.problems)):
            lines += [f"{title}: {text}" for text in texts]
        return "\n".join(lines) or "nothing is wrong"


def judge(run: Run, calm: Run, setting: Setting, *, faults: tuple[str, ...], code: int = 0) -> Verdict:
    """Compare a run with the undisturbed one of the same setting and number of steps.

    Args:
        run: Traced, and launched warm.
        calm: The same without faults.
        setting: What both trained.
        faults: That must have struck.
        code: What the job must have ended with; a job that was to end early is compared up to its end.
    """
    verdict = Verdict()
    if calm.code != 0:
        verdict.problems.append(f"the undisturbed run ended with {calm.code}: {calm.output[-1500:]}")
        return verdict
    if run.code != code:
        verdict.problems.append(f"exit code {run.code}, expected {code}: {run.output[-3000:]}")
    if sorted(run.fired) != sorted(faults):
        verdict.problems.append(f"faults that struck: {run.fired}, scripted: {list(faults)}")
    whole = run.code == 0
    trace = read_trace(run.folder)
    _judge_samples(verdict, run, calm, whole, trace.fewest_stages())
    _judge_lines(verdict, run, calm, whole)
    _judge_bits(verdict, trace, read_trace(calm.folder), setting)
    if whole:
        _judge_end(verdict, run, calm, setting)
    _judge_leaks(verdict, run, trace)
    return verdict


def _judge_samples(verdict: Verdict, run: Run, calm: Run, whole: bool, fewest_stages: Mapping[int, int]) -> None:
    ended_in = max(run.samples, default=0)
    for step, want in calm.samples.items():
        if not whole and step >= ended_in:  # the job ended in the middle of it
            continue
        told = run.samples.get(step, {})
        ends = [told.get(0, [])]
        if max(told, default=0) > 0:
            ends.append(told[max(told)])
        elif fewest_stages.get(step, 1) > 1:
            ends.append([])
        for ids in ends:
            ours, theirs = Counter(ids), Counter(want[0])
            verdict.samples_lost += (theirs - ours).total()
            verdict.samples_doubled += (ours - theirs).total()


def _judge_lines(verdict: Verdict, run: Run, calm: Run, whole: bool) -> None:
    count = len(calm.iterations) if whole else len(run.iterations)
    verdict.steps = len(run.iterations)
    if calm.iterations != list(range(1, len(calm.iterations) + 1)):
        verdict.problems.append(f"lines of the undisturbed run: {calm.iterations}")
    if run.iterations != calm.iterations[:count]:
        verdict.problems.append(f"iterations told: {run.iterations}")
    if run.consumed != calm.consumed[:count]:
        verdict.problems.append(f"consumed samples told: {run.consumed}, undisturbed {calm.consumed}")
    rates, calm_rates = (LEARNING_RATE.findall(each.output) for each in (run, calm))
    if rates != calm_rates[:count]:
        verdict.wrong_bits.append(f"learning rates {rates}, undisturbed {calm_rates}")
    validations, calm_validations = (VALIDATION.findall(each.output) for each in (run, calm))
    if len(dict(validations)) != len(validations):
        verdict.problems.append("an evaluation was told twice")
    if validations and whole and dict(validations).keys() != dict(calm_validations).keys():
        verdict.problems.append(f"evaluations told: {validations}, undisturbed {calm_validations}")
    for what, loss in validations:
        want = float(dict(calm_validations).get(what, "nan"))
        if not abs(float(loss) - want) <= 1e-4 * want:
            verdict.wrong_bits.append(f"{what}: {loss}, undisturbed {want}")


# ---------------------------------------------------------------- bits


def _judge_bits(verdict: Verdict, ours: Trace, theirs: Trace, setting: Setting) -> None:
    _judge_before_first_loss(verdict, ours, theirs)
    _judge_restored(verdict, ours, theirs, setting.tied)
    losses, calm_losses = ours.losses(), theirs.losses()
    for step, loss in losses.items():
        want = calm_losses[step]
        if not abs(loss - want) <= setting.relative * abs(want):
            verdict.wrong_bits.append(f"step {step}: loss {loss!r}, undisturbed {want!r}")
    norms = {step.step: step.norm for step in theirs.steps if step.norm is not None}
    for told in ours.steps:
        if told.norm is not None and not abs(told.norm - norms[told.step]) <= 100 * setting.relative * norms[told.step]:
            verdict.wrong_bits.append(
                f"step {told.step}: gradient norm {told.norm!r}, undisturbed {norms[told.step]!r}"
            )


def _judge_before_first_loss(verdict: Verdict, ours: Trace, theirs: Trace) -> None:
    shards = {(v.worker, v.version): (v.prints, v.optimizer_step) for v in theirs.versions}
    for version in ours.versions:
        if version.epoch == 0 and (version.prints, version.optimizer_step) != shards[version.worker, version.version]:
            verdict.wrong_bits.append(f"worker {version.worker}: its shard before step {version.version}, epoch 0")
    told = {(s.worker, s.step): (s.loss, s.norm) for s in theirs.steps}
    for step in ours.steps:
        if step.epoch == 0 and (step.loss, step.norm) != told[step.worker, step.step]:
            verdict.wrong_bits.append(
                f"worker {step.worker}: (loss, norm) of step {step.step} before the first loss: "
                f"{(step.loss, step.norm)}, undisturbed {told[step.worker, step.step]}"
            )


def _judge_restored(verdict: Verdict, ours: Trace, theirs: Trace, tied: bool) -> None:
    versions, calm = ours.whole_versions(), {version: p for (_, version), p in theirs.whole_versions().items()}
    epochs = sorted({epoch for epoch, _ in versions} - {0})
    for epoch in epochs:
        first = min(version for e, version in versions if e == epoch)
        earlier = [versions[e, first] for e in range(epoch) if (e, first) in versions]
        if not any(e for e, _ in versions if e < epoch):  # the state came from the undisturbed part
            earlier.append(calm[first])
        for want in earlier:
            got = versions[epoch, first]
            names = [name for name in want.keys() & got.keys() if got[name] != want[name]]
            if names := sorted([*names, *_other_names(got, want, tied)]):
                verdict.wrong_bits.append(f"epoch {epoch}: restored before step {first}: {len(names)} of {len(want)} "
                                          f"parameters, first {names[0]}")  # fmt: skip
    steps = {v.optimizer_step - v.version for v in (*ours.versions, *theirs.versions)}
    if len(steps) > 1:
        verdict.wrong_bits.append(
            f"the optimizer's count of steps and the number of the step differ by {sorted(steps)}"
        )


def _judge_end(verdict: Verdict, run: Run, calm: Run, setting: Setting) -> None:
    records = run.records("final")
    try:
        ours, theirs = (_by_name(assemble(each)) for each in (records, calm.records("final")))
    except AssertionError as error:
        verdict.wrong_bits.append(f"at the end {error}")
        return
    if different := _other_names(ours, theirs, setting.tied):
        verdict.wrong_bits.append(f"parameters at the end that only one run has: {different}")
    for key in ours.keys() & theirs.keys():
        scale = theirs[key].abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        error = float(((ours[key] - theirs[key]).abs() / scale).amax())
        if not error <= setting.state_error:
            verdict.wrong_bits.append(f"at the end {key} differs by {error:.1e} of its largest entry")
    for worker, record in records.items():
        if wrong := {name: sums for name, sums in record["reduced"].items() if sums[0] != sums[1]}:
            verdict.problems.append(f"worker {worker}: groups whose all-reduce of ones is not their size: {wrong}")


def _by_name(state: Mapping[tuple[int, int, str], torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{lane}/{name}": value for (_, lane, name), value in state.items()}


def _other_names(ours: Mapping[str, object], theirs: Mapping[str, object], tied: bool) -> list[str]:
    """Names that only one has. Where one stage has both ends of the model, there is no copy of a tied embedding."""

    def is_copy(name: str) -> bool:
        lane, _, parameter = name.partition("/")
        return tied and parameter == HEAD and f"{lane}/{EMBEDDING}" in ours

    return sorted(name for name in ours.keys() ^ theirs.keys() if not (name in theirs and is_copy(name)))


# ---------------------------------------------------------------- leaks


def _judge_leaks(verdict: Verdict, run: Run, trace: Trace) -> None:
    verdict.leaks += [f"process after the job's end: {line}" for line in run.left]
    temporary = Path(run.folder / "t")
    if temporary.exists():
        verdict.leaks += [f"file after the job's end: {path}" for path in sorted(temporary.iterdir())]
    told: dict[int, list[Step]] = {}
    for step in trace.steps:
        told.setdefault(step.worker, []).append(step)
    for worker, steps in told.items():
        for earlier, before, now in zip(steps, steps[1:], steps[2:], strict=False):
            settled = earlier.epoch == now.epoch  # links are made at first use
            found = find_growth(before.cost, now.cost, settled=settled)
            verdict.leaks += [f"worker {worker}, step {now.step}: {text}" for text in found]
        verdict.leaks += [f"worker {worker}: {text}" for text in _find_memory_growth(steps)]


def find_growth(before: Mapping[str, object], now: Mapping[str, object], *, settled: bool) -> list[str]:
    """What is more after a step than after the one before on the same worker, and may not be.

    Args:
        before: As ``take_footprint`` tells.
        now: The same.
        settled: Whether both steps, and one more before them, are of one epoch.
    """
    grown = []
    same = ("pid", "groups", "c10d", "children")
    if settled:
        same = (*same, "links_by_channel", "fds", "threads", "os_threads")
    grown += [f"{what} {before[what]} -> {now[what]}" for what in same if now[what] != before[what]]
    grown += [
        f"{what} {before[what]} -> {now[what]}"
        for what in ("threads", "os_threads")
        if now[what] > before[what] and what not in same  # type: ignore[operator]
    ]
    known, open_now = cast(Descriptors, before["descriptors"]), cast(Descriptors, now["descriptors"])
    if (now_other := len(others(open_now))) > (other := len(others(known))):
        grown.append(
            f"descriptors that are no links {other} -> {now_other}, new: {', '.join(find_new(known, open_now))}"
        )
    if now["links"] > now["most_links"]:  # type: ignore[operator]
        grown.append(f"{now['links']} links, at most {now['most_links']} are of use")
    return grown


def _find_memory_growth(steps: list[Step]) -> list[str]:
    """RSS beyond that of the worker's tensors, from recovery to recovery and over all of them."""
    weighed = [step.cost for step in steps if "tensor_bytes" in step.cost]
    if len(weighed) < 2:
        return []
    grown = []
    pairs = [(one, other, RSS_TOLERANCE_BYTES) for one, other in itertools.pairwise(weighed[1:])]
    pairs.append((weighed[1], weighed[-1], RSS_TOTAL_BYTES))
    for before, now, limit in pairs:
        growth = now["rss"] - before["rss"] - max(0, now["tensor_bytes"] - before["tensor_bytes"])
        if growth > limit:
            grown.append(
                f"{growth / 2**20:.1f} MiB more than its tensors from epoch {before['epoch']} to {now['epoch']}"
            )
    return grown
