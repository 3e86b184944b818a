"""What --elastic does not cover is refused in one sentence, before anything is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_elas.host.requirements import check_elastic_arguments, describe_job
from megatron_elas.spec.consistency import CONSISTENCY_LEVELS
from megatron_elas.spec.errors import BadUsage


def arguments(**changes: Any) -> SimpleNamespace:
    """Those of a run that is covered."""
    values = {
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "data_parallel_size": 2,
        "micro_batch_size": 2, "global_batch_size": 16, "use_distributed_optimizer": True,
        "context_parallel_size": 1, "expert_model_parallel_size": 1, "num_experts": None,
        "virtual_pipeline_model_parallel_size": None, "rampup_batch_size": None, "use_megatron_fsdp": False,
        "use_torch_fsdp2": False, "num_distributed_optimizer_instances": 1, "dataloader_type": "single", "fp16": False,
        "fp8": None, "fp4": None, "mtp_num_layers": None, "step_batch_size_schedule": None,
        "decrease_batch_size_if_needed": False, "full_validation": False, "multiple_validation_sets": False,
        "cuda_graph_impl": "none", "optimizer_cuda_graph": False, "non_persistent_ckpt_type": None, "optimizer": "adam",
        "optimizer_cpu_offload": False, "use_precision_aware_optimizer": False, "async_save": False, "save": None,
        "ckpt_format": "torch_dist", "phase_transition_iterations": None, "iterations_to_skip": [],
        "qk_clip": False, "log_max_attention_logit": False,
        "log_progress": False, "ddp_average_in_collective": False, "use_tp_pp_dp_mapping": False,
        "exit_duration_in_mins": None, "exit_signal_handler": False,
        "adlr_autoresume": False, "ckpt_assume_constant_structure": False, "world_size": 4,
        "transformer_impl": "local", "gradient_accumulation_fusion": False,
        "elastic_snapshot": "replay", "elastic_snapshot_replicas": 1, "elastic_migration": "async",
        "elastic_consistency": "numerical", "elastic_rng": "resharded", "hidden_dropout": 0.1, "attention_dropout": 0.0,
        "bf16": False, "accumulate_allreduce_grads_in_fp32": False, "grad_reduce_in_bf16": False,
        "cross_entropy_loss_fusion": False, "tp_comm_overlap": False, "deterministic_mode": False,
        "sft": False, "save_wgrads_interval": None,
    }  # fmt: skip
    assert changes.keys() <= values.keys()
    return SimpleNamespace(**{**values, **changes})


def test_a_covered_run_passes_and_its_job_is_described() -> None:
    check_elastic_arguments(arguments(), "cpu")
    job = describe_job(arguments(), (3, 5))
    assert (job.world_size, job.num_microbatches, job.micro_batch_size, job.num_layers) == (4, 8, 2, 8)
    assert job.snapshot_replicas == 1 and job.split_backward
    assert not describe_job(arguments(gradient_accumulation_fusion=True), (3, 5)).split_backward
    assert not describe_job(arguments(transformer_impl="transformer_engine"), (3, 5)).split_backward
    assert describe_job(arguments(elastic_snapshot="off"), (3, 5)).snapshot_replicas == 0
    assert not job.keeps_micro_batches
    assert describe_job(arguments(elastic_consistency="bitwise"), (3, 5)).keeps_micro_batches


def test_other_platforms_are_refused() -> None:
    with pytest.raises(BadUsage, match="this machine has 'cuda'"):
        check_elastic_arguments(arguments(), "cuda")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_distributed_optimizer": False}, "--use-distributed-optimizer"),
        ({"context_parallel_size": 2}, "--context-parallel-size 2"),
        ({"num_experts": 8}, "--num-experts"),
        ({"virtual_pipeline_model_parallel_size": 2}, "virtual pipeline"),
        ({"rampup_batch_size": [8, 8, 100]}, "--rampup-batch-size"),
        ({"optimizer": "sgd"}, "--optimizer sgd"),
        ({"save": "x", "ckpt_format": "torch"}, "--ckpt-format torch"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
        ({"log_progress": True}, "--log-progress"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_covered_is_named_with_its_flag(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadUsage) as refusal:
        check_elastic_arguments(arguments(**changes), "cpu")
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


LOW = {"bf16": True, "grad_reduce_in_bf16": True}
UPSTREAM = {"elastic_rng": "megatron"}


@pytest.mark.parametrize(
    ("changes", "lowest", "words"),
    [
        (LOW, "numerical", "--grad-reduce-in-bf16: gradients would be .* reduced in bf16; leave it out"),
        ({"sft": True}, "bitwise", "--sft: Megatron averages its evaluations over cells; leave it out"),
        ({"save_wgrads_interval": 9}, "bitwise", "--save-wgrads-interval 9: no worker has the whole gradients"),
        ({"bf16": True}, "numerical", "--bf16 alone: .* add --accumulate-allreduce-grads-in-fp32"),
        (UPSTREAM, "numerical", r"--elastic-rng megatron and dropout \(hidden 0.1, attention 0\): .* leave"),
        ({"gradient_accumulation_fusion": True}, "bitwise", "add --no-gradient-accumulation-fusion"),
        ({"cross_entropy_loss_fusion": True}, "bitwise", "--cross-entropy-loss-fusion: .* leave it out"),
        ({"tp_comm_overlap": True}, "bitwise", "--tp-comm-overlap: .* leave it out"),
        ({"transformer_impl": "transformer_engine"}, "bitwise", "engine on cpu without --deterministic-mode"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_levels_refuse_what_they_cannot_keep_their_promise_with(
    changes: dict[str, Any], lowest: str, words: str
) -> None:
    """And say the next lower level as the other remedy."""
    first = CONSISTENCY_LEVELS.index(lowest)
    lower = CONSISTENCY_LEVELS[first - 1]
    for level in CONSISTENCY_LEVELS[:first]:
        check_elastic_arguments(arguments(elastic_consistency=level, **changes), "cpu")
    for level in CONSISTENCY_LEVELS[first:]:
        with pytest.raises(BadUsage, match=rf"^--elastic-consistency {level} does not go with .*{words}") as refusal:
            check_elastic_arguments(arguments(elastic_consistency=level, **changes), "cpu")
        assert str(refusal.value).endswith(f"or choose --elastic-consistency {lower}")


def test_upstreams_streams_are_fine_where_nothing_is_drawn_and_bf16_where_sums_are_in_fp32() -> None:
    for level in CONSISTENCY_LEVELS:
        check_elastic_arguments(arguments(elastic_consistency=level, hidden_dropout=0.0, **UPSTREAM), "cpu")
        half = {"bf16": True, "accumulate_allreduce_grads_in_fp32": True}
        check_elastic_arguments(arguments(elastic_consistency=level, **half), "cpu")


def test_no_more_backups_than_other_workers() -> None:
    check_elastic_arguments(arguments(elastic_snapshot_replicas=3), "cpu")
    check_elastic_arguments(arguments(elastic_snapshot_replicas=4, elastic_snapshot="off"), "cpu")
    check_elastic_arguments(arguments(world_size=1), "cpu")
    with pytest.raises(BadUsage, match=r"--elastic-snapshot-replicas 4 .* each of the 4 has 3: choose 1 to 3"):
        check_elastic_arguments(arguments(elastic_snapshot_replicas=4), "cpu")
