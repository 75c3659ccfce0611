"""CBSR: its checks, its way to dense rows and back."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, TOLERANCE, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastsparse_core import CBSR, reference


def random_cbsr(num_rows: int, width: int, k: int, dtype: torch.dtype, device: str) -> CBSR:
    generator = torch.Generator().manual_seed(num_rows + width + k)
    ids = torch.rand(num_rows, width, generator=generator).argsort(1)[:, :k].sort(1).values
    values = torch.randn(num_rows, k, generator=generator, dtype=torch.float64).to(dtype)
    return CBSR.from_parts(values.to(device), ids.to(device), width)


@given(
    num_rows=st.sampled_from([0, 1, 2, 9, 150]),
    width=st.sampled_from([1, 2, 7, 64, 255, 256, 257, 300, 1024, 2049]),
    part=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_to_dense_and_back(device, poisoned_memory, num_rows, width, part, dtype):
    cbsr = random_cbsr(num_rows, width, max(1, round(part * width)), dtype, device)
    assert cbsr.ids.dtype == (torch.uint8 if width <= 256 else torch.uint16)
    dense = cbsr.to_dense()
    assert dense.dtype == dtype
    assert torch.equal(dense.double(), reference.cbsr_to_dense(cbsr.values, cbsr.ids, width))
    assert torch.equal(torch.ops.fastsparse.cbsr_gather(dense, cbsr.ids), cbsr.values)


@pytest.mark.parametrize("layout", ["row_stride", "transposed", "expanded"])
def test_gather_from_any_layout(device, layout):
    cbsr = random_cbsr(5, 300, 7, torch.float32, device)
    dense = torch.randn(300, 5, device=device).t()
    if layout == "row_stride":
        dense = torch.randn(5, 303, device=device)[:, :300]
    elif layout == "expanded":
        dense = torch.randn(1, 300, device=device).expand(5, 300)
    gathered = torch.ops.fastsparse.cbsr_gather(dense, cbsr.ids)
    assert torch.equal(gathered, dense.gather(1, cbsr.ids.long()))


def test_noncontiguous_parts(device):
    cbsr = random_cbsr(6, 20, 4, torch.float32, device)
    turned = CBSR(cbsr.values.t().contiguous().t(), cbsr.ids.t().contiguous().t(), 20)
    assert torch.equal(turned.to_dense(), cbsr.to_dense())


def test_attributes(device):
    cbsr = random_cbsr(6, 300, 4, torch.float16, device)
    assert (cbsr.num_rows, cbsr.k, cbsr.width, cbsr.dtype) == (6, 4, 300, torch.float16)
    assert cbsr.device.type == device
    assert cbsr.memory_usage() == {"values": 48, "ids": 48}
    assert random_cbsr(6, 256, 4, torch.float32, device).memory_usage() == {"values": 96, "ids": 24}
    doubled = cbsr.with_values(cbsr.values * 2)
    assert relative_error(doubled.to_dense(), cbsr.to_dense() * 2) <= TOLERANCE[torch.float16]
    with pytest.raises(ValueError, match=r"values: expected shape \(6, 4\)"):
        cbsr.with_values(cbsr.values[:, :3])


@pytest.mark.parametrize(
    ("ids", "width", "error", "message"),
    [
        ([[0, 3], [2, 2]], 5, ValueError, "ids: expected ascending columns .* a column twice in row 1"),
        ([[3, 0], [1, 2]], 5, ValueError, "ids: expected ascending columns .* descending columns in row 0"),
        ([[0, 5], [1, 2]], 5, ValueError, "ids: expected columns from 0 to 4, got 0 to 5"),
        ([[-1, 2], [1, 2]], 5, ValueError, "ids: expected columns from 0 to 4, got -1 to 2"),
        ([[0, 256], [1, 2]], 256, ValueError, "ids: expected columns from 0 to 255, got 0 to 256"),
        ([[0, 65_536], [1, 2]], 65_536, ValueError, "ids: expected columns from 0 to 65535"),
        ([[0, 1], [1, 2]], 65_537, ValueError, "width: expected at most 65536 columns"),
        ([[0], [1]], 5, ValueError, r"expected the same shape \(n, k\), got \(2, 2\) and \(2, 1\)"),
        ([[0, 1], [0, 1]], 1, ValueError, "ids: expected columns from 0 to 0"),
        ([[0.0, 1.0], [0.0, 1.0]], 5, TypeError, "ids: expected an integer tensor, got torch.float32"),
        ([[0, 1], [0, 1]], 5.0, TypeError, "width: expected an int, got float"),
    ],
)
def test_bad_ids(ids, width, error, message):
    with pytest.raises(error, match=message):
        CBSR.from_parts(torch.ones(2, 2), torch.tensor(ids), width)


def test_bad_parts():
    ids = torch.tensor([[0, 1]])
    with pytest.raises(TypeError, match=r"values: expected float64, .* got torch.int64"):
        CBSR.from_parts(ids, ids, 5)
    with pytest.raises(TypeError, match="ids: expected an integer tensor, got list"):
        CBSR.from_parts(torch.ones(1, 2), [[0, 1]], 5)
    with pytest.raises(TypeError, match=r"ids: expected torch.uint16 for width 300, got torch.uint8"):
        CBSR(torch.ones(1, 2), ids.to(torch.uint8), 300).check()
    with pytest.raises(ValueError, match="values: expected 1 to width = 5 entries in each row, got 0"):
        CBSR.from_parts(torch.ones(3, 0), torch.zeros(3, 0, dtype=torch.int64), 5)
