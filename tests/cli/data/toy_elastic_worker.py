"""An elastic worker without torch: steps, and the control plane's protocol around them.

Usage: toy_elastic_worker.py STAGES ROWS LOSSES [FAULT]. Ends when as many workers were lost as LOSSES says. With
TOY_NEVER_RECOVERS in the environment it hangs in its first step after a recovery, with TOY_RESUMES_WHEN until there is
such a file. The last worker joins when there is a file TOY_JOINS_WHEN, and all go on from step 5 when there is a file
TOY_STEPS_WHEN. The worker TOY_HOLDS_LOCK makes a call of HOLD_S in its fifth step, in which no other thread of its
interpreter runs. In the folder TOY_DIARY each worker writes down the epoch, number and time of its steps.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import time
from pathlib import Path

from megatron_elas.control.environment import WorkerEnvironment
from megatron_elas.control.link import ControlLink
from megatron_elas.control.messages import Crashed, FaultFired, Finished, Hello, Recovered, Settled
from megatron_elas.spec.errors import EpochChanged
from megatron_elas.spec.faults import FaultPhase, parse_fault
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.report import Holding, RecoveryReport, SettleReport
from megatron_elas.spec.step_report import StepReport
from megatron_elas.testing.faults import FaultInjector

STEP_S = 0.01
HOLD_S = 3.5
WAIT_S = 30.0
VERSIONS = tuple(range(1000))
"""A toy state exists in every version, so that steps need not be in lockstep."""


def file_is_there(variable: str) -> bool:
    """Whether the environment names no file, or one that exists."""
    return variable not in os.environ or Path(os.environ[variable]).exists()


class Toy:
    def __init__(self, job: JobSpec, faults: list[str]) -> None:
        self.env = WorkerEnvironment.from_environ(os.environ)
        self.worker = self.env.worker
        self.quiesced = threading.Event()
        self.epoch, self.step, self.num_lost = 0, 0, 0
        while self.worker == job.world_size - 1 and not file_is_there("TOY_JOINS_WHEN"):
            time.sleep(STEP_S)
        hello = Hello(
            worker=self.worker,
            pid=os.getpid(),
            host=socket.gethostname(),
            domain=self.env.domain,
            address=f"unix:{self.env.run_dir}/w{self.worker}.sock",
            job=job,
        )
        self.link = ControlLink(
            self.env.controller,
            self.env.token,
            hello,
            self.env.heartbeat_s,
            on_quiesce=lambda quiesce: self.quiesced.set(),
            on_inject=self.take_fault,
            progress_timeout_s=self.env.progress_s,
        )
        self.injector = FaultInjector(
            [parse_fault(text) for text in faults],
            self.worker,
            lambda fault, at_s: self.link.send(FaultFired(worker=self.worker, fault=str(fault), at_s=at_s)),
        )
        diary = Path(os.environ["TOY_DIARY"]) / str(self.worker) if "TOY_DIARY" in os.environ else Path(os.devnull)
        self.diary = diary.open("a", buffering=1)
        self.plans: list[ElasticPlan] = [self.link.wait_start(WAIT_S).plan]
        print(f"worker {self.worker} starts", flush=True)

    def train(self, num_losses: int) -> None:
        report = None
        while self.num_lost < num_losses or report is not None:
            if self.step == 5 and os.environ.get("TOY_HOLDS_LOCK") == str(self.worker):
                ctypes.PyDLL(None).usleep(round(HOLD_S * 1e6))
            while self.step == 5 and not file_is_there("TOY_STEPS_WHEN"):
                time.sleep(STEP_S)
            self.injector.at(self.step, FaultPhase.BETWEEN)
            self.diary.write(f"{self.epoch} {self.step} {time.time()}\n")
            if self.quiesced.wait(STEP_S):
                report = self.recover()
            elif report is not None and "TOY_NEVER_RECOVERS" in os.environ:
                threading.Event().wait()
            elif report is not None and not file_is_there("TOY_RESUMES_WHEN"):
                pass
            elif report is not None:
                report.marks_s["first_step"] = time.time()
                self.link.send(Recovered(report=report))
                report = None
            else:
                self.measure()
                self.step += 1
            self.link.progress(self.epoch, self.step)

    def take_fault(self, text: str) -> None:
        """From the controller."""
        self.injector.add(parse_fault(text))
        print(f"worker {self.worker} was told of {text}", flush=True)

    def measure(self) -> None:
        """Tell of the step, as if it took no time but that in which the toy waits."""
        plan = self.plans[-1]
        seat = plan.placement.find_seat(self.worker)
        if seat is not None:
            first, last = plan.layers[seat.stage]
            cells = len(plan.placement.stages[seat.stage])
            self.link.measured(
                StepReport(
                    worker=self.worker, epoch=plan.epoch, step=self.step, first_layer=first, last_layer=last,
                    cells=cells, step_s=STEP_S, stage=seat.stage,
                )
            )  # fmt: skip

    def hold(self, plan: ElasticPlan) -> Holding:
        """All that the plan asks for: a toy never lets a layout go."""
        wards = dict.fromkeys(plan.wards_of(self.worker), VERSIONS)
        return Holding(epoch=plan.epoch, live=self.step, kept=VERSIONS, wards=wards)

    def recover(self) -> RecoveryReport:
        while True:
            self.quiesced.clear()
            marks_s = {"quiesce": time.time()}
            quiesce = self.link.wait_quiesce(self.epoch, WAIT_S)
            holdings = tuple(self.hold(plan) for plan in reversed(self.plans))
            report = SettleReport(
                worker=self.worker, epoch=quiesce.epoch, step=self.step, activity=self.step, holdings=holdings
            )
            self.link.send(Settled(report=report))
            try:
                recover = self.link.wait_recover(quiesce.epoch, WAIT_S)
            except EpochChanged:
                continue
            for phase in ("settle", "groups", "restore", "rebuild", "verify"):
                marks_s[phase] = time.time()
            self.injector.at(recover.settlement.resume_step, FaultPhase.RECOVERY)
            self.plans.append(recover.plan)
            self.epoch = quiesce.epoch
            self.num_lost += len(quiesce.lost)
            print(f"worker {self.worker} goes on: {recover.plan.placement.describe()}", flush=True)
            return RecoveryReport(
                worker=self.worker,
                epoch=quiesce.epoch,
                resume_step=recover.settlement.resume_step,
                marks_s=marks_s,
            )


stages, rows, losses = map(int, sys.argv[1:4])
toy = Toy(
    JobSpec(
        tensor_parallel=int(os.environ.get("TOY_LANES", "1")),
        pipeline_parallel=stages,
        data_parallel=rows,
        micro_batch_size=1,
        num_microbatches=2 * rows,
    ),
    sys.argv[4:],
)
try:
    toy.train(losses)
except Exception as error:
    toy.link.send(Crashed(worker=toy.worker, step=toy.step, error=f"{type(error).__name__}: {error}"))
    raise
toy.link.send(Finished(worker=toy.worker))
toy.link.close()
