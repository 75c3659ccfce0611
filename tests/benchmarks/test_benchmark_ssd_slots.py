"""The papers' dataflows of ssd, which benchmarks alone run, against the reference."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ssd_slots import slotted_ssd
from fastsparse_core import Adjacency, maxk, reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("slots", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("update_mode", [False, True])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize(
    ("width", "k", "dtype"),
    [(256, 8, torch.float32), (300, 33, torch.float32), (64, 16, torch.float16), (64, 16, torch.bfloat16)],
)
def test_equals_reference(slots, update_mode, coupled, width, k, dtype):
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, n, (5000,), generator=generator) for n in (60, 90))
    row[:2700] = 7  # and some rows are empty
    row[row % 5 == 3] = 0
    adj = Adjacency.from_coo(row.cuda(), col.cuda(), (60, 90))
    cbsr = maxk(torch.randn(90, width, generator=generator).to("cuda", dtype), k)
    value, scale = torch.rand(5000, device="cuda"), torch.rand(90, device="cuda")
    options = {"slots": slots, "update_mode": update_mode, "coupled": coupled}
    out = slotted_ssd(adj, cbsr.values.contiguous(), cbsr.ids, width, value, scale, **options)
    expected = reference.ssd(adj, cbsr.values, cbsr.ids, width, value, scale_src=scale)
    terms = reference.ssd(adj, cbsr.values.abs(), cbsr.ids, width, value, scale_src=scale)
    assert float((out.double() - expected).norm() / terms.norm()) <= 1e-5
