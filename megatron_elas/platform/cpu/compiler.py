"""Keeps ``torch.compile`` from compiling: on the CPU it costs each worker about 18 s and gains nothing here."""

from __future__ import annotations

import os
import sys

DISABLING_VARIABLES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
"""Read by torch when it is imported; they only work before that."""


def disable() -> None:
    """Switch compilation off, unless the environment already says what to do.

    When torch's compiler was imported earlier, its own switch is set too, since the variables then come too late.
    """
    for name in DISABLING_VARIABLES:
        os.environ.setdefault(name, "1")
    if "torch._dynamo.config" in sys.modules and os.environ[DISABLING_VARIABLES[0]] == "1":
        sys.modules["torch._dynamo.config"].disable = True  # type: ignore[attr-defined]
