"""Checks that all ranks pass the same options: otherwise, they could wait for each other forever."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist


def check_agreement(
    options: dict[str, Any], device: torch.device, rank: int, group: dist.ProcessGroup | None
) -> None:
    """Raises an error on every rank unless all ranks pass options with the same ``repr``. Collective.

    Args:
        options: name of every option -> value that this rank passed.
        device: device of the messages that the group sends.
        rank: rank of this process in the group.
        group: the processes; None: all.

    Raises:
        ValueError: a rank passed another value than rank 0. All ranks raise the error, so that no rank waits
            for another.
    """
    mine = [zlib.crc32(repr(value).encode()) for value in options.values()]
    own = torch.tensor(mine, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    everywhere = torch.stack(gathered).tolist()
    for nth, (name, value) in enumerate(options.items()):
        others = [other for other, theirs in enumerate(everywhere) if theirs[nth] != everywhere[0][nth]]
        if others:
            raise ValueError(
                f"{name}: expected the same on all ranks, got {value!r} on rank {rank}; "
                f"ranks {others} differ from rank 0"
            )
