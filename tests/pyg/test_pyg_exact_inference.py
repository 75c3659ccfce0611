"""Exact inference: the results of a full forward pass, whatever the tiles, places and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from team import Team
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    GraphNorm,
    SAGEConv,
    SGConv,
    TransformerConv,
)
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

from fastsparse_core import Adjacency
from fastsparse_core.exact_inference import tiles
from fastsparse_pyg import FastGCNConv, exact_inference, inference

NODES = 60


def graph(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Data:
    """A random graph with loops, repeated edges and nodes without any."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES - 3, (2, 400), generator=generator)
    edges[:, :5] = torch.arange(5)
    return Data(x=torch.randn(NODES, 8, generator=generator).to(dtype), edge_index=edges).to(device)


def model_of(name: str, width: int = 12) -> nn.Module:
    """A model whose batch normalisation does something."""
    torch.manual_seed(0)
    kinds = {"GCN": GCN, "GraphSAGE": GraphSAGE, "GIN": GIN, "GAT": GAT}
    options: dict[str, object] = {"heads": 2} if name == "GAT" else {}
    model = kinds[name](8, width, 3, 5, dropout=0.5, norm="batch_norm", **options)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


class Usual(nn.Module):
    """A model as people write it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        sizes = [(8, 6, 2), (12, 5, 1)]
        make = {
            "GATv2": lambda i, o, heads: GATv2Conv(i, o, heads),
            "Transformer": lambda i, o, heads: TransformerConv(i, o, heads),
            "GraphConv": lambda i, o, heads: GraphConv(i, o * heads),
        }[kind]
        self.conv1, self.conv2 = (make(*size) for size in sizes)
        self.bn = nn.BatchNorm1d(12)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.elu(self.bn(self.conv1(x, edge_index))), training=self.training)
        return F.log_softmax(self.conv2(x, edge_index), dim=-1)


def full(model: nn.Module, data: Data) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(data.x, data.edge_index)


MODELS = ["GCN", "GraphSAGE", "GIN", "GAT", "GATv2", "Transformer", "GraphConv"]


def make(name: str) -> nn.Module:
    return Usual(name) if name in ("GATv2", "Transformer", "GraphConv") else model_of(name)


@pytest.mark.parametrize("tile", [None, 1, 7, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_full_pass(device: str, name: str, tile: int | None) -> None:
    data, model = graph(device=device), make(name).to(device)
    expected = full(model, data)
    model.train()
    found = inference(model, data, tile=tile)
    assert model.training
    assert not found.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("tile", [None, 5])
@pytest.mark.parametrize("name", MODELS)
def test_some_rows(device: str, name: str, tile: int | None) -> None:
    data, model = graph(device=device), make(name).to(device)
    expected = full(model, data)
    for rows in (torch.tensor([3]), torch.tensor([7, 2, 2, 59]), torch.tensor([], dtype=torch.int64)):
        found = inference(model, data, rows=rows, tile=tile)
        torch.testing.assert_close(found, expected[rows.to(device)], rtol=1e-4, atol=2e-5)
    mask = torch.zeros(NODES, dtype=torch.bool)
    mask[[1, 30]] = True
    found = inference(model, data, rows=mask, tile=tile)
    torch.testing.assert_close(found, expected[[1, 30]], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "GAT"])
def test_bfloat16(device: str, name: str) -> None:
    data, model = graph(device=device), make(name).to(device)
    expected = full(model, data)
    data.x, model = data.x.bfloat16(), model.bfloat16()
    plain = full(model, data).float()
    found = inference(model, data, tile=9)
    assert found.dtype == torch.bfloat16
    error, of_plain = ((out.float() - expected).abs().max().item() for out in (found, plain))
    assert error <= 2 * of_plain + 1e-2 * expected.abs().max().item()


class Rounding(nn.Module):
    """Rounds differently in a tile, as sums on a GPU do, whose terms come in any order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(0) >= 12:  # all nodes of the trial graph
            return x
        signs = (1 - 2 * (torch.arange(x.size(1)) % 2)).to(x.dtype)
        return x * (1 + signs * torch.finfo(x.dtype).eps)


def test_a_layer_may_enlarge_rounding() -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(8, 2, bias=False), nn.Linear(2, 1, bias=False)
    conv = GINConv(nn.Sequential(first, Rounding(), last)).bfloat16()
    with torch.no_grad():  # after GINConv, which resets the parameters
        first.weight[1] = first.weight[0] * 1.0625
        last.weight.copy_(torch.tensor([[1.0, -1.0]]))
    assert inference([conv], graph(torch.bfloat16)).shape == (NODES, 1)
    with pytest.raises(ValueError, match="from a node and its neighbours alone"):
        inference([SGConv(8, 5, K=2).bfloat16()], graph(torch.bfloat16))


