"""Sets of Megatron's flags under which a job loses two workers, and what each is there for."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.documents import PROMPT
from tests.fault.runs import LLAMA, TRAINING

STEPS = 8
EVALUATION = ("--eval-interval=3", "--eval-iters=2")
"""After steps 2 and 5, counted from 0."""
DATA = {
    "mock": ("--mock-data",),
    "documents": ("--data-path={documents}", "--eod-mask-loss"),
    "answers": ("--data-path={documents}-answers", f"--null-tokenizer-pad-id={PROMPT}"),
}
"""Which tokens count: all, all but the ends of documents, only those of answers (none in some samples)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSet:
    """A job with these flags, of which two workers are lost."""

    name: str
    flags: str
    tensor: int = 1
    pipeline: int = 2
    data: int = 2
    style: str = "llama"
    """"llama" (SwiGLU, grouped queries, rotary positions) or "gpt" (LayerNorm, biases, learned positions)."""
    tied: bool = False
    counted: str = "mock"
    """One of DATA."""
    first: str = "kill:worker=3@step=3,phase=forward,microbatch=1"
    second: str = "kill:worker=0@step=5,phase=backward,microbatch=0"
    batch: int = 6
    quick: bool = False

    @property
    def workers(self) -> int:
        """Processes of the job."""
        return self.tensor * self.pipeline * self.data

    @property
    def half(self) -> bool:
        """Whether weights are of 16 bits."""
        return "--bf16" in self.flags

    def command_line(self, documents: Path) -> tuple[str, ...]:
        """Model, data and training. ``documents``: prefix of the data that tests/distributed/documents.py writes."""
        words = shlex.split(
            "--num-layers=4 --hidden-size=32 --ffn-hidden-size=64 --num-attention-heads=4 --seq-length=32 "
            "--max-position-embeddings=32"
        )
        if self.style == "llama":
            words += [*LLAMA, "--group-query-attention", "--num-query-groups=2"]
        words += [] if self.tied else ["--untie-embeddings-and-output-weights"]
        words += [f"--tensor-model-parallel-size={self.tensor}", f"--pipeline-model-parallel-size={self.pipeline}"]
        data = [word.format(documents=documents) for word in DATA[self.counted]]
        training = shlex.join(TRAINING)
        if "--train-samples" in self.flags:  # against which Megatron holds a decay in steps
            training = training.replace("--lr-decay-iters 100", "")
        return (*words, *shlex.split(training), *data, "--split=80,20,0", *EVALUATION, *shlex.split(self.flags))


FLAG_SETS = (
    FlagSet(
        name="groups", style="gpt", tied=True, quick=True, first="kill:worker=3@step=3,phase=norm",
        second="kill:worker=0@step=5,phase=evaluate,microbatch=1",
        flags="--decoupled-lr=5e-4 --decoupled-min-lr=1e-5 --start-weight-decay=0.01 --end-weight-decay=0.3 "
        "--weight-decay-incr-style=linear --clip-grad=0.05 --log-num-zeros-in-grad --log-params-norm "
        "--overlap-grad-reduce --overlap-param-gather",
    ),
    FlagSet(
        name="unclipped", counted="documents", first="kill:worker=2@step=3,phase=optimizer",
        second="kill:worker=1@step=5,phase=gather",
        flags="--clip-grad=0 --log-num-zeros-in-grad --qk-layernorm --apply-wd-to-qk-layernorm --check-for-spiky-loss "
        "--no-check-for-nan-in-loss-and-grad --lr-decay-style=WSD --lr-wsd-decay-iters=4 --lr-decay-iters=8",
    ),
    FlagSet(
        name="bf16-reduced-in-bf16", first="kill:worker=1@step=3,phase=optimizer",
        second="kill:worker=2@step=5,phase=backward,microbatch=0",
        flags="--bf16 --grad-reduce-in-bf16 --elastic-consistency=statistical --overlap-grad-reduce "
        "--overlap-param-gather",
    ),
    FlagSet(
        name="bf16-reduced-in-fp32", tensor=2, pipeline=1, data=3, tied=True,
        first="kill:worker=3@step=3,phase=optimizer", second="kill:worker=0@step=5,phase=reduce",
        flags="--bf16 --accumulate-allreduce-grads-in-fp32 --sequence-parallel "
        "--recompute-granularity=full --recompute-method=block --recompute-num-layers=1 --log-params-norm",
    ),
    FlagSet(
        name="answers-per-token", counted="answers", quick=True, first="kill:worker=2@step=3,phase=optimizer",
        second="kill:worker=1@step=5,phase=reduce",
        flags="--calculate-per-token-loss --clip-grad=0.05 --recompute-granularity=selective",
    ),
    FlagSet(
        name="answers-per-sample", counted="answers", style="gpt", first="kill:worker=3@step=2,phase=evaluate",
        second="kill:worker=0@step=5,phase=gather",
        flags="--overlap-grad-reduce --overlap-param-gather --log-num-zeros-in-grad",
    ),
    FlagSet(
        name="answers-per-token-three-stages", counted="answers", tied=True, pipeline=3,
        first="kill:worker=5@step=3,phase=optimizer", second="kill:worker=1@step=5,phase=evaluate,microbatch=3",
        flags="--num-layers=3 --calculate-per-token-loss --overlap-grad-reduce --overlap-param-gather "
        "--recompute-granularity=full --recompute-method=uniform --recompute-num-layers=1",
    ),
    FlagSet(
        name="documents-reset", counted="documents", tensor=2, pipeline=2, data=2,
        first="kill:worker=6@step=3,phase=forward,microbatch=0", second="kill:worker=1@step=5,phase=snapshot",
        flags="--reset-attention-mask --reset-position-ids --sequence-parallel --overlap-grad-reduce "
        "--overlap-param-gather --log-num-zeros-in-grad --clip-grad=0.05",
    ),
    FlagSet(
        name="saved-activations", tensor=2, pipeline=1, data=2, style="gpt",
        first="kill:worker=3@step=3,phase=gather", second="",
        flags="--recompute-granularity=full --recompute-method=uniform --recompute-num-layers=2 "
        "--distribute-saved-activations --clip-grad=0 --log-params-norm",
    ),
    FlagSet(
        name="logging", first="kill:worker=3@step=3,phase=between",
        flags="--log-params-norm --timing-log-level=2 --timing-log-option=all "
        "--check-weight-hash-across-dp-replicas-interval=2 --train-sync-interval=3 --manual-gc --manual-gc-interval=2 "
        "--log-throughput --log-memory-interval=2 --empty-unused-memory-level=2 --rerun-mode=validate_results",
    ),
    FlagSet(
        name="mup", style="gpt", first="kill:worker=3@step=3,phase=commit", second="kill:worker=0@step=5,phase=norm",
        flags="--use-mup --mup-base-hidden-size=16 --mup-width-mult=2 --decoupled-lr=5e-4 --openai-gelu "
        "--data-parallel-random-init",
    ),
    FlagSet(
        name="samples", batch=8, second="kill:worker=0@step=5,phase=optimizer",
        flags="--train-samples=64 --lr-decay-samples=60 --lr-warmup-samples=8 "
        "--num-workers=2 --eval-global-batch-size=12 --eval-micro-batch-size=2 --micro-batch-size=2 "
        "--ddp-bucket-size=1000 --no-align-param-gather --overlap-grad-reduce --overlap-param-gather",
    ),
    FlagSet(
        name="reduce-scatter-fp32", first="kill:worker=2@step=3,phase=snapshot",
        flags="--bf16 --grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation "
        "--elastic-consistency=statistical",
    ),
)  # fmt: skip
