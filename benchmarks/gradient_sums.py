"""Adding a micro-batch's gradient in fixed point, beside DDP's addition in fp32.

    make bench-gradient-sums

Both take turns on one thread, over gradients that fit the cache and over some that do not. ``torch`` is the code that
runs where there is no C library. Lines ``RESULT name=value unit``:

    sum_cost@DTYPE/MiB         time to add in fixed point / time to add to fp32
    sum_cost_torch@DTYPE/MiB   the same for torch's code
    convert_cost@fp32/MiB      time to turn a total into fp32, which an owner does once per step / time to add to fp32
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from machine import describe_machine
from results import print_ratio, print_table

from megatron_elas.runtime.fixed_point import sums

EXPONENT = 40


def time_in_turns(kinds: Mapping[str, Callable[[], None]], turns: int, calls: int) -> dict[str, list[float]]:
    """Seconds per call of each kind in each turn."""
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(turns):
        for name, function in kinds.items():
            began = time.perf_counter()
            for _ in range(calls):
                function()
            taken[name].append((time.perf_counter() - began) / calls)
    return taken


def add_in_torch(gradient: torch.Tensor, total: torch.Tensor, largest: torch.Tensor) -> None:
    """As without the C library."""
    library, sums._library = sums._library, None
    sums.add(gradient, total, EXPONENT, largest)
    sums._library = library


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    turns = parser.parse_args().turns
    if sums._library is None:
        parser.error("the C library is not built: run 'make native'")
    torch.set_num_threads(1)
    print(describe_machine())
    rows = {}
    for mebibytes, calls in ((1, 64), (64, 1)):
        numel = mebibytes << 18
        for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
            gradient = torch.randn(numel).to(dtype)
            total, largest = torch.zeros(numel, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
            main_grad, result = torch.zeros(numel), torch.zeros(numel)
            taken = time_in_turns(
                {
                    "fp32": lambda: main_grad.add_(gradient),  # noqa: B023
                    "fixed": lambda: sums.add(gradient, total, EXPONENT, largest),  # noqa: B023
                    "torch": lambda: add_in_torch(gradient, total, largest),  # noqa: B023
                    "convert": lambda: sums.to_float(total, EXPONENT, result),  # noqa: B023
                },
                turns,
                calls,
            )
            where = f"{name}/{mebibytes}"
            print_ratio(f"sum_cost@{where}", taken["fixed"], taken["fp32"])
            print_ratio(f"sum_cost_torch@{where}", taken["torch"], taken["fp32"])
            if dtype is torch.float32:
                print_ratio(f"convert_cost@{where}", taken["convert"], taken["fp32"])
            rows[where] = [f"{1e9 * statistics.median(times) / numel:.2f}" for times in taken.values()]
    print_table("ns per element, by type of the gradient and MiB of fp32", list(taken), rows)


if __name__ == "__main__":
    main()
