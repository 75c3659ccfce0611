"""Training with several processes, one per GPU, started by torchrun.

    torchrun --nproc-per-node 4 examples/ogb_node.py --dataset ogbn-products --parallel fullgraph

The training loop calls `Parallel` to combine gradients, losses and scores, and to find out whether this
process prints and writes. `ALONE` is the object for training with one process.
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

#: Longest time that processes wait for another process, which loads data or evaluates.
PATIENCE = timedelta(hours=2)


@dataclass(frozen=True)
class Parallel:
    """This process, as one of the processes that train a model together.

    Attributes:
        kind: ``ddp``: each process has its own batches of nodes; ``fullgraph``: each process has its own rows
            of the whole graph; ``""``: there is one process.
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
        """Runs the block on the first process, then on all others, which can read the files of the first."""
        if self.kind and not self.is_first:
            dist.barrier()
        yield
        if self.kind and self.is_first:
            dist.barrier()

    def after_backward(self, model: nn.Module) -> None:
        """Sums gradients over all processes, except with DDP, which reduces them by itself."""
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
        """Returns the scores: with DDP those of the first process; otherwise all processes compute them."""
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
        """Returns this process's training nodes. Parts have the same size, so some nodes may be in two."""
        each = -(-seeds.numel() // self.size)
        padded = torch.cat([seeds, seeds[: each * self.size - seeds.numel()]])
        return padded[self.rank :: self.size]


ALONE = Parallel()


@contextlib.contextmanager
def processes(kind: str | None, device: torch.device) -> Iterator[tuple[Parallel, torch.device]]:
    """Joins the processes that torchrun started; returns the `Parallel` of this process and its device.

    Args:
        kind: One of `KINDS`, or None for one process.
        device: The value of --device. With ``cuda``, process i of a machine uses GPU i.

    Raises:
        ExampleError: torchrun did not start this process, or there are fewer GPUs than processes.
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
