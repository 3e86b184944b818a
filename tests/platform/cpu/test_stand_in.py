"""The stand-in for torch.cuda: what Megatron sees, what others see, and that it can be taken away.

Each check runs in a process of its own, since installing changes torch for the whole process.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.process

AS_MEGATRON = """
import types
def as_megatron(source):
    module = types.ModuleType("megatron.training.test")
    exec("import torch\\ndef ask(): return " + source, module.__dict__)
    return module.ask()
"""


def check(program: str) -> None:
    source = textwrap.dedent(program)
    source = f"from megatron_elas.platform import cpu\ncpu.install()\nimport torch\n{AS_MEGATRON}\n{source}"
    run(source)


def run(source: str) -> None:
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr


def test_importing_changes_nothing_and_does_not_import_torch() -> None:
    run("import sys\nimport megatron_elas.platform.cpu\nassert 'torch' not in sys.modules")


def test_uninstalling_restores_every_attribute() -> None:
    run(
        textwrap.dedent("""
        import torch
        owners = (torch, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor, torch.nn.Module)
        torch.cuda.nvtx
        before = [dict(vars(owner)) for owner in owners]
        from megatron_elas.platform import cpu
        cpu.install()
        assert cpu.is_installed()
        assert [dict(vars(owner)) for owner in owners] != before
        cpu.install()
        cpu.uninstall()
        assert not cpu.is_installed()
        for owner, then in zip(owners, before):
            now = dict(vars(owner))
            assert {name for name in then if now.get(name) is not then[name]} <= {"__annotations__"}, owner
            assert set(now) == set(then), set(now) ^ set(then)
        """)
    )


def test_only_megatron_believes_in_a_device() -> None:
    check(
        """
        import os
        os.environ["LOCAL_WORLD_SIZE"] = "3"
        assert as_megatron("torch.cuda.is_available()") and as_megatron("torch.cuda.device_count()") == 3
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
        assert as_megatron("torch.ones(1, dtype=torch.bfloat16).type()") == "torch.cuda.BFloat16Tensor"
        assert torch.ones(1).type() == "torch.FloatTensor"
        assert as_megatron("torch.cuda.get_device_properties(0).major") >= 8
        """
    )


def test_a_cuda_device_means_the_cpu_in_factories_and_moves() -> None:
    check(
        """
        cuda = torch.device("cuda:1")
        for device in ("cuda", "cuda:0", cuda, torch.cuda.current_device(), 0):
            assert torch.empty(2, device=device, pin_memory=True).device.type == "cpu"
            assert torch.tensor([1.0], device=device).to(device).device.type == "cpu"
            assert torch.ones(2).new_zeros(2, device=device).device.type == "cpu"
            assert torch.nn.Linear(2, 2).to(device).weight.device.type == "cpu"
        x = torch.ones(2)
        assert x.cuda() is x and x.cuda(non_blocking=True) is x and x.to("cuda") is x
        assert x.to(torch.float64).dtype is torch.float64 and x.to(dtype=torch.int64).dtype is torch.int64
        assert x.to("cuda", torch.float16).dtype is torch.float16
        assert torch.zeros(3, device="meta").device.type == "meta"
        """
    )


def test_a_default_device_still_reaches_the_factories() -> None:
    check(
        """
        with torch.device("meta"):
            assert torch.empty(2).device.type == "meta"
            assert torch.nn.Linear(2, 2).weight.device.type == "meta"
        """
    )


def test_streams_and_events_are_in_program_order() -> None:
    check(
        """
        stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
        start.record()
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.current_stream())
            stream.wait_event(stream.record_event())
        end.record(stream)
        torch.cuda.synchronize()
        assert end.query() and stream.query() and 0 <= start.elapsed_time(end) < 1000
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.cuda.memory_allocated() == 0 and torch.cuda.memory_stats()["anything"] == 0
        """
    )


def test_the_device_generator_is_the_cpu_generator() -> None:
    check(
        """
        torch.cuda.manual_seed(7)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
        torch.cuda.default_generators[0].set_state(state)
        assert torch.equal(torch.rand(3), first)
        torch.manual_seed(7)
        assert torch.equal(torch.rand(3), first)
        assert torch.cuda.initial_seed() == 7
        """
    )


@pytest.mark.slow
def test_torch_compile_is_off_whether_torch_was_imported_before_or_not() -> None:
    for first in ("", "import torch._dynamo.config\n"):
        run(
            f"{first}from megatron_elas.platform import cpu\ncpu.install()\nimport torch._dynamo\n"
            "assert torch._dynamo.config.disable\n"
        )


def test_a_patched_factory_costs_less_than_a_microsecond_more() -> None:
    check(
        """
        import timeit
        ours = torch.empty
        stock = ours.__wrapped__
        def cost_s(factory):
            return min(timeit.repeat(lambda: factory(1, dtype=torch.float32), number=5000, repeat=15)) / 5000
        difference_s = min(cost_s(ours) - cost_s(stock) for _ in range(3))
        assert difference_s < 1e-6, difference_s
        """
    )
