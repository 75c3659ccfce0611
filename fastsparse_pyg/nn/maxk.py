"""Layers on sparse activations: MaxK before the aggregation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.typing import OptTensor, Size

from fastsparse_core import CBSR, Adjacency, MaxK, ssd
from fastsparse_core.fused.maxk_linear import (
    can_maxk_linear,
    densifies,
    maxk_linear,
)
from fastsparse_pyg.graph import EdgesLike, values_of
from fastsparse_pyg.nn.base import is_plain_linear
from fastsparse_pyg.nn.gcn_conv import FastGCNConv
from fastsparse_pyg.nn.propagation import Propagation, message_dtype
from fastsparse_pyg.nn.sage_conv import FastSAGEConv


def _check_k(k: int, width: int) -> None:
    if k > width > 0:  # a lazily initialised layer's width is not known yet
        raise ValueError(f"k: expected at most {width}, the width of the input, got {k}")


def _dense(x: Any, activation: MaxK) -> Any:
    """Returns MaxK of the features as a dense tensor. CBSR features are only converted to a dense tensor."""
    if isinstance(x, (tuple, list)):
        return tuple(_dense(part, activation) for part in x)
    if isinstance(x, CBSR):
        return x.to_dense()
    return activation(x) if isinstance(x, Tensor) else x


def _compressed(x: Tensor | CBSR, activation: MaxK) -> CBSR:
    return x if isinstance(x, CBSR) else activation.compress(x)


def _densifies(x: Tensor | CBSR, activation: MaxK) -> bool:
    if isinstance(x, CBSR):
        return densifies(x.values, x.values.size(1), x.width)
    return densifies(x, activation.k, x.size(1))


def _values(x: Tensor | CBSR) -> Tensor:
    """Returns a tensor with the same number of rows, dtype and device as the features."""
    return x.values if isinstance(x, CBSR) else x


class FastMaxKGCNConv(FastGCNConv):
    r"""Graph convolution on MaxK's sparse activations.

    .. math::
        \mathbf{X}^{\prime} = \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}} \mathbf{\hat{D}}^{-1/2} \,
        \mathrm{MaxK}(\mathbf{X}) \, \mathbf{\Theta}

    From MaxK-GNN (arXiv:2312.08656, section 3): ``FastMaxKGCNConv(F, G, k=k)`` gives the result of
    ``GCNConv(F, G)(MaxK(k)(x), ...)``. In a stack of layers MaxK replaces ReLU; put a linear layer in front
    of the stack. Only the k kept entries of each row are gathered (:func:`fastsparse_core.ssd`). The
    exception is a large k on a GPU (more than a quarter of the features, or an eighth in 16 bits), for which
    dense rows are faster. Parameters and ``state_dict`` are those of
    :class:`~torch_geometric.nn.conv.GCNConv`. If PyG's own code has to run (with message hooks or in explain
    mode), it gets the dense MaxK features.

    Args:
        in_channels: width of the input; -1: taken from the first call.
        out_channels: width of the output.
        k: kept entries of each row, from 1 to ``in_channels``.
        recompute: whether the backward pass aggregates the kept entries again, for the gradient of the
            weight. This saves memory: otherwise the dense sums are stored in addition to the kept entries.
        kwargs: further arguments of GCNConv.

    Shapes:
        - **input:** as :class:`FastGCNConv`, or :class:`~fastsparse_core.CBSR`, to which MaxK is not applied
          again
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastMaxKGCNConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastMaxKGCNConv(8, 4, k=2)(x, edge_index).shape
        torch.Size([3, 4])
    """

    def __init__(
        self, in_channels: int, out_channels: int, k: int, *, recompute: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(in_channels, out_channels, **kwargs)
        self.maxk = MaxK(k)
        self.recompute = recompute
        _check_k(k, in_channels)

    def forward(self, x: Tensor | CBSR, edge_index: EdgesLike, edge_weight: OptTensor = None) -> Tensor:
        """Computes the new node features.

        Args:
            x: node features (N, F_in), float64, float32, float16 or bfloat16, or
                :class:`~fastsparse_core.CBSR`, to which MaxK is not applied again.
            edge_index: as in :meth:`FastGCNConv.forward`.
            edge_weight: as in :meth:`FastGCNConv.forward`.

        Returns:
            Node features (..., N, F_out).

        Raises:
            ValueError: sizes, dtypes or devices do not fit together, or the features are narrower than k.
            TypeError: features of another type.
        """
        # `_propagation` gets the CBSR values in place of the features. It uses only the number of rows, dtype
        # and device; the number of dimensions is checked here.
        if isinstance(x, (tuple, list)) or _values(x).dim() != 2:
            return super().forward(_dense(x, self.maxk), edge_index, edge_weight)
        like = _values(x)
        found = None if _densifies(x, self.maxk) else self._propagation(like, edge_index, edge_weight)
        if not isinstance(found, Propagation) or (
            found.value is not None and message_dtype(like, found.value) != like.dtype
        ):
            return super().forward(_dense(x, self.maxk), edge_index, edge_weight)
        adj, value, scale_dst, scale_src, _ = found
        cbsr, lin = _compressed(x, self.maxk), self.lin
        if (
            is_plain_linear(lin)
            and lin.bias is None
            and can_maxk_linear(adj, cbsr, lin.weight, self.bias, out_by_in=True)
        ):
            return maxk_linear(
                adj,
                cbsr,
                lin.weight,
                self.bias,
                value=value,
                out_by_in=True,
                recompute=self.recompute,
                scale_dst=scale_dst,
                scale_src=scale_src,
            )
        out = lin(ssd(adj, cbsr, value, scale_dst=scale_dst, scale_src=scale_src))
        return out if self.bias is None else out + self.bias


class FastMaxKSAGEConv(FastSAGEConv):
    r"""GraphSAGE on MaxK's sparse activations.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathrm{MaxK}(\mathbf{x}_i) + \mathbf{W}_2 \cdot \mathrm{aggr}_{j
        \in \mathcal{N}(i)} \mathrm{MaxK}(\mathbf{x}_j)

    From MaxK-GNN (arXiv:2312.08656, section 3): ``FastMaxKSAGEConv(F, G, k=k)`` gives the result of
    ``SAGEConv(F, G)(MaxK(k)(x), ...)``; see :class:`FastMaxKGCNConv`. With ``aggr`` sum, add or mean and
    without ``project``, the sparse rows are aggregated, unless k is large; otherwise the dense MaxK features
    are.

    Args:
        in_channels: width of the input, or a pair for sources and destinations; -1: taken from the first
            call.
        out_channels: width of the output.
        k: kept entries of each row, from 1 to ``in_channels``.
        recompute: as for :class:`FastMaxKGCNConv`.
        kwargs: further arguments of SAGEConv.

    Shapes:
        - **input:** as :class:`FastSAGEConv`, where each tensor may also be a :class:`~fastsparse_core.CBSR`,
          to which MaxK is not applied again
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})` or :math:`(|\mathcal{V_t}|, F_{out})`

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastMaxKSAGEConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastMaxKSAGEConv(8, 4, k=2)(x, edge_index).shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        k: int,
        *,
        recompute: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, **kwargs)
        self.maxk = MaxK(k)
        self.recompute = recompute
        for width in (in_channels,) if isinstance(in_channels, int) else in_channels:
            _check_k(k, width)

    def forward(self, x: Any, edge_index: EdgesLike, size: Size = None) -> Tensor:
        """Computes the new node features.

        Args:
            x: node features (N, F_in), float64, float32, float16 or bfloat16, or
                :class:`~fastsparse_core.CBSR`, to which MaxK is not applied again; or a pair of either.
            edge_index: as in :meth:`FastSAGEConv.forward`.
            size: as in :meth:`FastSAGEConv.forward`.

        Returns:
            Node features (N, F_out), or (number of destinations, F_out) for a pair.

        Raises:
            ValueError: sizes, dtypes or devices do not fit together, or features are narrower than k.
            TypeError: features of another type.
        """
        x_src, x_dst = x if isinstance(x, (tuple, list)) else (x, x)
        values = _values(x_src)
        like = (values, None if x_dst is None else values if x_dst is x_src else _values(x_dst))
        adj = None
        if values.dim() == 2 and not (_densifies(x_src, self.maxk) or self.project or self.node_dim % 2):
            adj = self._structure(like, edge_index, size)
        if not isinstance(adj, Adjacency) or (reduce := self._reduce()) not in ("sum", "mean"):
            return super().forward(_dense(x, self.maxk), edge_index, size)
        # PyG multiplies by the values of a torch.sparse matrix, but ignores the values of a SparseTensor.
        value = (
            None if getattr(edge_index, "layout", torch.strided) is torch.strided else values_of(edge_index)
        )
        if value is not None and not value.is_floating_point():
            value = value.to(values.dtype)
        cbsr, lin = _compressed(x_src, self.maxk), self.lin_l
        has_root = self.root_weight and x_dst is not None
        root = self.lin_r if has_root else None
        # If sources and destinations are the same, one kernel multiplies the destinations' rows as well.
        root_weight = None
        if root is not None and x_dst is x_src and is_plain_linear(root) and root.bias is None:
            root_weight = root.weight
        if is_plain_linear(lin) and can_maxk_linear(
            adj, cbsr, lin.weight, lin.bias, root_weight, out_by_in=True
        ):
            out = maxk_linear(
                adj,
                cbsr,
                lin.weight,
                lin.bias,
                root_weight,
                value,
                reduce,
                out_by_in=True,
                recompute=self.recompute,
            )
        else:
            root_weight = None
            out = lin(ssd(adj, cbsr, value, reduce))
        if root is not None and root_weight is None:
            out = out + root(cbsr.to_dense() if x_dst is x_src else _dense(x_dst, self.maxk))
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out
