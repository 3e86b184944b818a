"""Every symbol of Megatron that this project touches or counts on.

A host module declares its rows in a tuple ``ROWS`` and is named in ``ROW_MODULES``; nothing else is needed for
``elas doctor`` to check them. Importing this module imports neither torch nor Megatron.
"""

from __future__ import annotations

import importlib

from megatron_elas.host.cpu_noise import silence_cpu_noise
from megatron_elas.host.patching import Finding, Seam, check
from megatron_elas.host.versions import check_versions
from megatron_elas.platform.detect import detect

ROW_MODULES = (
    "megatron_elas.host.gpt_seams",
    "megatron_elas.host.cpu_fixes",
    "megatron_elas.host.upstream_fixes",
    "megatron_elas.host.elastic_seams",
    "megatron_elas.host.emulation_seams",
    "megatron_elas.host.script",
)
"""Host modules with a tuple ``ROWS``."""


def all_rows() -> tuple[Seam, ...]:
    """The rows of all modules, in order. Raises ValueError when two have the same id."""
    rows = tuple(row for name in ROW_MODULES for row in importlib.import_module(name).ROWS)
    ids = [row.id for row in rows]
    for row in rows:
        if ids.count(row.id) > 1:
            raise ValueError(f"{ids.count(row.id)} seams have the id '{row.id}': give each its own")
    return rows


def check_all() -> list[Finding]:
    """Everything that does not match what is installed; empty when all is well. Used by ``elas doctor``.

    Versions come first: an unsupported release explains most moved symbols.

    Raises:
        BadUsage: MEGATRON_ELAS_PLATFORM names no platform.
    """
    if detect() == "cpu":
        silence_cpu_noise()
    versions = [Finding(id="versions", symbol="", problem=problem) for problem in check_versions()]
    return versions + list(check(all_rows()))