@pytest.mark.parametrize("options", [{"improved": True}, {"add_self_loops": False}, {"normalize": False}])
@pytest.mark.parametrize("sizes", [(8, 4), (8, 16)])
def test_options_of_gcn(options: dict[str, bool], sizes: tuple[int, int]) -> None:
    data = graph(torch.float64)
    layer = GCNConv(*sizes, **options).double()
    torch.testing.assert_close(inference(layer, data, tile=7), full(layer, data))


def test_layers_in_a_list() -> None:
    torch.manual_seed(0)
    data = graph()
    first, second, third = nn.Linear(8, 6), SAGEConv(6, 12, "max", project=True), GINConv(nn.Linear(12, 3))
    layers = [first, second, torch.relu, nn.Dropout(0.5), third]
    with torch.no_grad():
        expected = third(second(first(data.x), data.edge_index).relu(), data.edge_index)
    torch.testing.assert_close(inference(layers, data, tile=11), expected)
    torch.testing.assert_close(inference(layers, data, rows=torch.tensor([4]), tile=11), expected[[4]])


def test_what_layers_keep_stays() -> None:
    data = graph()
    layer = FastGCNConv(8, 4, cached=True)
    expected = full(layer, data)
    kept = layer._cached_edge_index
    torch.testing.assert_close(inference([layer], data), expected)
    torch.testing.assert_close(layer._cached_edge_index, kept)
    torch.testing.assert_close(full(layer, data), expected)


def test_adjacency_and_sparse_matrix() -> None:
    data, model = graph(), make("GCN")
    expected = full(model, data)
    adj = Adjacency.from_coo(data.edge_index[1], data.edge_index[0], (NODES, NODES))
    torch.testing.assert_close(
        inference(model, Data(x=data.x, edge_index=adj)), expected, rtol=1e-4, atol=2e-5
    )
    edges = data.edge_index.unique(dim=1)
    matrix = torch.sparse_coo_tensor(edges.flip(0), torch.ones(edges.size(1)), (NODES, NODES)).to_sparse_csr()
    expected = full(make("GIN"), Data(x=data.x, edge_index=edges))
    found = inference(make("GIN"), Data(x=data.x, adj_t=matrix))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    with pytest.raises(ValueError, match=r"data\.adj_t: expected a matrix without values"):
        inference(make("GIN"), Data(x=data.x, adj_t=2 * matrix))


def test_mapped_files(device: str, tmp_path: Path) -> None:
    data, model = graph(device=device), make("GraphSAGE").to(device)
    expected = full(model, data)
    np.save(tmp_path / "x.npy", data.x.cpu().numpy())
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    out = np.memmap(tmp_path / "out.bin", np.float32, "w+", shape=(NODES, 5))
    assert inference(model, Data(x=x, edge_index=data.edge_index), out=out, tile=7) is out
    torch.testing.assert_close(torch.from_numpy(out), expected.cpu(), rtol=1e-4, atol=2e-5)
    rows = torch.tensor([5, 1, 5])
    few = torch.empty(3, 5)
    inference(model, Data(x=x, edge_index=data.edge_index), out=few, rows=rows)
    torch.testing.assert_close(few, expected.cpu()[rows], rtol=1e-4, atol=2e-5)


