"""What a level of consistency refuses of Megatron's flags, said before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_elas.platform.detect import PlatformName
from megatron_elas.spec.consistency import ConsistencyLevel
from megatron_elas.spec.errors import BadUsage


class _Conflict(NamedTuple):
    """A flag that a level cannot keep its promise with."""

    flag: str
    why: str
    remedy: str


def check_level(args: Any, platform: PlatformName) -> None:
    """Refuse flags with which the run could not be what ``--elastic-consistency`` promises.

    Raises:
        BadUsage: One sentence: level, flag, reason, remedy.
    """
    level: ConsistencyLevel = args.elastic_consistency
    if level == "statistical":
        return
    for conflict in _find_beside_numerical(args):
        _refuse(level, conflict, "statistical")
    if level == "bitwise":
        for conflict in _find_beside_bitwise(args, platform):
            _refuse(level, conflict, "numerical")


def _refuse(level: ConsistencyLevel, conflict: _Conflict, lower: ConsistencyLevel) -> None:
    raise BadUsage(
        f"--elastic-consistency {level} does not go with {conflict.flag}: {conflict.why}; {conflict.remedy}, or choose "
        f"--elastic-consistency {lower}"
    )


def _find_beside_numerical(args: Any) -> Iterator[_Conflict]:
    """Gradients in low precision, and masks that depend on who draws them."""
    if (args.bf16 or args.fp16) and not args.accumulate_allreduce_grads_in_fp32:
        precision = "bf16" if args.bf16 else "fp16"
        given = "--grad-reduce-in-bf16" if args.grad_reduce_in_bf16 else f"--{precision} alone"
        remedy = "leave it out" if args.grad_reduce_in_bf16 else "add --accumulate-allreduce-grads-in-fp32"
        yield _Conflict(given, f"gradients would be accumulated and reduced in {precision}", remedy)
    if args.elastic_rng == "megatron" and (args.hidden_dropout > 0 or args.attention_dropout > 0):
        yield _Conflict(
            f"--elastic-rng megatron and dropout (hidden {args.hidden_dropout:g}, attention "
            f"{args.attention_dropout:g})",
            "masks would depend on who draws them, and change with every event",
            "leave --elastic-rng out",
        )


def _find_beside_bitwise(args: Any, platform: PlatformName) -> Iterator[_Conflict]:
    """Sums that are made out of our sight, and kernels that may give other bits from one run to the next."""
    if args.gradient_accumulation_fusion:
        yield _Conflict(
            "fused accumulation of gradients",
            "micro-batches would be added up in fp32, in the order in which they come",
            "add --no-gradient-accumulation-fusion",
        )
    varying = {
        "--cross-entropy-loss-fusion": args.cross_entropy_loss_fusion,
        "--tp-comm-overlap": args.tp_comm_overlap,
    }
    for flag, given in varying.items():
        if given:
            yield _Conflict(flag, "Megatron calls its kernels nondeterministic", "leave it out")
    if args.sft:
        yield _Conflict("--sft", "Megatron averages its evaluations over cells", "leave it out")
    if args.save_wgrads_interval is not None:
        yield _Conflict(
            f"--save-wgrads-interval {args.save_wgrads_interval}",
            "no worker has the whole gradients that it saves, sums in fixed point are reduced and scattered",
            "leave it out",
        )
    if (platform != "cpu" or args.transformer_impl != "local") and not args.deterministic_mode:
        yield _Conflict(
            f"--transformer-impl {args.transformer_impl} on {platform} without --deterministic-mode",
            "kernels may give other bits from one run to the next",
            "add --deterministic-mode",
        )
