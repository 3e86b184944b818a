"""What an elastic run needs of Megatron's arguments, said before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_elas.host.consistency import check_level
from megatron_elas.platform.detect import PlatformName
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.job import JobSpec
from megatron_elas.spec.migration import MigrationMode


def check_elastic_arguments(args: Any, platform: PlatformName) -> None:
    """Refuse what elasticity does not cover yet.

    Raises:
        BadUsage: One sentence: flag, value, remedy.
    """
    if platform != "cpu":
        raise BadUsage(
            f"--elastic runs on the cpu platform only in this release (this machine has '{platform}'): copies "
            f"and moves of state in device memory come next; leave --elastic out to train as usual"
        )
    required = {"--use-distributed-optimizer": args.use_distributed_optimizer}
    for flag, given in required.items():
        if not given:
            raise BadUsage(f"--elastic needs {flag}: optimizer state is moved as its shards")
    refused = {
        f"--context-parallel-size {args.context_parallel_size}": args.context_parallel_size > 1,
        f"--expert-model-parallel-size {args.expert_model_parallel_size}": args.expert_model_parallel_size > 1,
        "--num-experts": args.num_experts is not None,
        "virtual pipeline stages": args.virtual_pipeline_model_parallel_size is not None,
        "--rampup-batch-size": args.rampup_batch_size is not None,
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--use-torch-fsdp2": args.use_torch_fsdp2,
        f"--num-distributed-optimizer-instances {args.num_distributed_optimizer_instances}": (
            args.num_distributed_optimizer_instances > 1
        ),
        f"--dataloader-type {args.dataloader_type}": args.dataloader_type != "single",
        "--fp8-format": args.fp8 is not None,
        "--fp4-format": args.fp4 is not None,
        "--mtp-num-layers": args.mtp_num_layers is not None,
        "--step-batch-size-schedule": args.step_batch_size_schedule is not None,
        "--decrease-batch-size-if-needed": args.decrease_batch_size_if_needed,
        "--full-validation": args.full_validation,
        "--multiple-validation-sets": args.multiple_validation_sets,
        f"--cuda-graph-impl {args.cuda_graph_impl}": args.cuda_graph_impl != "none",
        "--optimizer-cuda-graph": args.optimizer_cuda_graph,
        "--non-persistent-ckpt-type": args.non_persistent_ckpt_type is not None,
        f"--optimizer {args.optimizer}": args.optimizer != "adam",
        "--optimizer-cpu-offload": args.optimizer_cpu_offload,
        "--use-precision-aware-optimizer": args.use_precision_aware_optimizer,
        "--async-save": args.async_save,
        f"--ckpt-format {args.ckpt_format} with --save": args.save is not None and args.ckpt_format != "torch_dist",
        "--phase-transition-iterations": args.phase_transition_iterations is not None,
        "--exit-duration-in-mins": args.exit_duration_in_mins is not None,
        "--exit-signal-handler": args.exit_signal_handler,
        "--adlr-autoresume": args.adlr_autoresume,
        "--ckpt-assume-constant-structure": args.ckpt_assume_constant_structure,
        "--iterations-to-skip": bool(args.iterations_to_skip),
        "--qk-clip": args.qk_clip,
        "--log-max-attention-logit": args.log_max_attention_logit,
        "--ddp-average-in-collective": args.ddp_average_in_collective,
        "--use-tp-pp-dp-mapping": args.use_tp_pp_dp_mapping,
        # When a checkpoint is saved it looks for the start of a job of as many workers as are left.
        "--log-progress": args.log_progress,
    }
    for what, given in refused.items():
        if given:
            raise BadUsage(f"--elastic does not cover {what} yet: leave one of them out")
    check_level(args, platform)
    if args.elastic_snapshot != "off" and args.elastic_snapshot_replicas >= args.world_size > 1:
        raise BadUsage(
            f"--elastic-snapshot-replicas {args.elastic_snapshot_replicas} needs as many other workers, and each of "
            f"the {args.world_size} has {args.world_size - 1}: choose 1 to {args.world_size - 1}"
        )


def can_split(args: Any) -> bool:
    """Whether ``host.split_backward`` puts weight gradients of the run's layers off; of validated arguments."""
    return args.transformer_impl == "local" and not args.gradient_accumulation_fusion


def describe_job(args: Any, stage_layers: Sequence[int]) -> JobSpec:
    """The job that Megatron's validated arguments describe.

    Args:
        args: Validated.
        stage_layers: Transformer layers of every stage (see host.shape).
    """
    migration: MigrationMode = args.elastic_migration
    if migration == "async" and args.elastic_snapshot == "copy":  # its updates cannot be made elsewhere as well
        migration = "blocking"
    return JobSpec(
        migration=migration,
        tensor_parallel=args.tensor_model_parallel_size,
        pipeline_parallel=args.pipeline_model_parallel_size,
        data_parallel=args.data_parallel_size,
        micro_batch_size=args.micro_batch_size,
        num_microbatches=args.global_batch_size // args.micro_batch_size,
        stage_layers=tuple(stage_layers),
        snapshot_replicas=args.elastic_snapshot_replicas if args.elastic_snapshot != "off" else 0,
        split_backward=can_split(args),
        consistency=args.elastic_consistency,
        fp16=args.fp16,
    )
