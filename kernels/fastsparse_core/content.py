"""Checks that tensors have memory before their addresses are passed to the extension."""

from __future__ import annotations

import torch
from torch import Tensor


def has_content(tensor: Tensor) -> bool:
    """Returns True if kernels may read a tensor's memory: it is not fake, meta, functional or a wrapper."""
    return (
        not tensor.is_meta
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not torch._is_functional_tensor(tensor)
    )


def check_content(what: str, *tensors: Tensor | None) -> None:
    """Raises an error for tensors without memory, because the extension would read an invalid address.

    Args:
        what: name of the tensors, for the error message.
        tensors: tensors; None is skipped.

    Raises:
        TypeError: a tensor is fake, on the meta device, functional, or a wrapper of other tensors.
    """
    for tensor in tensors:
        if tensor is not None and not has_content(tensor):
            kind = "on the meta device" if tensor.is_meta else f"a {type(tensor).__name__} without content"
            raise TypeError(
                f"{what}: expected tensors in CPU or GPU memory, got one {kind}; build the structure outside "
                "of FakeTensorMode and similar modes"
            )
