"""A job that is simulated in milliseconds, and costs that can be added up by hand."""

from __future__ import annotations

from dataclasses import replace

from megatron_elas.simulator.recovery import Phase, RecoveryCosts, RestartCosts
from megatron_elas.simulator.traces import Event, Failure, Trace
from megatron_elas.spec.cluster import Cluster, load_cluster
from megatron_elas.spec.job_profile import JobProfile, load_job

STAGES, ROWS, STEPS = 4, 3, 8


def small_job(stages: int = STAGES, rows: int = ROWS, steps: int = STEPS, lanes: int = 1) -> JobProfile:
    """Llama 7B."""
    job = load_job("llama2-7b").with_grid(
        pipeline_parallel=stages, data_parallel=rows, num_microbatches=rows * steps, micro_batch_size=1
    )
    return replace(job, spec=replace(job.spec, tensor_parallel=lanes))


def small_cluster(job: JobProfile, *, per_node: int = 1, spare_nodes: int = 0) -> Cluster:
    """As many devices as the job needs, and some nodes more."""
    nodes = job.spec.world_size // per_node + spare_nodes
    return replace(load_cluster("npu-96"), name="small", nodes=nodes, devices_per_node=per_node)


def costs(
    *,
    detect_s: float = 2.0,
    phases: tuple[float, ...] = (3.0, 4.0),
    join_s: float = 5.0,
    backups: bool = False,
    leaves_slow_out: bool = False,
    drops_step: bool = False,
    interval_s: float = 1e9,
    detect_node_s: float | None = None,
) -> RecoveryCosts:
    """Whole seconds; a restart takes 100, a save 1, until it can be read 10 more."""
    return RecoveryCosts(
        name="costs",
        detect_s=detect_s,
        detect_node_s=detect_s if detect_node_s is None else detect_node_s,
        phases=tuple(Phase(name=f"phase {number}", fixed_s=seconds) for number, seconds in enumerate(phases)),
        join=(Phase(name="join", fixed_s=join_s),) if phases else (),
        backups=backups,
        leaves_slow_out=leaves_slow_out,
        drops_step=drops_step,
        checkpoint_s=interval_s,
        restart=RestartCosts(
            storage_bandwidth=1e9,
            phases=(Phase(name="restart", fixed_s=100.0),),
            save=(Phase(name="save", fixed_s=1.0),),
            write=(Phase(name="write", fixed_s=10.0),),
        ),
    )


def trace(seconds: float, *events: Event) -> Trace:
    return Trace(name="by hand", seconds=seconds, events=events)


def failure(at_s: float, *devices: int, repair_s: float = float("inf")) -> Failure:
    return Failure(at_s=at_s, devices=devices, repair_s=repair_s)
