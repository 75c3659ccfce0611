"""Whether a pruned layer multiplies sparse or dense."""

from __future__ import annotations

import torch

SPARSE_LINEAR_ALGORITHMS = ("auto", "sparse", "dense")

#: Share of weights from which a pruned layer is faster as a dense product, on CUDA: tensor cores leave little
#: to win in 16 bit. In 32 bit that of matrices whose sources fit into shared memory, and that of larger ones.
_DENSE_FROM_IN_16_BIT = 0.005
_DENSE_FROM_OF_SMALL, _DENSE_FROM_OF_LARGE = 0.4, 0.08
#: Weights, with the zeros, up to which a matrix is small in this sense.
_SMALL_MATRIX = 2**21
#: The same on the CPU, where training decides: inference alone has its crossover beyond one half.
_DENSE_FROM_ON_CPU = 0.3
#: Rows of a batch below which writing the dense matrix costs more than either product.
_FEW_ROWS = 8
#: Bytes of a dense matrix that no speed is worth: autograd keeps one per layer.
_MOST_DENSE_BYTES = 2**30


def sparse_linear_algorithm(
    algorithm: str,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int],
    num_weights: int,
    batch: int,
) -> str:
    """Resolves ``"auto"`` to ``"sparse"`` (spmm) or ``"dense"`` (a product with the zeros written out).

    Args:
        algorithm: as the caller asked.
        device: of the weights.
        dtype: that is computed in.
        shape: of the weight matrix.
        num_weights: that are left of it.
        batch: rows that are multiplied.
    """
    if algorithm != "auto":
        return algorithm
    total = shape[0] * shape[1]
    if batch < _FEW_ROWS or total * dtype.itemsize > _MOST_DENSE_BYTES:
        return "sparse"
    if device.type != "cuda":
        dense_from = _DENSE_FROM_ON_CPU
    elif dtype.itemsize == 2:
        dense_from = _DENSE_FROM_IN_16_BIT
    else:
        dense_from = _DENSE_FROM_OF_SMALL if total <= _SMALL_MATRIX else _DENSE_FROM_OF_LARGE
    return "dense" if num_weights >= dense_from * total else "sparse"
