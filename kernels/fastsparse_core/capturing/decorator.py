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
@overload
def capture() -> Callable[[_F], _F]: ...
def capture(step: Any = None) -> Any:
    """Runs a training step or a model as CUDA graphs, without changes of the training loop.

    A step on a small graph or batch consists of dozens of short kernels, and launching them takes longer than
    running them. A CUDA graph needs one launch.

    Calls run as follows:

    - The first 20 calls (8 on batches) run unchanged, while `capture` finds out what the step uses.
    - Then the step is recorded, and later calls replay the recorded graph. Training and evaluation are
      recorded separately, and so are calls with other sizes, dtypes or numbers, and calls that accumulate
      gradients.
    - Arguments that are the same tensors and graphs in every call are read in place, and so are other tensors
      that the step uses. All other arguments are copied into the recorded graph's memory. Batches (PyG's
      ``Batch``, batches of neighbour loaders, DGL's batches of graphs, lists of its blocks) are padded to a
      recorded size, by node type, edge type and hop. Normalisation over nodes, readouts and losses ignore the
      padding. A batch that is larger than all recorded sizes adds another recorded size, up to four.
    - Before a recorded graph is used, `capture` checks that the padded step and the first replay give the
      same results and gradients as the plain step. The effects of this check are undone.

    Dropout and other random numbers of the GPU stay random. Learning rates are kept in tensors, so schedulers
    outside the step change them as before. If an optimizer cannot read them from tensors, a change records
    the step again, at most eight times. Adam, AdamW and SGD use their fused kernels, unless you set
    ``foreach``. Results are copies without gradient. A number that the step only returns is read after the
    replay: ``return loss.item()``, ``return int(correct.sum()) / n``.

    A step that cannot be recorded runs unchanged. A :class:`SlowPathWarning` names the reason once, with the
    line of the step if it is known. The attribute ``captured.status`` of the function is ``"replaying"``,
    ``"watching (3 of 20 calls)"``, or ``"refused: "`` followed by the reason. Possible reasons:

    - there is no GPU, or an argument that changes between calls is on the CPU;
    - the step continues with a number from the GPU (``total += loss.item()``, ``print``, ``if loss > 1``);
    - a size is known only on the GPU (``dropout_edge``, ``negative_sampling``, ``x[x > 0]``), unless it
      depends only on integer or bool tensors that do not change, such as ``edge_index`` and masks;
    - the step calls a learning rate scheduler (call it after the step), or the optimizer counts steps on the
      CPU (Adagrad);
    - an operation mixes the nodes of different graphs of a batch, so padding would change the results;
    - the step keeps tensors or Python state from call to call (other effects of its Python code, such as
      appending to a list, happen only in calls that are not replayed);
    - its arguments have more than 32 combinations of shapes, dtypes and numbers, a batch is larger than all
      four recorded sizes, or there is too little memory;
    - batches would be padded under ``torch.use_deterministic_algorithms(True)``;
    - it calls DGL's own layers on batches or blocks, its argument is a DGL batch of heterogeneous graphs, or
      a batch is inside a list or dictionary (pass it as an argument);
    - it gets several batches, a changing argument requires a gradient, or gradients are sparse;
    - it returns a tensor that requires a gradient, and does not call ``backward()`` (capture the model).

    Args:
        step: a function with any arguments that includes the optimizer's step, or a model. The forward and
            backward pass of a model become a CUDA graph each, and the loop must call ``backward()`` before
            the model's next call. None: ``@capture()`` is the same as ``@capture``.

    Returns:
        The function to call instead, with ``captured.status``; for a model, the model itself, with
        ``forward.status``.

    Raises:
        TypeError: ``step`` is neither a function nor a model.
        RuntimeError: for a captured model, if it was called again before ``backward()``.

    Examples:
        >>> import fastsparse_core, torch
        >>> x, weight = torch.ones(3, 2), torch.ones(2)
        >>> @fastsparse_core.capture
        ... def step(x):
        ...     return x @ weight
        >>> step(x)
        tensor([2., 2., 2.])
    """
    if step is None:
        return capture
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


def captured_step(step: Callable[[], Any], *, warm_up: int = 0, stream: Any = None) -> Callable[[], Any]:
    """The old name ``CapturedStep`` of :func:`capture`; ``warm_up`` and ``stream`` are ignored."""
    return capture(step)
