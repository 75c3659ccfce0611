"""``capture``: a step of a loop, or a model, as CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from fastsparse_core.capturing.captured import Captured
from fastsparse_core.capturing.model import capture_model

_M = TypeVar("_M", bound=torch.nn.Module)
_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def capture(step: _M) -> _M: ...
@overload
def capture(step: _F) -> _F: ...
def capture(step: Any) -> Any:
    """Makes a step of a training loop, or a model, run as CUDA graphs; the loop stays as it is.

    A step on a small graph or batch is dozens of short kernels, which the host launches more slowly than the
    GPU runs them. A CUDA graph is one launch.

    When what happens:

    - The first 20 calls run as they are, on batches the first 8. Meanwhile, `capture` records what the step
      uses.
    - Then the step is recorded, and later calls replay the record. Training and evaluation are recorded
      apart, and so are calls of other sizes, dtypes or numbers, and those that add to gradients.
    - Arguments that are the same tensors and graphs in every call are read where they are, as is all that the
      step uses besides. Others are copied to memory of the record. So are batches (PyG's ``Batch``, batches
      of neighbour loaders, DGL's batches of graphs, lists of its blocks), padded to a recorded size, by node
      type, edge type and hop. Normalisation over nodes, readouts and losses leave the padding out. A batch
      larger than all before is recorded for its size too, four sizes at most.
    - Before a record is used it is tried, and the trial is undone: the padded step and the first replay must
      give the results and gradients of the step as it is.

    Dropout and other random numbers of the GPU stay random. Learning rates are kept in tensors, which
    schedulers outside of the step change as before; Adam, AdamW and SGD take their fused kernel. Results are
    copies without gradient. Numbers that the step only returns are read after the replay:
    ``return loss.item()``, ``return int(correct.sum()) / n``.

    A step that cannot be recorded runs as it is. A :class:`SlowPathWarning` says why, once, with the line
    where that is known. ``captured.status`` of the function says it at any time. It is ``"replaying"``, or
    ``"refused: "`` and the reason, or ``"watching (3 of 20 calls)"``. Reasons:

    - there is no GPU, or an argument that changes is not on it;
    - the step goes on to use a number of the GPU (``total += loss.item()``, ``print``, ``if loss > 1``);
    - a size is known only on the GPU (``dropout_edge``, ``negative_sampling``, ``x[x > 0]``). Sizes that
      follow from tensors of integers which stay, such as ``edge_index`` and masks, are known from earlier
      calls;
    - a scheduler steps in it (call it after the step), or the optimizer counts steps on the CPU (Adagrad);
    - something mixes the nodes of different graphs of a batch, so that padding would change the results;
    - the step keeps tensors or Python state from call to call (other effects of its Python code, such as
      appending to a list, happen only in calls that are not replayed);
    - its arguments have more than 32 forms or 4 sizes, there is too little memory, or algorithms have to be
      deterministic and batches are padded;
    - it calls DGL's own layers on batches or blocks, or gets DGL's batches of graphs of several types.

    Args:
        step: a function of any arguments, the optimiser's step in it. Or a model: its forward and its
            backward pass become a CUDA graph each, and the loop calls ``backward()`` before the next call.

    Returns:
        The function to call instead, with ``captured.status``; of a model, the model itself, with
        ``forward.status``.

    Raises:
        TypeError: ``step`` is neither.
        RuntimeError: of a model: in ``backward()``, if the model was called again before.

    Examples:
        >>> import fastsparse_core, torch
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