class Leaky(nn.Module):
    """A model whose activation differs from relu by less than 16 bits are allowed to."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = SAGEConv(8, 64), SAGEConv(64, 5)
        self.activation_name = activation

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.conv2(getattr(F, self.activation_name)(self.conv1(x, edge_index)), edge_index)


class OfOwnDtype(Leaky):
    """A model that only runs in its own dtype."""

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16(), edge_index)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu", "silu"])
def test_the_activation_is_found_in_every_dtype(device: str, activation: str, dtype: torch.dtype) -> None:
    data, model = graph(dtype, device), Leaky(activation).to(device, dtype)
    layers = [model.conv1, getattr(F, activation), model.conv2]
    assert torch.equal(inference(model, data), inference(layers, data))
    if activation == "leaky_relu":
        assert not torch.equal(inference(model, data), inference([layers[0], F.relu, layers[2]], data))
    assert all(parameter.dtype == dtype for parameter in model.parameters())


def test_the_activation_is_found_where_float32_does_not_run() -> None:
    data, model = graph(torch.bfloat16), OfOwnDtype("leaky_relu").bfloat16()
    layers = [model.conv1, F.leaky_relu, model.conv2]
    assert torch.equal(inference(model, data), inference(layers, data))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(8, 8), SAGEConv(8, 8)])

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = x + conv(x, edge_index)
        return x


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(8, 8)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.conv(x, edge_index, weight)


def test_models_that_cannot_be_split() -> None:
    data = graph()
    with pytest.raises(
        ValueError, match=r"one after the other.*convs\.0 \(SAGEConv\), convs\.1 \(SAGEConv\)"
    ):
        inference(Residual(), data)
    with pytest.raises(ValueError, match=r"raised TypeError.*conv \(GCNConv\)"):
        inference(Weighted(), data)
    with pytest.raises(ValueError, match="graph layers found in Linear: none"):
        inference(nn.Linear(8, 8), data)
    with pytest.raises(ValueError, match=r"one after the other.*GraphSAGE"):
        inference(GraphSAGE(8, 8, 2, jk="cat"), data)
    with pytest.raises(ValueError, match=r"layers\[0\] \(SGConv\)"):
        inference([SGConv(8, 8, K=2)], data)
    with pytest.raises(ValueError, match=r"layers\[0\] \(SAGEConv\), with the functions that follow it"):
        inference([SAGEConv(8, 8), GraphNorm(8)], data)


def test_arguments_are_checked() -> None:
    data, model = graph(), make("GCN")
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module or a list"):
        inference("GCN", data)
    with pytest.raises(TypeError, match=r"layers\[1\]: expected a graph layer or a function"):
        inference([GCNConv(8, 4), "relu"], data)
    with pytest.raises(ValueError, match="data: expected features x and edges"):
        inference(model, Data(x=data.x))
    with pytest.raises(ValueError, match=r"data\.x: expected floating features"):
        inference(model, Data(x=data.x.long(), edge_index=data.edge_index))
    with pytest.raises(TypeError, match="rows: expected node ids"):
        inference(model, data, rows=[1, 2])
    with pytest.raises(ValueError, match="rows: expected nodes from 0 to 59"):
        inference(model, data, rows=torch.tensor([60]))
    with pytest.raises(ValueError, match="tile: expected a positive number"):
        inference(model, data, tile=0)
    with pytest.raises(ValueError, match=r"out: expected shape \(60, 5\)"):
        inference(model, data, out=torch.empty(60, 4))
    with pytest.raises(TypeError, match=r"out: expected a floating-point dtype, got torch\.int64"):
        inference(model, data, out=torch.empty(60, 5, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"out: expected a floating-point dtype, got torch\.int32"):
        inference(model, data, out=np.empty((60, 5), np.int32))
    with pytest.raises(ValueError, match="group: expected None, because torch.distributed"):
        inference(model, data, group=object())


def test_results_are_not_written_to_a_read_only_array(tmp_path: Path) -> None:
    data, model = graph(), make("GCN")
    before = np.zeros((NODES, 5), np.float32)
    before.flags.writeable = False
    with pytest.raises(ValueError, match="out: expected a writable array, got a read-only one"):
        inference(model, data, out=before)
    assert not before.any()
    np.save(tmp_path / "out.npy", before)
    with pytest.raises(ValueError, match="out: expected a writable array, got a read-only one"):
        inference(model, data, out=np.load(tmp_path / "out.npy", mmap_mode="r"))


def test_tiles_follow_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less memory makes more tiles, down to one row each."""
    data, model = graph(), make("GraphSAGE")
    expected = full(model, data)
    counts = []
    compute = tiles._Tiles._compute

    def counted(self: tiles._Tiles, *arguments: object) -> torch.Tensor:
        counts[-1] += 1
        return compute(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tiles._Tiles, "_compute", counted)
    for memory in (1, 20_000, None):
        counts.append(0)
        torch.testing.assert_close(inference(model, data, memory=memory), expected, rtol=1e-4, atol=2e-5)
    assert counts[0] > counts[1] > counts[2]


def counted_columns(monkeypatch: pytest.MonkeyPatch, width: int | None = None) -> list[int]:
    """The number of columns at a time, of every layer that is computed so; of all that can be, if given."""
    found: list[int] = []
    choose = tiles._Tiles._width_of_columns

    def chosen(self: tiles._Tiles, stage: tiles.Stage, stored: tiles._Rows, *more: object) -> int:
        result = choose(self, stage, stored, *more)  # type: ignore[arg-type]
        if width is not None:
            result = width if stage.sums is not None and stored.data.size(0) == NODES else 0
        found.append(result)
        return result

    monkeypatch.setattr(tiles._Tiles, "_width_of_columns", chosen)
    return found


