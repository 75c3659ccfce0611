"""Messages with edge features: what `test_operators.py` does not test."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases import ragged
from operator_cases import BY_NAME, MESSAGES, each_operator
from test_operators import adjacency

from fastsparse_core import Adjacency, gated_aggregate
from fastsparse_core.message_plans import terms


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


@pytest.mark.parametrize("missing", ["gate_weight", "value_weight"])
def test_plans_with_one_map_of_the_edges(missing, device):
    """The other map is 0. Its zeros are stored, also if the first call is in inference mode."""
    terms._zero_maps.clear()
    generator = torch.Generator().manual_seed(0)
    adj = Adjacency.from_coo(*torch.randint(20, (2, 90), generator=generator).to(device), (20, 20))
    found = SimpleNamespace(special={"adj": adj})
    k, q, v = (torch.randn(20, 8, device=device, requires_grad=True) for _ in range(3))
    edge = torch.randn(90, 4, device=device)
    weight = torch.randn(8, 4, device=device, requires_grad=True)
    maps = {"gate_weight": weight, "value_weight": weight, missing: None}

    def planned():
        return terms.by_gated_aggregate(found, k, q, v, edge, **maps)

    zeros = torch.zeros_like(weight)
    expected = gated_aggregate(adj, k, q, v, edge_attr=edge, **{**maps, missing: zeros})
    wanted = torch.autograd.grad(expected.sin().sum(), (k, q, v, weight))
    with torch.inference_mode():
        assert torch.equal(planned(), expected)
    for _ in range(2):
        out = planned()
        assert torch.equal(out, expected)
        got = torch.autograd.grad(out.sin().sum(), (k, q, v, weight))
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)
    (stored,) = terms._zero_maps.values()
    assert not stored.any()
