"""Reference graph transformer layers, written with the frameworks' own message passing.

Neither framework has a layer of this kind for sparse graphs. The parameters, names and formulas are the same
as in ``fastsparse_pyg.GraphTransformerLayer`` and ``fastsparse_dgl.GraphTransformerLayer``, so a layer can
load the weights of the other.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

_NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


class _GraphTransformerLayer(nn.Module):
    """Attention over neighbours and a feed-forward part, each with residual and norm.

    Dwivedi and Bresson (2021), "A Generalization of Transformer Networks to Graphs", equations 4 to 8.

    Args:
        in_channels: Width of input and output.
        out_channels: Width of the output, equal to `in_channels`.
        heads: Number of heads.
        dropout: Dropout probability of the attention's result, and inside the feed-forward part.
        attention_dropout: Dropout probability of the attention weights.
        norm: ``batch`` or ``layer``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        self.heads = heads
        self.attention_dropout = attention_dropout
        self.query = nn.Linear(in_channels, out_channels, bias=False)
        self.key = nn.Linear(in_channels, out_channels, bias=False)
        self.value = nn.Linear(in_channels, out_channels, bias=False)
        self.out = nn.Linear(out_channels, out_channels)
        self.dropout = nn.Dropout(dropout)
        self.norm1 = _NORMS[norm](out_channels)
        self.feed_forward = nn.Sequential(
            nn.Linear(out_channels, 2 * out_channels),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(2 * out_channels, out_channels),
        )
        self.norm2 = _NORMS[norm](out_channels)

    def _layer(self, x: Tensor, graph: Any, num_targets: int) -> Tensor:
        """Computes the new features of the first `num_targets` nodes."""
        key, value = (linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.key, self.value))
        x = x[:num_targets]
        query = self.query(x).unflatten(-1, (self.heads, -1))
        out = self._attention(graph, query / math.sqrt(query.size(-1)), key, value)
        x = self.norm1(x + self.out(self.dropout(out.flatten(1))))
        return self.norm2(x + self.feed_forward(x))

    def _attention(self, graph: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise NotImplementedError

    def _dropped(self, weight: Tensor) -> Tensor:
        return F.dropout(weight, self.attention_dropout, self.training)


class PygGraphTransformerLayer(_GraphTransformerLayer):
    """With PyG's gather, softmax and scatter; called as ``layer(x, edge_index)``."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Computes (num_nodes, out_channels) from (num_nodes, in_channels) and edges (2, E)."""
        return self._layer(x, edge_index, x.size(0))

    def _attention(self, graph: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        utils = importlib.import_module("torch_geometric.utils")
        source, target = graph
        score = (query[target] * key[source]).sum(-1)
        weight = self._dropped(utils.softmax(score, target, num_nodes=query.size(0)))
        return utils.scatter(weight[..., None] * value[source], target, dim_size=query.size(0))


class DglGraphTransformerLayer(_GraphTransformerLayer):
    """With DGL's sampled product, edge softmax and weighted sum; called as ``layer(graph, x)``."""

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """Computes (num_nodes, out_channels) from a DGLGraph or block and (num_nodes, in_channels)."""
        return self._layer(x, graph, graph.num_dst_nodes())

    def _attention(self, graph: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ops = importlib.import_module("dgl.ops")
        score = ops.u_dot_v(graph, key, query)
        weight = self._dropped(ops.edge_softmax(graph, score))
        return ops.u_mul_e_sum(graph, value, weight)
