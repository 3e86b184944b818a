"""The arguments of a checkpoint that is loaded carry state of this package's own, of more than one owner."""

from __future__ import annotations

from typing import Any

from megatron_elas.host.gradient_sum_seams import wrap_loaded_arguments
from megatron_elas.host.random_seams import wrap_checkpoint_args
from megatron_elas.host.summed_rows import wrap_loaded_rows


def wrap_argument_check(original: Any) -> Any:
    """What looks at them: the exponents of sums, what they are divided by, and the random streams go on."""
    return wrap_checkpoint_args(wrap_loaded_rows(wrap_loaded_arguments(original)))
