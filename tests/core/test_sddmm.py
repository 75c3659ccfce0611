"""sddmm against the float64 reference, its gradients, and its errors."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, LAYOUTS, TOLERANCE, WIDTHS, edge_lists, features, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastsparse_core import Adjacency, reference, sddmm


@given(
    edges=edge_lists(),
    width=st.sampled_from(WIDTHS),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    scaled=st.booleans(),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_reference(device, poisoned_memory, edges, width, dtype, layout, scaled):
    adj = edges.adjacency(device)
    x_dst = features(adj.num_dst, width, dtype, layout, device)
    x_src = features(adj.num_src, width, dtype, "contiguous", device, seed=1)
    scales = {}
    if scaled:
        scales = {
            "scale_dst": torch.rand(adj.num_dst, device=device),
            "scale_src": torch.rand(adj.num_src, device=device),
        }
    out = sddmm(adj, x_dst, x_src, **scales)
    assert out.dtype == dtype
    # A dot product that cancels is compared with the size of its terms, not with what is left of them.
    terms = reference.sddmm(adj, x_dst.double().abs(), x_src.double().abs(), **scales)
    difference = (out.double() - reference.sddmm(adj, x_dst, x_src, **scales)).norm()
    assert difference <= TOLERANCE[dtype] * max(terms.norm().item(), 1e-30)


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("head_width", [1, 8, 20, 47])
def test_heads(device, heads, head_width):
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, n, (500,), generator=generator).to(device) for n in (30, 50))
    adj = Adjacency.from_coo(row, col, (30, 50))
    x_dst = torch.randn(30, heads, head_width, device=device)
    x_src = torch.randn(50, heads, head_width, device=device)
    out = sddmm(adj, x_dst, x_src)
    assert out.shape == (500, heads)
    assert relative_error(out, reference.sddmm(adj, x_dst, x_src)) < 1e-6


def test_caller_order_with_replaced_loops(device):
    row = torch.tensor([2, 0, 1, 1], device=device)
    col = torch.tensor([0, 1, 1, 2], device=device)
    adj = Adjacency.from_coo(row, col, (3, 3), self_loops="replace")
    x = torch.arange(1.0, 4.0, device=device)[:, None]
    assert sddmm(adj, x, x).tolist() == [3.0, 2.0, 0.0, 6.0, 1.0, 4.0, 9.0]


def test_gradients_and_double_backward(device):
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, n, (25,), generator=generator).to(device) for n in (5, 6))
    adj = Adjacency.from_coo(row, col, (5, 6), self_loops="replace")
    make = {"dtype": torch.float64, "device": device, "requires_grad": True}
    x_dst, x_src = torch.randn(5, 2, 3, **make), torch.randn(6, 2, 3, **make)
    scales = {
        "scale_dst": torch.rand(5, dtype=torch.float64, device=device),
        "scale_src": torch.rand(6, dtype=torch.float64, device=device),
    }
    assert torch.autograd.gradcheck(lambda a, b: sddmm(adj, a, b, **scales), (x_dst, x_src))
    assert torch.autograd.gradgradcheck(lambda a, b: sddmm(adj, a, b, **scales), (x_dst, x_src))


@pytest.mark.parametrize(
    ("x_dst", "x_src", "error", "message"),
    [
        (torch.ones(4, 2), torch.ones(4, 2), ValueError, "x_dst: expected num_dst = 3 rows"),
        (torch.ones(3, 2), torch.ones(4, 3), ValueError, "x_dst and x_src: expected"),
        (torch.ones(3), torch.ones(4), ValueError, "x_dst and x_src: expected"),
        (torch.ones(3, 2), torch.ones(4, 2).double(), TypeError, "x_dst and x_src: expected one dtype"),
        (torch.ones(3, 2).int(), torch.ones(4, 2).int(), TypeError, "x_dst: expected float64"),
    ],
)
def test_bad_input(x_dst, x_src, error, message):
    adj = Adjacency.from_coo(torch.tensor([0, 2]), torch.tensor([3, 1]), (3, 4))
    with pytest.raises(error, match=message):
        sddmm(adj, x_dst, x_src)
