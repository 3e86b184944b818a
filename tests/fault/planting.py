"""Plants everything, one at a time, and walks."""

from __future__ import annotations

from typing import Any

from tests.fault.plants_megatron import megatron_plants
from tests.fault.plants_runtime import runtime_plants
from tests.fault.stale import Scene, find_stale

BLIND = "a walk that sees no object"


def switch_straggler_detector_on(attached: Any) -> None:
    """Give it rank and world, as --log-straggler does where there is an accelerator."""
    from megatron.core.utils import StragglerDetector

    scene = Scene(attached)
    detector = StragglerDetector._instance
    detector.world, detector.rank = len(scene.seated), scene.rank_of[scene.worker]


def find_planted(attached: Any) -> dict[str, tuple[str, str, list[str]]]:
    """By name of the plant: the check that must find it, what it must say, and all that was found."""
    results = {"nothing": ("", "", find_stale(Scene(attached)))}
    scene = Scene(attached)
    for name, plant in {**runtime_plants(scene), **megatron_plants(scene)}.items():
        with plant.plant():
            results[name] = (plant.check, plant.says, find_stale(Scene(attached)))
    scene = Scene(attached)
    scene._by_type.clear()
    results[BLIND] = ("", "it is blind", find_stale(scene))
    results["nothing, at the end"] = ("", "", find_stale(Scene(attached)))
    return results
