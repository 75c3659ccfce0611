"""The dense matrix of a structure and its values."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, TOLERANCE, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastsparse_core import Adjacency
from fastsparse_core.ops.csr_to_dense import csr_to_dense


@given(
    num_dst=st.sampled_from([0, 1, 3, 65]),
    num_src=st.sampled_from([1, 8, 47, 1025, 5000]),
    edges=st.sampled_from([0, 1, 40, 700]),
    dtype=st.sampled_from(DTYPES),
    shuffled=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_matches_torch(device, num_dst, num_src, edges, dtype, shuffled):
    generator = torch.Generator().manual_seed(edges + num_src)
    edges = edges if num_dst else 0
    row, col = (torch.randint(max(size, 1), (edges,), generator=generator) for size in (num_dst, num_src))
    if not shuffled:
        row = row.sort().values
    adj = Adjacency.from_coo(row.to(device), col.to(device), (num_dst, num_src))
    value = torch.randn(edges, generator=generator).to(device, dtype).requires_grad_()
    poison = torch.full((num_dst, num_src), float("nan"), device=device, dtype=dtype)
    del poison  # the allocator hands out this memory for the result next
    dense = csr_to_dense(adj, value)

    expected = torch.zeros(num_dst, num_src, dtype=torch.float64)
    expected.index_put_((row, col), value.detach().double().cpu(), accumulate=True)
    assert dense.dtype == dtype
    assert relative_error(dense.cpu(), expected) < TOLERANCE[dtype]
    gradient = torch.randn(num_dst, num_src, generator=generator).to(device, dtype)
    dense.backward(gradient)
    assert torch.equal(value.grad.cpu(), gradient.cpu()[row, col])


def test_gradcheck(device):
    adj = Adjacency.from_coo(torch.tensor([2, 0, 2]), torch.tensor([1, 3, 1]), (3, 4)).to(device)
    value = torch.randn(3, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda it: csr_to_dense(adj, it), value)
    assert torch.autograd.gradgradcheck(lambda it: csr_to_dense(adj, it).square(), value)


@pytest.mark.gpu
def test_a_wide_row_on_the_gpu_is_laid_out_in_tiles(device):
    adj = Adjacency.from_coo(torch.zeros(3000).long(), torch.arange(3000) * 7, (1, 21000)).to(device)
    dense = csr_to_dense(adj, torch.ones(3000, device=device))
    assert dense.sum() == 3000
    assert dense[0, ::7].all()


def test_repeated_entries_add_up_alike_every_time(device):
    row = torch.zeros(4000, dtype=torch.long, device=device)
    adj = Adjacency.from_coo(row, row, (1, 3))
    value = torch.randn(4000, dtype=torch.float64, device=device)
    torch.use_deterministic_algorithms(True)
    try:
        first = csr_to_dense(adj, value)
        assert all(torch.equal(csr_to_dense(adj, value), first) for _ in range(20))
    finally:
        torch.use_deterministic_algorithms(False)
    assert abs(first[0, 0] - value.sum()) < 1e-10
