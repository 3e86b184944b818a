"""Flags that Megatron needs on the CPU platform where its own defaults ask for CUDA."""

from __future__ import annotations

from collections.abc import Sequence

CPU_DEFAULTS: tuple[tuple[str, ...], ...] = (
    ("--transformer-impl", "local"),
    ("--distributed-backend", "gloo"),
    ("--no-rope-fusion",),
    ("--no-persist-layer-norm",),
    ("--no-masked-softmax-fusion",),
    ("--no-gradient-accumulation-fusion",),
)
"""Each a flag with its value. Without them the model cannot be built, or no process group made."""


def missing_defaults(argv: Sequence[str]) -> list[str]:
    """The words to add to ``argv`` for the CPU platform: those flags that it does not name itself."""
    named = {word.partition("=")[0] for word in argv}
    return [word for words in CPU_DEFAULTS if words[0] not in named for word in words]
