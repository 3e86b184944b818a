"""What a forked worker of the tests counts: parameters of Megatron's own model by stage, on the meta device."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def count_on_meta(folder: str, argv: list[str], world_size: int) -> int:
    """Build lane 0 of every stage of a job of ``world_size`` workers, one after the other, in this one process.

    Nothing is allocated: process groups are torch's "fake" ones, and tensors have a shape and no memory. Writes to
    ``folder/counted.json``: parameters per stage, and ``ModelShape`` and the grid as our own code describes them.
    """
    import msgspec
    import torch
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_and_validate_args
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_elas.host.argument_files import expand_files
    from megatron_elas.host.arguments import add_entry_arguments
    from megatron_elas.host.cpu_defaults import missing_defaults
    from megatron_elas.host.shape import describe_model

    words = expand_files(argv)
    sys.argv = ["count", *missing_defaults(words), *words]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    args = parse_and_validate_args(extra_args_provider=add_entry_arguments)
    model_config = gpt_config_from_args(args)
    model_config.transformer.perform_initialization = False
    torch.cuda.current_device = lambda: "meta"  # Megatron names this device in every layer
    counted = []
    tp, pp, dp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.data_parallel_size
    for stage in range(pp):
        dist.init_process_group("fake", store=FakeStore(), rank=stage * dp * tp, world_size=world_size)
        mpu.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
        builder = model_config.get_builder_cls()(model_config)
        with torch.device("meta"):
            model = builder.build_model(
                ProcessGroupCollection.use_mpu_process_groups(), pre_process=stage == 0, post_process=stage == pp - 1
            )
        assert all(parameter.is_meta for parameter in model.parameters())
        counted.append(sum(parameter.numel() for parameter in model.parameters()))
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
    shape = msgspec.to_builtins(describe_model(args, model_config.transformer))
    Path(folder, "counted.json").write_text(json.dumps({"stages": counted, "shape": shape, "tensor_parallel": tp}))
    return 0
