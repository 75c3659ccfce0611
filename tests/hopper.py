"""The kernels behind `aggregate_linear` on Hopper, and what stands for them where there is no such GPU."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fastsparse_core import _C, gpu
from fastsparse_core.fused import aggregate_transform as fused
from fastsparse_core.structure.row_formats import RowFormats

KERNELS = ("aggregate_linear", "aggregate_linear_backward")


@dataclass
class Hopper:
    """Where the kernels run, and which of them did."""

    device: str
    launched: list[str] = field(default_factory=list)


def prepare(device: str, monkeypatch: pytest.MonkeyPatch) -> Hopper:
    """Lets structures of any number of rows have the kernels; on the CPU those below."""
    small = dataclasses.replace(gpu.profile_of(torch.device(device)), least_rows=1)
    monkeypatch.setattr(gpu, "_override", small)
    if device == "cpu":
        _pretend(monkeypatch)
    elif not gpu.has_wgmma(torch.device(device)):
        pytest.skip("needs a GPU of architecture 9.0 and a build for it")
    hopper = Hopper(device)
    for name in KERNELS:
        monkeypatch.setattr(_C, name, _recorded(name, getattr(_C, name), hopper.launched))
    return hopper


def _recorded(name: str, kernel: Callable[..., None], launched: list[str]) -> Callable[..., None]:
    def launch(**arguments: Any) -> None:
        launched.append(name)
        kernel(**arguments)

    return launch


def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sums of bfloat16 terms on the CPU, at the addresses that a launch is given."""
    monkeypatch.setattr(fused, "_has_kernels", lambda device: True)
    monkeypatch.setattr(RowFormats, "plain_structure", property(lambda adj: adj))
    for name, kernel in zip(KERNELS, (_forward, _backward), strict=True):
        monkeypatch.setattr(_C, name, kernel)


Memory = Tensor | int | None


def _address(memory: Memory) -> int:
    return memory.data_ptr() if isinstance(memory, Tensor) else memory or 0


def _matrix(memory: Memory, rows: int, width: int, stride: int) -> Tensor:
    """What is at an address, as the kernels read it."""
    address = _address(memory)
    assert rows > 0, "an empty grid cannot be launched"
    assert address > 0
    assert address % 16 == 0
    assert width % 4 == stride % 4 == 0
    numbers = (ctypes.c_float * ((rows - 1) * stride + width)).from_address(address)
    return torch.frombuffer(numbers, dtype=torch.float32).as_strided((rows, width), (stride, 1))


def _vector(memory: Memory, length: int) -> Tensor:
    """Likewise, by single numbers."""
    return torch.frombuffer((ctypes.c_float * length).from_address(_address(memory)), dtype=torch.float32)


def _terms(x: Tensor, count: int) -> list[Tensor]:
    """bfloat16 terms of float32 numbers, each what the upper half of the bits left holds."""
    terms = []
    for _ in range(count):
        terms.append((x.contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32))
        x = x - terms[-1]
    return terms


def _product(left: Tensor, right: Tensor, num_terms: int) -> Tensor:
    lefts, rights = _terms(left, num_terms), _terms(right, num_terms)
    total = torch.zeros(left.size(0), right.size(1), dtype=torch.float64)
    for order in reversed(range(num_terms)):
        for term in range(order + 1):
            total += lefts[term].double() @ rights[order - term].double()
    return total


def _forward(
    structure: Any,
    sums_given: bool,
    scale_dst: Memory,
    x: Tensor,
    weight: Tensor,
    root_weight: Memory,
    bias: Memory,
    sums: Memory,
    out: Memory,
    num_terms: int,
    **_: Any,
) -> None:
    (num_dst, num_src), (out_width, width) = structure.shape, weight.shape
    features = _matrix(x, num_src, width, x.stride(0))
    matrices = [_matrix(each, out_width, width, width) for each in (weight, root_weight)]
    if sums_given:
        summed = _matrix(sums, num_dst, width, width)
    else:
        row = torch.arange(num_dst).repeat_interleave(structure.rowptr.diff())  # what is padded has no more
        summed = torch.zeros(num_dst, width).index_add_(0, row, features[structure.col[: row.numel()].long()])
        if scale_dst is not None:
            summed *= _vector(scale_dst, num_dst)[:, None]
        if sums is not None:
            _matrix(sums, num_dst, width, width).copy_(summed)
    total = _product(summed, matrices[0].t(), num_terms)
    total += _product(features[:num_dst], matrices[1].t(), num_terms)
    if bias is not None:
        total += _vector(bias, out_width)
    _matrix(out, num_dst, out_width, out_width).copy_(total)


def _backward(
    num_rows: int,
    grad: Memory,
    out_width: int,
    sums: Memory,
    x: Tensor,
    width: int,
    num_slabs: int,
    weights: Memory,
    bias: int,
    grad_weight: Memory,
    grad_root: Memory,
    grad_bias: Memory,
    num_terms: int,
    **_: Any,
) -> None:
    assert num_slabs > 0
    grads = _matrix(grad, num_rows, out_width, out_width)
    factors = (_matrix(sums, num_rows, width, width), _matrix(x, num_rows, width, x.stride(0)))
    results = _matrix(weights, num_slabs * 2 * out_width, width, width).view(num_slabs, 2, out_width, width)
    stages = -(-num_rows // 64)
    for slab in range(num_slabs):
        begin, end = (min(stages * place // num_slabs * 64, num_rows) for place in (slab, slab + 1))
        part = grads[begin:end]
        for result, factor in zip(results[slab], factors, strict=True):
            result.copy_(_product(part.t(), factor[begin:end], num_terms))
        if bias:
            _vector(bias + 4 * slab * out_width, out_width).copy_(part.double().sum(0))
    for total, nth in ((grad_weight, 0), (grad_root, 1)):
        _matrix(total, out_width, width, width).copy_(results[:, nth].double().sum(0))
    assert (grad_bias is not None) == bool(bias)
    if bias:
        parts = _vector(bias, num_slabs * out_width).view(num_slabs, out_width)
        _vector(grad_bias, out_width).copy_(parts.double().sum(0))
