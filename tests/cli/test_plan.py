"""``elas plan``: what it prints is the planner's plan, checked; what it cannot plan it says in a sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_elas.cli import elas, plan_facts
from megatron_elas.planner.policies import POLICIES, ours, recycle, stock
from megatron_elas.planner.situation import Situation
from megatron_elas.planner.step_plan import QUICK, THOROUGH
from megatron_elas.schedule.actions import parse_order
from megatron_elas.schedule.checks import Fault
from megatron_elas.schedule.grid import print_orders
from megatron_elas.spec.cluster import load_cluster
from megatron_elas.spec.cost import JobCost, UnitCost, load_cost
from megatron_elas.spec.job_profile import load_job
from megatron_elas.spec.layout import Placement
from megatron_elas.spec.step_report import PassTotal, StepReport
from megatron_elas.spec.tables import as_table, configs_folder

GRID = ["--pp", "4", "--dp", "2", "--micro-batches", "8"]
JOB = ["plan", "--job", "llama2-34b", "--cluster", "npu-96", *GRID]
LOST = ((1, 1),)


def begin() -> Situation:
    job = load_job("llama2-34b").with_grid(pipeline_parallel=4, data_parallel=2, num_microbatches=8)
    return Situation.of(job, load_cluster("npu-96"))


def call(*arguments: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """What is printed; where it is not 0 that was asked for, the sentence that is told."""
    assert elas.main([*JOB, *arguments]) == code
    told = capsys.readouterr()
    assert (told.err == "") == (code == 0), told.err
    return told.err if code else told.out


def facts(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(call("--json", *arguments, capsys=capsys))
    return read


def test_what_is_printed_is_the_planners_plan_of_the_situation(capsys: pytest.CaptureFixture[str]) -> None:
    plan, before = ours(begin(), LOST, effort=THOROUGH).plan, stock(begin())
    assert plan is not None
    text = call("--lost", "1:1", capsys=capsys)
    assert plan.explain() in text
    assert f"step {before.step_s:.4g} s without a loss (stock 1F1B), {plan.step_s:.4g} s after it:" in text
    kept = before.step_s / plan.step_s
    assert f"{kept:.1%} of the throughput on 87.5% of the cells: {kept / 0.875:.3f} of their share" in text
    for stage, (first, last) in enumerate(pairwise(plan.candidate.cuts)):
        assert re.search(
            rf"^  {stage} +{first}-{last - 1} \({last - first}\) +{plan.candidate.widths[stage]} ", text, re.M
        )
    assert f"{plan.moved_bytes() / 1e9:.1f} GB of optimizer state" in text
    assert "policies:" not in text and "\n0.0 " not in text


def test_a_job_that_keeps_its_micro_batches_has_a_plan_with_whole_ones_and_more_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid = ("--pp", "6", "--dp", "4", "--micro-batches", "16", "--micro-batch-size", "2")
    more = ("--lost", "1:1", "--effort", "quick", *grid)
    exact, free = (facts(*more, "--consistency", level, capsys=capsys) for level in ("bitwise", "numerical"))
    assert (exact["spec"]["consistency"], free["spec"]["consistency"]) == ("bitwise", "numerical")
    assert {tuple(stage["item_samples"]) for stage in exact["plan"]["stages"]} == {(2, 2)}
    assert {(1, 1), (2, 2)} <= {tuple(stage["item_samples"]) for stage in free["plan"]["stages"]}
    assert exact["plan"]["step_s"] > 1.1 * free["plan"]["step_s"] and exact["before_s"] > free["before_s"]
    text = call(*more, "--consistency", "bitwise", capsys=capsys)
    assert "of 2 samples, consistency bitwise\n" in text
    assert "Micro-batches are neither cut nor joined: consistency is bitwise." in text


def test_the_numbers_of_the_json_agree_with_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    read = facts("--lost", "1:1", "--grid", "--policy", "ours,torchft,recycle", capsys=capsys)
    plan = read["plan"]
    stages = plan["stages"]
    assert [stage["first_layer"] for stage in stages[1:]] == [stage["last_layer"] for stage in stages[:-1]]
    assert (stages[0]["first_layer"], stages[-1]["last_layer"]) == (0, 48)
    cells = sorted(tuple(cell) for stage in stages for cell in stage["cells"])
    assert cells == [(stage, row) for stage in range(4) for row in range(2) if (stage, row) != (1, 1)]
    for number, stage in enumerate(stages):
        orders = [parse_order(text) for name, text in plan["orders"].items() if name.startswith(f"{number}.")]
        runs = Counter((action.kind, action.item) for order in orders for action in order)
        assert set(runs.values()) == {1}
        items = sum(kind == "F" for kind, _ in runs)
        assert items == sum(kind == "B" for kind, _ in runs)
        least, most = stage["samples"]
        assert least * len(orders) <= 8 <= most * len(orders)
        assert stage["busy_s"] <= plan["step_s"]
        assert 0 < stage["memory_bytes"] <= begin().memory_bytes
    named = {policy["policy"]: policy for policy in read["policies"]}
    assert list(named) == ["ours", "torchft", "recycle"]
    assert named["ours"]["step_s"] == plan["step_s"] == plan["clocks"]["boosted"]["timed"]["step_s"]
    assert named["recycle"]["step_s"] == recycle(begin(), LOST).step_s
    for policy in named.values():
        assert policy["throughput_share"] == pytest.approx(policy["samples"] / policy["step_s"] * read["before_s"] / 8)
        assert policy["share_of_surviving"] == pytest.approx(policy["throughput_share"] / (7 / 8))
    assert plan["faults"] == []


def test_backups_are_of_all_that_are_left_and_of_nobody_else(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = facts("--lost", "1:1", capsys=capsys)["plan"]["backups"]
    left = Placement.initial(begin().job).without(Placement.initial(begin().job).stages[1][1].workers).workers
    assert [owner for owner, _ in pairs] == sorted(left)
    assert {backup for _, backup in pairs} <= set(left)
    assert all(owner // 8 != backup // 8 for owner, backup in pairs)


def test_quick_is_the_plan_that_is_made_while_workers_wait(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ours(begin(), LOST, effort=QUICK).plan
    assert plan is not None
    read = facts("--lost", "1:1", "--effort", "quick", capsys=capsys)["plan"]
    assert (read["step_s"], read["exact"]) == (plan.step_s, False)
    assert "one cell for each stage" in call("--lost", "1:1", "--effort", "quick", capsys=capsys)


def test_a_running_jobs_freedom_moves_samples_and_nothing_else_while_stages_have_cells(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--lost", "1:1", "--freedom", "runtime", "--micro-batches", "32", "--grid")
    plan = facts(*flags, capsys=capsys)["plan"]
    assert (plan["moves"]["layers"], plan["micro_batch_size"]) == (0, 1)
    sizes = [tuple(stage["item_samples"]) for stage in plan["stages"]]
    assert sizes[0] == sizes[2] == sizes[3] == (1, 1) and sizes[1] in {(1, 1), (2, 2)}, "of one cell in place of two"
    assert not any("W" in order for order in plan["orders"].values())
    assert plan["step_s"] <= plan["nothing_s"]
    lost = facts("--lost", "1:0", "1:1", "--freedom", "runtime", capsys=capsys)["plan"]
    assert sum(len(stage["cells"]) for stage in lost["stages"]) == 6 and lost["nothing_s"] is None


def test_without_a_loss_nothing_is_sent_between_cells_unless_layers_move(capsys: pytest.CaptureFixture[str]) -> None:
    read = facts(capsys=capsys)
    assert read["lost"] == [] and read["surviving_share"] == 1
    assert (read["plan"]["moves"]["transfers"] > 0) == (read["plan"]["moves"]["layers"] > 0)
    assert read["plan"]["step_s"] <= read["before_s"]


def test_the_schedule_is_printed_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = ours(begin(), LOST, effort=THOROUGH).plan
    assert plan is not None
    text = call("--lost", "1:1", "--grid", "--gantt", str(tmp_path / "step.svg"), capsys=capsys)
    assert print_orders(plan.prediction.schedule) in text
    assert len(re.findall(r"^\d\.\d +\|.{110}\| ", text, re.M)) == 7
    svg = (tmp_path / "step.svg").read_text()
    assert svg.startswith("<svg") and svg.count('class="bar"') == plan.prediction.schedule.num_actions
    assert "llama2-34b on npu-96, lost: 1:1" in svg
    call("--lost", "1:1", "--gantt", str(tmp_path / "step.html"), capsys=capsys)
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")


def test_a_fault_in_the_schedule_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(1, 0, 2, "1F1 is listed twice: its gradient would be counted twice")
    monkeypatch.setattr(plan_facts, "find_faults", lambda schedule, limits: (fault,))
    assert elas.main([*JOB, "--lost", "1:1", "--grid"]) == 1
    told = capsys.readouterr()
    assert "^ 1F1 is listed twice" in told.out and "checked" not in told.out
    assert "elas: the schedule has 1 fault, the first in stage 1, cell 0: 1F1 is listed twice" in told.err


# ------------------------------------------------------------ policies


def test_several_policies_are_compared_and_those_without_a_plan_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    text = call("--lost", "1:1", "2:0", "--policy", ",".join(POLICIES), capsys=capsys)
    table = text[text.index("policies:") :].splitlines()[2:]
    assert [line.split()[0] for line in table] == list(POLICIES)
    assert "no plan: every replica lost a worker" in next(line for line in table if "torchft" in line)
    assert "optimizers are staggered by recycle only" in text


def test_ours_can_stagger_its_optimizers_too(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--lost", "1:1", "--policy", "ours,recycle")
    staggered = ours(begin(), LOST, effort=THOROUGH, staggered=True)
    read = facts(*flags, "--staggered", capsys=capsys)
    assert read["policies"][0]["step_s"] == staggered.step_s != facts(*flags, capsys=capsys)["policies"][0]["step_s"]
    assert "optimizers are staggered by ours and recycle only" in call(*flags, "--staggered", capsys=capsys)


def test_other_policies_can_be_asked_for_alone(capsys: pytest.CaptureFixture[str]) -> None:
    text = call("--lost", "1:1", "--policy", "recycle", capsys=capsys)
    assert "Cells per stage" not in text and "\n  recycle " in text


def test_when_no_policy_has_a_plan_it_gives_up(capsys: pytest.CaptureFixture[str]) -> None:
    told = call("--lost", "1:1", "2:0", "--policy", "torchft", capsys=capsys, code=3)
    assert told.startswith("elas: torchft: every replica lost a worker")


# ------------------------------------------------------------ costs


def slower(cost: JobCost, factor: float) -> JobCost:
    def scaled(unit: UnitCost) -> UnitCost:
        return replace(
            unit,
            forward=unit.forward.scaled(factor),
            input_gradient=unit.input_gradient.scaled(factor),
            weight_gradient=unit.weight_gradient.scaled(factor),
        )

    return replace(
        cost,
        embedding=scaled(cost.embedding),
        layers=tuple(map(scaled, cost.layers)),
        head=scaled(cost.head),
        loss=scaled(cost.loss),
    )


def write_reports(path: Path, cost: JobCost) -> None:
    """As a job writes them whose passes take what ``cost`` says, but for each worker's first step."""
    with path.open("w") as file:
        for step in range(3):
            for stage in range(4):
                times = cost.stage_times(12 * stage, 12 * stage + 12)
                backward_s = times.input_gradient.seconds(1) + times.weight_gradient.seconds(1)
                late = 10.0 if step == 0 else 1.0
                report = StepReport(
                    worker=stage, epoch=0, step=step, first_layer=12 * stage, last_layer=12 * stage + 12, cells=2,
                    step_s=9.0, first=step == 0,
                    passes=(
                        PassTotal(kind="forward", passes=4, samples=4, seconds=4 * late * times.forward.seconds(1)),
                        PassTotal(kind="backward", passes=4, samples=4, seconds=4 * late * backward_s),
                    ),
                )  # fmt: skip
                file.write(json.dumps(as_table(report)) + "\n")


