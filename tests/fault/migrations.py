"""Jobs whose layers move while nobody is lost: how they are run, what they tell, and what they are compared with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron_elas.planner.improve import improve
from megatron_elas.planner.job_costs import JobCosts
from megatron_elas.planner.plan import initial_plan, replan
from megatron_elas.spec.cluster import load_cluster
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.job_profile import JobProfile
from megatron_elas.spec.shape import ModelShape, TrainingShape
from tests.fault.runs import LLAMA, TRAINING, Run, assemble, assert_same_norms, run_job
from tests.fault.settings import BY_PROFILE
from tests.fault.warm_launcher import WarmLauncher

State = dict[tuple[int, str], torch.Tensor]
"""(lane, global name) -> (3, numel): master and moments."""

_STAMPED = re.compile(r"^.*\[(\d{4}-\d\d-\d\d [\d:.]+)\] iteration +\d+/.*\n", re.MULTILINE)
_PATIENCE = ("--heartbeat-timeout-s=20", "--settle-timeout-s=60")
"""On a machine that others use too, one that waits for its turn is not a lost one."""
HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A small job with stages of given layers."""

    layers: tuple[int, ...]
    data: int = 1
    """Cells of each stage."""
    tensor: int = 1
    per_row: int = 2
    """Micro-batches of one sample per cell and step."""
    steps: int = 16
    clip: float = 0.0
    """0: gradients are not clipped, so nothing depends on the order in which their norm is summed up."""
    llama: bool = True
    tied: bool = False
    data_flags: tuple[str, ...] = ("--mock-data",)
    more: tuple[str, ...] = ()
    """Further flags."""

    @property
    def workers(self) -> int:
        """Processes."""
        return self.tensor * len(self.layers) * self.data

    @property
    def batch(self) -> int:
        """Samples per step."""
        return self.per_row * self.data

    @property
    def model(self) -> tuple[str, ...]:
        """Model, data and training."""
        flags = [f"--num-layers={sum(self.layers)}", "--hidden-size=16", "--ffn-hidden-size=32"]
        flags += ["--num-attention-heads=4", "--seq-length=32", "--max-position-embeddings=32", *self.data_flags]
        flags += LLAMA if self.llama else ()
        flags += [] if self.tied else ["--untie-embeddings-and-output-weights"]
        return (*flags, *TRAINING, f"--clip-grad={self.clip}")

    @property
    def flags(self) -> tuple[str, ...]:
        """Grid and features."""
        flags = [f"--tensor-model-parallel-size={self.tensor}", f"--pipeline-model-parallel-size={len(self.layers)}"]
        if len(set(self.layers)) > 1:
            stages = ["t" if count == 1 else f"t*{count}" for count in self.layers]
            flags.append(f"--pipeline-model-parallel-layout=E{'|'.join(stages)}L")
        return (*flags, *self.more)

    def run(
        self,
        folder: Path,
        warm: WarmLauncher | None,
        *asked: str,
        mode: str = "async",
        faults: Sequence[str] = (),
        flags: Sequence[str] = (),
        launcher_flags: Sequence[str] = BY_PROFILE,
        environ: Mapping[str, str] | None = None,
        timeout_s: float = 300,
    ) -> Run:
        """Train; ``asked`` as in ``asker.py``, ``folder`` is made and filled."""
        logs = folder / "logs"
        run = run_job(
            folder, (*self.flags, f"--elastic-migration={mode}", *flags), workers=self.workers, model=self.model,
            faults=faults, steps=self.steps, batch=self.batch, timeout_s=timeout_s, warm=warm,
            launcher_flags=(*_PATIENCE, *launcher_flags, f"--log-dir={logs}"),
            environ={"ELAS_TEST_ASK": ";".join(asked), **(environ or {})},
        )  # fmt: skip
        told = "".join(path.read_text(errors="replace") for path in sorted(logs.glob("worker*.log")))
        lines = sorted(_STAMPED.finditer(told), key=lambda match: match.group(1))
        rest = _STAMPED.sub("", told)
        return replace(run, output="".join([rest, *(line.group() for line in lines), run.output]))

    @cached_property
    def planning(self) -> tuple[JobSpec, JobCosts]:
        """What the controller plans with under ``BY_PROFILE``. For Llamas without features."""
        spec = JobSpec(
            tensor_parallel=self.tensor,
            pipeline_parallel=len(self.layers),
            data_parallel=self.data,
            micro_batch_size=1,
            num_microbatches=self.batch,
            stage_layers=self.layers,
            split_backward=True,
        )
        shape = ModelShape(
            layers=self.layers,
            hidden=16,
            ffn=32,
            heads=4,
            kv_heads=4,
            head_size=4,
            vocab=256,
            positions=0,
            sequence=32,
            norm_vectors=1,
            qk_norm=False,
            gated=True,
            linear_bias=False,
            qkv_bias=False,
            tied=self.tied,
        )
        training = TrainingShape(
            weight_bytes=4,
            gradient_bytes=4,
            sharded_optimizer=True,
            sequence_parallel=False,
            recompute="none",
            hidden_dropout=False,
            attention_dropout=False,
            keeps_scores=True,
        )
        profile = JobProfile(name="tiny", spec=spec, shape=shape, training=training)
        return spec, JobCosts.of(profile, load_cluster("cpu"))

    def plans_after(self, *losses: Sequence[int]) -> list[tuple[int, ...] | None]:
        """Layers of every stage after the migration that follows each loss; None where there is none."""
        spec, costs = self.planning
        plan, found = initial_plan(spec, {}, costs), []
        for lost in losses:
            plan = replan(spec, plan, lost, plan.epoch + 1, {}, costs)
            better = improve(spec, plan, plan.epoch + 1, {}, costs)
            found.append(None if better is None else tuple(stop - start for start, stop in better.layers))
            plan = better or plan
        return found


