"""Putting the stand-in for ``torch.cuda`` in place, and taking it away."""

from __future__ import annotations

from megatron_elas.platform.cpu import compiler
from megatron_elas.platform.cpu.substitution import Substitutions

_installed: Substitutions | None = None


def install() -> None:
    """Put the stand-in in place for this process and those forked from it. A second call does nothing.

    Call it before Megatron is imported, and for a full effect (``torch.compile`` off) before torch is.
    """
    global _installed
    if _installed is not None:
        return
    compiler.disable()
    # Imported here: these modules import torch, which reads the variables just set.
    from megatron_elas.platform.cpu import availability, factories, memory, moves, rng, streams, type_names

    substitutions = Substitutions()
    for subject in (availability, streams, memory, rng, factories, moves, type_names):
        subject.substitute(substitutions)
    _installed = substitutions


def is_installed() -> bool:
    """Whether the stand-in is in place in this process."""
    return _installed is not None


def uninstall() -> None:
    """Give torch its own functions back. What was already imported by value elsewhere keeps the substitute."""
    global _installed
    if _installed is None:
        return
    from megatron_elas.platform.cpu import rng

    _installed.revert()
    rng.restore_warning()
    _installed = None
