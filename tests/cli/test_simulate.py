"""``elas simulate``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from megatron_elas.cli import elas, simulate
from megatron_elas.planner.policies import POLICIES
from megatron_elas.simulator.outcome import Outcome
from megatron_elas.simulator.rates import StepRates
from megatron_elas.simulator.trace_files import read_trace
from megatron_elas.simulator.traces import Failure, Trace
from megatron_elas.spec.cluster import Cluster
from megatron_elas.spec.errors import NoFeasiblePlan
from megatron_elas.spec.job_profile import JobProfile
from tests.simulator.outcomes import make_outcome

SMALL = ("simulate", "--job", "llama2-34b", "--cluster", "npu-96")
Seen = list[tuple[JobProfile, Cluster, Trace, str]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What the engine is asked for; it is not run."""
    calls: Seen = []

    def note(job: JobProfile, cluster: Cluster, trace: Trace, policy: str, *, rates: StepRates | None) -> Outcome:
        assert rates is None
        calls.append((job, cluster, trace, policy))
        return make_outcome(policy)

    monkeypatch.setattr(simulate, "simulate", note)
    return calls


def test_every_policy_runs_through_the_same_trace(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    assert elas.main([*SMALL, "--trace", "rsc-1", "--failure-factor", "20", "--days", "3", "--seed", "5"]) == 0
    assert [call[3] for call in seen] == ["ours", "recycle", "torchft"]
    job, cluster, trace, _ = seen[0]
    assert (job.name, cluster.name, trace.name) == ("llama2-34b", "npu-96", "rsc-1 x20, seed 5")
    assert trace.seconds == 3 * 86400 and trace.events and all(call[2] == trace for call in seen)
    out = capsys.readouterr().out.splitlines()
    grid = "tensor 4 x pipeline 4 x data 6"
    assert out[0] == f"job      llama2-34b: {grid}, 192 micro-batches of 1, consistency numerical"
    assert out[1] == "cluster  npu-96: 96 x Ascend 910B"
    assert out[2] == f"trace    rsc-1 x20, seed 5: 3 days, {len(trace.events)} failures"
    assert [line.split()[0] for line in out[4:]] == ["policy", "ours", "recycle", "torchft"]


def test_the_grid_can_be_another_one(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ("--pp", "8", "--dp", "2", "--micro-batches", "32", "--micro-batch-size", "6")
    assert elas.main([*SMALL, *grid, "--policy", "ours", "--trace", "one-loss"]) == 0
    spec = seen[0][0].spec
    assert (spec.tensor_parallel, spec.pipeline_parallel, spec.data_parallel) == (4, 8, 2)
    assert (spec.num_microbatches, spec.micro_batch_size) == (32, 6)
    assert "96 x Ascend 910B, 32 of them spare" in capsys.readouterr().out


def test_single_devices_fail_as_often_as_asked_for(seen: Seen) -> None:
    flags = ("--trace", "generated", "--mtbf-h", "2", "--repair-h", "1", "--days", "50", "--policy", "ours")
    assert elas.main([*SMALL, *flags]) == 0
    trace = seen[0][2]
    assert trace.name == "a device every 2 h, seed 1"
    # Four standard deviations of 600; about one device in a hundred is away.
    assert abs(len(trace.events) - 600) < 98
    assert all(
        isinstance(event, Failure) and len(event.devices) == 1 and event.repair_s == 3600 for event in trace.events
    )


def test_a_trace_of_the_users_own_is_run_as_it_is(seen: Seen, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("at_s,devices,repair_s\n60,8-15,3600\n90000,1,\n")
    assert elas.main([*SMALL, "--trace", str(path), "--policy", "ours"]) == 0
    assert elas.main([*SMALL, "--trace", str(path), "--policy", "ours", "--days", "0.5"]) == 0
    whole, cut = seen[0][2], seen[1][2]
    assert whole == read_trace(path) and whole.seconds == 2 * 86400
    assert cut.seconds == 43200 and cut.events == whole.events[:1]


def test_files_are_written_to_a_folder(seen: Seen, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "out"
    assert elas.main([*SMALL, "--trace", "two-losses", "--out", str(folder)]) == 0
    assert capsys.readouterr().out.endswith(f"\nwritten to {folder}: open {folder / 'index.html'}\n")
    assert sorted(file.name for file in folder.iterdir()) == [
        "index.html",
        "outcomes.json",
        "shares.png",
        "shares.svg",
        "throughput.png",
        "throughput.svg",
        "trace.jsonl",
    ]
    assert read_trace(folder / "trace.jsonl") == seen[0][2]
    page = (folder / "index.html").read_text()
    for name in ("throughput", "shares"):
        assert (folder / f"{name}.svg").read_text() in page
        with Image.open(folder / f"{name}.png") as image:
            assert image.size[0] == 1100
    values = json.loads((folder / "outcomes.json").read_text())
    assert [policy["policy"] for policy in values["policies"]] == ["ours", "recycle", "torchft"]


def test_without_pillow_all_else_is_written(
    seen: Seen, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert elas.main([*SMALL, "--out", str(tmp_path)]) == 0
    assert "shares.png was not written: PNG needs Pillow, which is missing" in capsys.readouterr().err
    assert (tmp_path / "shares.svg").exists() and not (tmp_path / "shares.png").exists()


def test_json_is_one_object(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    assert elas.main([*SMALL, "--trace", "two-losses", "--policy", "torchft,torchft", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["events"] == 2 and values["spec"]["pipeline_parallel"] == 4 and values["no_plan"] == {}
    assert [(policy["policy"], policy["goodput"]) for policy in values["policies"]] == [("torchft", 0.82)]


def refuse(job: JobProfile, cluster: Cluster, trace: Trace, policy: str, *, rates: StepRates | None) -> Outcome:
    if policy == "elaswave":
        raise NoFeasiblePlan("it does not fit")
    return make_outcome(policy)


def test_a_policy_without_a_plan_is_told_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate, "simulate", refuse)
    assert elas.main([*SMALL, "--policy", "elaswave,ours"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "elaswave: no plan to begin with: it does not fit"
    assert elas.main([*SMALL, "--policy", "elaswave"]) == 3
    assert capsys.readouterr().err == "elas: elaswave: it does not fit\n"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--trace", "llama"), "there is no 'llama' in configs/traces: name one of ascend-10k, hpn-switches, llama3-"),
        (("--trace", "none.jsonl"), "none.jsonl cannot be read (No such file or directory): name another file"),
        (("--policy", "ours,mine"), "--policy ours,mine: 'mine' is none: name some of recycle, torchft, oobleck, el"),
        (("--policy", ""), "--policy : '' is none: name some of"),
        (("--job", "llama"), "there is no 'llama' in configs/jobs: name one of llama-tiny, llama2-13b, llama2-34b"),
        (("--cluster", "npu"), "there is no 'npu' in configs/clusters: name one of a100-96"),
        (("--dp", "12"), "llama2-34b takes 192 workers (tensor 4 x pipeline 4 x data 12), and npu-96 has 96 devices: "),
        (
            ("--dp", "5"),
            "192 micro-batches do not divide by 5 data-parallel rows: give --micro-batches a multiple of 5",
        ),
        (("--pp", "0"), "--pp must be at least 1, got 0"),
        (("--days", "0"), "--days must be above 0, got 0"),
        (("--days", "nan"), "--days must be above 0, got nan"),
        (("--days", "week"), "argument --days: invalid float value: 'week'"),
        (("--seed", "-1"), "the seed is -1: give one that is not negative"),
        (("--failure-factor", "-2"), "--failure-factor must be above 0, got -2"),
        (("--mtbf-h", "2"), "--mtbf-h and --repair-h are for --trace generated: leave them out for llama3-405b"),
        (("--trace", "one-loss", "--seed", "2"), "--seed and --failure-factor are for traces that are drawn, and one"),
        (("--policy", "recycle", "--staggered"), "--staggered is for ours: add it to --policy recycle"),
        (("--speed",), "--speed is not known; elas simulate --help says what it takes"),
    ],
)
def test_bad_usage_is_one_sentence(
    flags: tuple[str, ...], sentence: str, seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    assert elas.main([*SMALL, *flags]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"elas: {sentence}") and told.err.count("\n") == 1 and not told.out
    assert not seen


def test_a_trace_of_another_cluster_is_refused(seen: Seen, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.jsonl"
    path.write_text('{"at_s": 60, "devices": [500]}\n')
    assert elas.main([*SMALL, "--trace", str(path)]) == 2
    assert "large: the event at 60 s is of device 500, and npu-96 has devices 0 to 95" in capsys.readouterr().err
    file = tmp_path / "file"
    file.touch()
    assert elas.main([*SMALL, "--out", str(file)]) == 2
    assert "cannot be made (File exists): name another folder" in capsys.readouterr().err


def test_help_lists_policies_and_traces(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        elas.main(["simulate", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert all(name in out for name in (*POLICIES, "llama3-405b", "one-loss"))


@pytest.mark.process
def test_it_loads_no_torch() -> None:
    program = (
        "import sys; from megatron_elas.cli import elas\n"
        "try: elas.main(['simulate', '--help'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL, timeout=60)


def run_small(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, dict[str, float]]:
    """Really simulates one pipeline of four stages and two rows through a day with two losses."""
    grid = ("--pp", "4", "--dp", "2", "--micro-batches", "16", "--trace", "two-losses", "--json")
    assert elas.main([*SMALL, *grid, *flags]) == 0
    values = json.loads(capsys.readouterr().out)
    assert not values["no_plan"]
    return {outcome["policy"]: outcome for outcome in values["policies"]}


def test_losses_cost_what_they_must_under_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    # The grid leaves 64 of 96 devices to spare: what is lost is a recovery each, nothing else.
    found = run_small(capsys, "--policy", ",".join(POLICIES))
    assert set(found) == set(POLICIES)
    for outcome in found.values():
        assert outcome["recoveries"] == outcome["failures"] == 1, "device 41 is a spare one"
        assert 0 < outcome["mean_recovery_s"] == outcome["worst_recovery_s"] < 86400
        by_cause = outcome["seconds_by_cause"]
        assert isinstance(by_cause, dict) and sum(by_cause.values()) == pytest.approx(86400)
        # A spare cell takes the seat, so all but the recovery is training at the whole grid's speed.
        assert 0.98 < outcome["own_goodput"] < 1
    assert found["restart"]["restarts"] == 1 and found["ours"]["restarts"] == 0
    assert found["ours"]["mean_recovery_s"] < found["restart"]["mean_recovery_s"]
    assert found["torchft"]["dropped"] > 0 == found["ours"]["dropped"]
    assert run_small(capsys, "--policy", "ours")["ours"] == found["ours"], "the same again"


def test_ours_may_stagger_optimizers_too(capsys: pytest.CaptureFixture[str]) -> None:
    plain = run_small(capsys, "--policy", "ours")["ours"]
    staggered = run_small(capsys, "--policy", "ours", "--staggered")["ours"]
    assert staggered["own_samples_per_s"] >= plain["own_samples_per_s"]
    assert staggered["stock_samples_per_s"] == plain["stock_samples_per_s"]
