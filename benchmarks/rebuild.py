"""The host's part of a switch at which one layer moves: what a worker needs to fit model, buffers and optimizer.

Two stages of one worker each give a layer to and fro. In turns they keep what stays, with the layer that comes made
ahead, and make all anew; both in the same processes, in which training goes on between.

LAYERS is how many layers the smaller of both has when it gains one. Prints a table by part and, for each size, lines
``RESULT name=value unit``:

* ``rebuild_vs_whole@LAYERS=...``: time of a rebuild that keeps what stays, in that of one that does not; below 1 is
  faster;
* ``rebuild@LAYERS=...``, ``make_ahead@LAYERS=...``: milliseconds of it, and of making the layer before.

Times are CPU time of the main thread, so that other load on the machine counts little.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import print_ratio, print_result, print_table

from megatron_elas.spec.plan import ElasticPlan
from tests.host import restage_jobs
from tests.host.restage_jobs import SessionStandIn, Worker, make_plan, run_job

PARTS = ("modules", "DDP", "parameter groups", "optimizer", "rest")
"""The rest finds names and pieces. Where layers are exchanged, DDP's hooks count for modules."""
KEPT, WHOLE = "kept", "whole"

Times = dict[str, dict[str, list[float]]]
"""Milliseconds of every turn, by kind of rebuild and part; ``all`` is their sum, ``ahead`` comes before."""


class Measured(SessionStandIn):
    """Rebuilds in turns, and takes the times."""

    times: Times
    spent: defaultdict[str, float]

    def attach(self, host: Any, first_step: int) -> None:
        """Also puts clocks around the parts."""
        super().attach(host, first_step)
        self.times = {kind: defaultdict(list) for kind in (KEPT, WHOLE)}
        self.spent = defaultdict(float)
        self.turn = 0
        from megatron.core.distributed import DistributedDataParallel

        from megatron_elas.host import layer_edit
        from megatron_elas.host.training import ModelFactory, OptimizerFactory

        self._clock(ModelFactory, "exchange", "model")
        self._clock(ModelFactory, "remake", "model")
        self._clock(layer_edit, "_cut_anew", "DDP")
        self._clock(DistributedDataParallel, "__init__", "DDP")
        self._clock(OptimizerFactory, "rebuild", "optimizer")
        models = host._models
        models.sort_parameters = self._timed("parameter groups", models.sort_parameters)

    def _clock(self, kind: Any, name: str, part: str) -> None:
        setattr(kind, name, self._timed(part, getattr(kind, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[part] += 1e3 * (time.thread_time() - begin_s)

        return timed

    def rebuild(self, plan: ElasticPlan) -> None:
        """To and fro keeping what stays, then to and fro making all anew."""
        kind = KEPT if self.turn // 2 % 2 == 0 else WHOLE
        self.turn += 1
        times, host = self.times[kind], self.host
        begin_s = time.thread_time()
        if kind == KEPT:
            host.prebuild(plan)
        else:
            host._part = None
        times["ahead"].append(1e3 * (time.thread_time() - begin_s))
        self.spent.clear()
        begin_s = time.thread_time()
        host.rebuild(plan)
        whole = 1e3 * (time.thread_time() - begin_s)
        spent = self.spent
        modules = spent["model"] - spent["DDP"] - spent["parameter groups"]
        found = [modules, *(spent[part] for part in PARTS[1:-1])]
        for part, took in zip(PARTS, [*found, whole - sum(found)], strict=True):
            times[part].append(took)
        times["all"].append(whole)


def take_times(attached: Any) -> dict[str, Any]:
    """Called on each worker at the end."""
    return {kind: dict(times) for kind, times in attached.session.times.items()}


def measure(layers: int, hidden: int, turns: int) -> list[Worker]:
    """Both workers of a job in which one of ``2 * layers + 1`` layers moves to and fro."""
    total = 2 * layers + 1
    restage_jobs.SIZES[:] = (
        f"--num-layers={total} --hidden-size={hidden} --ffn-hidden-size={2 * hidden} --num-attention-heads=4 "
        "--group-query-attention --num-query-groups=2 --seq-length=32 --max-position-embeddings=32 --mock-data"
    ).split()
    restage_jobs.SessionStandIn = Measured  # type: ignore[misc]
    plans = {
        step: make_plan(step, [[[0]], [[1]]], [(0, cut), (cut, total)])
        for step in range(1, 4 * turns + 1)
        for cut in [layers + 1 if step % 2 else layers]
    }
    flags = ("--pipeline-model-parallel-size=2", f"--decoder-first-pipeline-num-layers={layers}", restage_jobs.UNTIED)
    with tempfile.TemporaryDirectory() as folder:
        return run_job(Path(folder) / "job", flags, 2, plans, steps=4 * turns + 2, look=take_times, timeout_s=900)


def report(layers: int, hidden: int, workers: list[Worker]) -> None:
    """The table and the lines of one size."""
    parts = (*PARTS, "all", "ahead")
    merged: Times = {
        kind: {part: [took for worker in workers for took in worker.found[kind][part]] for part in parts}
        for kind in (KEPT, WHOLE)
    }
    rows = {kind: [f"{statistics.median(times[part]):.2f}" for part in parts] for kind, times in merged.items()}
    columns = [*PARTS, "rebuild", "made ahead"]
    print_table(f"{layers} to {layers + 1} layers of {hidden}, medians in ms", columns, rows)
    place = f"@LAYERS={layers},HIDDEN={hidden}"
    print_ratio(f"rebuild_vs_whole{place}", merged[KEPT]["all"], merged[WHOLE]["all"])
    print_result(f"rebuild{place}", statistics.median(merged[KEPT]["all"]), "ms")
    gained = [took for took in merged[KEPT]["ahead"] if took > 0.3 * max(merged[KEPT]["ahead"])]
    print_result(f"make_ahead{place}", statistics.median(gained), "ms")


def main() -> None:
    """All sizes, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 15])
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512], help="hidden sizes (default: 64 512)")
    parser.add_argument("--turns", type=int, default=10, help="pairs of rebuilds to and fro of each kind (default: 10)")
    options = parser.parse_args()
    import megatron.training  # noqa: F401  before workers are forked

    for hidden in options.hidden:
        for layers in options.layers:
            report(layers, hidden, measure(layers, hidden, options.turns))


if __name__ == "__main__":
    main()
