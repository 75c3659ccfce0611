"""Prepares the next batches during the training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import TypeVar

import torch

from fastsparse_core.sampling.host_rows import Gather, deferred

_Item = TypeVar("_Item")
_Started = TypeVar("_Started")
_Batch = TypeVar("_Batch")


def prefetched(
    items: Iterable[_Item],
    start: Callable[[_Item], _Started],
    finish: Callable[[_Started], _Batch],
    stream: torch.cuda.Stream | None,
    *,
    reads_rows: bool = True,
) -> Iterator[_Batch]:
    """Yields a batch per item. On a GPU, the next two batches are prepared on a separate stream.

    While the caller uses one batch, the device gathers the features of the next batch, and samples the batch
    after the next. Sampling starts one batch before the host reads the sizes, so the host seldom waits for
    the sampling.

    The memory of a batch is reused as soon as the caller drops the batch: preparation waits for the work that
    the caller has queued on its current stream. For batches that are used on other streams, call
    `Tensor.record_stream`.

    Args:
        items: the inputs of the batches, such as indices of seeds.
        start: function that starts to sample a batch; it must not wait for the device.
        finish: function that completes a batch.
        stream: stream on which ``start`` and ``finish`` run; None: both run on the caller's stream, and no
            batch is prepared ahead.
        reads_rows: True if ``finish`` reads the rows that it gets from a `FeatureTable`. If False, ``finish``
            only passes the rows on, so host threads may gather them during the caller's step.

    Returns:
        An iterator over the batches, in the order of ``items``.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, NeighborSampler
        >>> ring = Adjacency.from_coo(torch.arange(6), torch.arange(6).roll(1), (6, 6))
        >>> from fastsparse_core.sampling import prefetched
        >>> sampler = NeighborSampler(ring, [1])
        >>> seeds = torch.arange(6).split(2)
        >>> [len(batch.nodes) for batch in prefetched(seeds, sampler.start, lambda draw: draw.finish(), None)]
        [3, 3, 3]
    """
    if stream is None:
        for item in items:
            yield finish(start(item))
        return
    device = stream.device
    remaining = iter(items)
    started: list[_Started] = []
    ready: tuple[_Batch, torch.cuda.Event, list[Gather]] | None = None
    is_first = True
    while is_first or started or ready is not None:
        caller = torch.cuda.current_stream(device)
        stream.wait_stream(caller)
        upcoming = None
        with torch.cuda.stream(stream):
            if is_first:
                started = [start(item) for item in _some(remaining)]
            if started:
                with nullcontext(list[Gather]()) if reads_rows else deferred() as gathers:
                    batch = finish(started.pop())
                event = torch.cuda.Event()
                event.record(stream)
                upcoming = (batch, event, gathers)
                started = [start(item) for item in _some(remaining)]
        is_first = False
        if ready is not None:
            caller.wait_event(ready[1])
            for gather in ready[2]:
                gather.wait()
            batch, ready = ready[0], upcoming
            del upcoming
            yield batch
            del batch
        else:
            ready = upcoming


def _some(remaining: Iterator[_Item]) -> list[_Item]:
    """The next item in a list, or an empty list if no item remains."""
    for item in remaining:
        return [item]
    return []
