"""``elasrun``'s flags: torchrun's common ones, and a few of our own. Reading them is all that happens here."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NoReturn

from megatron_elas.cli.rebalance import read_layers
from megatron_elas.config import ControlTimeouts, flag_of
from megatron_elas.control.environment import TOKEN_VARIABLE
from megatron_elas.control.launch import Rebalance
from megatron_elas.control.launch_options import LaunchOptions
from megatron_elas.control.starter_messages import Target
from megatron_elas.spec.cluster import load_cluster
from megatron_elas.spec.errors import BadUsage
from megatron_elas.spec.policy import RUNNING_POLICIES

DEFAULT_PORT = 29400
"""torchrun's default rendezvous port; the controller's, on several nodes."""
DEFAULT_PRELOADS = {"megatron_elas.pretrain_gpt": "megatron_elas.pretrain_gpt:preload"}
"""What a fork can share, by the module that is launched."""
DRY_RUN_ENTRIES = frozenset({"megatron_elas.pretrain_gpt"})
"""Modules that take ``--elastic-dry-run FILE`` and then say what they would train."""
DEVICE_FILES = {"gpu": r"nvidia\d+", "npu": r"davinci\d+"}
"""In /dev, one per accelerator."""
VISIBLE_DEVICES = {"gpu": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
DEFAULT_CLUSTERS = {"gpu": "gpu-96", "npu": "npu-96"}
"""Profile in configs/clusters, by kind of accelerator."""
DEFAULT_CPU_CLUSTER = "cpu"
KNOWN_BACKENDS = ("static", "c10d")
TIMEOUT_HELP = {
    "heartbeat_interval_s": "a worker says this often that it lives",
    "heartbeat_timeout_s": "a joined worker, or a node, that is silent for so long is lost, and killed",
    "hang_timeout_s": "a worker whose process is stopped (SIGSTOP, a debugger) for so long is lost, and killed",
    "interpreter_timeout_s": "a worker that lives but whose Python is silent for so long is lost, and killed",
    "progress_timeout_s": "a worker that hangs in a step for so long, and ten times the longest, is lost, and killed",
    "settle_timeout_s": "a survivor that has not stopped its step so long after a loss is lost too, and killed",
    "resume_timeout_s": "a survivor whose first step after a loss takes so long is lost too, and killed",
    "join_timeout_s": "for all nodes to join, and from the first worker that joined to the last",
    "grace_s": "between asking a worker to end (SIGTERM) and killing it",
}
"""What each of ``ControlTimeouts`` limits."""


class _Parser(argparse.ArgumentParser):
    """Reports errors in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise BadUsage(f"{message}; elasrun --help lists the flags")


def build_parser() -> argparse.ArgumentParser:
    """The flags, in both spellings (``--nproc-per-node`` and ``--nproc_per_node``)."""
    parser = _Parser(
        prog="elasrun",
        description="Starts a training job whose workers may die: the others go on. Takes torchrun's flags.",
        allow_abbrev=False,
    )

    def add(name: str, **settings: object) -> None:
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
        parser.add_argument(*spellings, **settings)  # type: ignore[arg-type]

    add(
        "nproc-per-node", default="1", metavar="N", help="workers per node: a number, auto, cpu, gpu or npu; default: 1"
    )
    add("nnodes", default="1", metavar="N", help="number of nodes; default: 1")
    add("node-rank", metavar="N", help="this node, from 0; node 0 runs the controller")
    add("rdzv-endpoint", default="", metavar="HOST[:PORT]", help="node 0, where the controller listens")
    add("rdzv-id", metavar="ID", help="name of the job")
    add("rdzv-backend", default="static", help="accepted for torchrun's sake; has no effect")
    add("master-addr", metavar="HOST", help="MASTER_ADDR of the workers; default: node 0")
    add("master-port", metavar="PORT", help="MASTER_PORT of the workers; default: a free one")
    add("controller-port", metavar="PORT", help=f"default: that of --rdzv-endpoint; {DEFAULT_PORT} on several nodes")
    add("token-file", metavar="FILE", help=f"secret of the job, the same on all nodes; or set {TOKEN_VARIABLE}")
    add("log-dir", metavar="DIR", help="write each worker's output to DIR/workerN.log, events and steps beside it")
    add("start-method", choices=["auto", "fork", "spawn"], default="auto", help="auto forks where no accelerator is")
    add("preload", metavar="MODULE:FUNCTION", help="called once, before workers are forked; none switches it off")
    add(
        "exit-code-file",
        metavar="FILE",
        help="node 0 writes the job's exit code there, for schedulers that report another",
    )
    add("cluster", metavar="NAME|FILE", help="profile to plan with, see configs/clusters; default: by device")
    add(
        "costs",
        choices=["measured", "profile"],
        default="measured",
        help="plan with what the job's own steps took, once they did, or with the profile alone",
    )
    add(
        "policy",
        choices=RUNNING_POLICIES,
        default="ours",
        help="who plans after a loss: our planner, or what another system would do, to compare with",
    )
    add(
        "rebalance",
        action="append",
        default=[],
        metavar="STEP:N,N,...",
        help="when that step is reached, have stages take so many layers each, as elas rebalance does; may be repeated",
    )
    add(
        "dry-run",
        action="store_true",
        help="check everything, print grid, memory and environment of the workers, and start nothing",
    )
    for field in fields(ControlTimeouts):
        meaning = f"{TIMEOUT_HELP[field.name]}; default: {field.default:g} s"
        add(field.name.replace("_", "-"), default=str(field.default), metavar="S", help=meaning)
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as with python -m")
    parser.add_argument("script", help="script or module to run in every worker")
    arguments = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    arguments.required = False  # else argparse names it beside the script when both are missing
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    flags, unknown = build_parser().parse_known_args(argv)
    if not unknown:
        return flags
    known = [flag_of(name) for name in vars(flags) if name not in ("script", "arguments")]
    name = unknown[0].partition("=")[0]
    similar = difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.75)
    hint = f", did you mean {similar[0]}?" if similar else ":"
    raise BadUsage(f"there is no flag {name}{hint} elasrun --help lists the flags")


