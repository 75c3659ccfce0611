"""Dtypes: the kernels' codes for them, what sums are kept in."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import _C

#: Feature dtypes and their codes in kernels/include/fastsparse/views.h.
DTYPE_CODE = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
_C.know_dtypes(dtypes=list(DTYPE_CODE))


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, which takes the host 1 us even where it gives the tensor itself."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


#: What sums of each feature dtype are kept in.
ACCUMULATION_DTYPE = dict.fromkeys(DTYPE_CODE, torch.float32) | {torch.float64: torch.float64}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32; warm calls look it up themselves."""
    return ACCUMULATION_DTYPE.get(dtype, torch.float32)
