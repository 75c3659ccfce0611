"""A linear layer whose weight matrix is pruned: a fixed structure with trainable values."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsparse_core import choose
from fastsparse_core.adjacency import Adjacency
from fastsparse_core.ops._common import DTYPE_CODE, autocast_dtype
from fastsparse_core.ops.csr_to_dense import csr_to_dense
from fastsparse_core.ops.spmm import spmm


class SparseLinear(nn.Module):
    r"""A pruned linear layer, the weights of Deep Learning Matrix Collection (DLMC) for example.

    .. math::
        \mathbf{y} = \mathbf{W} \mathbf{x} + \mathbf{b}, \quad W_{ij} = 0 \text{ where the mask is False}

    Only the values that the mask leaves are parameters; the structure is fixed. ``"sparse"`` computes
    :math:`\mathbf{Y}^{\top} = \mathbf{W} \mathbf{X}^{\top}` with :func:`spmm`, whose features are the batch:
    it copies ``x`` unless its last dimension has the largest stride, and gives a result laid out like that,
    so that layers in a row, with functions of single elements between them, copy once. ``"dense"`` writes the
    matrix with its zeros and leaves the product to :func:`torch.nn.functional.linear`; autograd keeps that
    matrix until the backward pass. ``"auto"`` takes what :func:`choose.sparse_linear_algorithm` expects to be
    faster.

    Args:
        in_features: width of ``x``.
        out_features: width of the result.
        mask: bool (out_features, in_features), True where a weight stays; or a ``torch.sparse_csr`` matrix,
            whose values become the first weights; or an :class:`Adjacency` of that shape.
        bias: whether the layer has a bias.
        algorithm: ``"auto"``, ``"sparse"`` or ``"dense"``.
        device: of the parameters; None: that of ``mask``.
        dtype: of the parameters; None: that of a sparse matrix's values, else PyTorch's default.

    Attributes:
        values: weights, (num_weights,), row by row.
        bias: (out_features,), or None.
        rowptr: int64 (out_features + 1,), the range of weights of every row; in the state_dict.
        col: int32 (num_weights,), the input of every weight; in the state_dict.

    Raises:
        TypeError: ``mask`` is nothing of the above.
        ValueError: shapes do not fit, or the algorithm is unknown.

    Examples:
        >>> layer = SparseLinear(3, 2, torch.tensor([[True, False, True], [False, False, True]]))
        >>> layer.values.shape
        torch.Size([3])
    """

    rowptr: Tensor
    col: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mask: Tensor | Adjacency,
        bias: bool = True,
        *,
        algorithm: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        choose.check_algorithm(algorithm, choose.SPARSE_LINEAR_ALGORITHMS)
        self.in_features, self.out_features, self.algorithm = in_features, out_features, algorithm
        rowptr, col, values = _structure_of(mask, (out_features, in_features))
        if values is not None and dtype is None:
            dtype = values.dtype
        device = col.device if device is None else device
        self.register_buffer("rowptr", rowptr.to(device))
        self.register_buffer("col", col.to(device))
        self.values = nn.Parameter(torch.empty(col.numel(), device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        if values is not None:
            with torch.no_grad():
                self.values.copy_(values)
        self._built: tuple[Any, Adjacency] | None = None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        mask: Tensor | Adjacency | None = None,
        *,
        sparsity: float = 0.9,
        algorithm: str = "auto",
    ) -> SparseLinear:
        """A pruned copy of a dense layer.

        Args:
            linear: whose weights and bias are copied.
            mask: which weights stay, as for the constructor, without values; None: the greatest by magnitude.
            sparsity: share of weights that go, from 0 to 1, where there is no mask.
            algorithm: as for the constructor.
        """
        weight = linear.weight.detach()
        if mask is None:
            if not 0 <= sparsity <= 1:
                raise ValueError(f"sparsity: expected a share from 0 to 1, got {sparsity}")
            kept = weight.numel() - round(sparsity * weight.numel())
            mask = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
            mask[weight.abs().flatten().topk(kept).indices] = True
            mask = mask.view_as(weight)
        layer = cls(
            linear.in_features,
            linear.out_features,
            mask,
            bias=linear.bias is not None,
            algorithm=algorithm,
            device=weight.device,
            dtype=weight.dtype,
        )
        with torch.no_grad():
            layer.values.copy_(weight[layer.adjacency.row().long(), layer.col.long()])
            if layer.bias is not None:
                layer.bias.copy_(linear.bias)
        return layer

    def reset_parameters(self) -> None:
        """Draws weights and bias as :class:`torch.nn.Linear` draws those of the dense layer."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        nn.init.uniform_(self.values, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def adjacency(self) -> Adjacency:
        """The structure, rows = outputs, on the device of the layer; rebuilt where the buffers changed."""
        parts = (self.rowptr, self.col)
        # Tensors of inference mode have no version; they cannot be written outside of it either.
        stamp = tuple(
            (id(part), part.data_ptr(), 0 if part.is_inference() else part._version) for part in parts
        )
        if self._built is None or self._built[0] != stamp:
            shape = (self.out_features, self.in_features)
            self._built = (stamp, Adjacency.from_csr(*parts, shape, group_rows="none"))
        return self._built[1]

    def to_dense(self) -> Tensor:
        """The weight matrix with its zeros, (out_features, in_features); differentiable."""
        return csr_to_dense(self.adjacency, self.values)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer.

        Args:
            x: (..., in_features), float64, float32, float16 or bfloat16, in the dtype of the weights unless
                autocast is on.

        Returns:
            (..., out_features); differentiable in ``x``, weights and bias.

        Raises:
            TypeError: the dtype is not supported.
            ValueError: the width or the device does not fit.
        """
        if not isinstance(x, Tensor) or x.dtype not in DTYPE_CODE:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"x: expected a float64, float32, float16 or bfloat16 tensor, got {kind}")
        if x.dim() == 0 or x.size(-1) != self.in_features:
            raise ValueError(
                f"x: expected in_features = {self.in_features} in the last dimension, "
                f"got shape {tuple(x.shape)}"
            )
        if x.device != self.values.device:
            raise ValueError(
                f"x: expected device {self.values.device} like the weights, got {x.device}; "
                "move one with .to()"
            )
        autocast = None if x.dtype == torch.float64 else autocast_dtype(x)
        dtype = autocast or x.dtype
        if dtype != self.values.dtype and autocast is None:
            raise ValueError(
                f"x: expected {self.values.dtype} like the weights, got {x.dtype}; convert one with .to()"
            )
        batch = x.numel() // self.in_features if self.in_features else 0
        if self._algorithm(dtype, batch) == "dense":
            return F.linear(x, csr_to_dense(self.adjacency, self.values.to(dtype)), self.bias)
        rows = x.reshape(x.shape[:-1].numel(), self.in_features)
        out = spmm(self.adjacency, rows.t(), self.values).t()
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.reshape(*x.shape[:-1], self.out_features)

    def _algorithm(self, dtype: torch.dtype, batch: int) -> str:
        shape = (self.out_features, self.in_features)
        return choose.sparse_linear_algorithm(
            self.algorithm, self.values.device, dtype, shape, self.values.numel(), batch
        )

    def extra_repr(self) -> str:
        """Sizes and options, for `repr`."""
        total = self.out_features * self.in_features
        sparsity = 1 - self.values.numel() / total if total else 0.0
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, sparsity={sparsity:.3f}"
            + (f", algorithm={self.algorithm!r}" if self.algorithm != "auto" else "")
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_built": None}


def _structure_of(mask: Tensor | Adjacency, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Row pointers, columns and values, if there are any, of what the constructor takes."""
    if not isinstance(mask, (Tensor, Adjacency)):
        raise TypeError(
            f"mask: expected a bool tensor, a sparse CSR tensor or an Adjacency, got {type(mask).__name__}"
        )
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"mask: expected shape (out_features, in_features) = {shape}, got {tuple(mask.shape)}"
        )
    if isinstance(mask, Adjacency):
        return mask.rowptr, mask.col, None
    if mask.layout is torch.sparse_csr:
        values = mask.values().detach() if mask.is_floating_point() else None
        return mask.crow_indices().long(), mask.col_indices().int(), values
    if mask.layout is not torch.strided or mask.dtype != torch.bool:
        raise TypeError(
            "mask: expected a bool tensor, a sparse CSR tensor or an Adjacency, got a tensor of dtype "
            f"{mask.dtype} and layout {mask.layout}; pass (weight != 0)"
        )
    rowptr = torch.zeros(shape[0] + 1, dtype=torch.int64, device=mask.device)
    torch.cumsum(mask.sum(1), 0, out=rowptr[1:])
    return rowptr, mask.nonzero()[:, 1].int(), None
