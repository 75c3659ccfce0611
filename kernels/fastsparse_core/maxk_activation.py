"""MaxK as an activation module."""

from __future__ import annotations

from torch import Tensor, nn

from fastsparse_core.formats.cbsr import CBSR
from fastsparse_core.ops.maxk import check_k, maxk, maxk_dense


class MaxK(nn.Module):
    r"""Keeps the k largest entries of the last dimension and sets the others to 0; replaces ReLU.

    .. math::
        \mathrm{MaxK}(\mathbf{x})_c = \begin{cases} x_c & c \in \operatorname{top}_k(\mathbf{x}) \\ 0 &
        \text{else} \end{cases}

    From MaxK-GNN (arXiv:2312.08656), section 3.1. Calling the module returns dense features. :meth:`compress`
    returns only the kept entries, for the FastMaxK layers. For the backward pass, a call of the module stores
    one bit per entry, and :meth:`compress` stores k bytes per row (2 k bytes if rows have more than 256
    columns). ReLU stores its whole result.

    Args:
        k: number of kept entries per row, at most the width D of the features.

    Raises:
        TypeError: ``k`` is not an int.
        ValueError: ``k`` is less than 1.

    Example:
        >>> import torch
        >>> from fastsparse_core import MaxK
        >>> MaxK(2)(torch.tensor([1.0, 5.0, -2.0, 3.0]))
        tensor([0., 5., 0., 3.])
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        check_k(k)
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        """Computes MaxK along the last dimension.

        Args:
            x: (..., D), float64, float32, float16 or bfloat16.

        Returns:
            The result, in the shape and dtype of ``x``.

        Raises:
            TypeError: the dtype is not supported.
            ValueError: ``x`` has no dimension, or ``k`` is more than D.
        """
        if x.dim() == 2:
            return maxk_dense(x, self.k)
        if x.dim() == 0:
            raise ValueError("x: expected at least one dimension, got a tensor without dimensions")
        return maxk_dense(x.reshape(-1, x.size(-1)), self.k).reshape(x.shape)

    def compress(self, x: Tensor) -> CBSR:
        """Returns the kept entries of a matrix (n, D), without the zeros.

        Args:
            x: (n, D), float64, float32, float16 or bfloat16.

        Raises:
            TypeError: the dtype is not supported.
            ValueError: ``x`` is not a matrix, or ``k`` is more than D.
        """
        return maxk(x, self.k)

    def extra_repr(self) -> str:
        """The arguments that the module's repr shows: ``k``."""
        return f"k={self.k}"
