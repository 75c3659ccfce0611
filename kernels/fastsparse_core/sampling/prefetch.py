"""The next batches prepared beside the step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

#: Batches that are being drawn at once.
_STARTED = 2

_Item = TypeVar("_Item")
_Started = TypeVar("_Started")
_Batch = TypeVar("_Batch")


def prefetched(
    items: Iterable[_Item],
    start: Callable[[_Item], _Started],
    finish: Callable[[_Started], _Batch],
    stream: torch.cuda.Stream | None,
) -> Iterator[_Batch]:
    """Batches of items: on a GPU three ahead, on a stream of their own.

    While the caller works with one batch, the device gathers the features of the next and draws one more. The
    host reads the sizes of a draw when the one after it has been given to the device too: so what it waits
    for is older than the caller's last step, and it has the next one there before that is done.

    Memory of a batch may be used again as soon as the caller drops it: whatever is prepared first waits for
    what the caller has given to the stream that it iterates on. Batches that it hands to other streams need
    `Tensor.record_stream`.

    Args:
        items: what batches are made of, such as indices of seeds.
        start: begins to draw a batch; must not wait for the device.
        finish: completes it.
        stream: where both run; None: where the caller is, one batch at a time.
    """
    if stream is None:
        for item in items:
            yield finish(start(item))
        return
    device = stream.device
    remaining = iter(items)
    started: list[_Started] = []
    ready: tuple[_Batch, torch.cuda.Event] | None = None
    is_first = True
    while is_first or started or ready is not None:
        caller = torch.cuda.current_stream(device)
        stream.wait_stream(caller)
        upcoming = None
        with torch.cuda.stream(stream):
            if is_first:
                started = [start(item) for item in itertools.islice(remaining, _STARTED)]
            if started:
                batch = finish(started.pop(0))
                event = torch.cuda.Event()
                event.record(stream)
                upcoming = (batch, event)
                started += [start(item) for item in itertools.islice(remaining, 1)]
        is_first = False
        if ready is not None:
            caller.wait_event(ready[1])
            batch, ready = ready[0], upcoming
            del upcoming
            yield batch
            del batch
        else:
            ready = upcoming
