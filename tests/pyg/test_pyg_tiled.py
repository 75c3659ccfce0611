"""tiled(): the numbers of the model itself, in tiles of rows and in less memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import models

from fastsparse_core import Adjacency, tiling
from fastsparse_pyg import (
    FastGATConv,
    FastGCNConv,
    FastGINConv,
    FastGraphConv,
    FastSAGEConv,
    accelerate,
    tiled,
)

NODES, WIDTHS, TILE = 200, (12, 16, 16, 5), 33
LAYERS = {
    "gcn": FastGCNConv,
    "gcn without norm": lambda a, b: FastGCNConv(a, b, normalize=False, bias=False),
    "sage": FastSAGEConv,
    "sage, sum": lambda a, b: FastSAGEConv(a, b, aggr="sum", normalize=True),
    "sage without root": lambda a, b: FastSAGEConv(a, b, root_weight=False),
    "graph": FastGraphConv,
    "gin": lambda a, b: FastGINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU()), train_eps=True),
}


class Chain(nn.Module):
    """Layers with normalisation, activation and dropout between them."""

    def __init__(
        self, make: Any, widths: Any = WIDTHS, *, dropout: float = 0.0, first: Any = None, between: Any = None
    ) -> None:
        super().__init__()
        self.convs = nn.ModuleList(make(*pair) for pair in itertools.pairwise(widths))
        self.between = nn.LayerNorm(widths[1]) if between is None else between
        self.dropout, self.first = nn.Dropout(dropout), first

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        x = x if self.first is None else self.first(x)
        for conv in self.convs[:-1]:
            x = self.dropout(self.between(conv(x, edges)).relu())
        return self.convs[-1](x, edges)


def graph(device: str, *, symmetric: bool = False, loops: bool = False) -> Adjacency:
    row, col = torch.randint(NODES, (2, 1500), device=device)
    if symmetric:
        row, col = torch.cat([row, col]), torch.cat([col, row])
    kept = (row != col) | loops
    return Adjacency.from_coo(row[kept], col[kept], (NODES, NODES))


def features(device: str, **options: Any) -> Tensor:
    return torch.randn(NODES, WIDTHS[0], device=device, **{"dtype": torch.float64, **options})


def gradients(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    weight = torch.arange(out.numel(), dtype=out.dtype, device=out.device).view_as(out).sin()
    return torch.autograd.grad(out, inputs, weight)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients(name, offload, device):
    for symmetric, loops, some in ((False, True, True), (True, False, False), (False, False, True)):
        adj = graph(device, symmetric=symmetric, loops=loops)
        rows = torch.randint(NODES, (70,), device=device) if some else None
        for edges, first in (
            (adj, None),
            (torch.stack([adj.col.long(), adj.row().long()]), nn.Linear(12, 12)),
        ):
            model = Chain(LAYERS[name], first=first).double().to(device)
            x = features(device, requires_grad=True)
            inputs = [x, *model.parameters()]
            expected = model(x, edges)
            expected = expected if rows is None else expected[rows]
            net = tiled(model, tile_rows=TILE, offload=offload)
            out = net(x, edges, rows=rows)
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(gradients(out, inputs), gradients(expected, inputs))
            with torch.no_grad():
                assert torch.equal(net(x, edges, rows=rows), out)
            out = tiled(model, offload=offload)(x.detach(), edges, rows=rows)  # no gradient of the features
            expected = model(x.detach(), edges)
            expected = expected if rows is None else expected[rows]
            torch.testing.assert_close(gradients(out, inputs[1:]), gradients(expected, inputs[1:]))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("make", [FastGCNConv, FastSAGEConv])
def test_dropped_features_are_the_same_in_the_backward_pass(make, offload, device):
    """The backward pass recomputes each tile with the same dropout mask, as finite differences show."""
    model = Chain(make, (3, 4, 4, 2), dropout=0.5, first=nn.Dropout(0.3)).double().to(device)
    adj, rows = graph(device), torch.arange(3, NODES, 7, device=device)
    net = tiled(model, tile_rows=64, offload=offload)
    x = features(device)[:, :3].clone().requires_grad_()
    inputs = [x, *model.parameters()]
    with torch.no_grad():  # with nonzero biases, no node is at the kink of the activation
        for each in inputs:
            each.copy_(torch.randn(each.shape))

    def call() -> Tensor:
        torch.manual_seed(3)
        return net(x, adj, rows=rows)

    out = call()
    assert torch.equal(call(), out)
    assert not torch.equal(net(x, adj, rows=rows), out)
    weight = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, weight)
    step, directions = 1e-6, [torch.randn_like(each) for each in inputs]
    ends = []
    for sign in (step, -2 * step):
        with torch.no_grad():
            for each, direction in zip(inputs, directions, strict=True):
                each.add_(direction, alpha=sign)
            ends.append((call() * weight).sum())
    slope = sum((one * direction).sum() for one, direction in zip(found, directions, strict=True))
    torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), slope, rtol=1e-5, atol=1e-6)


def test_both_ways_to_keep_activations_draw_the_same(device):
    model = Chain(FastSAGEConv, dropout=0.5).to(device)
    adj, x = graph(device), features(device, dtype=torch.float32)
    found = []
    for offload in (False, True):
        torch.manual_seed(1)
        out = tiled(model, tile_rows=TILE, offload=offload)(x, adj)
        found.append((out, *gradients(out, list(model.parameters()))))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("offload", [False, True])
def test_autocast_and_16_bits(offload, device):
    adj = graph(device, symmetric=True)
    for make in (FastGCNConv, FastSAGEConv):
        model = Chain(make).to(device)
        x = features(device, dtype=torch.bfloat16)
        exact = model(x.float(), adj)
        with torch.autocast(device, torch.bfloat16):
            out = tiled(model, tile_rows=TILE, offload=offload)(x, adj)
            # Casts that were made without gradients are not reused for calls with gradients.
            again = gradients(model(x, adj), list(model.parameters()))
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.05)
        found = gradients(out, list(model.parameters()))
        for ours, one, plain in zip(found, gradients(exact, list(model.parameters())), again, strict=True):
            assert ours.dtype == torch.float32
            error, usual = (float((each - one).norm() / one.norm()) for each in (ours, plain))
            assert error < max(2 * usual, 0.02)
        half = tiled(model.bfloat16(), tile_rows=TILE, offload=offload)(x, adj)
        torch.testing.assert_close(half.float(), exact, rtol=0.1, atol=0.1)
        assert all(each.dtype == torch.bfloat16 for each in gradients(half, list(model.parameters())))


@pytest.mark.parametrize("kind", [models.GCN, models.GraphSAGE, models.GIN])
def test_models_of_pyg(kind, device):
    model = kind(12, 16, num_layers=3, out_channels=5, norm="layer_norm", norm_kwargs={"mode": "node"})
    accelerate(model.double().to(device), show=False)
    adj, x = graph(device), features(device)
    edges = torch.stack([adj.col.long(), adj.row().long()])
    if kind is models.GIN:  # its layers normalise batches
        model.eval()
    parameters = list(model.parameters())
    out, expected = tiled(model, tile_rows=TILE)(x, edges), model(x, edges)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(out, parameters), gradients(expected, parameters))


def peak_bytes(step: Any, device: str) -> int:
    """The peak memory of a step in addition to what was allocated before."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as found:
        step()
    events = [each for each in found.profiler.kineto_results.events() if each.name() == "[memory]"]
    events.sort(key=lambda each: each.start_ns())
    return max(itertools.accumulate(each.nbytes() for each in events))