def test_costs_are_fitted_to_a_jobs_reports_saved_and_given_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    steps, saved = tmp_path / "steps.jsonl", tmp_path / "cost.json"
    write_reports(steps, slower(begin().cost, 3.0))
    read = facts("--lost", "1:1", "--measured", str(steps), "--save-cost", str(saved), capsys=capsys)
    # The first steps, ten times as long, do not count.
    assert read["fit"]["reports"] == 8
    assert [factor["factor"] for factor in read["fit"]["factors"]] == pytest.approx([3.0] * 9, rel=1e-3)
    assert read["fit"]["deviation"] < 1e-3
    estimated = facts("--lost", "1:1", capsys=capsys)["plan"]["step_s"]
    assert 2.5 < read["plan"]["step_s"] / estimated < 3.1
    assert load_cost(saved).layers[0].forward.compute_s == pytest.approx(3 * begin().cost.layers[0].forward.compute_s)
    assert facts("--lost", "1:1", "--cost", str(saved), capsys=capsys)["plan"]["step_s"] == read["plan"]["step_s"]
    text = call("--measured", str(steps), capsys=capsys)
    assert re.search(r"from 8 reports; fitted times differ from measured ones by 0\.0%", text)
    assert re.search(r"^  layer +weight gradient +3$", text, re.M)


