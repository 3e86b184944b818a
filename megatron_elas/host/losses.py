"""The losses of a batch, added over cells; or put together by micro-batch first, so that their sum does not depend on
who ran which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_elas.spec.items import CellItems

Losses = list[dict[str, torch.Tensor]]
"""One dictionary per pass, in order; values are (sum, count) or a mean."""


def gather_losses(losses: Losses, items: CellItems, num_microbatches: int, group: Any) -> Losses:
    """Every micro-batch's losses, in the order of their numbers, on all cells of the last stage.

    One all-reduce, to which all but one cell add zeros for a micro-batch, so that it changes no bit.

    Args:
        losses: Of this cell's items, in their order.
        items: Whole micro-batches.
        num_microbatches: Of the batch, over all cells.
        group: The cells.
    """
    keys = list(losses[0])
    kinds = {key: (losses[0][key].dtype, losses[0][key].numel()) for key in keys}
    width = sum(numel for _, numel in kinds.values())
    device = losses[0][keys[0]].device if keys else torch.device("cpu")
    board = torch.zeros((num_microbatches, width), dtype=torch.float64, device=device)
    for item, entry in zip(items, losses, strict=True):
        if keys:
            board[item.number] += torch.cat([entry[key].detach().reshape(-1).double() for key in keys])
    dist.all_reduce(board, group=group)
    columns = board.split([numel for _, numel in kinds.values()], dim=1)
    return [
        {key: column[number].to(kinds[key][0]) for key, column in zip(keys, columns, strict=True)}
        for number in range(num_microbatches)
    ]


def told_once(losses: Losses, rank: int) -> Losses:
    """What a cell gives Megatron of ``gather_losses``'s, so that its own sums over the cells come out right.

    Megatron adds (sum, count) over the cells: all but the first give zeros. It takes a mean as it finds it.

    Args:
        losses: All micro-batches'.
        rank: Of the cell in the group that Megatron adds over.
    """
    if rank == 0:
        return losses
    return [
        {key: torch.zeros_like(value) if value.numel() == 2 else value for key, value in entry.items()}
        for entry in losses
    ]


def sum_losses(losses: Sequence[dict[str, torch.Tensor]], group: Any = None) -> dict[str, torch.Tensor]:
    """The step's losses, as Megatron's ``train_step`` reports them.

    Args:
        losses: One dictionary per pass; its values are (sum, count) or a mean.
        group: The cells to add over; None: these are everybody's losses already.
    """
    result = {}
    for key in losses[0] if losses else ():
        values = torch.stack([entry[key].detach().view(-1) for entry in losses])
        if values.shape[1] == 2:
            total = values.sum(dim=0)
            if group is not None:
                dist.all_reduce(total, group=group)
            result[key] = total[0] / total[1]
        else:
            result[key] = values.mean()
    return result
