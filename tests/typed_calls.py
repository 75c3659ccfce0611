"""Calls that a type checker must accept or reject; `make typecheck` reads this file, but nothing runs it.

A comment that ignores an error marks a call to reject: mypy reports the comment if there is no error.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor
from typing_extensions import assert_type

import fastsparse_core
import fastsparse_dgl
import fastsparse_pyg
from fastsparse_core import Adjacency, scatter, segment_reduce, spmm, ssd


class Model(torch.nn.Module):
    """A model with a method of its own."""

    def own(self) -> int:
        """A number."""
        return 1


def names(adj: Adjacency) -> None:
    fastsparse_core.Adjacancy  # type: ignore[attr-defined]  # noqa: B018
    fastsparse_pyg.FastGNCConv  # type: ignore[attr-defined]  # noqa: B018
    fastsparse_dgl.FastGraphCov  # type: ignore[attr-defined]  # noqa: B018
    adj.num_edgs  # type: ignore[attr-defined]  # noqa: B018


def reductions(adj: Adjacency, x: Tensor, index: Tensor) -> None:
    assert_type(spmm(adj, x, reduce="mean"), Tensor)
    spmm(adj, x, reduce="average")  # type: ignore[arg-type]
    assert_type(ssd(adj, fastsparse_core.maxk(x, 2), reduce="mean"), Tensor)
    ssd(adj, fastsparse_core.maxk(x, 2), reduce="max")  # type: ignore[arg-type]
    assert_type(scatter(x, index, reduce="std"), Tensor)
    assert_type(scatter(x, index, reduce="max", return_arg=True), tuple[Tensor, Tensor])
    scatter(x, index, reduce="add")  # type: ignore[call-overload]
    assert_type(segment_reduce(x, index, "mul"), Tensor)
    segment_reduce(x, index, "prod")  # type: ignore[call-overload]


def kinds_of_edges(
    x: Tensor, edge_index: Tensor, own: EdgeIndex, matrix: SparseTensor, adj: Adjacency
) -> None:
    layer = fastsparse_pyg.FastGATConv(8, 8)
    for edges in (edge_index, own, matrix, adj, edge_index.to_sparse_csr()):
        layer.forward(x, edges)
    assert_type(fastsparse_pyg.FastGCNConv(8, 8).forward(x, adj), Tensor)
    fastsparse_pyg.FastGCNConv(8, 8).forward(x, adj, edge_weights=x)  # type: ignore[call-arg]


def captured(model: Model, x: Tensor) -> None:
    assert_type(fastsparse_core.capture(model), Model)
    assert_type(fastsparse_core.capture(model).own(), int)

    @fastsparse_core.capture
    def step(x: Tensor) -> Tensor:
        return x.sum()

    assert_type(step(x), Tensor)
    step("x")  # type: ignore[arg-type]