def test_a_cost_of_another_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "cost.json"
    saved.write_text(json.dumps(as_table(Situation.of(load_job("llama2-7b"), load_cluster("npu-96")).cost)))
    told = call("--cost", str(saved), capsys=capsys, code=2)
    assert "is of a model with 32 layers, and --job has 48: give the file that was saved for this job" in told


def test_a_whole_jobs_plan_keeps_to_the_memory_where_samples_take_most_between_their_gradients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert elas.main(["plan", "--job", "llama2-34b", "--cluster", "npu-96"]) == 0
    assert "within the memory" in capsys.readouterr().out


def test_reports_without_passes_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    steps = tmp_path / "steps.jsonl"
    report = StepReport(worker=0, epoch=0, step=0, first_layer=0, last_layer=12, cells=2, step_s=1.0)
    steps.write_text(json.dumps(as_table(report)) + "\n")
    told = call("--measured", str(steps), capsys=capsys, code=2)
    assert f"--measured {steps}: no report has times of passes: measure some steps first" in told


# ------------------------------------------------------------ what cannot be


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lost", "4:0"], "--lost 4:0 is no cell of 4 stages and 2 rows: stages are 0 to 3, rows 0 to 1"),
        (["--lost", "0:2"], "--lost 0:2 is no cell"),
        (["--lost", "one"], "'one' is no cell: write its stage and its row, such as 1:2"),
        (["--dp", "3"], "8 micro-batches do not divide by 3 data-parallel rows: give --micro-batches a multiple of 3"),
        (["--dp", "0"], "--dp must be at least 1, got 0"),
        (["--dp", "8", "--pp", "8"], "llama2-34b takes 256 workers"),
        (["--pp", "49", "--dp", "1", "--job", "llama2-34b"], "48 layers are too few for 49 stages"),
        (["--job", "llama3"], "there is no 'llama3' in configs/jobs: name one of"),
        (["--cluster", "mine"], "there is no 'mine' in configs/clusters: name one of"),
        (["--policy", "ours,theirs"], "--policy ours,theirs: 'theirs' is none: name some of recycle, torchft"),
        (["--policy", "recycle", "--grid"], "--grid and --gantt show the schedule of ours: add it to --policy recycle"),
        (["--gantt", "step.gif"], "--gantt step.gif: a picture ends in .svg, .png, .html"),
        (["--gantt", "/nowhere/step.svg"], "--gantt /nowhere/step.svg cannot be written: give the path of a file in"),
        (["--save-cost", "/"], "--save-cost / cannot be written"),
        (["--measured", "/nowhere"], "/nowhere cannot be read (No such file or directory): name another file"),
        (["--cost", "/nowhere.json"], "/nowhere.json cannot be read"),
        (["--cost", "a.json", "--measured", "b"], "not allowed with argument --cost; elas plan --help says what"),
        (["--effort", "huge"], "invalid choice: 'huge'"),
        (["--lots"], "--lots is not known; elas plan --help says what it takes"),
    ],
)
def test_bad_usage_is_one_sentence_with_the_remedy_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert elas.main([*JOB, *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == "" and words in told.err and len(told.err.splitlines()) == 1


@pytest.mark.process
def test_planning_loads_neither_torch_nor_what_talks_to_a_job() -> None:
    script = (
        "import sys\nfrom megatron_elas.cli import elas\n"
        f"code = elas.main({[*JOB, '--lost', '1:1', '--policy', 'ours,recycle']!r})\n"
        "print('loaded', sorted({'torch', 'numpy', 'websockets', 'msgspec', 'asyncio'} & set(sys.modules)), code)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.endswith("loaded [] 0\n"), ran.stdout[-300:] + ran.stderr


@pytest.mark.process
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "megatron_elas.cli.elas", *JOB, "--json", "--grid"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 141


def test_the_commands_of_the_docs_are_understood() -> None:
    text = (configs_folder().parent / "docs/planning.md").read_text()
    lines = re.findall(r"^\$ elas (.+)$", text, re.M)
    assert len(lines) >= 3
    for line in lines:
        words = line.split()
        assert elas.build_parser(words[0]).parse_args(words).command == words[0]
