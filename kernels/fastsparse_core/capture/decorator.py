"""``capture``: a step of a loop, or a model, as CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from fastsparse_core.capture.captured import Captured
from fastsparse_core.capture.model import capture_model

_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def capture(step: torch.nn.Module) -> torch.nn.Module: ...
@overload
def capture(step: _F) -> _F: ...
def capture(step: Any) -> Any:
    """Makes a step of a loop, or a model, run as CUDA graphs; the loop stays as it is.

    A step on a small graph or batch is dozens of short kernels, which the host launches more slowly than the
    GPU runs them. The first calls run as they are. Then a call is recorded, and later ones replay the record:
    one launch. Tensors and graphs that are the same objects in every call are read where they are; others
    are copied to memory of the record. Batches of the frameworks (PyG's ``Batch`` and what neighbour loaders
    give) are padded to recorded sizes. Normalisation over nodes, readouts and losses leave the padding out;
    whether a step's results and gradients are the same with padding is tried before it is recorded.

    Optimisers in the step get learning rates in tensors, which schedulers outside of it change as before
    (Adam, AdamW and SGD also take their fused kernel), unless the step is not recorded. Dropout stays random.
    Training and evaluation are recorded apart, and so are calls that add to gradients. A step that cannot be
    recorded runs as it is, and the log says why once. That is so if it reads a number on the host
    (``loss.item()``: return ``loss`` instead). What else the host does in a step, such as appending to a
    list, is done only while it is not replayed. The first replay is tried too: it has to give the results and
    gradients that a run gives. Results are copies without gradient. Without a GPU everything runs as it is.

    Args:
        step: a function; or a model, whose forward and backward pass become two CUDA graphs each.

    Returns:
        The function to call instead; the model itself.

    Raises:
        TypeError: ``step`` is neither.

    Examples:
        >>> x, weight = torch.ones(3, 2), torch.ones(2)
        >>> @fastsparse_core.capture
        ... def step(x):
        ...     return x @ weight
        >>> step(x)
        tensor([2., 2., 2.])
    """
    if isinstance(step, torch.nn.Module):
        return capture_model(step)
    if not callable(step):
        raise TypeError(f"step: expected a function or a torch.nn.Module, got {type(step).__name__}")
    captured = Captured(step)

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        return captured(*args, **kwargs)

    run.captured = captured  # type: ignore[attr-defined]
    return run
