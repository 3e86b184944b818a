"""What it costs to run orders of a plan, and to split backward passes, beside the stock schedule.

    python benchmarks/orders.py [--grids 2x2 4x1] [--turns 3] [--hidden 256]

A grid PxD has P pipeline stages and D data-parallel rows. The variants run the same items, in the same order, and take
turns; no worker is lost. Prints a table, and lines ``RESULT name=value ratio``:

    order_vs_stock@GRID  step time with 1F1B as an order / with Megatron's 1F1B; 1 is free
    split_vs_order@GRID  the same order with every backward pass in two, W right after its B / in one
    late_vs_order@GRID   with all W after the last B, so that what they need is kept as long as can be / in one
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from results import format_all, print_ratio, print_table
from step_times import WARM_UP, time_in_turns
from training_jobs import Grid, Model, train_flags

STEPS = 40
ORDERS = {"stock": "", "order": "1f1b", "split": "1f1b-split", "late": "1f1b-late"}
"""Variant -> ELAS_BENCH_ORDERS of ``measured_worker.py``."""


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grids", nargs="+", default=["2x2", "4x1"], metavar="PxD")
    parser.add_argument("--turns", type=int, default=3, help="runs of each variant (default 3)")
    parser.add_argument("--hidden", type=int, default=256, help="size of the model (default 256)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elas-bench-") as folder:
        for grid in map(Grid.parse, options.grids):
            flags = [*train_flags(Model(hidden=options.hidden), grid, STEPS, 8 * grid.rows), "--elastic"]
            variants = {name: (flags, {"ELAS_BENCH_ORDERS": orders}) for name, orders in ORDERS.items()}
            times = time_in_turns(Path(folder) / str(grid), grid, variants, options.turns, WARM_UP)
            print_table(
                f"{grid}: ms per step, turn by turn", ("",), {name: [format_all(ms)] for name, ms in times.items()}
            )
            for name, over in (("order", "stock"), ("split", "order"), ("late", "order")):
                print_ratio(f"{name}_vs_{over}@{grid}", times[name], times[over])


if __name__ == "__main__":
    main()
