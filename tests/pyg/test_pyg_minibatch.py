"""Graphs seen once: what is built for them, and that results do not depend on it."""

from __future__ import annotations

import pytest
import torch
from padded import WIDTH, check_layer
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

from fastsparse_core.formats.bsb import Bsb
from fastsparse_core.structure import adjacency, construction
from fastsparse_pyg import (
    FastGATConv,
    FastGCNConv,
    FastGINConv,
    FastSAGEConv,
    FastTransformerConv,
    clear_cache,
)


def sampled_blocks(device: str, seed: int = 0) -> list[tuple[torch.Tensor, int, int]]:
    """(edge_index sorted by destination, sources, destinations) of three layers, first layer first."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [8, 60, 300, 800]
    blocks = []
    for num_dst, num_src, fanout in zip(sizes, sizes[1:], (15, 10, 5), strict=False):
        row = torch.arange(num_dst).repeat_interleave(fanout)
        col = torch.randint(0, num_src, row.shape, generator=generator)
        blocks.append((torch.stack([col, row]).to(device), num_src, num_dst))
    return blocks[::-1]


def train_step(layers: nn.ModuleList, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    blocks = sampled_blocks(x.device.type, seed)
    for layer, (edge_index, _, num_dst) in zip(layers, blocks, strict=True):
        x = layer((x, x[:num_dst]), edge_index).relu()
    x.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in layers.parameters()]
    layers.zero_grad()
    return [x.detach(), *gradients]


@pytest.fixture
def sorts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of edges of every sort."""
    counted: list[int] = []
    sorts = ((construction, "compress", 0), (adjacency, "transpose", 1), (adjacency, "transpose_pairs", 1))
    for module, name, edges in sorts:
        function = getattr(module, name)

        def sort(*args, function=function, edges=edges, **kwargs):
            counted.append(args[edges].numel())
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, sort)
    return counted


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs):
        raise AssertionError("a structure that was seen once is converted")

    monkeypatch.setattr(Bsb, "from_csr", refuse)


@pytest.mark.parametrize(("fast", "original"), [(FastSAGEConv, SAGEConv), (FastGATConv, GATConv)])
def test_sampled_blocks_sort_only_for_attention(device, sorts, no_conversion, fast, original):
    torch.manual_seed(0)
    options = {"add_self_loops": False} if fast is FastGATConv else {}
    layers = nn.ModuleList(fast(16, 16, **options) for _ in range(3)).to(device)
    reference = nn.ModuleList(original(16, 16, **options) for _ in range(3)).to(device)
    reference.load_state_dict(layers.state_dict())
    x = torch.randn(800, 16, device=device)
    # Many more batches than the number of uses before a structure is converted.
    for seed in range(12):
        sorts.clear()
        results = train_step(layers, x, seed)
        assert len(sorts) == (0 if fast is FastSAGEConv else 3)
        for ours, theirs in zip(results, train_step(reference, x, seed), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_square_batches_are_not_converted(device, no_conversion):
    torch.manual_seed(0)
    layer = FastGCNConv(16, 16).to(device)
    reference = GCNConv(16, 16).to(device)
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(300, 16, device=device)
    for _ in range(20):
        row = torch.arange(300, device=device).repeat_interleave(4)
        edge_index = torch.stack([torch.randint(0, 300, row.shape, device=device), row])
        torch.testing.assert_close(layer(x, edge_index), reference(x, edge_index), rtol=1e-4, atol=1e-5)


def test_a_batch_seen_again_is_found_again(device, sorts):
    clear_cache()
    layer = FastSAGEConv(16, 16).to(device)
    edge_index, num_src, num_dst = sampled_blocks(device)[0]
    x = torch.randn(num_src, 16, device=device, requires_grad=True)
    for _ in range(3):
        layer((x, x[:num_dst]), edge_index).sum().backward()
    assert len(sorts) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["mean", "sum", "max", "gin"])
def test_layers_on_padded_structures(kind, device):
    layer = FastGINConv(nn.Linear(WIDTH, 5)) if kind == "gin" else FastSAGEConv(WIDTH, 5, aggr=kind)
    layer = layer.to(device)
    check_layer(layer, lambda structure, x: layer((x, x[: structure.num_dst]), structure), device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("edges", [False, True])
def test_dot_product_attention_on_padded_structures(edges, device):
    layer = FastTransformerConv(WIDTH, 5, heads=3, edge_dim=2 if edges else None).to(device)

    def call(structure, x):
        attr = torch.arange(64, device=device).view(32, 2).cos()[: structure.num_edges] if edges else None
        return layer((x, x[: structure.num_dst]), structure, attr)

    check_layer(layer, call, device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_additive_attention_on_padded_structures(device):
    layer = FastGATConv(WIDTH, 5, add_self_loops=False).to(device)
    check_layer(layer, lambda structure, x: layer((x, x[: structure.num_dst]), structure), device)
