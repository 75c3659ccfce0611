"""Training with several processes, one per GPU, started by torchrun.

    torchrun --nproc-per-node 4 examples/ogb_node.py --dataset ogbn-products --parallel fullgraph

The training loop calls `Parallel` to combine gradients, losses and scores, and to find out whether this
process prints and writes. `ALONE` is a training of one process.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import ExampleError

#: The values of --parallel.
KINDS = ("ddp", "fullgraph")

#: The longest that processes wait for one that loads or evaluates.
PATIENCE = timedelta(hours=2)


@dataclass(frozen=True)
class Parallel:
    """This process among those that train one model.

    Attributes:
        kind: ``ddp``: each process has its own batches of nodes; ``fullgraph``: its own rows of the whole
            graph; ``""``: there is one process.
        rank: Number of this process.
        size: Number of processes.
    """

    kind: str = ""
    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """True if this process prints and writes."""
        return self.rank == 0

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        """Runs the block on the first process, then on all others: what it writes is there for them."""
        if self.kind and not self.is_first:
            dist.barrier()
        yield
        if self.kind and self.is_first:
            dist.barrier()

    def after_backward(self, model: nn.Module) -> None:
        """Makes gradients those of all processes; with DDP they are already."""
        if self.kind == "fullgraph":
            from fastsparse_core.distributed import all_reduce_gradients

            all_reduce_gradients(model)

    def mean_loss(self, total: Tensor | float, examples: int) -> float:
        """The mean loss of an epoch over all processes.

        Args:
            total: Sum over this process's batches of loss times number of examples; with ``fullgraph`` of its
                share in the loss times the number of all examples.
            examples: Sum of the number of examples.
        """
        if not self.kind:
            return float(total) / examples
        device = total.device if isinstance(total, Tensor) else "cpu"
        sums = torch.tensor([float(total), float(examples)], dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        loss, count = sums.tolist()
        return loss / (examples if self.kind == "fullgraph" else count)

    def scores(self, evaluate: Callable[[], dict[str, float]], device: torch.device) -> dict[str, float]:
        """Scores for all processes: with DDP the first one's, with a divided graph what all compute."""
        if self.kind != "ddp":
            return evaluate()
        parts = ("train", "val", "test")
        values = torch.full((len(parts),), math.nan, dtype=torch.float64, device=device)
        if self.is_first:
            scores = evaluate()
            values = values.new_tensor([scores[part] for part in parts])
        dist.broadcast(values, 0)
        return dict(zip(parts, values.tolist(), strict=True))

    def share(self, seeds: Tensor) -> Tensor:
        """This process's part of the nodes to train on: as many for each, some twice if need be."""
        each = -(-seeds.numel() // self.size)
        padded = torch.cat([seeds, seeds[: each * self.size - seeds.numel()]])
        return padded[self.rank :: self.size]


ALONE = Parallel()


@contextlib.contextmanager
def processes(kind: str | None, device: torch.device) -> Iterator[tuple[Parallel, torch.device]]:
    """Joins the processes that torchrun started; gives this one's place and its device.

    Args:
        kind: One of `KINDS`, or None for one process.
        device: The value of --device. With ``cuda``, every process takes the GPU of its number.

    Raises:
        ExampleError: torchrun did not start this, or a process has no GPU of its own.
    """
    if kind is None:
        yield ALONE, device
        return
    if "RANK" not in os.environ or "LOCAL_RANK" not in os.environ:
        raise ExampleError(
            f"--parallel {kind}: start it with torchrun --nproc-per-node GPUS examples/ogb_node.py ..., which"
            " runs one process for each GPU."
        )
    if device.type == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise ExampleError(
                f"--parallel {kind}: process {local} of this machine has no GPU, there are"
                f" {torch.cuda.device_count()}: start torchrun with a smaller --nproc-per-node."
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield Parallel(kind, dist.get_rank(), dist.get_world_size()), device
    finally:
        dist.destroy_process_group()
