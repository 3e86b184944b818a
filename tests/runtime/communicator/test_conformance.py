"""What torch.distributed gives with gloo, it gives with the elastic backend too; ``conformance`` says how that is run.

Inputs are small whole numbers, so sums are exact in every dtype and results must be equal.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.communicator.collective_cases import COLLECTIVES, CROSS_PRODUCT
from tests.runtime.communicator.conformance import Outcomes, Suite, check, names_for, run_suite
from tests.runtime.communicator.library_cases import LIBRARY
from tests.runtime.communicator.point_to_point_cases import POINT_TO_POINT

pytestmark = pytest.mark.process

SMALL: Suite = {**COLLECTIVES, **POINT_TO_POINT}
LARGE: Suite = {
    name: case
    for name, case in SMALL.items()
    if not name.startswith("reductions") or name.endswith(("SUM of torch.float32", "AVG of torch.bfloat16"))
}
"""For groups in which not everybody talks to everybody."""
EVERYTHING: Suite = {**SMALL, **LIBRARY, **CROSS_PRODUCT}

SUITES: dict[tuple[str, int], Suite] = {
    ("quick", 2): COLLECTIVES,
    ("quick", 3): {**POINT_TO_POINT, **LIBRARY},
    ("quick", 4): {**SMALL, **LIBRARY},
}
SLOW: dict[tuple[str, int], Suite] = {
    ("everything", 2): EVERYTHING,
    ("everything", 3): EVERYTHING,
    ("everything", 4): EVERYTHING,
    ("everything", 5): EVERYTHING,
    ("large", 9): LARGE,
    ("large", 11): LARGE,
}

_done: dict[tuple[str, int], list[tuple[Outcomes, Outcomes]]] = {}


def outcomes(which: tuple[str, int]) -> list[tuple[Outcomes, Outcomes]]:
    """Of a suite, which is run when the first of its cases asks."""
    if which not in _done:
        _done.clear()  # one at a time in memory
        _done[which] = []  # of one that could not be run
        _done[which] = run_suite({**SUITES, **SLOW}[which], which[1], timeout_s=60 if which[0] == "quick" else 300)
    return _done[which]


def parameters(suites: dict[tuple[str, int], Suite], *marks: Any) -> list[Any]:
    return [
        pytest.param(which, name, id=f"{which[0]}-{which[1]}-{name}", marks=marks)
        for which, suite in suites.items()
        for name in names_for(suite, which[1])
    ]


@pytest.mark.parametrize(("which", "name"), [*parameters(SUITES), *parameters(SLOW, pytest.mark.slow)])
def test_the_elastic_backend_gives_what_gloo_gives(which: tuple[str, int], name: str) -> None:
    found = outcomes(which)
    assert found, "the ranks of this suite did not end, see its first case"
    check({**SUITES, **SLOW}[which], name, found)