@pytest.mark.parametrize("make", [FastGCNConv, FastSAGEConv])
def test_memory(make, device):
    """Beside the features, at most three matrices with a row per node, and two if sums are offloaded."""
    nodes, width = 20_000, 64
    row, col = torch.randint(nodes, (2, 40_000), device=device)
    adj = Adjacency.from_coo(torch.cat([row, col]), torch.cat([col, row]), (nodes, nodes))
    assert adj.is_symmetric
    model = Chain(make, (width, width, width, 8), dropout=0.5, between=nn.Identity()).to(device)
    x = torch.randn(nodes, width, device=device)
    rows = torch.arange(0, nodes, 100, device=device)
    whole = x.nbytes

    def step(call: Any) -> None:
        call().square().sum().backward()

    kept = tiled(model, tile_rows=256)
    offloaded = tiled(model, tile_rows=256, offload=True)
    step(lambda: kept(x, adj, rows=rows))  # scales of the structure are built once
    plain = peak_bytes(lambda: step(lambda: model(x, adj)[rows]), device)
    found = peak_bytes(lambda: step(lambda: kept(x, adj, rows=rows)), device)
    assert plain > 2 * found
    assert found < (2.3 if make is FastGCNConv else 3.3) * whole
    if device == "cuda":
        assert peak_bytes(lambda: step(lambda: offloaded(x, adj, rows=rows)), device) < 2.4 * whole


def test_tiles_are_small_where_the_model_is_wide(monkeypatch):
    monkeypatch.setattr(tiling, "_TILE_BYTES", 64 * 4 * 10)
    model = Chain(FastGCNConv, (12, 64, 64, 5))
    seen = []
    model.between.register_forward_hook(lambda module, given, out: seen.append(out.size(0)))
    adj, x = graph("cpu"), features("cpu", dtype=torch.float32)
    net = tiled(model)
    net(x, adj)
    del seen[:]  # the first call checks the model on more rows
    out = net(x, adj)
    assert max(seen) == 10
    torch.testing.assert_close(out, model(x, adj))


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
def test_features_on_the_host(offload):
    adj = graph("cuda")
    model = Chain(FastSAGEConv, dropout=0.5).cuda()
    x = features("cpu", dtype=torch.float32)
    found = []
    for given in (x.cuda(), x, x.pin_memory(), x.clone().requires_grad_()):
        torch.manual_seed(2)
        out = tiled(model, tile_rows=TILE, offload=offload)(given, adj)
        inputs = [*model.parameters(), *([given] if given.requires_grad else [])]
        found.append((out, *gradients(out, inputs)))
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=False):
            assert torch.equal(one, same)
    assert found[-1][-1].device.type == "cpu"


