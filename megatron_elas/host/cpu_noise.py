"""What torch and Megatron say in every run on a machine without an accelerator, and what no user can change."""

from __future__ import annotations

import logging
import re
import warnings

KNOWN_WARNINGS: tuple[tuple[type[Warning], str, str], ...] = (
    (UserWarning, r"megatron\.", r"Transformer Engine and Apex are not installed\. Falling back to "),
    (UserWarning, r"megatron\.core\.models\.", r"Apex is not installed\. Falling back to Torch Norm$"),
    (UserWarning, r"megatron\.core\.hyper_comm_grid$", r"absl\.logging is not installed\. "),
    (
        UserWarning,
        r"megatron\.core\.extensions\.transformer_engine_spec_provider$",
        r"Only transformer-engine>=1\.7\.0 supports MoE experts, but your version is 0\.0\.0\. ",
    ),
    (UserWarning, r"megatron\.core\.models\.mimo\.", r"MimoModelConfig is experimental "),
    (
        FutureWarning,
        r"torch\.distributed\.c10d_logger$",
        r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated\. ",
    ),
)
"""Category, and how the names of the modules and the texts begin (regular expressions)."""
KNOWN_LOG_LINES = {"torch.utils.cpp_extension": re.compile(r"No CUDA runtime is found, using CUDA_HOME=")}
"""How the lines begin, by logger."""


def silence_cpu_noise() -> None:
    """From now on, leave out exactly these. Only for the CPU platform; a second call changes nothing."""
    for category, module, message in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    for name in KNOWN_LOG_LINES:
        logging.getLogger(name).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return KNOWN_LOG_LINES[record.name].match(record.getMessage()) is None
