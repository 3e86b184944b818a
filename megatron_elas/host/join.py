"""Makes Megatron's groups over the elastic communicator and puts the elastic seams in force."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from megatron.core import mpu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.arguments import core_transformer_config_from_args

from megatron_elas.host import elastic_seams, emulation_seams, patching
from megatron_elas.host.attachment import Attachment, attach
from megatron_elas.host.emulation import Emulation
from megatron_elas.host.gpt_step import get_embedding_ranks
from megatron_elas.host.gradient_sums import GradientSums
from megatron_elas.host.groups import keep_data_parallel_size_logical
from megatron_elas.host.log_handover import Log
from megatron_elas.host.logging_seams import share_tensorboard
from megatron_elas.host.pipeline import Route, RoutedPipeline
from megatron_elas.host.random_seams import make_streams
from megatron_elas.host.schedule import PassCounter
from megatron_elas.host.step_timer import StepTimer
from megatron_elas.host.step_tracer import StepTracer
from megatron_elas.runtime.communicator.communicator import Communicator
from megatron_elas.runtime.ports import FaultPoint
from megatron_elas.runtime.session import Session
from megatron_elas.runtime.transport.base import Transport
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.plan import ElasticPlan
from megatron_elas.spec.step_report import StepReport


def join_megatron(
    args: Any,
    job: JobSpec,
    plan: ElasticPlan,
    transport: Transport,
    communicator: Communicator,
    session: Session,
    strike: FaultPoint,
    log: Log,
    tell: Callable[[StepReport], None] = lambda report: None,
    emulation: Emulation | None = None,
    tracer: StepTracer | None = None,
) -> tuple[Attachment, dict[str, Any]]:
    """Build all groups and attach to Megatron. Called once per worker, on all workers.

    ``tell`` takes the times of every finished step, ``tracer`` what it was made of.

    Returns:
        The attachment, and the keyword arguments for ``pretrain``.

    Raises:
        WrongVersion: A symbol of Megatron is not as expected; nothing was attached.
    """
    patching.require(elastic_seams.ROWS)
    args.enable_gloo_process_groups = args.use_gloo_process_groups = False
    communicator.register_backend()
    # The groups need no store: everybody's address came with the plan. c10d asks for one all the same.
    dist.init_process_group("elastic", store=dist.HashStore(), rank=session.worker, world_size=job.world_size)
    mpu.initialize_model_parallel(
        job.tensor_parallel,
        job.pipeline_parallel,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        order="tp-cp-ep-dp-pp",
        get_embedding_ranks=get_embedding_ranks,
        create_gloo_process_groups=False,
    )
    keep_data_parallel_size_logical(job.data_parallel)
    route = Route(plan, session.worker)
    if emulation is None:
        timer = StepTimer(session.worker, tell, tracer=tracer)
    else:
        device = emulation.device
        timer = StepTimer(session.worker, lambda report: tell(replace(report, clock=device.clock)), tracer=tracer)
        emulation.optimizing = timer.optimizing
    attached = Attachment(
        worker=session.worker,
        job=job,
        initial=plan.placement,
        session=session,
        communicator=communicator,
        transport=transport,
        route=route,
        pipeline=RoutedPipeline(core_transformer_config_from_args(args), route, transport, timer.waiting),
        counter=PassCounter(strike),
        timer=timer,
        strike=strike,
        log=log,
        summed_rows=job.summed_rows,
        emulation=emulation,
        streams=make_streams(args),
        sums=GradientSums(job.num_microbatches) if job.consistency == "bitwise" else None,
    )
    attach(attached)
    share_tensorboard(args, log)
    patching.apply_missing(elastic_seams.ROWS)
    if emulation is not None:
        emulation.follow(lambda: route.plan)
        attached.pipeline.times = emulation
        emulation_seams.attach(emulation, elastic=True)
    return attached, {
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
        "p2p_communicator": attached.pipeline,
        "skip_model_parallel_init": True,
    }
