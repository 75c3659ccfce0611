"""FastResGatedGraphConv: outputs, all gradients, every option."""

from __future__ import annotations

import pytest
import torch
from pyg_cases import alike, random_graph, same
from torch import Tensor
from torch_geometric.nn import ResGatedGraphConv

from fastsparse_pyg import FastResGatedGraphConv


def pair(
    *args: object, device: str, dtype: torch.dtype = torch.float32, **options: object
) -> tuple[ResGatedGraphConv, FastResGatedGraphConv]:
    reference, layer = (
        conv(*args, **options).to(device, dtype) for conv in (ResGatedGraphConv, FastResGatedGraphConv)
    )
    return reference, layer


def draw(rows: int, width: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)


def edges_of(
    edge_index: Tensor, options: dict, device: str, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """The layer's third argument, if it takes one."""
    return [draw(edge_index.size(1), options["edge_dim"], device, dtype)] if "edge_dim" in options else []


@pytest.mark.parametrize(("edge_dim", "given"), [(3, None), (None, 3)])
def test_edge_features_and_edge_dim_need_each_other(edge_dim, given):
    """One without the other raises an error, as in the original."""
    edge_index = random_graph()
    x = draw(40, 6, "cpu")
    edges = [draw(edge_index.size(1), given, "cpu")] if given else []
    for conv in pair(6, 5, device="cpu", edge_dim=edge_dim):
        with pytest.raises((AssertionError, RuntimeError)):
            conv(x, edge_index, *edges)


@pytest.mark.parametrize("options", [{}, {"edge_dim": 3}], ids=str)
@pytest.mark.usefixtures("kernels_only")
def test_under_autocast_results_have_the_original_dtype(device, options):
    edge_index = random_graph(device=device)
    reference, layer = pair(6, 5, device=device, **options)
    x, edges = draw(40, 6, device), edges_of(edge_index, options, device)
    with torch.autocast(device, torch.bfloat16):
        same(reference, layer, lambda conv: conv(x, edge_index, *edges), [x, *edges], tolerance=5e-2, floor=1)


@pytest.mark.parametrize("options", [{}, {"edge_dim": 3}, {"root_weight": False}, {"bias": False}], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("kernels_only")
def test_one_step_under_autocast(device, options, given):
    edge_index = random_graph(device=device)
    reference, layer = pair(6, 5, device=device, **options)
    layer.load_state_dict(reference.state_dict())
    x = draw(40, 6, device).detach().to(given).requires_grad_()
    edges = edges_of(edge_index, options, device)
    results = []
    for conv in (layer, reference):
        with torch.autocast(device, torch.bfloat16):
            out = conv(x, edge_index, *edges)
            with torch.no_grad():
                assert conv is reference or torch.equal(conv(x, edge_index, *edges), out)
        assert conv is reference or out.grad_fn.name() == "_GatedBackward"
        inputs = [x, *edges, *conv.parameters()]
        once = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
        again = torch.autograd.grad(out, inputs, torch.ones_like(out), create_graph=True)
        twice = torch.autograd.grad(sum(each.float().square().sum() for each in again), inputs[:1])
        results.append([out, *once, *again, *twice])
    for found, expected in zip(*results, strict=True):
        alike(found, expected, 1e-1)


def test_features_may_be_written_after_the_layer_under_autocast(device):
    """As with the original, whose linear maps keep what autocast cast."""
    edge_index = random_graph(device=device)
    layer, x = pair(6, 6, device=device)[1], draw(40, 6, device)
    gradients = []
    for written in (False, True):
        features = 1 * x
        with torch.autocast(device, torch.bfloat16):
            out = layer(features, edge_index)
        if written:
            features += out.detach()
        gradients.append(torch.autograd.grad(out.sum(), [x])[0])
    assert torch.equal(*gradients)


def test_features_of_edges_that_were_written_are_refused_with_a_cure(device):
    edge_index = random_graph(device=device)
    layer, x = pair(6, 6, device=device, edge_dim=3)[1], draw(40, 6, device)
    edge_attr = draw(edge_index.size(1), 3, device) * 1
    out = layer(x, edge_index, edge_attr)
    edge_attr += 1
    with pytest.raises(RuntimeError, match=r"residual gated graph convolution: .* write `x = x \+ conv"):
        out.sum().backward()
    out = layer(x, edge_index, edge_attr)
    out.sum().backward()
    with pytest.raises(RuntimeError, match=r"^Trying to backward through the graph a second time"):
        out.sum().backward()


def test_weights_may_be_written_before_the_backward_pass(device):
    """The backward pass reads a joint copy of the weights."""
    edge_index = random_graph(device=device)
    layer, x = pair(6, 5, device=device)[1], draw(40, 6, device)
    outs = [layer(x, edge_index) for _ in range(2)]
    expected, *_ = torch.autograd.grad(outs[0].sum(), [x])
    with torch.no_grad():
        layer.lin_key.weight.mul_(2)
    found, *_ = torch.autograd.grad(outs[1].sum(), [x], retain_graph=True)
    assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match="weight: modified"):
        torch.autograd.grad(outs[1].sum(), [x], create_graph=True)
