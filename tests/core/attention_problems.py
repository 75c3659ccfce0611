"""Attention operators and their references as one, on random arguments and structures."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cases import EdgeList, features
from torch import Tensor

from fastsparse_core import (
    Adjacency,
    additive_attention,
    additive_attention_weights,
    attention,
    attention_weights,
    gatv2_attention,
    gatv2_attention_weights,
    reference,
)

ALGORITHMS = ("fused3s", "unfused")
KINDS = ("dot_product", "additive", "gatv2")
#: On both sides of every vector and lane boundary, and the widths that models use.
HEAD_WIDTHS = (1, 3, 8, 16, 20, 32, 40, 47, 64, 130)


def each_algorithm(*shapes: tuple[int, int]) -> pytest.MarkDecorator:
    """Heads and widths: all for the fused kernels, two for the unfused steps, which other tests cover."""
    cases = [("fused3s", *shape) for shape in shapes] + [("unfused", *shape) for shape in shapes[:2]]
    return pytest.mark.parametrize(("algorithm", "heads", "width"), cases)


@dataclass
class Problem:
    """Arguments of one of the operators, in the order of its gradients."""

    kind: str
    tensors: list[Tensor]  # the differentiable ones; the last is the bias, if there is one
    biased: bool = False
    slope: float = 0.2

    def run(self, adj: Adjacency, tensors=None, dropout_p: float = 0.0, **options) -> Tensor:
        return self._call(attention, additive_attention, gatv2_attention, adj, tensors, dropout_p, **options)

    def expected(self, adj: Adjacency, tensors=None, dropout_p: float = 0.0, seed: int = 0) -> Tensor:
        functions = (reference.attention, reference.additive_attention, reference.gatv2_attention)
        return self._call(*functions, adj, tensors, dropout_p, seed=seed)

    def _call(self, dot, additive, gatv2, adj, tensors, dropout_p, **options) -> Tensor:
        tensors = list(self.tensors if tensors is None else tensors)
        bias = tensors.pop() if self.biased else None
        if self.kind == "dot_product":
            return dot(adj, *tensors, None, bias, dropout_p, **options)
        if self.kind == "additive":
            return additive(adj, *tensors, self.slope, bias, dropout_p, **options)
        return gatv2(adj, *tensors, self.slope, dropout_p, **options)

    def terms(self, adj: Adjacency) -> float:
        """Size of what is summed: results that cancel are compared with it."""
        weights = self.weights(adj)
        v = self.tensors[1] if self.kind == "gatv2" else self.tensors[2]
        return reference.spmm(adj, v.abs(), weights).norm().item()

    def weights(self, adj: Adjacency) -> Tensor:
        tensors = [tensor.double() for tensor in self.tensors]
        bias = tensors.pop() if self.biased else None
        if self.kind == "dot_product":
            return attention_weights(adj, *tensors[:2], bias=bias)
        if self.kind == "additive":
            return additive_attention_weights(adj, *tensors[:2], self.slope, bias=bias)
        return gatv2_attention_weights(adj, *tensors, self.slope)

    def doubled(self) -> list[Tensor]:
        return [tensor.detach().double().requires_grad_() for tensor in self.tensors]


def problem(
    kind: str,
    adj: Adjacency,
    heads: int = 2,
    width: int = 16,
    value_width: int | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    biased: bool = False,
    layout: str = "contiguous",
    spread: float = 1.0,
    requires_grad: bool = False,
) -> Problem:
    """Random arguments whose scores are of the size `spread`."""
    device = str(adj.device)
    precise = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(rows: int, columns: int, seed: int, factor: float = 1.0) -> Tensor:
        matrix = features(rows, heads * columns, dtype, layout, device, seed)
        return (matrix if factor == 1 else matrix * factor).unflatten(1, (heads, columns))

    def scores(rows: int, seed: int) -> Tensor:
        return features(rows, heads, precise, "contiguous", device, seed) * spread

    value_width = width if value_width is None else value_width
    if kind == "dot_product":
        tensors = [
            draw(adj.num_dst, width, 1, spread),
            draw(adj.num_src, width, 2),
            draw(adj.num_src, value_width, 3),
        ]
    elif kind == "additive":
        tensors = [scores(adj.num_dst, 1), scores(adj.num_src, 2), draw(adj.num_src, value_width, 3)]
    else:
        att = features(heads, width, precise, "contiguous", device, 3) * spread * width**-0.5
        tensors = [draw(adj.num_dst, width, 1), draw(adj.num_src, width, 2), att]
    biased = biased and kind != "gatv2"
    if biased:
        tensors.append(features(adj.num_values, heads, precise, "contiguous", device, 4))
    if requires_grad:
        tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    return Problem(kind, tensors, biased)


def random_graph(num_dst: int = 40, num_src: int = 60, num_edges: int = 600) -> EdgeList:
    """Duplicates, a row without edges and one with half of them."""
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, n, (num_edges,), generator=generator) for n in (num_dst, num_src))
    row[: num_edges // 2] = 3 % num_dst
    row[row == 4] = 0
    return EdgeList(row, col, (num_dst, num_src))


def with_loops(device: str) -> Adjacency:
    """Loops replace some of the caller's edges: more values than entries."""
    edges = random_graph(5, 6, 30)
    return Adjacency.from_coo(edges.row.to(device), edges.col.to(device), edges.shape, self_loops="replace")


def next_seed(manual_seed: int) -> int:
    """The seed that an operator draws after torch.manual_seed(manual_seed)."""
    torch.manual_seed(manual_seed)
    seed = int(torch.randint(2**63 - 1, ()))
    torch.manual_seed(manual_seed)
    return seed
