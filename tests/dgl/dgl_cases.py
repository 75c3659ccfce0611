"""Graphs, comparisons and imports that the DGL tests share."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradient_terms import gradient_terms
from torch import Tensor

if importlib.util.find_spec("dgl") is None:
    pytest.skip("DGL is not installed (there is no wheel for Python 3.13)", allow_module_level=True)

fastsparse_dgl = importlib.import_module("fastsparse_dgl")
dgl = fastsparse_dgl.compat.dgl
DGLError = dgl.DGLError

#: Output and gradients by name.
Results = dict[str, Tensor | None]

#: Largest error of float32 results, relative to the largest entry.
TOLERANCE = 1e-5


def random_edges(num_src: int, num_dst: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random edges with repetitions, such that every destination has one."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(num_src, (count,), generator=generator)
    dst = torch.randint(num_dst, (count,), generator=generator)
    dst[:num_dst] = torch.randperm(num_dst, generator=generator)
    return src, dst


def homogeneous(idtype: torch.dtype = torch.int64, seed: int = 0) -> Any:
    src, dst = random_edges(30, 30, 120, seed)
    return dgl.graph((src, dst), num_nodes=30, idtype=idtype)


def block(idtype: torch.dtype = torch.int64) -> Any:
    graph = homogeneous(idtype)
    seeds = torch.arange(12, dtype=idtype)
    return dgl.to_block(dgl.in_subgraph(graph, seeds), seeds)


def bipartite(num_src: int = 17, num_dst: int = 23) -> Any:
    src, dst = random_edges(num_src, num_dst, 90)
    return dgl.heterograph(
        {("user", "rates", "item"): (src, dst)}, num_nodes_dict={"user": num_src, "item": num_dst}
    )


def from_csc() -> Any:
    """A graph whose edges DGL stores in their own order, so that it leaves the edge ids out."""
    indptr, indices, _ = homogeneous().adj_tensors("csc")
    return dgl.graph(("csc", (indptr, indices, [])))


def restricted(layout: str) -> Any:
    """A graph that may not make other formats than this one."""
    return homogeneous().formats([layout])


GRAPHS: dict[str, Callable[[], Any]] = {
    "homogeneous": homogeneous,
    "int32": lambda: homogeneous(torch.int32),
    "batched": lambda: dgl.batch([homogeneous(seed=1), homogeneous(seed=2)]),
    "csc": from_csc,
    "block": block,
    "block-int32": lambda: block(torch.int32),
    "wide": lambda: bipartite(23, 17),
    "tall": lambda: bipartite(17, 23),
}

#: Graphs whose layers take one feature tensor.
SINGLE = [name for name in GRAPHS if name not in ("wide", "tall")]


def features(
    graph: Any, width: int, *middle: int, dtype: torch.dtype = torch.float32, seed: int = 3
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(graph.num_src_nodes(), *middle, width, generator=generator, dtype=dtype)


def pair(graph: Any, src_width: int, dst_width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return (
        torch.randn(graph.num_src_nodes(), src_width, generator=generator),
        torch.randn(graph.num_dst_nodes(), dst_width, generator=generator),
    )


def weights(graph: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(graph.num_edges(), *shape, generator=generator, dtype=dtype) + 0.5


def layer_pair(fast_class: type, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """A drop-in and DGL's layer, made with the same arguments, with copies of the same parameters."""
    fast = fast_class(*copy.deepcopy(args), **kwargs)
    reference = next(base for base in fast_class.__mro__ if base.__module__.startswith("dgl."))(
        *copy.deepcopy(args), **kwargs
    )
    fast.load_state_dict(reference.state_dict())
    return fast, reference


def _leaf(item: Any, device: str) -> Any:
    if isinstance(item, tuple):
        return tuple(_leaf(part, device) for part in item)
    if isinstance(item, Tensor):
        return item.detach().clone().to(device).requires_grad_()
    return item


def _leaves(item: Any) -> list[Tensor]:
    if isinstance(item, tuple):
        return [leaf for part in item for leaf in _leaves(part)]
    return [item] if isinstance(item, Tensor) else []


def outputs_and_gradients(layer: Any, graph: Any, feat: Any, options: dict[str, Any], device: str) -> Results:
    """The result and the gradients of all inputs and parameters for one fixed upstream gradient."""
    layer = layer.to(device)
    layer.zero_grad()
    feat = _leaf(feat, device)
    options = {name: _leaf(item, device) for name, item in options.items()}
    out = layer(graph, feat, **options)
    (out * _upstream(out)).sum().backward()
    found: Results = {"output": out.detach()}
    for index, leaf in enumerate(_leaves(feat)):
        found[f"feat[{index}]"] = leaf.grad
    for name, item in options.items():
        for leaf in _leaves(item):
            found[name] = leaf.grad
    for name, parameter in layer.named_parameters():
        # A copy, because moving the module would also move these gradients.
        found[name] = None if parameter.grad is None else parameter.grad.clone()
    return found


def _upstream(out: Tensor) -> Tensor:
    """The fixed upstream gradient of an output."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64).to(out)


def terms_of_gradients(layer: Any, graph: Any, feat: Any, options: dict[str, Any]) -> dict[str, float]:
    """What the gradients of parameters of one number sum up, on the CPU: see `gradient_terms`."""
    layer = layer.to("cpu")

    def output() -> Tensor:
        return layer(graph, feat, **options)

    with torch.no_grad():
        upstream = _upstream(output())
    return gradient_terms(layer, output, upstream)


def assert_close(
    found: Results, expected: Results, tolerance: float, terms: dict[str, float] | None = None
) -> None:
    """Equal to ``tolerance`` of the largest entry, or of the terms that an entry is the sum of."""
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = found[name]
        assert (got is None) == (want is None), f"{name}: got {got}, expected {want}"
        if want is None or got is None:
            continue
        assert got.shape == want.shape, name
        assert got.dtype == want.dtype, name
        scale = max(want.abs().max().item() if want.numel() else 0.0, (terms or {}).get(name, 0.0))
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=tolerance * max(scale, 1e-30), msg=name)


def check_parity(
    layers: tuple[Any, Any],
    graph: Any,
    feat: Any,
    device: str,
    *,
    fast_graph: Any = None,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> None:
    """Our layer on ``device`` and DGL's on the CPU give the same result and the same gradients."""
    fast, reference = layers
    expected = outputs_and_gradients(reference, graph, feat, options, "cpu")
    terms = terms_of_gradients(reference, graph, feat, options)
    found = outputs_and_gradients(fast, graph if fast_graph is None else fast_graph, feat, options, device)
    assert_close(found, expected, tolerance, terms)
