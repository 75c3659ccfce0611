"""DGL with and without `enable()`: the same call on both sides, outputs and gradients."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from dgl_cases import fastsparse_dgl
from torch import Tensor
from torch.utils import backend_registration

# Imported when tests are collected, because autograd counts the devices at its first backward pass. Not
# imported if there is a GPU: the tests then run on it, and PyTorch would take the pretended device for the
# machine's accelerator.
pretended: ModuleType | None = None
if not torch.cuda.is_available() and hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    pretended = importlib.import_module("pretended")

#: Devices that DGL does not support: the pretended one, and a GPU.
AWAY = [
    pytest.param(
        "pretended:0", marks=pytest.mark.skipif(pretended is None, reason="a GPU, or no backends in Python")
    ),
    pytest.param("cuda:0", marks=pytest.mark.gpu),
]


@contextlib.contextmanager
def enabled_for(device: str) -> Iterator[None]:
    """Context in which DGL runs on FastSparse, with graphs on that device."""
    if device == "pretended:0":
        assert pretended is not None
        with pretended.pretended_device():
            yield
    else:
        with enabled():
            yield


def in_thread(device: str) -> Any:
    """Context that makes the device available in another thread than that of :func:`enabled_for`."""
    return pretended.Pretend() if pretended and device == "pretended:0" else contextlib.nullcontext()


@contextlib.contextmanager
def enabled(**options: Any) -> Iterator[None]:
    """Context in which DGL runs on FastSparse; DGL's own code runs again after it."""
    fastsparse_dgl.enable(**options)
    try:
        yield
    finally:
        fastsparse_dgl.disable()


def tensors_of(item: Any) -> list[Tensor]:
    """All tensors of a result, in order."""
    if isinstance(item, Tensor):
        return [item]
    if isinstance(item, dict):
        return [leaf for key in sorted(item, key=str) for leaf in tensors_of(item[key])]
    if isinstance(item, (list, tuple)):
        return [leaf for part in item for leaf in tensors_of(part)]
    return []


def moved(item: Any, device: str) -> Any:
    """Leaves of a fresh graph of autograd's, on a device; all that has `to` moves too."""
    if isinstance(item, Tensor):
        copy = item.detach().clone().to(device)
        return copy.requires_grad_() if item.is_floating_point() else copy
    if isinstance(item, dict):
        return {key: moved(part, device) for key, part in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(moved(part, device) for part in item)
    return item


def run(function: Callable[..., Any], graph: Any, inputs: Any, device: str = "cpu") -> list[Tensor]:
    """Outputs and gradients of `function(graph, *inputs)`, on the CPU again."""
    inputs = moved(inputs, device)
    graph = graph.to(device)
    outputs = tensors_of(function(graph, *inputs))
    upstream = [
        torch.randn(out.shape, generator=torch.Generator().manual_seed(nth), dtype=torch.float64).to(out)
        for nth, out in enumerate(outputs)
    ]
    pairs = [(out, up) for out, up in zip(outputs, upstream, strict=True) if out.requires_grad]
    leaves = [leaf for leaf in tensors_of(inputs) if leaf.requires_grad]
    if pairs and leaves:
        sum((out * up).sum() for out, up in pairs).backward()
    found = outputs + [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    assert all(str(tensor.device).startswith(device) for tensor in found)
    return [tensor.detach().cpu() for tensor in found]


def assert_same(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    """Shapes, dtypes and numbers, to ``tolerance`` of each tensor's largest entry."""
    assert len(found) == len(expected)
    for nth, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert got.shape == want.shape, (nth, got.shape, want.shape)
        assert got.dtype == want.dtype, (nth, got.dtype, want.dtype)
        scale = float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(
            got, want, rtol=0, atol=tolerance * max(scale, 1e-30), msg=lambda text, nth=nth: f"{nth}: {text}"
        )


def check(
    function: Callable[..., Any], graph: Any, inputs: Any, device: str, tolerance: float = 1e-5
) -> None:
    """`function` gives on ``device`` with `enable()` what it gives on the CPU without."""
    expected = run(function, graph, inputs)
    with enabled_for(device):
        found = run(function, graph, inputs, device)
    assert_same(found, expected, tolerance)