@pytest.mark.parametrize("tile", [None, 7])
@pytest.mark.parametrize("name", MODELS)
def test_columns_at_a_time(monkeypatch: pytest.MonkeyPatch, name: str, tile: int | None) -> None:
    """As where features do not fit on a GPU; x stays, and results of layers may be overwritten."""
    data, model = graph(), make(name)
    expected, before = full(model, data), data.x.clone()
    found = counted_columns(monkeypatch, 5)
    torch.testing.assert_close(inference(model, data, tile=tile), expected, rtol=1e-4, atol=2e-5)
    assert torch.equal(data.x, before)
    assert (5 in found) == (name in ("GCN", "GraphSAGE", "GIN", "GraphConv"))
    if name == "GraphSAGE":
        out = torch.empty_like(expected)
        assert inference(model, data, out=out) is out
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min"])
def test_columns_of_every_reduction(monkeypatch: pytest.MonkeyPatch, aggr: str) -> None:
    torch.manual_seed(0)
    layers = [GraphConv(8, 8, aggr=aggr), torch.relu, SAGEConv(8, 8, aggr=aggr, normalize=True)]
    layers += [GINConv(nn.Linear(8, 8), aggr=aggr, train_eps=True)]
    data = graph()
    expected = inference(layers, data)
    widths = counted_columns(monkeypatch, 3)
    torch.testing.assert_close(inference(layers, data), expected, rtol=1e-4, atol=2e-5)
    assert widths.count(3) == 3


@pytest.mark.parametrize(
    ("owner", "function", "size", "most"),
    [
        (exact_inference, "spmm", lambda adj, *more: adj.num_dst, 9),
        (tiles._Tiles, "_sum_part", lambda self, stage, part, target: part.size(1), 4),
        (tiles, "_no_entries", len, 9),
    ],
    ids=["sums", "columns", "results"],
)
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE"])
def test_tiles_of_columns_are_halved(
    monkeypatch: pytest.MonkeyPatch, name: str, owner: Any, function: str, size: Callable[..., int], most: int
) -> None:
    """Memory runs out for the sums of a tile, for some columns of all features, or for results of a tile."""
    data, model = graph(), make(name)
    expected = full(model, data)
    widths, failed = counted_columns(monkeypatch, 8), []
    call = getattr(owner, function)

    def limited(*args: Any, **options: Any) -> Any:
        if widths and widths[-1] and size(*args) > most:
            failed.append(size(*args))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return call(*args, **options)

    monkeypatch.setattr(owner, function, limited)
    torch.testing.assert_close(inference(model, data), expected, rtol=1e-4, atol=2e-5)
    assert failed


def _together(rank: int, size: int, device: torch.device, tile: int | None) -> None:
    for name in ("GCN", "GAT"):
        for dtype in (torch.float32, torch.bfloat16):
            data, model = graph(dtype, str(device)), make(name).to(device, dtype)
            rows = torch.tensor([9, 3, 50])
            alone = inference(model, data, tile=tile)
            found = inference(model, data, tile=tile, group=dist.group.WORLD)
            assert found.dtype == dtype
            torch.testing.assert_close(found, alone, rtol=1e-4, atol=2e-5)
            found = inference(model, data, rows=rows, tile=tile, group=dist.group.WORLD)
            torch.testing.assert_close(found, alone[rows.to(device)], rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_several_processes() -> None:
    team = Team(2)
    try:
        for tile in (None, 7):
            team.run(_together, tile)
    finally:
        team.close()


def compare_within(name: str, num_nodes: int, num_edges: int, more_mb: int) -> None:
    """Compares a model that may take so much memory of the GPU with the full pass; the limit holds."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(num_nodes, (2, num_edges), generator=generator)
    data = Data(x=torch.randn(num_nodes, 8, generator=generator), edge_index=edges)
    model = model_of(name, 128).cuda()
    expected = full(model, data.clone().cuda()).cpu()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    limit = torch.cuda.memory_allocated() + more_mb * 2**20
    found = inference(model, data, memory=limit).cpu()
    assert torch.cuda.max_memory_allocated() <= 1.1 * limit
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT"])
def test_features_on_the_host_of_a_gpu(name: str) -> None:
    """Features, graph and results that do not fit stay on the host."""
    compare_within(name, 200_000, 2_000_000, 40)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN"])
def test_columns_on_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """If only a quarter of the features fits, they are sent column by column."""
    widths = counted_columns(monkeypatch)
    compare_within(name, 400_000, 12_000_000, 80)
    assert any(0 < width < 128 for width in widths)


@pytest.mark.gpu
def test_the_model_is_on_another_gpu_than_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are not used again before their pieces are sent."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setattr(tiles, "_PIECE_BYTES", 2**20)
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(300_000, (2, 300_000), generator=generator)
    data = Data(x=torch.randn(300_000, 64, generator=generator), edge_index=edges)
    model = SAGEConv(64, 64)
    expected = full(model, data)
    model.cuda(1)
    with torch.cuda.device(0):
        out = torch.empty(300_000, 64)
        inference(model, data, out=out)
        assert torch.cuda.current_device() == 0
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
