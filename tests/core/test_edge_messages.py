"""Messages with edge features: what `test_operators.py` does not test."""

from __future__ import annotations

import pytest
import torch
from cases import ragged
from operator_cases import BY_NAME, MESSAGES, each_operator
from test_operators import adjacency


@each_operator(MESSAGES)
def test_gradients_that_nobody_wants(op, device):
    """Each tensor alone, of a result alone: what is left out changes nothing."""
    adj = ragged(600, device)
    tensors = op.make(adj, (16, 4), torch.float32)
    plain = op.results(op.call, adj, tensors)
    for number, out in enumerate(plain):
        for name in tensors:
            found = []
            for wanted in ([name], list(tensors)):
                given = {key: tensor.clone().requires_grad_(key in wanted) for key, tensor in tensors.items()}
                chosen = op.results(op.call, adj, given)[number]
                assert torch.equal(chosen, out)
                if chosen.requires_grad:
                    found += torch.autograd.grad(chosen.square().sum(), given[name], allow_unused=True)
            assert all(x is None or torch.equal(x, found[-1]) for x in found)


def test_many_raw_features_are_projected_once_or_run_step_by_step(device, reasons):
    adj = ragged(600, device)
    for name in ("gine raw", "gated raw", "gated raw"):
        assert not reasons.text or name == "gated raw"
        op = BY_NAME[name]
        op.compare(adj, op.make(adj, (16, 40), torch.float32), 4)
    assert reasons.text.count("edges have 40 features, and the fused kernel takes up to 32") == 1


@pytest.mark.parametrize("kind", ["gine", "gated"])
def test_numbers_that_are_not_finite_stay_in_their_rows(kind, device):
    op, adj = BY_NAME[kind], adjacency([0, 0, 1, 2], [0, 1, 1, 2], (3, 3), device)
    tensors = op.make(adj, (8, 4), torch.float32)
    tensors["x" if kind == "gine" else "v"][0] = torch.inf
    for name, tensor in tensors.items():
        tensor[-1] = torch.nan if name != "edge_attr" else 0
    assert op.expected is not None
    want = op.everything(op.expected, adj, {name: tensor.double() for name, tensor in tensors.items()})
    for got, expected in zip(op.everything(op.call, adj, tensors), want, strict=True):
        torch.testing.assert_close(got, expected.float(), equal_nan=True)
