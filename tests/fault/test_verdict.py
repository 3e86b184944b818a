"""What the campaign's verdicts are made of finds what it is there to find."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.faults import MIGRATION_PHASES, RECOVERY_PHASES, FaultPhase
from tests.fault import footprint
from tests.fault.descriptors import LINK
from tests.fault.runs import Run
from tests.fault.scenarios import Scenario
from tests.fault.settings import Outlook, Setting
from tests.fault.soak import STEP_PHASES, draw_scenario
from tests.fault.traces import add_prints, print_piece
from tests.fault.verdict import find_growth, judge

SETTING = Setting(pipeline=1, data=2)
STEPS = 4
COST = {
    "pid": 1, "epoch": 0, "groups": 9, "c10d": {}, "children": 0, "links_by_channel": {"0": 1}, "fds": 2, "threads": 5,
    "os_threads": 6, "links": 1, "most_links": 4, "rss": 100 << 20,
    "descriptors": {"3": "/dev/null", "4": f"{LINK}1 of channel 0"},
}  # fmt: skip


def test_prints_of_pieces_add_up_however_a_parameter_is_cut() -> None:
    whole = torch.randn(3, 100)
    for cuts in ([0, 100], [0, 1, 100], [0, 30, 31, 77, 100]):
        parts = [{"w": print_piece(a, whole[:, a:b])} for a, b in itertools.pairwise(cuts)]
        assert add_prints(parts) == {"w": print_piece(0, whole)}


def test_a_bit_two_values_or_two_elements_exchanged_change_a_print() -> None:
    whole = torch.randn(3, 100)
    flipped, swapped, moved = whole.clone(), whole.clone(), whole[[0, 2, 1]]
    flipped.view(torch.int32)[1, 7] ^= 1
    swapped[0, [3, 4]] = whole[0, [4, 3]]
    prints = print_piece(0, whole)
    assert [a != b for a, b in zip(print_piece(0, flipped), prints, strict=True)] == [False, True, False]
    assert [a != b for a, b in zip(print_piece(0, swapped), prints, strict=True)] == [True, False, False]
    assert print_piece(0, moved) != prints


# ---------------------------------------------------------------- a run that never was


def write_run(
    folder: Path, edit: Callable[[dict[str, object]], dict[str, object] | None] = lambda record: record
) -> Run:
    """Two workers that train STEPS steps; worker 1 is lost in step 2 and worker 0 goes on in epoch 1.

    ``edit`` changes the records of the trace on their way, or leaves them out.
    """
    state = torch.arange(30.0).view(3, 10)
    shards = {0: [("w", 0, state[:, :6])], 1: [("w", 6, state[:, 6:])]}
    folder.mkdir()
    lines: list[dict[str, object]] = []
    for step in range(STEPS):
        epoch = 0 if step < 2 else 1
        for worker in (0, 1) if epoch == 0 else (0,):
            pieces = shards[worker] if epoch == 0 else [*shards[0], *shards[1]]
            prints = add_prints({f"0/{name}": print_piece(start, values + step)} for name, start, values in pieces)
            lines.append(
                {"worker": worker, "epoch": epoch, "version": step, "seated": 2 - epoch, "stages": 1,
                 "optimizer_step": float(step), "prints": prints}
            )  # fmt: skip
            cost = {**COST, "epoch": epoch}
            lines.append({"worker": worker, "epoch": epoch, "step": step, "loss": 5.0, "norm": 1.0, "cost": cost})
    for record in lines:
        if (kept := edit(record)) is not None:
            with (folder / f"trace.{record['worker']}").open("a") as file:
                file.write(json.dumps(kept) + "\n")
    samples = [{"epoch": 0, "step": s, "stage": 0, "samples": [4 * s + i for i in range(4)]} for s in range(STEPS)]
    (folder / "samples.0").write_text("".join(json.dumps(line) + "\n" for line in samples))
    told = "".join(
        f" iteration {s + 1}/ 4 | consumed samples: {4 * s + 4} | learning rate: 1.0E-03 | lm loss: 5.0E+00 | x\n"
        for s in range(STEPS)
    )
    final = {"stage": 0, "lane": 0, "pieces": [("w", 0, 10, state)], "reduced": {"world": (1, 1.0)}}
    torch.save(final, folder / "final.0.pt")
    return Run(code=0, output=told, folder=folder)


def found(run: Run, calm: Run) -> dict[str, object]:
    verdict = judge(run, calm, SETTING, faults=())
    return {name: value for name, value in vars(verdict).items() if value and name != "steps"}


@pytest.fixture
def calm(tmp_path: Path) -> Run:
    return write_run(tmp_path / "calm")


def test_nothing_is_wrong_with_a_run_that_is_the_same(calm: Run, tmp_path: Path) -> None:
    assert found(write_run(tmp_path / "run"), calm) == {}


@pytest.mark.parametrize("epoch", [0, 1], ids=["before-the-loss", "restored"])
def test_one_other_bit_is_found(epoch: int, calm: Run, tmp_path: Path) -> None:
    def flip(record: dict[str, object]) -> dict[str, object]:
        if record.get("version") == 2 * epoch and record["epoch"] == epoch and record["worker"] == 0:
            first, *rest = record["prints"]["0/w"]  # type: ignore[index]
            return {**record, "prints": {"0/w": (first ^ 1, *rest)}}
        return record

    assert list(found(write_run(tmp_path / "run", flip), calm)) == ["wrong_bits"]


def test_a_loss_that_differs_in_its_last_bit_before_the_fault_is_found(calm: Run, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", lambda r: {**r, "loss": 5.000000000000001} if r.get("step") == 0 else r)
    assert list(found(run, calm)) == ["wrong_bits"]


def test_samples_that_are_missing_or_read_twice_are_counted(calm: Run, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run.folder / "samples.0").read_text().splitlines()]
    lines[1]["samples"] = [4, 4, 5]
    (run.folder / "samples.0").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert found(run, calm) == {"samples_lost": 2, "samples_doubled": 1}


def test_a_fault_that_did_not_strike_and_another_exit_code_are_problems(calm: Run, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    fault = "kill:worker=1@step=2,phase=forward"
    assert judge(run, calm, SETTING, faults=(fault,)).problems
    assert judge(run, calm, SETTING, faults=(), code=4).problems


@pytest.mark.parametrize("what", ["threads", "os_threads", "groups", "children"])
def test_whatever_grows_from_step_to_step_is_a_leak(what: str) -> None:
    grown = {**COST, what: COST[what] + 1}  # type: ignore[operator]
    assert find_growth(COST, COST, settled=True) == []
    assert find_growth(COST, grown, settled=True)
    assert find_growth(COST, grown, settled=False)


def test_a_descriptor_more_is_told_with_what_it_is_unless_it_is_a_link() -> None:
    grown = {**COST, "fds": 3, "descriptors": {**COST["descriptors"], "5": "socket:[77]"}}  # type: ignore[dict-item]
    assert find_growth(COST, grown, settled=False) == ["descriptors that are no links 1 -> 2, new: 5 socket:[77]"]
    linked = {**COST, "fds": 3, "links": 2, "descriptors": {**COST["descriptors"], "5": f"{LINK}2 of channel 0"}}  # type: ignore[dict-item]
    assert find_growth(COST, linked, settled=False) == []
    assert find_growth(COST, linked, settled=True)


@pytest.fixture
def attached() -> Iterator[Any]:
    """As much of a worker as a footprint looks at; its link is one end of a real pair of sockets."""
    ours, theirs = socket.socketpair()
    transport = SimpleNamespace(_links={(1, 0): SimpleNamespace(sock=ours, peer=1, channel=0)})
    plan = SimpleNamespace(epoch=0, placement=SimpleNamespace(workers=(0, 1)))
    with ours, theirs:
        yield SimpleNamespace(
            communicator=SimpleNamespace(transport=transport, groups=[]), session=SimpleNamespace(plan=plan)
        )


def test_one_descriptor_that_each_recovery_leaves_open_is_told_each_time(
    attached: Any, calm: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "LASTING_S", 0.1)
    costs = [footprint.take_lasting_footprint(attached, None)]
    with contextlib.ExitStack() as leaks:
        for what in (lambda: os.eventfd(0), lambda: os.open("/dev/null", os.O_RDONLY)):
            leaks.callback(os.close, what())
            costs.append(footprint.take_lasting_footprint(attached, costs[-1]))
        ours, theirs = (leaks.enter_context(end) for end in socket.socketpair())
        costs.append(footprint.take_lasting_footprint(attached, costs[-1]))
    told = [text for before, now in itertools.pairwise(costs) for text in find_growth(before, now, settled=False)]
    assert len(told) == 3, told
    assert "eventfd" in told[0] and "/dev/null" in told[1] and "AF_UNIX" in told[2], told
    assert ours.fileno() == theirs.fileno() == -1
    epochs = iter([costs[0], costs[0], costs[1], costs[1]])  # as if worker 0 had them at its steps

    def leak(record: dict[str, object]) -> dict[str, object]:
        return {**record, "cost": {**COST, **next(epochs)}} if "cost" in record and record["worker"] == 0 else record

    assert list(found(write_run(tmp_path / "run", leak), calm)) == ["leaks"]


def test_what_another_thread_has_open_for_a_moment_is_no_leak(attached: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    links, take = attached.communicator.transport._links, footprint.take_footprint
    looked, noticed = threading.Event(), threading.Event()

    def finish_dial() -> None:
        looked.wait()
        os.close(waker)
        links[2, 0] = SimpleNamespace(sock=accepted, peer=2, channel=0)
        noticed.wait()

    def take_while_dialling(attached: Any) -> dict[str, Any]:
        cost = take(attached)
        looked.set()
        return cost

    thread = threading.Thread(target=finish_dial)
    thread.start()
    before = footprint.take_lasting_footprint(attached, None)
    waker, accepted = os.eventfd(0), links[1, 0].sock.dup()
    under_way = take(attached)
    monkeypatch.setattr(footprint, "take_footprint", take_while_dialling)
    with accepted:
        now = footprint.take_lasting_footprint(attached, before)
        noticed.set()
        thread.join()
    (told,) = find_growth(before, under_way, settled=False)
    assert "eventfd" in told and "AF_UNIX" in told
    assert find_growth(before, now, settled=False) == [] and now["links"] == 2


# ---------------------------------------------------------------- the soak's draws


def test_a_case_is_the_same_job_whenever_it_is_drawn() -> None:
    phases = (*STEP_PHASES, *RECOVERY_PHASES)
    first = [draw_scenario(1, case, phases) for case in range(20)]
    assert first[::-1] == [draw_scenario(1, case, phases) for case in reversed(range(20))]
    assert first != [draw_scenario(2, case, phases) for case in range(20)]


def test_cases_have_all_phases_and_end_as_the_planner_says() -> None:
    cases = [draw_scenario(3, case, (*STEP_PHASES, *RECOVERY_PHASES)) for case in range(200)]
    faults = [fault for case in cases for fault in case.faults]
    assert {fault.phase for fault in faults} == {*FaultPhase} - {*MIGRATION_PHASES}
    assert sum(fault.phase in RECOVERY_PHASES for fault in faults) > len(faults) / 10
    for case in cases:
        assert _ends_with(case) is case.code, str(case)
    assert 0 < sum(case.code is not ExitCode.FINISHED for case in cases) < len(cases) / 4


def _ends_with(case: Scenario) -> ExitCode:
    outlook = Outlook.of(case.setting)
    for step in sorted({fault.step for fault in case.faults}):
        for fault in case.faults:
            if fault.step == step:
                outlook = outlook.without(fault.worker)
        if outlook.exit_code is not ExitCode.FINISHED:
            return outlook.exit_code
        outlook = outlook.recovered
    return ExitCode.FINISHED
