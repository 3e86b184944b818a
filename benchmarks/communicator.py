"""The elastic process groups against gloo: editing groups, collectives, cancelling, training steps, recovery.

    python benchmarks/communicator.py [--quick] [--only PART ...] [--transport unix|tcp]

Everything is measured on this machine's CPU in one run, ours and theirs taking turns; figures are medians over the
turns. Takes about twenty minutes on two idle cores, with --quick three. Prints tables, and lines
``RESULT name=value unit``. Ratios above 1 mean that ours is faster, but for step_vs_gloo, which is to be
measured on an idle machine only: it depends on what else computes.

    regroup (regrouping.py): a killed worker is removed from all groups of TP 2 x PP 2 x DP N/4, and a spare joins
    edit_vs_full@N, edit_vs_partial@N            time of rebuilding (all / the struck groups) on gloo / of our edit
    edit_ops_vs_full@N, edit_ops_vs_partial@N    both with the first all-reduce on every struck group
    join_ops_vs_full@N, join_ops_vs_partial@N    the same for the spare's joining
    ..._vs_full_nodestroy@N                      without the time that destroying the old groups takes

    collectives (collectives_in_turns.py)
    OP_vs_gloo@SIZExN                            gloo's time / ours; all_reduce, reduce_scatter, all_gather, p2p

    cancel (cancelling.py)
    cancel_ms_p50, cancel_ms_p99, cancel_ms_max  from cancel to the return of an operation in flight

    steps (step_times.py): the tiny Llama, P pipeline stages x D data-parallel rows
    step_vs_gloo@GRID                            step time with --elastic / stock Megatron on gloo

    replicas (replicas.py): a data-parallel loop loses one of N replicas
    recovery_vs_torchft_default@N, _tuned@N      SIGKILL to the next committed step on all survivors: torchft's / ours
    recovery_stop_vs_torchft_default@N, _tuned@N the same for SIGSTOP
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from cancelling import measure_cancel
from collectives_in_turns import OPERATIONS, SIZES, measure_collectives
from machine import describe_machine
from results import print_ratio
from step_times import time_steady
from training_jobs import Grid, Model, train_flags

PARTS = ("regroup", "collectives", "cancel", "steps", "replicas")
QUICK_SIZES = ("1KiB", "64KiB", "1MiB", "64MiB")
STEPS = 40


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns and sizes: about three minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    parser.add_argument("--transport", choices=["unix", "tcp"], default="unix", help="of our links (default: unix)")
    parser.add_argument("--turns", type=int, help="of each measurement (default 5, quick 2; of whole jobs 3, quick 1)")
    parser.add_argument("--regroup-workers", type=int, nargs="+", metavar="N", help="default 4 8 16 32, quick 4 8")
    parser.add_argument("--workers", type=int, nargs="+", metavar="N", help="in collectives; default 2 4 8, quick 2 4")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help=f"in collectives; default {' '.join(SIZES)}")
    parser.add_argument("--cancel-rounds", type=int, metavar="N", help="of each state (default 50, quick 15)")
    parser.add_argument("--grids", nargs="+", metavar="PxD", help="of steps; default 2x2 2x4, quick 2x2")
    parser.add_argument("--replicas", type=int, nargs="+", metavar="N", help="default 4 8, quick 4")
    options = parser.parse_args()
    if wrong := [n for n in options.regroup_workers or () if n < 4 or n % 4]:
        parser.error(f"--regroup-workers {wrong[0]}: TP 2 x PP 2 x DP N/4 needs a multiple of 4")
    warnings.simplefilter("ignore")  # of Megatron without Transformer Engine, of torch about old names
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # that there is no GPU
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    quick = options.quick
    turns, jobs = options.turns or (2 if quick else 5), options.turns or (1 if quick else 3)
    print(describe_machine(), flush=True)
    if "regroup" in options.only:
        from regrouping import measure_regrouping  # imports Megatron

        measure_regrouping(options.regroup_workers or ((4, 8) if quick else (4, 8, 16, 32)), turns, options.transport)
    if "collectives" in options.only:
        workers = options.workers or ((2, 4) if quick else (2, 4, 8))
        sizes = options.sizes or (QUICK_SIZES if quick else list(SIZES))
        measure_collectives(workers, sizes, list(OPERATIONS), turns, options.transport)
    if "cancel" in options.only:
        measure_cancel(options.cancel_rounds or (15 if quick else 50), options.transport)
    with tempfile.TemporaryDirectory(prefix="elas-bench-") as folder:
        if "steps" in options.only:
            for grid in map(Grid.parse, options.grids or (["2x2"] if quick else ["2x2", "2x4"])):
                times = time_steady(Path(folder), grid, train_flags(Model(), grid, STEPS), jobs)
                print_ratio(f"step_vs_gloo@{grid}", *times)
        if "replicas" in options.only:
            from replicas import measure_replicas

            measure_replicas(Path(folder), options.replicas or ((4,) if quick else (4, 8)), jobs, quick)


if __name__ == "__main__":
    main()
