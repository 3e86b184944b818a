"""Flags for the CPU platform, where Megatron's own defaults ask for CUDA or for a package that nobody can have."""

from __future__ import annotations

import importlib.util
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
NO_ONE_LOGGER = ("--no-one-logger",)
"""Added where that package, internal to NVIDIA, is missing: Megatron would tell the user to install it."""


def missing_defaults(argv: Sequence[str]) -> list[str]:
    """The words to add to ``argv`` for the CPU platform: those flags that it does not name itself."""
    named = {word.partition("=")[0] for word in argv}
    wanted = CPU_DEFAULTS if importlib.util.find_spec("one_logger") else (*CPU_DEFAULTS, NO_ONE_LOGGER)
    return [word for words in wanted if words[0] not in named for word in words]
