"""Wrappers that tell Megatron which layers a stage has under the plan in force, and remember how it built the model."""

from __future__ import annotations

import functools
from typing import Any

from megatron_elas.host.attachment import attachment
from megatron_elas.host.restage import ModelFactory


def wrap_num_layers(original: Any) -> Any:
    """How many layers a stage builds: those of the plan."""

    @functools.wraps(original)
    def get_num_layers_to_build(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
        start, stop = _layers(pp_rank)
        return stop - start

    return get_num_layers_to_build


def wrap_layer_offset(original: Any) -> Any:
    """How many layers are on the stages before: as the plan says."""

    @functools.wraps(original)
    def get_transformer_layer_offset(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
        return _layers(pp_rank)[0]

    return get_transformer_layer_offset


def _layers(stage: int | None) -> tuple[int, int]:
    route = attachment().route
    return route.plan.layers[route.seat.stage if stage is None else stage]


def wrap_setup_model(original: Any) -> Any:
    """The builder of model and optimizer, which also says how to build the model again."""

    @functools.wraps(original)
    def setup_model_and_optimizer(
        model_type: Any,
        model_provider_func: Any = None,
        checkpointing_context: Any = None,
        *,
        cfg_container: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        build = functools.partial(_build_model, model_type, model_provider_func, cfg_container, pg_collection)
        attachment().models = ModelFactory(build)
        return original(
            model_type, model_provider_func, checkpointing_context, cfg_container=cfg_container,
            pg_collection=pg_collection,
        )  # fmt: skip

    return setup_model_and_optimizer


def _build_model(model_type: Any, provider: Any, container: Any, pg_collection: Any, config: Any) -> Any:
    """As Megatron's setup does it: from the description of the model, or by the script's own function."""
    from megatron.training.training import get_model

    if container is None or getattr(container, "model", None) is None:
        return get_model(provider, model_type, config=config, pg_collection=pg_collection)
    builder = container.model.get_builder_cls()(container.model)
    return builder.build_distributed_models(
        pg_collection=pg_collection,
        ddp_config=container.ddp,
        overlap_param_gather_with_optimizer_step=container.optimizer.overlap_param_gather_with_optimizer_step,
        data_parallel_random_init=False,
    )


def wrap_param_groups(original: Any) -> Any:
    """Sorting parameters by learning rate and weight decay, remembered."""

    @functools.wraps(original)
    def _get_param_groups(model_chunks: Any, config: Any, config_overrides: Any) -> Any:
        models = attachment().models
        assert models is not None, "Megatron builds an optimizer before a model"
        models.sort_parameters = functools.partial(original, config=config, config_overrides=config_overrides)
        return original(model_chunks, config, config_overrides)

    return _get_param_groups
