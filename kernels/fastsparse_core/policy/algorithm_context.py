"""The user's settings for all calls: the context manager `algorithms`, and PyTorch's setting for TF32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType

import torch

from fastsparse_core.locks import ForkSafeLock

SPMM_ALGORITHMS = ("auto", "csr", "flashsparse", "tca", "hr")
SDDMM_ALGORITHMS = ("auto", "csr", "flashsparse")
ATTENTION_ALGORITHMS = ("auto", "fused3s", "csr", "unfused")
SSD_ALGORITHMS = ("auto", "decoupled", "densify")
#: Operator -> names that its calls and `algorithms` accept.
ALGORITHMS = {
    "spmm": SPMM_ALGORITHMS,
    "sddmm": SDDMM_ALGORITHMS,
    "attention": ATTENTION_ALGORITHMS,
    "ssd": SSD_ALGORITHMS,
}

#: The choice made with `algorithms` in this thread or asynchronous task: operator -> algorithm.
_requests: ContextVar[Mapping[str, str]] = ContextVar("requests", default=MappingProxyType({}))
#: For eager code: faster than `requested`, because it does not check whether code is being traced.
eager_requests = _requests.get
#: `_open` has the choices of all contexts that are open in any thread, in the order in which they were
#: entered. `_last_opened` is the last of these choices. Traced code reads `_last_opened`, because
#: torch.compile can guard on a global, but cannot read a context variable.
_open: dict[int, Mapping[str, str]] = {}
_last_opened: Mapping[str, str] | None = None
_open_lock = ForkSafeLock()


def check_algorithm(algorithm: str, known: tuple[str, ...], name: str = "algorithm") -> None:
    """Raises an error unless ``algorithm`` is one of the ``known`` names.

    Raises:
        ValueError: ``algorithm`` is not among ``known``.
    """
    if algorithm not in known:
        names = ", ".join(repr(it) for it in known)
        raise ValueError(f"{name}: expected one of {names}, got {algorithm!r}")


@contextlib.contextmanager
def algorithms(
    *,
    spmm: str | None = None,
    sddmm: str | None = None,
    attention: str | None = None,
    ssd: str | None = None,
) -> Iterator[None]:
    """Context manager and decorator that replaces ``"auto"`` in the operators and layers called inside.

    Gradients use the algorithm of the forward pass, wherever ``backward()`` is called. The ``algorithm``
    argument of a call takes precedence. Contexts can be nested. Each applies to its own thread or
    asynchronous task. ``torch.compile`` compiles again if the algorithm changes, and uses the context that
    was entered last in any thread.

    Args:
        spmm: one of `SPMM_ALGORITHMS`; None: no change.
        sddmm: one of `SDDMM_ALGORITHMS`; None: no change.
        attention: one of `ATTENTION_ALGORITHMS`; None: no change.
        ssd: one of `SSD_ALGORITHMS`; None: no change.

    Returns:
        A context manager, also usable as a decorator.

    Raises:
        ValueError: An operator has no algorithm with the given name.

    Examples:
        >>> import torch
        >>> from fastsparse_core import Adjacency, algorithms, spmm
        >>> adj = Adjacency.from_coo(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> with algorithms(spmm="csr"):
        ...     y = spmm(adj, torch.eye(2))
    """
    asked = {"spmm": spmm, "sddmm": sddmm, "attention": attention, "ssd": ssd}
    given = {operator: algorithm for operator, algorithm in asked.items() if algorithm is not None}
    for operator, algorithm in given.items():
        check_algorithm(algorithm, ALGORITHMS[operator], operator)
    requests = {**_requests.get(), **given}
    token = _requests.set(requests)
    _show_to_traces(id(requests), requests)
    try:
        yield
    finally:
        _requests.reset(token)
        _show_to_traces(id(requests), None)


def _show_to_traces(context: int, requests: Mapping[str, str] | None) -> None:
    """Records that a context was entered or, if ``requests`` is None, left."""
    global _last_opened
    with _open_lock:
        if requests is None:
            del _open[context]
        else:
            _open[context] = requests
        _last_opened = next(reversed(_open.values()), None)


def requested(operator: str, algorithm: str) -> str:
    """The algorithm of a call: its own argument or, if that is ``"auto"``, the choice made with `algorithms`.

    Operators call it only in the forward pass, because the backward pass runs in other threads, where the
    context variable is not set.

    Raises:
        ValueError: The operator has no algorithm with this name.
    """
    if algorithm != "auto":
        check_algorithm(algorithm, ALGORITHMS[operator])
        return algorithm
    requests = _last_opened if torch.compiler.is_compiling() else _requests.get()
    return algorithm if requests is None else requests.get(operator, algorithm)


def allows_tf32() -> bool:
    """Returns whether PyTorch's settings allow products of float32 matrices with lower precision."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # raised after `fp32_precision`, new in torch 2.9, was set
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
