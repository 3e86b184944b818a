"""Audits of real jobs: what a lost worker has told is whole, and two runs part where something was planted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_elas.cli.audit_comparison import Comparison, compare
from megatron_elas.cli.audit_files import read_audit
from megatron_elas.host.sample_log import read_samples
from megatron_elas.spec.audit import GRADIENTS, KINDS, STATES, range_size
from tests.fault.runs import Run, run_job
from tests.fault.warm_launcher import WarmLauncher

pytestmark = [pytest.mark.process, pytest.mark.timeout(500)]

STEPS = 5
BATCH = 4


def run(
    folder: Path, warm: WarmLauncher, *flags: str, part: str = "", faults: tuple[str, ...] = (), audit: int = 1
) -> Run:
    """Two stages of two cells, audited."""
    done = run_job(
        folder, ("--pipeline-model-parallel-size=2", f"--elastic-audit={audit}", *flags), workers=4, steps=STEPS,
        batch=BATCH, faults=faults, warm=warm, launcher_flags=(f"--log-dir={folder / 'logs'}",),
        environ={"ELAS_TEST_PART": part},
    )  # fmt: skip
    told = "".join(path.read_text(errors="replace") for path in sorted((folder / "logs").glob("worker*.log")))
    done = replace(done, output=told + done.output)
    assert done.code == 0 and sorted(done.fired) == sorted(faults), done.output[-6000:]
    assert bool(part) == bool(list(folder.glob("part.*"))), "nothing was planted"
    return done


def compared(one: Run, other: Run) -> Comparison:
    """Their audits."""
    return compare(read_audit(one.folder / "logs"), read_audit(other.folder / "logs"))


def test_a_gradient_that_is_wrong_in_one_bit_is_named_before_and_after_a_loss(
    warm: WarmLauncher, tmp_path: Path
) -> None:
    # The worker that is lost has told of the step in which it dies: the others finish that step.
    calm = run(tmp_path / "calm", warm)
    fault = "kill:worker=3@step=2,phase=optimizer"
    struck = run(tmp_path / "struck", warm, part="gradient:worker=1@step=1", faults=(fault,))
    assert "resumed  step 3 on 3 of 4 workers" in struck.output, struck.output[-6000:]
    audit = read_audit(struck.folder / "logs")
    assert audit.steps == tuple(range(STEPS + 1)) and not audit.unfinished
    assert [audit.read_step(step).epoch for step in audit.steps] == [0, 0, 0, 1, 1, 1]
    for step, stages in read_samples(str(struck.folder / "samples")).items():
        told = audit.read_step(step).values["samples"]
        assert sorted(told) == sorted(
            (end, sample) for end, stage in (("first", 0), ("last", 1)) for sample in stages[stage]
        )
        assert all(told["first", sample] == told["last", sample] != "-" for sample in stages[0])
    found = compared(calm, struck).difference
    assert found is not None
    name, element = (struck.folder / "part.1").read_text().split()
    assert (found.step, found.kind, found.further, found.others) == (1, GRADIENTS, 0, ())
    assert found.same[:4] == ("samples", *STATES)
    count = audit.read_step(1).counts[name, 0]
    assert found.place == (name, 0, int(element) // range_size(count))
    assert 1 in found.b.workers and found.a.placement == found.b.placement


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [(), ("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1")]
)
def test_a_flipped_mask_is_named_and_nothing_but_it_when_samples_have_moved(
    flags: tuple[str, ...], warm: WarmLauncher, tmp_path: Path
) -> None:
    flags = (*flags, "--attention-dropout=0.1", "--hidden-dropout=0.1")
    fault = "kill:worker=3@step=1,phase=forward,microbatch=0"
    struck = run(tmp_path / "struck", warm, *flags, faults=(fault,))
    part = run(tmp_path / "part", warm, *flags, part="mask:sample=10,layer=3@step=2", faults=(fault,))
    found = compared(struck, part).difference
    assert found is not None
    assert (found.step, found.kind, found.place[:2], found.further) == (2, "masks", (10, 3), 0)
    assert found.same == ("samples", *STATES) and GRADIENTS in found.others
    calm = run(tmp_path / "calm", warm, *flags)
    one, other = read_audit(calm.folder / "logs"), read_audit(struck.folder / "logs")
    for step in range(STEPS):
        masks = one.read_step(step).values["masks"]
        assert masks == other.read_step(step).values["masks"] and len(masks) >= BATCH * 4 * 3


@pytest.mark.slow
def test_at_bitwise_nothing_parts_from_the_undisturbed_run(warm: WarmLauncher, tmp_path: Path) -> None:
    flags = ("--elastic-consistency=bitwise", "--attention-dropout=0.1", "--hidden-dropout=0.1")
    faults = ("kill:worker=3@step=1,phase=backward,microbatch=0", "kill:worker=0@step=3,phase=optimizer")
    calm, struck = run(tmp_path / "calm", warm, *flags), run(tmp_path / "struck", warm, *flags, faults=faults)
    found = compared(calm, struck)
    assert found.difference is None, found.difference
    assert found.equal == tuple(range(STEPS + 1)) and found.kinds == KINDS


@pytest.mark.slow
def test_samples_in_another_order_are_named(warm: WarmLauncher, tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", warm)
    found = compared(calm, run(tmp_path / "order", warm, part="order:sample=9@step=2")).difference
    assert found is not None
    assert (found.step, found.kind, found.place, found.further) == (2, "samples", ("first", 9), 1)
    assert GRADIENTS in found.others and "parameters" not in found.others


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [(), ("--bf16",), ("--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=1")]
)
def test_a_run_is_equal_to_itself_and_told_rarely_too(
    flags: tuple[str, ...], warm: WarmLauncher, tmp_path: Path
) -> None:
    one, other = run(tmp_path / "one", warm, *flags), run(tmp_path / "other", warm, *flags, audit=2)
    found = compared(one, other)
    assert found.difference is None and found.equal == (0, 2, 4, 5)


@pytest.mark.slow
def test_a_job_without_a_log_folder_is_refused(warm: WarmLauncher, tmp_path: Path) -> None:
    done = run_job(tmp_path / "run", ("--elastic-audit=3",), workers=2, warm=warm)
    assert done.code == 2
    assert "--elastic-audit 3 writes to the folder of elasrun --log-dir, which was not given" in done.output
