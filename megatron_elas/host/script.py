"""Wraps what Megatron's own pretraining script calls: its model, data and forward step train as an elastic job.

In force only with ``--elastic``, from before the script imports these functions. The order of events is that of
``gpt_run``: arguments are read and checked, Megatron completes them, the worker joins the job, ``pretrain`` runs.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron.training import get_args

from megatron_elas.host import gpt_run, gpt_seams, patching
from megatron_elas.host.argument_files import expand_files
from megatron_elas.host.arguments import add_entry_arguments
from megatron_elas.host.cpu_defaults import missing_defaults
from megatron_elas.host.patching import Seam, wrap
from megatron_elas.platform.detect import PlatformName
from megatron_elas.spec.errors import BadUsage

ArgumentsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the wrappers need of the modules above this one."""

    load_worker: Callable[[], gpt_run.ElasticWorker]
    """Imports the elastic worker."""
    errors_told: Callable[[], AbstractContextManager[None]]
    """Inside, an error of our own ends the process with a sentence and its exit code."""


_current: list[Script] = []


def attach(script: Script, platform: PlatformName) -> None:
    """Put the wrappers in place, and add what the platform needs to the command line.

    Raises:
        BadUsage: An ``@file`` cannot be read, or a flag stands against it that Megatron would act on before it
            validates its arguments.
        WrongVersion: This Megatron is not the expected one; nothing was attached.
    """
    if "--inprocess-restart" in sys.argv:
        raise BadUsage(gpt_run.TWO_HANDLERS)
    sys.argv[1:] = expand_files(sys.argv[1:])
    added = missing_defaults(sys.argv[1:]) if platform == "cpu" else []
    patching.require(gpt_seams.ROWS)
    gpt_run.attach(platform, elastic=True)
    patching.apply(ROWS)
    _current.append(script)
    sys.argv[1:1] = added
    gpt_run.say_added(added)


def _wrap_parsing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def parse_and_validate_args(
        extra_args_provider: ArgumentsProvider | None = None,
        ignore_unknown_args: bool = False,
        args_defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            return add_entry_arguments(extra_args_provider(parser) if extra_args_provider else parser)

        with _current[0].errors_told(), gpt_run.refusals_told():
            gpt_run.read_arguments(provide)
            return original(provide, ignore_unknown_args, dict(args_defaults))

    return parse_and_validate_args


def _wrap_describing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def describe(*args: Any, **kwargs: Any) -> Any:
        with _current[0].errors_told(), gpt_run.refusals_told():
            return original(*args, **kwargs)

    return describe


def _wrap_pretrain(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def pretrain(*args: Any, **kwargs: Any) -> None:
        script, options = _current[0], get_args()
        with script.errors_told():
            if not options.elastic:
                original(*args, **kwargs)
                return
            if getattr(options, "modelopt_enabled", False):
                raise BadUsage("--elastic does not cover --modelopt-enabled yet: leave one of them out")
            gpt_run.run_worker(script.load_worker(), options, functools.partial(original, *args, **kwargs))

    return pretrain


ROWS: tuple[Seam, ...] = (
    wrap(
        "script.parse-and-validate-args",
        "megatron.training.arguments:parse_and_validate_args",
        "(extra_args_provider=None, ignore_unknown_args=False, args_defaults={})",
        'adds the group "elastic" to the script\'s own arguments, and checks them before a process group is made',
        _wrap_parsing,
    ),
    wrap(
        "script.model-config",
        "megatron.training.argument_utils:gpt_config_from_args",
        "(args, config=None, model_config_cls=<class 'megatron.training.models.gpt.GPTModelConfig'>)",
        "tells Megatron's refusals in one sentence",
        _wrap_describing,
    ),
    wrap(
        "script.config-container",
        "megatron.training.argument_utils:pretrain_cfg_container_from_args",
        "(args, model_cfg=None)",
        "tells Megatron's refusals in one sentence",
        _wrap_describing,
    ),
    wrap(
        "script.pretrain",
        "megatron.training.training:pretrain",
        "(cfg_container, train_valid_test_dataset_provider, model_type, forward_step_func, model_provider=None, "
        "process_non_loss_data_func=None, get_embedding_ranks=None, get_position_embedding_ranks=None, "
        "non_loss_data_func=None, store=None, inprocess_call_wrapper=None, p2p_communicator=None, pg_collection=None, "
        "skip_model_parallel_init=False)",
        "joins the job before it, hands it our groups and communicator, and leaves the job after it",
        _wrap_pretrain,
    ),
)
"""Only applied in a script that called ``megatron_elas.install()``, with --elastic."""
