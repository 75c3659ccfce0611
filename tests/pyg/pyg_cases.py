"""Graphs, input kinds and comparisons shared by the tests of fastsparse_pyg."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from gradient_terms import gradient_terms
from torch import Tensor

from fastsparse_core import Adjacency

torch_geometric = pytest.importorskip("torch_geometric", reason="needs PyG")
EdgeIndex = torch_geometric.EdgeIndex
SparseTensor = torch_geometric.typing.SparseTensor

#: Ways to pass one graph, (edge_index, num_src, num_dst), to a layer.
KINDS = [
    "edge_index",
    "edge_index_int32",
    "EdgeIndex",
    "EdgeIndex_sorted",
    "csr",
    "coo",
    "SparseTensor",
    "Adjacency",
]


def random_graph(
    num_src: int = 40, num_dst: int | None = None, num_edges: int = 260, *, device: str = "cpu", seed: int = 0
) -> Tensor:
    """Edges (2, E) with self loops, repeated edges, one hub and nodes without any edge."""
    generator = torch.Generator().manual_seed(seed)
    num_dst = num_src if num_dst is None else num_dst
    src = torch.randint(0, num_src - 2, (num_edges,), generator=generator)
    dst = torch.randint(0, num_dst - 2, (num_edges,), generator=generator)
    dst[: num_edges // 6] = 1
    dst = torch.where(src == dst, (dst + 1) % (num_dst - 2), dst)
    # At most one loop per node: PyG keeps one of repeated loops, but gives all of them its gradient.
    loops = torch.tensor([0, 3, 5])
    src, dst = torch.cat([src, src[:5], loops]), torch.cat([dst, dst[:5], loops])
    order = torch.randperm(len(src), generator=generator)
    return torch.stack([src[order], dst[order]]).to(device)


def simple_graph(num_nodes: int = 40, num_edges: int = 200, *, device: str = "cpu", seed: int = 0) -> Tensor:
    """Edges without repetition, sorted by destination: every input kind means the same graph."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randperm((num_nodes - 2) ** 2, generator=generator)[:num_edges].sort().values
    dst, src = flat // (num_nodes - 2), flat % (num_nodes - 2)
    return torch.stack([src, dst]).to(device)


def as_kind(kind: str, edge_index: Tensor, num_src: int, num_dst: int, weight: Tensor | None = None) -> Any:
    """The same graph as another kind of input; matrices are transposed (rows = destinations)."""
    src, dst = edge_index
    if kind == "edge_index":
        return edge_index
    if kind == "edge_index_int32":
        return edge_index.int()
    if kind == "EdgeIndex":
        return EdgeIndex(edge_index, sparse_size=(num_src, num_dst))
    if kind == "EdgeIndex_sorted":
        return EdgeIndex(edge_index, sparse_size=(num_src, num_dst), sort_order="col")
    if kind == "Adjacency":
        return Adjacency.from_coo(dst, src, (num_dst, num_src))
    if kind == "SparseTensor":
        if not torch_geometric.typing.WITH_TORCH_SPARSE:
            pytest.skip("needs torch-sparse")
        return SparseTensor(row=dst, col=src, value=weight, sparse_sizes=(num_dst, num_src))
    value = torch.ones(len(src), device=src.device) if weight is None else weight
    matrix = torch.sparse_coo_tensor(torch.stack([dst, src]), value, (num_dst, num_src)).coalesce()
    return {"coo": matrix, "csr": matrix.to_sparse_csr(), "csc": matrix.to_sparse_csc()}[kind]


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-5, floor: float = 1e-3) -> None:
    """Equal to `tolerance` of the largest expected value, but at least of `floor`; NaN in the same places."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    scale = expected.detach().nan_to_num(0, 0, 0).abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        got, expected, rtol=tolerance, atol=tolerance * max(scale, floor), equal_nan=True
    )


def alike(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal to `tolerance` by the norm of their difference: single sums in 16 bits may be far off."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    difference = float(torch.linalg.vector_norm((got - expected).double()))
    assert difference <= tolerance * float(torch.linalg.vector_norm(expected.double()))


def gradients(output: Tensor, inputs: list[Tensor], seed: int = 1) -> list[Tensor]:
    """Gradients of a fixed random functional of the output."""
    return list(torch.autograd.grad(output, inputs, cotangent(output, seed), allow_unused=True))


def cotangent(output: Tensor, seed: int = 1) -> Tensor:
    """The gradient of an output that `gradients` takes."""
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output)


def same(
    reference: torch.nn.Module,
    layer: torch.nn.Module,
    call: Callable[[torch.nn.Module], Tensor],
    inputs: list[Tensor],
    *,
    fast_call: Callable[[torch.nn.Module], Tensor] | None = None,
    tolerance: float = 1e-5,
    floor: float = 1e-3,
) -> None:
    """Output and gradients of every parameter and every tensor in `inputs` agree.

    Raise `floor` to the size of usual gradients where some are zero except for rounding. Gradients of
    parameters of one number are compared with the terms that they sum up (`gradient_terms`).
    """
    layer.load_state_dict(reference.state_dict())
    expected = call(reference)
    got = (fast_call or call)(layer)
    close(got, expected, tolerance)
    names = [name for name, parameter in reference.named_parameters() if parameter.requires_grad]
    tensors = [tensor for tensor in inputs if tensor.requires_grad]
    expected_gradients = gradients(
        expected, [dict(reference.named_parameters())[name] for name in names] + tensors
    )
    got_gradients = gradients(got, [dict(layer.named_parameters())[name] for name in names] + tensors)
    terms = gradient_terms(reference, lambda: call(reference), cotangent(expected))
    floors = [max(floor, terms.get(name, 0.0)) for name in names] + [floor] * len(tensors)
    for got_gradient, expected_gradient, least in zip(got_gradients, expected_gradients, floors, strict=True):
        assert (got_gradient is None) == (expected_gradient is None)
        if got_gradient is not None:
            close(got_gradient, expected_gradient, tolerance, least)


def same_on(
    graphs: Iterable[Any],
    given: Any,
    reference: torch.nn.Module,
    layer: torch.nn.Module,
    x: Tensor | tuple[Tensor, ...],
    *rest: Any,
    run: Callable[..., Any] = lambda layer, *given: layer(*given),
    **bounds: float,
) -> None:
    """`same` of ``run(layer, x, graph, *rest)`` for all of `graphs`; the original gets ``given`` for each."""
    inputs = [each for each in (*(x if isinstance(x, tuple) else (x,)), *rest) if isinstance(each, Tensor)]
    for graph in graphs:
        same(
            reference,
            layer,
            lambda conv: run(conv, x, given, *rest),
            inputs,
            fast_call=lambda conv, graph=graph: run(conv, x, graph, *rest),
            **bounds,
        )


def no_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a test fail where PyG's own code runs instead of the kernels."""
    from fastsparse_pyg.nn.base import FastConv

    def fail(self: Any, reason: str, *args: Any) -> Tensor:
        raise AssertionError(f"PyG's own code ran: {reason}")

    monkeypatch.setattr(FastConv, "_original_forward", fail)