def read_options(argv: Sequence[str], environ: Mapping[str, str]) -> LaunchOptions:
    """Parse and check.

    Raises:
        BadUsage: A flag or value cannot work, in one sentence.
    """
    flags = _parse(argv)
    nnodes = _read_nnodes(flags.nnodes)
    node_rank = _read_node_rank(flags.node_rank, nnodes)
    host, port = _read_endpoint(flags, nnodes)
    target = Target(name=flags.script, is_module=flags.module, arguments=tuple(flags.arguments))
    _check_target(target)
    fresh = flags.start_method == "spawn" or (flags.start_method == "auto" and _has_accelerator())
    return LaunchOptions(
        nnodes=nnodes,
        node_rank=node_rank,
        workers_per_node=_read_workers(flags.nproc_per_node, environ),
        controller_host=host,
        controller_port=port,
        master_address=flags.master_addr or host,
        master_port=None if flags.master_port is None else _read_port("--master-port", flags.master_port),
        run_id=flags.rdzv_id or ("" if flags.dry_run else secrets.token_hex(4)),
        token=_read_token(flags.token_file, environ, nnodes),
        target=target,
        preload=_choose_preload(flags.preload, target, fresh),
        fresh=fresh,
        log_dir=_make_log_dir(flags.log_dir, keep=not flags.dry_run),
        exit_code_file=None if flags.exit_code_file is None else _check_writable(flags.exit_code_file),
        dry_run=flags.dry_run,
        cluster=_choose_cluster(flags.cluster),
        costs=flags.costs,
        policy=flags.policy,
        rebalances=_read_rebalances(flags.rebalance),
        timeouts=ControlTimeouts(
            **{field.name: _read_seconds(field.name, getattr(flags, field.name)) for field in fields(ControlTimeouts)}
        ),
    )


def find_ignored(argv: Sequence[str]) -> str | None:
    """A line about a flag that has no effect, if one was given."""
    backend = _parse(argv).rdzv_backend
    if backend in KNOWN_BACKENDS:
        return None
    return f"--rdzv-backend {backend} has no effect: the controller on node 0 is the rendezvous"


# ---------------------------------------------------------------- one flag each