def test_models_that_are_no_chain():
    adj, x = graph("cpu"), features("cpu", dtype=torch.float32)

    class Skips(Chain):
        def forward(self, x: Tensor, edges: Any) -> Tensor:
            x = self.convs[0](x, edges)
            return self.convs[2](x + self.convs[1](x, edges), edges)

    class Weighs(Chain):
        def forward(self, x: Tensor, edges: Any) -> Tensor:
            return self.convs[0](x, edges, torch.ones(edges.num_edges))

    class Pools(Chain):
        def forward(self, x: Tensor, edges: Any) -> Tensor:
            return self.convs[0](x, edges).mean(0, keepdim=True)

    class Centres(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    class Reduces(Chain):
        def __init__(self, reduce: str, at: int) -> None:
            super().__init__(FastGCNConv)
            self.reduce, self.at, self.lin = reduce, at, nn.Linear(WIDTHS[at], 16)

        def forward(self, x: Tensor, edges: Any) -> Tensor:
            for nth, conv in enumerate(self.convs[:-1]):
                if nth == self.at:
                    over_all = getattr(x, self.reduce)(0, keepdim=True)
                x = conv(x, edges)
            return self.convs[-1](x + self.lin(over_all), edges)

    reduced = "differs from that of its parts one after the other.*sums or means over all nodes"
    for model, message in (
        *((Reduces(reduce, at), reduced) for reduce in ("sum", "mean") for at in (0, 1)),
        (Skips(FastGCNConv), "a chain of layers, but the code after layer 2 failed"),
        (Weighs(FastGCNConv), r"called as layer\(x, edges\)"),
        (Pools(FastGCNConv), "a row for every node between layers, but part 1 of the model returned 1 rows"),
        (
            Chain(FastGCNConv, between=Centres()),
            "In part 1 of the model the result of a row depends on other rows",
        ),
        (Chain(FastGCNConv, between=nn.BatchNorm1d(16)), "BatchNorm1d in training mode"),
        (Chain(lambda a, b: FastSAGEConv(a, b, aggr="max")), "FastSAGEConv with aggr='max'"),
        (Chain(lambda a, b: FastSAGEConv(a, b, project=True)), "FastSAGEConv with project=True"),
    ):
        with pytest.raises(ValueError, match=message):
            tiled(model)(x, adj)
        assert "forward" not in model.convs[0].__dict__
        assert model.training

    class Roots(nn.Module):  # NaN for negative numbers; also random in evaluation
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x.sqrt(), 0.5)

    tiled(Chain(FastGCNConv, first=Roots(), between=Roots()))(x.abs(), adj)
    model = Chain(FastGCNConv, between=nn.BatchNorm1d(16)).eval()
    torch.testing.assert_close(tiled(model, tile_rows=TILE)(x, adj), model(x, adj))


def test_wrong_arguments():
    adj, x = graph("cpu"), features("cpu", dtype=torch.float32)
    with pytest.raises(TypeError, match=r"supports FastGCNConv.* got a FastGATConv"):
        tiled(Chain(FastGATConv))
    with pytest.raises(TypeError, match=r"call fastsparse_pyg\.accelerate\(model\) first"):
        tiled(models.GCN(12, 16, num_layers=2))
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module"):
        tiled(lambda x, edges: x)
    with pytest.raises(ValueError, match="got none"):
        tiled(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="tile_rows: expected at least 1"):
        tiled(Chain(FastGCNConv), tile_rows=0)
    net = tiled(Chain(FastGCNConv))
    with pytest.raises(TypeError, match="x: expected a floating-point matrix"):
        net(x.long(), adj)
    with pytest.raises(TypeError, match="edge_index: expected a tensor or an Adjacency, got list"):
        net(x, [adj])
    with pytest.raises(TypeError, match="rows: expected int64"):
        net(x, adj, rows=torch.ones(NODES, dtype=torch.bool))
    with pytest.raises(IndexError, match="rows: expected node indices from 0 to 199, got 0 to 200"):
        net(x, adj, rows=torch.tensor([0, 200]))
    assert net(x, adj, rows=torch.empty(0, dtype=torch.int64)).shape == (0, 5)
    loss = net(x, adj).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward pass of this call has already run"):
        loss.backward()
    loss = net(x, adj).sum()
    with torch.no_grad():
        net.model.convs[0].lin.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
