"""The recorded fakes have the real signatures, so the call sequences they record are calls that the real ones take.

NCCL: compared with the class that is installed; a CUDA build of torch has it without a device too. HCCL: the table
below was read in torch-npu 2.13.0 (git c798c65, Python files of the wheel; bindings in Ascend/pytorch ``Init.cpp``),
and is compared with the installed torch-npu where there is one.
"""

from __future__ import annotations

import importlib.util
import inspect
import re

import pytest
import torch.distributed as dist

from tests.runtime.communicator.accelerators.fakes import FakeHccl, FakeNccl, Record, npu_library

NCCL_METHODS = (
    "eager_connect_single_device",
    "abort",
    "get_runtime_nccl_version",
    "shrink",
    "get_error",
    "allreduce",
    "allreduce_coalesced",
    "_reduce_scatter_base",
    "_allgather_base",
    "allgather",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "send",
    "recv",
    "_start_coalescing",
    "_end_coalescing",
)

TORCH_NPU_2_13 = {
    "npu.stop_device": "device_id",
    "npu.restart_device": "device_id, rebuild_all_resources=, disable_tensor_unsafe_check=",
    "distributed.reinit_process_group": "group=, rebuild_link=",
}
HCCL_2_13 = {
    "__init__": "store, rank, size, options",
    "abort_hccl_comm": "reason",
    "resume_hccl_comm": "device_id",
    "set_watchdog_status": "status",
    "clear_workmeta_list": "",
    "batch_isend_irecv": "op_type, tensors, remote_rank_list",
}
"""Positional in C++, which names not all of them."""

needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")


def overloads(documentation: str, name: str) -> list[str]:
    """Parameters per overload, with "=" behind those that have a default, from what pybind11 writes."""
    found = []
    for line in documentation.splitlines():
        match = re.match(rf"(?:\d+\. )?{name}\(self: [\w.]+(?:, )?(.*)\) -> ", line)
        if match:
            found.append(", ".join(name + ("=" if "=" in rest else "") for name, rest in split(match[1])))
    return found


def split(parameters: str) -> list[tuple[str, str]]:
    """Names and the rest, cut at commas outside of brackets."""
    parts, depth, word = [], 0, ""
    for character in parameters:
        depth += (character in "[(<") - (character in "])>")
        if character == "," and not depth:
            parts.append(word)
            word = ""
        else:
            word += character
    parts.append(word)
    return [(part.strip().split(":")[0], part) for part in parts if part.strip()]


def parameters(function: object) -> str:
    listed = list(inspect.signature(function).parameters.values())  # type: ignore[arg-type]
    if listed and listed[0].name == "self":
        listed = listed[1:]
    return ", ".join(p.name + ("" if p.default is p.empty else "=") for p in listed)


@needs_nccl
@pytest.mark.parametrize("name", NCCL_METHODS)
def test_a_method_of_the_fake_is_called_like_the_installed_one(name: str) -> None:
    from torch.distributed import ProcessGroupNCCL

    real = getattr(ProcessGroupNCCL, name)
    if name == "get_runtime_nccl_version":
        assert not parameters(getattr(FakeNccl, name)) and callable(real)
        return
    assert parameters(getattr(FakeNccl, name)) in overloads(real.__doc__, name), real.__doc__


@needs_nccl
def test_the_constructor_options_and_properties_are_the_installed_ones() -> None:
    from torch.distributed import ProcessGroupNCCL

    assert "rank: typing.SupportsInt" in ProcessGroupNCCL.__init__.__doc__
    assert parameters(FakeNccl) in overloads(ProcessGroupNCCL.__init__.__doc__, "__init__")
    options = ProcessGroupNCCL.Options()
    assert parameters(FakeNccl.Options) in overloads(type(options).__init__.__doc__, "__init__")
    options.config.blocking = 0
    options._timeout = FakeNccl.Options()._timeout
    options.global_ranks_in_group = [4, 5]
    options.group_name = "name"
    assert (options.config.blocking, options.global_ranks_in_group, options.group_name) == (0, [4, 5], "name")
    assert ProcessGroupNCCL.bound_device_id.fset is not None
    assert ProcessGroupNCCL.supports_shrinking.fget is not None
    assert ProcessGroupNCCL.get_runtime_nccl_version() >= (2, 27)


@needs_nccl
def test_a_store_of_ours_is_asked_by_torchs_prefix_store_for_what_it_has(tmp_path: object) -> None:
    """The names that C++ looks up on a Python store are no documented interface."""
    from megatron_elas.runtime.communicator.accelerators.rendezvous import MeetingStore

    class Alone:
        me = 0

        def post_value(self, key: bytes, value: bytes) -> None:
            posted.append((key, value))

    posted: list[tuple[bytes, bytes]] = []
    ours = MeetingStore(Alone())  # type: ignore[arg-type]
    store = dist.PrefixStore("group", ours)
    store.set("0", "id")
    assert posted == [(b"group/0", b"id")]
    assert store.get("0") == b"id"
    assert store.add("count", 2) == 2 and store.add("count", 3) == 5
    assert store.check(["0"]) and not store.check(["1"])
    store.wait(["0"])
    assert store.num_keys() == 2 and store.delete_key("0") and not store.check(["0"])
    assert store.clone().get("count") == b"5"


def test_the_fakes_of_torch_npu_are_those_that_were_read() -> None:
    library = npu_library(Record(), list)
    for path, expected in TORCH_NPU_2_13.items():
        folder, name = path.split(".")
        assert parameters(getattr(getattr(library, folder), name)) == expected, path
    for name, expected in HCCL_2_13.items():
        assert parameters(FakeHccl if name == "__init__" else getattr(FakeHccl, name)) == expected, name


@pytest.mark.npu
@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is None, reason="torch-npu is not installed")
def test_the_installed_torch_npu_is_the_one_that_was_read() -> None:
    import torch_npu

    for path, expected in TORCH_NPU_2_13.items():
        folder, name = path.split(".")
        assert parameters(getattr(getattr(torch_npu, folder), name)) == expected, path
    for name in HCCL_2_13:
        assert hasattr(torch_npu._C._distributed_c10d.ProcessGroupHCCL, name), name
