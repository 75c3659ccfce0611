"""FastPNAConv against PyG's PNAConv: output and all gradients over the option grid."""

from __future__ import annotations

import pytest
import torch
from pyg_cases import random_graph
from torch import Tensor
from torch_geometric.nn import PNAConv

import fastsparse_pyg
from fastsparse_pyg import FastPNAConv, accelerate, restore

AGGREGATORS = ["mean", "min", "max", "std"]
SCALERS = ["identity", "amplification", "attenuation"]
DEG = torch.tensor([0, 3, 5, 9, 12, 4, 1])


def layer_pair(
    in_channels: int = 6, out_channels: int = 8, *args, dtype: torch.dtype = torch.float64, **options
) -> tuple[PNAConv, FastPNAConv]:
    args = args or (AGGREGATORS, SCALERS)
    layers = [
        kind(in_channels, out_channels, *args, deg=DEG.clone(), **options) for kind in (PNAConv, FastPNAConv)
    ]
    return tuple(layer.to(dtype) for layer in layers)


def inputs(
    edge_index: Tensor, width: int = 6, edge_dim: int | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, width, generator=generator, dtype=torch.float64).to(dtype).to(edge_index.device)
    if edge_dim is None:
        return x.requires_grad_(), None
    edges = torch.randn(edge_index.size(1), edge_dim, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), edges.to(dtype).to(edge_index.device).requires_grad_()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 2e-2)], ids=str
)
def test_other_dtypes(dtype, tolerance, device):
    """Against the original in float64: in 16 bits its variance loses what ours keeps."""
    edge_index = random_graph(device=device)
    reference, _ = (layer.to(device) for layer in layer_pair(edge_dim=3))
    _, fast = (layer.to(device) for layer in layer_pair(edge_dim=3, dtype=dtype))
    fast.load_state_dict(reference.state_dict())
    reference.load_state_dict(fast.state_dict())
    x, edges = (it.detach() for it in inputs(edge_index, 6, 3, dtype))
    out = fast(x, edge_index, edges)
    expected = reference(x.double(), edge_index, edges.double())
    assert out.dtype == dtype
    assert (out.double() - expected).norm() < tolerance * expected.norm()


def test_hooks_are_called():
    edge_index = random_graph()
    _, fast = layer_pair()
    x, _ = inputs(edge_index)
    expected = fast(x, edge_index)
    seen = []
    for module in (fast.pre_nns[0][0], fast.post_nns[0][0], fast.lin, fast.aggr_module):
        handle = module.register_forward_hook(lambda *_: seen.append(True))
        torch.testing.assert_close(fast(x, edge_index), expected)
        handle.remove()
    assert len(seen) == 4


def test_accelerate_and_restore():
    torch.manual_seed(0)
    deep = PNAConv(6, 8, AGGREGATORS, SCALERS, DEG, pre_layers=2)
    model = torch.nn.ModuleList(
        [PNAConv(6, 8, AGGREGATORS, SCALERS, DEG), deep, PNAConv(6, 8, ["median"], SCALERS, DEG)]
    )
    accelerate(model, show=False)
    assert [isinstance(layer, FastPNAConv) for layer in model] == [True, True, False]
    restore(model)
    assert all(type(layer) is PNAConv for layer in model)
    assert fastsparse_pyg.nn.DROP_INS[PNAConv] is FastPNAConv


def test_no_message_is_stored(device):
    edge_index = random_graph(num_edges=4000, device=device)
    _, fast = (layer.to(device) for layer in layer_pair(16, 16, edge_dim=3, dtype=torch.float32))
    x, edges = inputs(edge_index, 16, 3, torch.float32)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda it: sizes.append(it.numel()) or it, lambda it: it):
        fast(x, edge_index, edges)
    assert max(sizes) < edge_index.size(1) * 16
