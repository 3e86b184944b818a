from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_elas.runtime.transport import sockets
from megatron_elas.runtime.transport.engine import Control, Engine
from megatron_elas.runtime.transport.native_engine import NativeEngine
from megatron_elas.runtime.transport.native_link import library
from megatron_elas.runtime.transport.python_engine import PythonEngine
from megatron_elas.runtime.transport.sockets import SocketTransport
from tests.runtime.transport.together import transports

ENGINES: dict[str, Callable[[int], bool]] = {
    "native": lambda worker: True,
    "python": lambda worker: False,
    "mixed": lambda worker: worker % 2 == 0,
}
"""By name: which workers use the C core."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quick set has both engines together only where that matters most: programs, cancels, wrong use."""
    for item in items:
        if item.path.name == "test_sockets.py" and "mixed" in item.name:
            item.add_marker(pytest.mark.slow)


needs_library = pytest.mark.skipif(library() is None, reason="the C core is not built; run make native")


@pytest.fixture(params=[pytest.param(name, marks=() if name == "python" else needs_library) for name in ENGINES])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs with the links of each engine, and with both in one job."""
    is_native = ENGINES[request.param]

    def choose(control: Control) -> Engine:
        worker = control.refusal.__self__.worker  # type: ignore[attr-defined]
        return NativeEngine(control) if is_native(worker) else PythonEngine(control)

    monkeypatch.setattr(sockets, "choose_engine", choose)
    return str(request.param)


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[SocketTransport]]:
    with transports(2, tmp_path, request.param) as made:
        yield made


@pytest.fixture
def unix_pair(tmp_path: Path) -> Iterator[list[SocketTransport]]:
    with transports(2, tmp_path) as made:
        yield made
