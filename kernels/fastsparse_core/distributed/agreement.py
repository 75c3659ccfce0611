"""Options that all ranks must give alike, or their messages would never meet."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist


def check_agreement(
    options: dict[str, Any], device: torch.device, rank: int, group: dist.ProcessGroup | None
) -> None:
    """Compares options by what they print as. Collective.

    Args:
        options: name -> value.
        device: where the group's messages are.
        rank: of this process in the group.
        group: the processes; None: all.

    Raises:
        ValueError: a rank gave another value; on every rank, so that none waits for the others.
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