def events(run: Run, name: str) -> list[dict[str, Any]]:
    """What ``events.jsonl`` says of that name, in order."""
    lines = (run.folder / "logs" / "events.jsonl").read_text().splitlines() if _logged(run) else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


def _logged(run: Run) -> bool:
    return (run.folder / "logs" / "events.jsonl").exists()


def splits(run: Run) -> list[tuple[int, ...]]:
    """Layers of every stage after each migration."""
    return [tuple(stop - start for start, stop in event["layers_after"]) for event in events(run, "migration")]


def answers(run: Run) -> list[str]:
    """To what was asked, in order."""
    paths = sorted(run.folder.glob("asked.*"), key=lambda path: int(path.suffix[1:]))
    return [path.read_text() for path in paths]


def whole_state(run: Run) -> State:
    """Of all layers at the end, wherever they are; every element has exactly one owner."""
    whole: State = {}
    for (_, lane, name), value in assemble(run.records("final")).items():
        assert (lane, name) not in whole, f"{name} is on two stages"
        whole[lane, name] = value
    return whole


def whole_parameters(run: Run) -> dict[tuple[int, str], torch.Tensor]:
    """(lane, global name) -> what forward passes use at the end; equal on all who have it."""
    whole: dict[tuple[int, str], torch.Tensor] = {}
    for worker, record in run.records("final").items():
        for name, value in record["parameters"].items():
            known = whole.setdefault((record["lane"], name), value)
            assert torch.equal(known, value), f"worker {worker} has another {name} than its replicas"
    return whole


def assert_layers_once(run: Run, layers: Sequence[int]) -> None:
    """At the end every stage has its layers, so every layer is there exactly once."""
    expected, first = {}, 0
    for stage, count in enumerate(layers):
        expected[stage] = set(range(first, first + count))
        first += count
    for worker, record in run.records("final").items():
        names = {int(match.group(1)) for name in record["parameters"] if (match := re.search(r"layers\.(\d+)\.", name))}
        assert names == expected[record["stage"]], f"worker {worker} of stage {record['stage']}"


def assert_same_lines(run: Run, calm: Run) -> None:
    """Both ended well, with the same iteration lines and sample ids."""
    assert (run.code, calm.code) == (0, 0), run.output[-8000:] if run.code else calm.output[-8000:]
    assert calm.iterations == list(range(1, len(calm.iterations) + 1)), f"undisturbed: lines {calm.iterations}"
    assert run.iterations == calm.iterations, f"lines {run.iterations}"
    assert run.consumed == calm.consumed, f"consumed {run.consumed}, undisturbed {calm.consumed}"
    assert_same_samples(run, calm)


def assert_same_samples(run: Run, calm: Run) -> None:
    """Both ends of the pipeline had the samples of the undisturbed run in every step."""
    ends = [
        {step: [ids for ids in stages.values() if ids] for step, stages in each.samples.items()} for each in (run, calm)
    ]
    assert ends[0].keys() == ends[1].keys()
    for step, want in ends[1].items():
        got = ends[0][step]
        assert got and all(ids == want[0] for ids in got), f"step {step}: samples {got}, undisturbed {want}"


def assert_same_bits(run: Run, calm: Run) -> None:
    """Losses as printed, masters, both moments and parameters are bit for bit those of the undisturbed run."""
    assert_same_lines(run, calm)
    assert run.losses == calm.losses
    for what, ours, theirs in (
        ("state", whole_state(run), whole_state(calm)),
        ("weights", whole_parameters(run), whole_parameters(calm)),
    ):
        assert ours.keys() == theirs.keys(), f"{what}: other parameters than in the undisturbed run"
        different = sorted(key for key in theirs if not torch.equal(ours[key], theirs[key]))
        assert not different, f"{what}: {len(different)} of {len(theirs)} differ, first {different[0]}"


def assert_same_training(run: Run, calm: Run, *, relative: float = 1e-5, state_error: float = 1e-3) -> None:
    """The same to rounding: where cells have left, or norms are summed up over other shards.

    Losses to ``relative``, state to ``state_error`` of each parameter's largest entry, as in
    ``tests.fault.runs.assert_same_training``.
    """
    assert_same_lines(run, calm)
    for step, (got, want) in enumerate(zip(run.losses, calm.losses, strict=True)):
        assert abs(got - want) <= relative * want, f"step {step}: loss {got}, undisturbed {want}"
    if calm.gradient_norms:
        assert_same_norms(run.gradient_norms, calm.gradient_norms)
    ours, theirs = whole_state(run), whole_state(calm)
    copies = {key for key in theirs if key[1] == HEAD and key not in ours and (key[0], EMBEDDING) in ours}
    assert ours.keys() == theirs.keys() - copies, "other parameters than in the undisturbed run"
    for key, value in ours.items():
        want = theirs[key]
        scale = want.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        error = float(((value - want).abs() / scale).amax())
        assert error <= state_error, f"{key}: differs by {error:.1e} of its largest entry"


def assert_nothing_stale(run: Run) -> None:
    """After every recovery and migration, and at the end, nobody with a seat knew what is gone or over."""
    epochs = [event["epoch"] for name in ("recovery", "migration") for event in events(run, name)]
    assert epochs, "nobody was lost, and nothing moved"
    for epoch in sorted(epochs):
        walks = run.records(f"walk.{epoch}")
        assert walks, f"nobody walked in epoch {epoch}"
        for worker, walk in walks.items():
            assert walk["problems"] == [], f"epoch {epoch}, worker {worker}"
    for worker, record in run.records("final").items():
        assert record["problems"] == [], f"at the end, worker {worker}"
        assert {name for name, (size, total) in record["reduced"].items() if size != total} == set()