def _read_whole(flag: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise BadUsage(f"{flag} must be a whole number from {least} up, got '{text}'")
    return int(text)


def _read_port(flag: str, text: str) -> int:
    port = _read_whole(flag, text, 0)
    if port > 65535:
        raise BadUsage(f"{flag} must be a port from 0 to 65535, got {port}")
    return port


def _read_seconds(field_name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadUsage(f"{flag_of(field_name)} must be a number of seconds, got '{text}'") from None


def _read_nnodes(text: str) -> int:
    if ":" in text:
        raise BadUsage(f"--nnodes {text}: a range is not supported, nodes may die but not be missing: give one number")
    return _read_whole("--nnodes", text, 1)


def _read_node_rank(text: str | None, nnodes: int) -> int:
    if text is None:
        if nnodes > 1:
            raise BadUsage(f"--nnodes {nnodes} needs --node-rank on every node, from 0 to {nnodes - 1}")
        return 0
    node_rank = _read_whole("--node-rank", text, 0)
    if node_rank >= nnodes:
        raise BadUsage(f"--node-rank {node_rank} is not one of 0 to {nnodes - 1} (--nnodes {nnodes})")
    return node_rank


def _read_workers(text: str, environ: Mapping[str, str]) -> int:
    if text in ("gpu", "npu"):
        count = _count_devices(text, environ)
        if count == 0:
            raise BadUsage(f"--nproc-per-node {text}, but this node has none: give a number, or cpu")
        return count
    if text == "auto":
        return _count_devices("gpu", environ) or _count_devices("npu", environ) or (os.cpu_count() or 1)
    if text == "cpu":
        return os.cpu_count() or 1
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise BadUsage(f"--nproc-per-node must be a number from 1 up, auto, cpu, gpu or npu, got '{text}'")
    return int(text)


def _count_devices(kind: str, environ: Mapping[str, str]) -> int:
    """Accelerators of this node that the job may use, without loading a device library."""
    visible = environ.get(VISIBLE_DEVICES[kind])
    present = sum(re.fullmatch(DEVICE_FILES[kind], name) is not None for name in os.listdir("/dev"))
    return present if visible is None else min(present, len([part for part in visible.split(",") if part.strip()]))


def _has_accelerator() -> bool:
    return any(_count_devices(kind, {}) for kind in DEVICE_FILES)


def _choose_cluster(given: str | None) -> str:
    """A profile that can be read, as a path where it is a file."""
    name = given or next(
        (name for kind, name in DEFAULT_CLUSTERS.items() if _count_devices(kind, {})), DEFAULT_CPU_CLUSTER
    )
    load_cluster(name)
    return str(Path(name).absolute()) if name.endswith((".toml", ".json")) else name


def _read_endpoint(flags: argparse.Namespace, nnodes: int) -> tuple[str, int]:
    """Host and port of the controller."""
    host, _, port = flags.rdzv_endpoint.rpartition(":") if ":" in flags.rdzv_endpoint else (flags.rdzv_endpoint, "", "")
    host = host.strip("[]") or flags.master_addr or ("" if nnodes > 1 else "127.0.0.1")
    if not host:
        raise BadUsage(f"--nnodes {nnodes} needs --rdzv-endpoint HOST[:PORT], the address of node 0, on every node")
    if flags.controller_port is not None:
        return host, _read_port("--controller-port", flags.controller_port)
    if port:
        return host, _read_port("--rdzv-endpoint", port)
    return host, DEFAULT_PORT if nnodes > 1 else 0


def _read_token(token_file: str | None, environ: Mapping[str, str], nnodes: int) -> str:
    if token_file is not None:
        try:
            token = Path(token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadUsage(f"--token-file {token_file} cannot be read: {error}") from error
    else:
        token = environ.get(TOKEN_VARIABLE, "").strip()
    if not token and (nnodes > 1 or token_file is not None):
        raise BadUsage(
            f"--nnodes {nnodes} needs a secret: put one random line into a file, and give --token-file or "
            f"{TOKEN_VARIABLE} the same on all nodes"
        )
    if not (token.isascii() and token.isprintable()):
        raise BadUsage("the job's secret must be printable ASCII on one line")
    return token or secrets.token_hex(16)


def _check_target(target: Target) -> None:
    if target.is_module:
        if not _has_module(target.name):
            raise BadUsage(f"there is no module {target.name} to run: install it, or give a script's path without -m")
    elif not Path(target.name).is_file():
        raise BadUsage(f"there is no script {target.name} in {os.getcwd()}; a module needs -m")


def _has_module(name: str) -> bool:
    """Whether ``python -m`` would find it. Imports nothing: packages on the way may load torch."""
    places: list[str] | None = [os.getcwd(), *sys.path]
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        if places is None:  # what comes before is no package
            return False
        try:
            spec = _find_spec(".".join(parts[:length]), places)
        except KeyError:  # a folder without __init__.py in a package: only an import can tell
            return True
        if spec is None:
            return False
        places = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    return places is None or _find_spec(f"{name}.__main__", places) is not None


def _find_spec(name: str, places: list[str]) -> ModuleSpec | None:
    specs = (finder.find_spec(name, places) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _choose_preload(given: str | None, target: Target, fresh: bool) -> str | None:
    if given == "none" or (given is None and fresh):
        return None
    if given is None:
        return DEFAULT_PRELOADS.get(target.name) if target.is_module else None
    if fresh:
        raise BadUsage(
            f"--preload {given} has no use when workers are not forked: add --start-method fork, or leave it"
        )
    if not re.fullmatch(r"[\w.]+:\w+", given):
        raise BadUsage(f"--preload must be module:function, got '{given}'")
    return given


def _read_rebalances(texts: Sequence[str]) -> tuple[Rebalance, ...]:
    read = []
    for text in texts:
        step, colon, layers = text.partition(":")
        if not (colon and step.isascii() and step.isdigit()):
            raise BadUsage(f"--rebalance must be STEP:N,N,... with a number of layers for each stage, got '{text}'")
        read.append(Rebalance(step=int(step), layers=read_layers("--rebalance", layers)))
    return tuple(sorted(read, key=lambda rebalance: rebalance.step))


def _make_log_dir(given: str | None, *, keep: bool) -> Path | None:
    """The folder, made; removed again unless it is to be kept."""
    if given is None:
        return None
    path = Path(given).absolute()
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadUsage(f"--log-dir {given} cannot be made: {error.strerror}") from error
    for folder in () if keep else new:
        folder.rmdir()
    return path


def _check_writable(given: str) -> Path:
    path = Path(given).absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise BadUsage(f"--exit-code-file {given} cannot be written: give the path of a file in an existing folder")
    return path
