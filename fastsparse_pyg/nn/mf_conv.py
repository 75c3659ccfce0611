"""Convolution on molecular fingerprints, whose weights depend on a node's degree."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.nn import MFConv
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import OptPairTensor, Size

from fastsparse_core import Adjacency
from fastsparse_core.fallback import Reason
from fastsparse_core.fused.joint_linear import add_linear
from fastsparse_pyg import fallback
from fastsparse_pyg.graph import EdgesLike
from fastsparse_pyg.nn.base import ANY_REDUCTION, FastConv, is_plain_linear, size_for_pyg

_UNKNOWN_SIZES = Reason(
    "torch.compile, which cannot handle sizes that depend on the edges", fallback.NOT_COMPILED
)


class FastMFConv(FastConv, MFConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.MFConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}^{(\deg(i))}_1 \mathbf{x}_i + \mathbf{W}^{(\deg(i))}_2
        \sum_{j \in \mathcal{N}(i)} \mathbf{x}_j

    From "Convolutional Networks on Graphs for Learning Molecular Fingerprints"
    (https://arxiv.org/abs/1509.09292). Degrees above ``max_degree`` use the weights of ``max_degree``. Nodes
    are sorted by degree once per structure, not in every call. For a ``SparseTensor`` and under
    ``torch.compile``, PyG's own code runs. As in PyG, a ``torch.sparse`` matrix is not supported.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastMFConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastMFConv(8, 4)(x, edge_index).shape
        torch.Size([3, 4])
    """

    _aggregations = ANY_REDUCTION
    _features = "matrix"
    _takes_matrices = False

    def forward(self, x: Tensor | OptPairTensor, edge_index: EdgesLike, size: Size = None) -> Tensor:
        """Computes the new node features (N, F_out), or (number of destinations, F_out) for a pair.

        Arguments and errors are the same as in :meth:`FastSAGEConv.forward`.
        """
        adj = _UNKNOWN_SIZES if torch.compiler.is_compiling() else self._structure(x, edge_index, size)
        if not isinstance(adj, Adjacency):
            return self._original_forward(adj, x, edge_index, size_for_pyg(edge_index, size))
        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        key = ("fastsparse_pyg.by_degree", self.max_degree)
        order, place, counts = adj.derived(key, lambda: _by_degree(adj, self.max_degree))
        sums = self._aggregate_neighbours(adj, x_src, None).index_select(0, order).split(counts)
        roots = [None] * len(counts) if x_dst is None else x_dst.index_select(0, order).split(counts)
        parts = []
        for lin, lin_root, of_sums, of_roots in zip(self.lins_l, self.lins_r, sums, roots, strict=True):
            out = lin(of_sums)
            if of_roots is not None:
                plain = is_plain_linear(lin)  # `add_linear` overwrites `out`, which hooks may have stored
                out = add_linear(out, (of_roots,), (lin_root,), Linear) if plain else out + lin_root(of_roots)
            parts.append(out)
        return torch.cat(parts).index_select(0, place)


def _by_degree(adj: Adjacency, most: int) -> tuple[Tensor, Tensor, list[int]]:
    """Returns the destinations sorted by degree, the inverse permutation, and the nodes per degree."""
    degree = adj.in_degree().clamp(max=most)
    order = degree.argsort(stable=True)
    return order, order.argsort(), torch.bincount(degree, minlength=most + 1).tolist()
