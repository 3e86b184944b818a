"""On the CPU, what Megatron always says is left out; what is new is not, and on accelerators nothing is."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest

from megatron_elas.host import cpu_noise, seams

KNOWN = [
    (
        UserWarning,
        "megatron.core.optimizer.clip_grads",
        "Transformer Engine and Apex are not installed. Falling back to local implementations of multi_tensor_applier",
    ),
    (UserWarning, "megatron.core.models.gpt.gpt_layer_specs", "Apex is not installed. Falling back to Torch Norm"),
    (
        FutureWarning,
        "torch.distributed.c10d_logger",
        "`torch.distributed.all_gather_into_tensor` is deprecated. Please use `all_gather_single` instead.",
    ),
]
UNKNOWN = [
    (UserWarning, "megatron.core.models.gpt.gpt_layer_specs", "Apex is too old. Falling back to Torch Norm"),
    (UserWarning, "my_model", "Apex is not installed. Falling back to Torch Norm"),
    (DeprecationWarning, *KNOWN[0][1:]),
    (FutureWarning, "torch.distributed.c10d_logger", "`torch.distributed.broadcast` is deprecated."),
]


@pytest.fixture
def shown() -> Iterator[list[warnings.WarningMessage]]:
    """What would be shown; filters are as before afterwards."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    for name in cpu_noise.KNOWN_LOG_LINES:
        logging.getLogger(name).removeFilter(cpu_noise._is_news)


def warn(category: type[Warning], module: str, text: str) -> None:
    warnings.warn_explicit(text, category, "file.py", 1, module=module)


def test_exactly_the_known_warnings_are_left_out(shown: list[warnings.WarningMessage]) -> None:
    cpu_noise.silence_cpu_noise()
    for warning in KNOWN + UNKNOWN:
        warn(*warning)
    assert [str(item.message) for item in shown] == [text for _, _, text in UNKNOWN]


def test_a_second_call_changes_nothing(shown: list[warnings.WarningMessage]) -> None:
    cpu_noise.silence_cpu_noise()
    before = list(warnings.filters)
    cpu_noise.silence_cpu_noise()
    assert sorted(map(str, warnings.filters)) == sorted(map(str, before))


def test_a_logger_that_says_one_known_line_may_say_others(
    shown: list[warnings.WarningMessage], caplog: pytest.LogCaptureFixture
) -> None:
    cpu_noise.silence_cpu_noise()
    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.addHandler(caplog.handler)
    try:
        logger.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local")
        logger.warning("the compiler is too old")
    finally:
        logger.removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {"the compiler is too old"}


@pytest.mark.parametrize(("platform", "silenced"), [("cpu", 1), ("cuda", 0), ("npu", 0)])
def test_elas_doctor_leaves_out_nothing_on_accelerators(
    platform: str, silenced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setenv("MEGATRON_ELAS_PLATFORM", platform)
    monkeypatch.setattr(seams, "silence_cpu_noise", lambda: calls.append(None))
    monkeypatch.setattr(seams, "check_versions", lambda: ())
    monkeypatch.setattr(seams, "ROW_MODULES", ())
    assert seams.check_all() == []
    assert len(calls) == silenced


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["megatron_elas.cli.elas", "doctor"], 0, ""),
        (
            ["megatron_elas.pretrain_gpt", "--nosuch"],
            2,
            "megatron_elas: unrecognized arguments: --nosuch; see --help\n",
        ),
    ],
    ids=["doctor", "bad-usage"],
)
def test_on_the_cpu_nothing_comes_before_what_matters(words: list[str], code: int, told: str) -> None:
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONWARNINGS"}
    ran = subprocess.run(
        [sys.executable, "-m", *words],
        env={**environ, "MEGATRON_ELAS_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == code
    assert ran.stderr == told
