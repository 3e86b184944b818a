"""Tools, the script and workers that take part in a change of plan, over real sockets."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from megatron_elas.cli import elas
from megatron_elas.control import service
from megatron_elas.control.commands import ImprovePlan, ShowMigration
from megatron_elas.control.events import PlanImproved, PlanKept
from megatron_elas.control.launch import Rebalance
from megatron_elas.control.port import LinkPort
from megatron_elas.control.states import Running
from megatron_elas.spec.errors import ExitCode
from megatron_elas.spec.migration import MigrationReport
from tests.control.jobs import make_job, shifted
from tests.control.served import TOKEN, WAIT_S, Member, Served, joined, serving
from tests.control.test_coming_back import cut, wait_until
from tests.control.test_service import PATIENT, exited

JOB = make_job(pipeline=2, data=2, layers=(3, 3), migration="async")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[tuple[int, int]]:
    """Worker and exit code of those that are told to end; here they are threads and stay."""
    told: queue.Queue[tuple[int, int]] = queue.Queue()
    monkeypatch.setattr(
        "megatron_elas.control.link._end_process", lambda worker, stop: told.put((worker, stop.exit_code))
    )
    return told


@pytest.fixture(autouse=True)
def planner(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[ImprovePlan]:
    """What the planner was asked; it moves a layer."""
    asked: queue.Queue[ImprovePlan] = queue.Queue()

    def answer(command: ImprovePlan, costs: object, *policy: object) -> PlanImproved | PlanKept:
        asked.put(command)
        return shifted(command)

    monkeypatch.setattr(service, "improve_plan", answer)
    monkeypatch.setenv("ELAS_TOKEN", TOKEN)
    return asked


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(4, timeouts=PATIENT) as served:
        yield served


def port_of(member: Member) -> LinkPort:
    return LinkPort(member.worker, member.link, WAIT_S)


def go_over(members: list[Member], epoch: int) -> None:
    for member in members:
        member.link.progress(epoch, 9)
        port_of(member).migrated(MigrationReport(worker=member.worker, epoch=epoch, step=9))


def test_a_worker_is_drained(
    served: Served, ended: queue.Queue[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    with joined(served, JOB) as members:
        code: queue.Queue[int] = queue.Queue()
        asking = threading.Thread(target=lambda: code.put(elas.main(["drain", "3", "--controller", served.address])))
        asking.start()
        for member in members:
            wait_until(lambda member=member: port_of(member).migration is not None)
            assert port_of(member).migration.plan.placement.find_seat(3) is None
        port_of(members[3]).drained()
        assert elas.main(["drain", "2", "--controller", served.address]) == 2
        assert "is going over to epoch 1: ask again" in capsys.readouterr().err
        assert code.empty(), "it has not left"
        go_over(members[:3], 1)
        assert code.get(timeout=WAIT_S) == 0
        asking.join()
        text = (
            "worker 3 handed over everything; epoch 1 is in force: stage 0 (layers 0-3): [0] [1] | stage 1 (layers "
            "4-5): [2]"
        )
        assert text in capsys.readouterr().out
        assert ended.get(timeout=WAIT_S) == (3, ExitCode.FINISHED)
        block = served.shown.get(timeout=WAIT_S)
        assert isinstance(block, ShowMigration) and block.facts["drained"] == [3]
        served.apply(exited(3, 0))
        wait_until(lambda: 3 in served.state.roster.exited)
        assert isinstance(served.state, Running) and not served.state.roster.lost
        assert elas.main(["status", "--controller", served.address]) == 0
        assert "worker 3: drained" in capsys.readouterr().out.splitlines()


def test_a_worker_that_was_away_gets_the_order(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_elas.control.link.FIRST_PAUSE_S", 0.4)
    monkeypatch.setattr("megatron_elas.control.health.LINK_GRACE_S", WAIT_S)
    with joined(served, JOB) as members:
        cut(served, 1)
        assert elas.main(["rebalance", "--layers", "4,2", "--controller", served.address]) == 0
        wait_until(lambda: port_of(members[1]).migration is not None)
        assert members[1].link.migration.plan.layers == ((0, 4), (4, 6))


def test_an_order_is_void_when_the_next_epoch_was_announced(served: Served) -> None:
    with joined(served, JOB) as members:
        assert elas.main(["rebalance", "--controller", served.address]) == 0
        wait_until(lambda: members[1].link.migration is not None)
        served.apply(exited(3))
        assert members[1].link.wait_quiesce(0, WAIT_S).epoch == 2
        assert members[1].link.migration is None


def test_the_script_is_followed_when_its_steps_come(planner: queue.Queue[ImprovePlan]) -> None:
    script = (Rebalance(step=5, layers=(4, 2)), Rebalance(step=6, layers=(5, 1)), Rebalance(step=50, layers=(1, 5)))
    with serving(4, timeouts=PATIENT, rebalances=script) as served, joined(served, JOB) as members:
        for member in members:
            member.link.progress(0, 4)
        with pytest.raises(queue.Empty):
            planner.get(timeout=0.3)
        members[0].link.progress(0, 7)
        assert planner.get(timeout=WAIT_S).search.layers == (4, 2)
        with pytest.raises(queue.Empty):  # one at a time
            planner.get(timeout=0.3)
        go_over(members, 1)
        assert planner.get(timeout=WAIT_S).search.layers == (5, 1)
        assert served.state.roster.scripted == 2


def test_a_loss_answers_who_waits_for_a_plan(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(command: ImprovePlan, costs: object, *policy: object) -> PlanImproved | PlanKept:
        begun.set()
        assert go_on.wait(WAIT_S)
        return shifted(command)

    monkeypatch.setattr(service, "improve_plan", slow)
    with joined(served, JOB) as members:
        codes: queue.Queue[int] = queue.Queue()
        tool = threading.Thread(target=lambda: codes.put(elas.main(["drain", "1", "--controller", served.address])))
        tool.start()
        assert begun.wait(WAIT_S)
        served.apply(exited(3))
        assert codes.get(timeout=WAIT_S) == ExitCode.BAD_USAGE
        tool.join(WAIT_S)
        assert "ask again when it runs, see elas status" in capsys.readouterr().err
        go_on.set()
        assert members[1].link.wait_quiesce(0, WAIT_S).epoch == 1
        assert members[1].link.migration is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["drain"], "elas: the following arguments are required: WORKER; elas drain --help says what it takes"),
        (["drain", "x"], "elas: WORKER must be the number of a worker, from 0 up, got 'x'"),
        (["rebalance", "--layers", "1,,2"], "elas: --layers must be a number of layers for each stage"),
        (["drain", "7"], "worker 7 is not one of 0 to 3"),
        (["drain", "0", "1", "2", "3"], "nobody would be left"),
        (["rebalance", "--layers", "1,2"], "the layers 1,2 do not fit 2 stages with 6 layers in all"),
    ],
)
def test_bad_input_gets_one_sentence(
    words: list[str], sentence: str, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    with joined(served, JOB):
        assert elas.main([*words, "--controller", served.address] if len(words) > 1 else words) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert sentence in line
