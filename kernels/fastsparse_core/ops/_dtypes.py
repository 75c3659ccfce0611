"""Dtypes: the kernels' codes for them, what sums are kept in, whether products may have fewer digits."""

from __future__ import annotations

import torch
from torch import Tensor

#: Feature dtypes and their codes in kernels/include/fastsparse/views.h.
DTYPE_CODE = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, which takes the host 1 us even where it gives the tensor itself."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def allows_tf32() -> bool:
    """Whether products of float32 matrices may have fewer digits, as PyTorch's own were told."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was told by a setting of torch 2.9, after which that question is an error
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
