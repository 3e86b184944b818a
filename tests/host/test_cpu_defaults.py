"""On the CPU, flags are added only where the user has not said."""

from __future__ import annotations

import importlib.util

import pytest

from megatron_elas.host.cpu_defaults import CPU_DEFAULTS, NO_ONE_LOGGER, missing_defaults


def test_an_empty_command_line_gets_all() -> None:
    assert missing_defaults([]) == [word for words in (*CPU_DEFAULTS, NO_ONE_LOGGER) for word in words]


def test_one_logger_is_left_on_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert missing_defaults([]) == [word for words in CPU_DEFAULTS for word in words]


def test_what_the_user_says_is_left_alone() -> None:
    said = ["--transformer-impl", "transformer_engine", "--distributed-backend=mpi", "--no-rope-fusion"]
    added = missing_defaults(said)
    assert not {"--transformer-impl", "--distributed-backend", "--no-rope-fusion"} & set(added)
    assert "--no-persist-layer-norm" in added
