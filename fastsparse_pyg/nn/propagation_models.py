"""Drop-ins for PyG's models LabelPropagation and LightGCN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.models import LabelPropagation, LightGCN
from torch_geometric.typing import OptTensor, SparseTensor
from torch_geometric.utils import one_hot

from fastsparse_core.fallback import Reason
from fastsparse_pyg.graph import EdgesLike
from fastsparse_pyg.nn.base import FastConv
from fastsparse_pyg.nn.propagation import PropagatingConv
from fastsparse_pyg.nn.spmm_convs import FastLGConv


class FastLabelPropagation(PropagatingConv, LabelPropagation):
    r"""PyG's :class:`~torch_geometric.nn.models.LabelPropagation` on FastSparse kernels.

    .. math::
        \mathbf{Y}^{(l+1)} = \alpha \mathbf{D}^{-1/2} \mathbf{A} \mathbf{D}^{-1/2} \mathbf{Y}^{(l)} + (1 -
        \alpha) \mathbf{Y}^{(0)}

    From Zhu and Ghahramani, "Learning from Labeled and Unlabeled Data with Label Propagation" (2002).

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastLabelPropagation
        >>> edge_index, is_known = torch.tensor([[1, 2], [2, 1]]), torch.tensor([True, True, False])
        >>> model = FastLabelPropagation(num_layers=2, alpha=0.9)
        >>> model(torch.tensor([0, 1, 0]), edge_index, mask=is_known).argmax(dim=1)
        tensor([0, 1, 1])
    """

    @torch.no_grad()
    def forward(
        self,
        y: Tensor,
        edge_index: EdgesLike,
        mask: OptTensor = None,
        edge_weight: OptTensor = None,
        post_step: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Propagates labels.

        Args:
            y: labels, int64 (num_nodes,), or a number per node and class.
            edge_index: edges, or a sparse matrix or Adjacency whose rows are the destinations.
            mask: nodes whose labels are known, as a bool mask (num_nodes,) or indices; None: all nodes.
            edge_weight: edge weights, floating (E,), which are used without normalisation; None: the
                symmetric normalisation of the formula above.
            post_step: function that is applied to the labels after every step; None: labels are clamped to
                the range from 0 to 1.

        Returns:
            Labels after the last step, a floating-point number per node and class.
        """
        labels = one_hot(y.view(-1)) if y.dtype == torch.long and y.size(0) == y.numel() else y
        out = labels
        if mask is not None:
            out = torch.zeros_like(labels)
            out[mask] = labels[mask]
        has_value = edge_weight is not None
        if isinstance(edge_index, SparseTensor):
            has_value = edge_index.has_value()
        matrix = self._propagation(out, edge_index, edge_weight, normalize=not has_value)
        if isinstance(matrix, Reason):
            edge_weight = self._written_for_original(labels, edge_index, edge_weight)
            return FastConv._original_forward(self, matrix, y, edge_index, mask, edge_weight, post_step)
        # For edges without weights, PyG makes float32 weights, so its sums are at least float32.
        dtype = torch.promote_types(out.dtype, torch.float32 if matrix.value is None else matrix.value.dtype)
        rest = ((1 - self.alpha) * out).to(dtype)
        for _ in range(self.num_layers):
            out = torch.add(rest, self._multiply(matrix, out), alpha=self.alpha)
            out = out.clamp_(0.0, 1.0) if post_step is None else post_step(out)
        return out


class FastLightGCN(LightGCN):
    r"""PyG's :class:`~torch_geometric.nn.models.LightGCN` with :class:`FastLGConv` for its layers.

    .. math::
        \mathbf{x}_i = \sum_{l=0}^{L} \alpha_l \mathbf{x}^{(l)}_i, \quad \mathbf{x}^{(l+1)}_i = \sum_{j \in
        \mathcal{N}(i)} \frac{1}{\sqrt{\deg(i) \deg(j)}} \mathbf{x}^{(l)}_j

    From "LightGCN" (https://arxiv.org/abs/2002.02126). Arguments, parameters and results are the same as
    PyG's.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastLightGCN
        >>> model = FastLightGCN(num_nodes=3, embedding_dim=8, num_layers=2)
        >>> model.get_embedding(torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        num_nodes: int,
        embedding_dim: int,
        num_layers: int,
        alpha: float | Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_nodes, embedding_dim, num_layers, alpha, **kwargs)
        self.convs = torch.nn.ModuleList(FastLGConv(**kwargs) for _ in range(num_layers))
