import copy
import gc
import io
import os
import pickle
import subprocess
import sys
from collections import Counter
from types import ModuleType

import pytest
import torch
import torch_geometric.loader
import torch_geometric.utils
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, LinkNeighborLoader, NeighborLoader
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GENConv,
    GraphNorm,
    MaxAggregation,
    MessagePassing,
    SAGEConv,
    SoftmaxAggregation,
    VarAggregation,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
    to_hetero,
)
from torch_geometric.utils import degree, scatter, segment, softmax, spmm

import fastsparse_core
import fastsparse_pyg
from fastsparse_core import call_report, sparse_products
from fastsparse_pyg import layer_swap
from fastsparse_pyg.hooks import PARTS, functions, table
from fastsparse_pyg.nn import FastGATConv, FastGCNConv
from fastsparse_pyg.nn.base import FastConv

ROWS, SEGMENTS = 6000, 500


@pytest.fixture
def enabled():
    fastsparse_pyg.enable(report=True)
    yield
    fastsparse_pyg.disable()


@pytest.fixture
def graph():
    torch.manual_seed(0)
    return torch.randn(300, 8), torch.randint(300, (2, 5000))


def calls_of(name):
    counts = Counter()
    for row, count in call_report.report().rows:
        if row.call == name:
            counts[row.by] += count
    return counts


def everything():
    """All names of all modules of PyG and of this one, and PyTorch's registrations for sparse matrices."""
    modules = [
        (title, dict(vars(module)))
        for title, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and title.startswith(("torch_geometric", __name__, "torch_s"))
    ]
    classes = dict(vars(MessagePassing))
    return modules, classes, torch._C._dispatch_dump("aten::addmm"), list(sys.meta_path)


def test_disable_puts_every_name_back(graph):
    x, edge_index = graph
    GCNConv(8, 4)(x, edge_index)  # PyG writes into the class when it is first used
    before = everything()
    fastsparse_pyg.enable()
    GCNConv(8, 4)(x, edge_index)
    assert torch_geometric.utils.scatter is scatter is not before
    changed = everything()
    fastsparse_pyg.disable()
    after = everything()
    assert changed[1:] != before[1:]
    assert after[1:] == before[1:]
    for (title, names), (other, now) in zip(before[0], after[0], strict=True):
        assert title == other
        assert names.keys() == now.keys()
        assert [name for name in names if names[name] is not now[name]] == []


def test_names_that_were_imported_before_are_replaced(enabled):
    assert scatter is torch_geometric.utils.scatter
    assert scatter.__wrapped__.__module__ == "torch_geometric.utils._scatter"
    assert torch_geometric.loader.DataLoader is fastsparse_pyg.DataLoader
    assert functions.scatter is not scatter


def test_enabling_twice_changes_nothing_and_parts_add_up():
    fastsparse_pyg.enable(["scatter"])
    mine = scatter
    assert not sparse_products.is_enabled()
    fastsparse_pyg.enable(["scatter", "sparse_mm"])
    assert scatter is mine
    assert sparse_products.is_enabled()
    assert fastsparse_pyg.is_enabled()
    fastsparse_pyg.disable()
    fastsparse_pyg.disable()
    assert not fastsparse_pyg.is_enabled()
    assert not hasattr(scatter, "__wrapped__")


def test_unknown_parts_are_refused():
    with pytest.raises(ValueError, match="parts: expected some of layers, .*got 'scater'"):
        fastsparse_pyg.enable(["scater"])
    with pytest.raises(ValueError, match="parts: .*got 'layer'"):
        fastsparse_pyg.enable("layer")
    assert not fastsparse_pyg.is_enabled()


def test_another_pyg_is_refused_as_a_whole(monkeypatch):
    monkeypatch.setattr(torch_geometric.utils, "degree", lambda index, nodes: None)
    with pytest.raises(RuntimeError, match=r"degree takes \(index, nodes\), not \(index, num_nodes, dtype\)"):
        fastsparse_pyg.enable()
    assert not fastsparse_pyg.is_enabled()
    assert not hasattr(scatter, "__wrapped__")


@pytest.mark.parametrize("part", PARTS)
def test_the_variable_switches_parts_off(monkeypatch, part, graph):
    monkeypatch.setenv("FASTSPARSE_DISABLE", part)
    fastsparse_pyg.enable()
    try:
        layer = GCNConv(8, 4)
        layer(*graph)
        assert isinstance(layer, FastGCNConv) == (part != "layers")
        assert hasattr(scatter, "__wrapped__") == (part != "scatter")
        of_pools = vars(sys.modules["torch_geometric.nn.pool.glob"])["scatter"]
        assert hasattr(of_pools, "__wrapped__") == (part != "pool")
        assert (torch_geometric.loader.DataLoader is fastsparse_pyg.DataLoader) == (part != "loaders")
        assert sparse_products.is_enabled() == (part != "sparse_mm")
    finally:
        fastsparse_pyg.disable()


def test_a_report_with_times(graph):
    with pytest.raises(ValueError, match="report: expected True, False or 'time', got 'times'"):
        fastsparse_pyg.enable(report="times")
    assert not fastsparse_pyg.is_enabled()
    fastsparse_pyg.enable(report="time")
    try:
        layer, matrix = GCNConv(8, 4), torch.rand(300, 300).to_sparse()
        index = torch.randint(SEGMENTS, (ROWS,))
        for _ in range(3):
            layer(*graph)
            matrix @ graph[0]
            scatter(torch.rand(ROWS, 2), index, reduce="max")
        found = fastsparse_core.report()
        measured = {row.call: found.times.host_ms[row] for row, _ in found.rows}
        assert measured.keys() == {"GCNConv", "torch.sparse product", "scatter"}
        assert min(measured.values()) > 0
    finally:
        fastsparse_pyg.disable()


@pytest.mark.filterwarnings("ignore::fastsparse_core.SlowPathWarning")
def test_loaders_are_in_the_report(graph):
    x, edge_index = graph
    data = Data(x=x, edge_index=edge_index)
    fastsparse_pyg.enable(report=True)
    try:
        for _ in range(2):
            for _ in fastsparse_pyg.NeighborLoader(data, num_neighbors=[2], batch_size=100):
                pass
            next(iter(fastsparse_pyg.DataLoader([data, data], batch_size=2)))
        next(iter(fastsparse_pyg.DataLoader([x, x], batch_size=2)))
        found = {(row.call, row.by, bool(row.reason)): count for row, count in fastsparse_core.report().rows}
    finally:
        fastsparse_pyg.disable()
    assert found == {
        ("NeighborLoader", "FastSparse", False): 2,
        ("DataLoader", "FastSparse", False): 2,
        ("DataLoader", "PyG", True): 1,
    }


# ---------------------------------------------------------------- functions


def compare(call, src, *, times=3):
    """Calls with the originals and enabled: the same results and gradients."""
    src = src.clone().requires_grad_()
    expected = call(src)
    cotangent = torch.randn_like(expected)
    (expected_grad,) = torch.autograd.grad(expected, src, cotangent)
    fastsparse_pyg.enable(report=True)
    try:
        for _ in range(times):
            out = call(src)
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(torch.autograd.grad(out, src, cotangent)[0], expected_grad)
    finally:
        fastsparse_pyg.disable()


REDUCTIONS = ["sum", "add", "mean", "min", "max", "amin", "amax", "mul"]


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("dim_size", [None, SEGMENTS + 3])
def test_scatter(reduce, dim_size):
    index = torch.randint(SEGMENTS, (ROWS,))
    src = torch.rand(ROWS, 3, dtype=torch.float64) + 0.5
    compare(lambda src: scatter(src, index, 0, dim_size, reduce), src)
    assert calls_of("scatter")["segments"] >= 2


def test_scatter_of_other_shapes():
    index = torch.randint(SEGMENTS, (ROWS,))
    compare(lambda src: scatter(src, index, dim=-1), torch.rand(ROWS))
    assert calls_of("scatter") == {"PyG": 1, "segments": 2}
    compare(lambda src: scatter(src, index, -3, SEGMENTS, "max"), torch.rand(ROWS, 2, 3))
    assert calls_of("scatter") == {"segments": 3}
    compare(lambda src: scatter(src, index, dim=1), torch.rand(2, ROWS))
    assert calls_of("scatter") == {"PyG": 3}
    compare(lambda src: scatter(src, index[:50] % 7, dim_size=7), torch.rand(50, 3))
    assert calls_of("scatter") == {"PyG": 3}


def test_rows_of_an_edge_index_are_recognised():
    edge_index = torch.randint(SEGMENTS, (2, ROWS))
    compare(lambda src: scatter(src, edge_index[1], 0, SEGMENTS), torch.rand(ROWS, 4))
    assert calls_of("scatter") == {"PyG": 1, "segments": 2}


def test_a_new_index_in_every_call_is_left_to_pyg_for_sums(enabled):
    for _ in range(4):
        scatter(torch.rand(ROWS, 4), torch.randint(SEGMENTS, (ROWS,)))
    assert calls_of("scatter") == {"PyG": 4}
    assert "the index is new. Keep one index tensor" in fastsparse_core.report().advice[0]


def test_an_edited_index_is_another_one(enabled):
    index, src = torch.randint(SEGMENTS, (ROWS,)), torch.rand(ROWS, 4)
    for _ in range(3):
        scatter(src, index, 0, SEGMENTS)
    index.copy_(index.flip(0))
    expected = torch.zeros(SEGMENTS, 4).index_add_(0, index, src)
    torch.testing.assert_close(scatter(src, index, 0, SEGMENTS), expected)


def test_softmax_and_segment():
    index = torch.randint(SEGMENTS, (ROWS,))
    compare(lambda src: softmax(src, index), torch.randn(ROWS, 4))
    compare(lambda src: softmax(src, index, num_nodes=SEGMENTS + 5), torch.randn(ROWS))
    ptr = torch.cat([torch.zeros(1, dtype=torch.long), index.bincount(minlength=SEGMENTS).cumsum(0)])
    compare(lambda src: softmax(src, ptr=ptr), torch.randn(ROWS, 2))
    assert calls_of("softmax") == {"segments": 3}
    for reduce in ("sum", "mean", "min", "max"):
        compare(lambda src, reduce=reduce: segment(src, ptr, reduce), torch.randn(ROWS, 2))
        assert calls_of("segment") == {"segments": 3}


def test_degree_of_an_index_that_is_sorted_already(enabled):
    edge_index = torch.randint(SEGMENTS, (2, ROWS))
    expected = edge_index[0].bincount(minlength=SEGMENTS)
    torch.testing.assert_close(degree(edge_index[0], SEGMENTS, torch.long), expected)
    assert calls_of("degree") == {"PyG": 1}
    for _ in range(2):
        scatter(torch.rand(ROWS, 2), edge_index[0], 0, SEGMENTS)
    torch.testing.assert_close(degree(edge_index[0], SEGMENTS), expected.float())
    torch.testing.assert_close(degree(edge_index[0], dtype=torch.long), expected)
    assert calls_of("degree") == {"PyG": 1, "segments": 2}


def test_spmm_of_a_coo_matrix_is_not_converted(enabled, recwarn):
    matrix = torch.rand(40, 40).relu().to_sparse()
    x = torch.rand(40, 3)
    for _ in range(3):
        torch.testing.assert_close(spmm(matrix, x), matrix.to_dense() @ x)
    assert not [each for each in recwarn if "Converting sparse tensor" in str(each.message)]


@pytest.mark.parametrize(
    "module",
    [MaxAggregation(), VarAggregation(), SoftmaxAggregation(learn=True), GraphNorm(4)],
    ids=lambda module: type(module).__name__,
)
def test_aggregations_and_norms(module):
    batch = torch.randint(SEGMENTS, (ROWS,)).sort()[0]
    batch[-1] = SEGMENTS - 1
    compare(lambda src: module(src, batch), torch.randn(ROWS, 4, dtype=torch.float64).float())
    assert calls_of("scatter")["segments"] + calls_of("softmax").get("segments", 0) >= 2


@pytest.mark.parametrize("pool", [global_add_pool, global_mean_pool, global_max_pool])
def test_pools(pool):
    batch = torch.randint(SEGMENTS, (ROWS,)).sort()[0]
    compare(lambda src: pool(src, batch, SEGMENTS), torch.randn(ROWS, 4))
    assert calls_of("scatter")["segments"] >= 2


def errors_of(call):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return type(caught.value), str(caught.value)


BAD_CALLS = {
    "index of two dimensions": lambda: scatter(torch.rand(ROWS, 2), torch.zeros(ROWS, 1).long()),
    "dim": lambda: scatter(torch.rand(ROWS, 2), torch.zeros(ROWS).long(), 2),
    "reduce": lambda: scatter(torch.rand(ROWS, 2), torch.zeros(ROWS).long(), reduce="median"),
    "too large": lambda: scatter(torch.rand(ROWS, 2), torch.arange(ROWS), 0, 10, "max"),
    "negative": lambda: scatter(torch.rand(ROWS, 2), torch.arange(ROWS) - 5, 0, ROWS, "max"),
    "no index": lambda: softmax(torch.rand(ROWS, 2)),
    "sizes": lambda: scatter(torch.rand(ROWS + 1, 2), torch.zeros(ROWS).long(), reduce="max"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_errors_are_those_of_pyg(name):
    expected = errors_of(BAD_CALLS[name])
    fastsparse_pyg.enable()
    try:
        assert errors_of(BAD_CALLS[name]) == expected
    finally:
        fastsparse_pyg.disable()


def test_functions_can_be_scripted_traced_and_compiled(enabled):
    index, src = torch.randint(SEGMENTS, (ROWS,)), torch.rand(ROWS, 2)
    expected = torch.zeros(SEGMENTS, 2).index_add_(0, index, src)
    torch.testing.assert_close(torch.jit.script(scatter)(src, index, 0, SEGMENTS), expected)
    traced = torch.jit.trace(lambda src: scatter(src, index, 0, SEGMENTS, "max"), (src,))
    torch.testing.assert_close(traced(src), scatter(src, index, 0, SEGMENTS, "max"))
    compiled = torch.compile(lambda src: scatter(src, index, 0, SEGMENTS), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(src), expected)


# ---------------------------------------------------------------- layers


class Mine(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return 2 * x_j


class Normalised(Mine):
    def forward(self, x, edge_index):
        return super().forward(softmax(x, torch.arange(len(x)) % 7), edge_index)


class Strange(Mine):
    def propagate(self, edge_index, **kwargs):
        return super().propagate(edge_index, **kwargs)


@pytest.mark.parametrize(
    "make",
    [lambda: GCNConv(8, 4), lambda: GATConv(8, 4), lambda: SAGEConv(8, 4), lambda: GENConv(8, 4), Mine],
)
def test_layers_become_drop_ins_at_their_first_call(make, graph):
    layer, original = make(), None
    x, edge_index = graph
    original = type(layer)
    expected = layer(x, edge_index)
    fastsparse_pyg.enable(report=True)
    try:
        assert type(layer) is original
        torch.testing.assert_close(layer(x, edge_index), expected, rtol=1e-4, atol=1e-5)
        assert type(layer) is not original
        assert isinstance(layer, original)
        assert layer(x, edge_index).shape == expected.shape
        assert "PyG" not in calls_of(original.__name__)
    finally:
        fastsparse_pyg.disable()
    assert type(layer) is original
    torch.testing.assert_close(layer(x, edge_index), expected)


def test_layers_that_have_to_stay_stay_and_are_reported(enabled, graph):
    layer = Strange()
    layer(*graph)
    layer(*graph)
    assert type(layer) is Strange
    assert calls_of("Strange") == {"PyG": 2}
    (reason,) = {row.reason for row, _ in call_report.report().rows if row.call == "Strange"}
    assert reason == "a layer with its own propagate"


def test_the_report_counts_a_layer_once(enabled, graph):
    GATConv(8, 4)(*graph)
    Normalised()(*graph)
    scatter(graph[0], torch.zeros(300, dtype=torch.int64))
    callers = {row.call: row.caller for row, _ in call_report.report().rows}
    assert callers == {"GATConv": "", "Normalised": "", "softmax": "Normalised", "scatter": ""}
    assert "computed 2 of 3 calls" in str(call_report.report())


def test_the_report_does_not_count_calls_of_a_trace(enabled, graph):
    """`to_hetero` traces a model by a tracer of PyG's own."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GCNConv(8, 4, add_self_loops=False)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    to_hetero(Net(), (["u"], [("u", "to", "u")]))
    assert not call_report.report().rows
    Net()(*graph)
    assert calls_of("GCNConv")


def test_accelerate_and_restore_rule(enabled, graph):
    layer = GCNConv(8, 4)
    layer(*graph)
    assert type(layer) is FastGCNConv
    fastsparse_pyg.restore(layer)
    layer(*graph)
    assert type(layer) is GCNConv
    fastsparse_pyg.accelerate(layer, show=False)
    assert type(layer) is FastGCNConv
    fastsparse_pyg.disable()
    assert type(layer) is FastGCNConv


def test_hooks_and_parameters_stay(enabled, graph):
    layer = GCNConv(8, 4, cached=True)
    weight, seen = layer.lin.weight, []
    layer.register_forward_hook(lambda *_: seen.append(1))
    layer(*graph)
    layer(*graph)
    assert layer.lin.weight is weight
    assert seen == [1, 1]


@pytest.mark.parametrize("make", [lambda: GCNConv(8, 4, cached=True), lambda: GATConv(8, 4), Mine])
def test_pickles_need_no_fastsparse(enabled, graph, make):
    layer = make()
    expected = layer(*graph)
    model = torch.nn.Sequential(layer)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"fastsparse" not in buffer.getvalue()
    assert b"Accelerated" not in buffer.getvalue()
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)[0]
    copied = copy.deepcopy(model)[0]
    again = pickle.loads(pickle.dumps(layer))
    original = layer_swap.FIRST_CALLS.original_class(layer)
    for other in (loaded, copied, again):
        assert not isinstance(other, FastConv)
        assert type(other) is original
        torch.testing.assert_close(other(*graph), expected)
    torch.testing.assert_close(layer(*graph), expected)


def test_a_layer_of_accelerate_is_pickled_as_what_it_is(enabled, graph):
    layer = GATConv(8, 4)
    fastsparse_pyg.accelerate(layer, show=False)
    layer(*graph)
    assert type(pickle.loads(pickle.dumps(layer))) is FastGATConv


def test_layers_are_not_kept_alive(enabled, graph):
    layer = GCNConv(8, 4)
    layer(*graph)
    import weakref

    reference = weakref.ref(layer)
    del layer
    gc.collect()
    assert reference() is None


def test_compiled_models_run_pygs_code(enabled, graph):
    layer = GCNConv(8, 4)
    compiled = torch.compile(layer, backend="eager")
    out = compiled(*graph)
    torch.testing.assert_close(out, layer(*graph), rtol=1e-4, atol=1e-5)


def test_extrema_run_on_the_kernels_where_they_are_faster(enabled):
    """On the CPU PyTorch's is faster for an index that does not ascend, if no gradient is needed."""
    src, index = torch.randn(ROWS, 8), torch.randint(SEGMENTS, (ROWS,))
    for _ in range(3):
        scatter(src, index, dim_size=SEGMENTS, reduce="max")
    assert calls_of("scatter") == {"PyG": 3}
    scatter(src.requires_grad_(), index, dim_size=SEGMENTS, reduce="max")
    assert calls_of("scatter") == {"PyG": 3, "segments": 1}
    with torch.no_grad():
        scatter(src, index, dim_size=SEGMENTS, reduce="min")
        scatter(src, index.sort().values, dim_size=SEGMENTS, reduce="max")
    assert calls_of("scatter") == {"PyG": 4, "segments": 2}


@pytest.mark.gpu
def test_sums_of_few_rows_on_a_gpu_are_pygs(enabled):
    for rows, expected in ((100_000, {"PyG": 3}), (300_000, {"PyG": 4, "segments": 2})):
        src, index = torch.randn(rows, 8, device="cuda"), torch.arange(rows, device="cuda") // 25
        for _ in range(3):  # a new index also runs PyG's code
            scatter(src, index, dim_size=rows // 25, reduce="sum")
        assert calls_of("scatter") == expected
    scatter(src[:100_000].half(), index[:100_000].clone(), dim_size=4000, reduce="max")
    assert calls_of("scatter") == {"PyG": 5, "segments": 2}


# ---------------------------------------------------------------- loaders and shims


def test_loaders(enabled, graph):
    x, edge_index = graph
    data = [Data(x=x[:5], edge_index=edge_index[:, :6] % 5) for _ in range(4)]
    batches = list(torch_geometric.loader.DataLoader(data, batch_size=2))
    assert [batch.num_graphs for batch in batches] == [2, 2]
    loader = torch_geometric.loader.NeighborLoader(Data(x=x, edge_index=edge_index), [3], batch_size=50)
    assert isinstance(loader, fastsparse_pyg.NeighborLoader)
    assert sum(batch.batch_size for batch in loader) == 300


def loaders_of(x, edge_index, **options):
    """One of each, by the names that the script imported before."""
    graphs = [Data(x=torch.randn(5, 3), edge_index=torch.randint(5, (2, 8))) for _ in range(12)]
    data = Data(x=x, edge_index=edge_index)
    links = edge_index[:, :200]
    return [
        NeighborLoader(data, [3, 2], batch_size=50, **options),
        LinkNeighborLoader(data, [3], edge_label_index=links, batch_size=50, **options),
        DataLoader(graphs, batch_size=2, **options),
    ]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loaders_of_worker_processes(enabled, graph, method):
    for loader in loaders_of(*graph, num_workers=1, multiprocessing_context=method):
        assert type(loader).__module__.startswith("fastsparse_pyg")
        assert len(list(loader)) == len(loader)


def test_loaders_can_be_pickled_and_are_the_originals_too(enabled, graph):
    loaders = loaders_of(*graph)
    fastsparse_pyg.disable()
    kinds = [torch_geometric.loader.NeighborLoader, torch_geometric.loader.LinkNeighborLoader]
    for loader, kind in zip(loaders, [*kinds, torch_geometric.loader.DataLoader], strict=True):
        assert isinstance(loader, kind)
        assert len(list(pickle.loads(pickle.dumps(loader)))) == len(loader)


def test_loaders_can_be_subclassed(enabled, graph, monkeypatch):
    class Mine(torch_geometric.loader.NeighborLoader):
        def __init__(self, *arguments, tag, **options):
            super().__init__(*arguments, **options)
            self.tag, self.seen = tag, 0

        def collate_fn(self, index):
            self.seen += 1
            return super().collate_fn(index)

        def filter_fn(self, out):
            batch = super().filter_fn(out)
            batch.tag = self.tag
            return batch

    loader = Mine(Data(x=graph[0], edge_index=graph[1]), [3], batch_size=100, tag="mine")
    assert [batch.tag for batch in loader] == ["mine"] * 3
    assert loader.seen == 3
    loader._device = torch.device("cuda")  # here batches are prepared ahead
    monkeypatch.setattr("fastsparse_pyg.loader.base.prefetched", lambda *_, **__: pytest.fail("not called"))
    loader._get_iterator()


def test_loaders_are_on_the_gpu_only_if_the_script_uses_it(monkeypatch, graph):
    from fastsparse_pyg.loader import base, data_loader

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(base._C, "build_info", lambda: {"cuda": True})
    assert base.choose_device(None, None).type == "cuda"
    fastsparse_pyg.enable()
    try:
        assert base.choose_device(None, None).type == "cpu"
        loaders = loaders_of(*graph, num_workers=2)
        assert [len(list(loader)) for loader in loaders] == [6, 4, 6]
        for module in (base, data_loader):
            monkeypatch.setattr(module, "script_uses_gpu", lambda: True)
        assert base.choose_device(None, None).type == "cuda"
        chosen = []
        for module in (base, data_loader):
            choose = lambda *_: chosen.append(1) or torch.device("cpu")  # noqa: E731
            monkeypatch.setattr(module, "choose_device", choose)
        assert [len(list(loader)) for loader in loaders] == [6, 4, 6]
        assert len(chosen) == 3
        assert [loader.num_workers for loader in loaders] == [0, 0, 0]
    finally:
        fastsparse_pyg.disable()
    assert not base.Script.decides


@pytest.mark.gpu
def test_loaders_go_to_the_gpu_with_the_script(graph):
    code = """
import torch, fastsparse_pyg
fastsparse_pyg.enable()
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, LinkNeighborLoader, NeighborLoader
x, edge_index = torch.randn(300, 8), torch.randint(300, (2, 5000))
data = Data(x=x, edge_index=edge_index)
graphs = [Data(x=torch.randn(5, 3), edge_index=torch.randint(5, (2, 8))) for _ in range(12)]
loaders = [
    NeighborLoader(data, [3, 2], batch_size=50, num_workers=2, persistent_workers=True),
    LinkNeighborLoader(data, [3], edge_label_index=edge_index[:, :200], batch_size=50),
    DataLoader(graphs, batch_size=2),
]
where = lambda: [{batch.x.device.type for batch in loader} for loader in loaders]
print(where())
torch.ones(1, device="cuda")
print(where(), where())
"""
    done = run_python(code)
    assert done.stdout == f"{[{'cpu'}] * 3}\n{[{'cuda'}] * 3} {[{'cuda'}] * 3}\n", done.stderr


def run_python(code, **environment):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_missing_packages_are_put_in_place_when_they_are_imported():
    pytest.importorskip("torch_geometric")
    code = """
import importlib.util, sys
if importlib.util.find_spec("torch_scatter") is not None:
    sys.exit(77)
import fastsparse_pyg, torch_geometric.typing as typing
fastsparse_pyg.enable()
assert not typing.WITH_TORCH_SCATTER and "torch_scatter" not in sys.modules
import torch_scatter
assert typing.WITH_TORCH_SCATTER
from torch_sparse import SparseTensor
fastsparse_pyg.disable()
assert not typing.WITH_TORCH_SCATTER and typing.SparseTensor is not SparseTensor
try:
    sys.modules.pop("torch_scatter", None)
    import torch_scatter
except ModuleNotFoundError:
    print("gone")
"""
    done = run_python(code)
    if done.returncode == 77:
        pytest.skip("torch_scatter is installed")
    assert done.stdout == "gone\n", done.stderr


def test_placeholders_are_replaced_in_every_loaded_module():
    """PyG's own tests import `SparseTensor` first, and read PyG's flag later."""
    pytest.importorskip("torch_geometric")
    code = """
import importlib.util, sys, types
if importlib.util.find_spec("torch_sparse") is not None:
    sys.exit(77)
import torch, fastsparse_pyg, torch_geometric.typing
early = types.ModuleType("early")
sys.modules["early"] = early
sys.modules["odd"] = object()  # not a module
exec("from torch_geometric.typing import SparseTensor, WITH_TORCH_SPARSE", vars(early))
placeholder = early.SparseTensor
fastsparse_pyg.enable()
import torch_sparse
assert torch_geometric.typing.WITH_TORCH_SPARSE and not early.WITH_TORCH_SPARSE
matrix = early.SparseTensor.from_edge_index(torch.tensor([[0, 1], [1, 0]]))
assert isinstance(matrix, torch_sparse.SparseTensor)
fastsparse_pyg.disable()
assert early.SparseTensor is placeholder
print("restored")
"""
    done = run_python(code)
    if done.returncode == 77:
        pytest.skip("torch_sparse is installed")
    assert done.stdout == "restored\n", done.stderr


def test_the_missing_packages_can_be_installed_after_enable():
    """`enable()` finds the packages itself, but they are still missing."""
    pytest.importorskip("torch_geometric")
    code = """
import importlib.util, sys
if any(importlib.util.find_spec(name) is not None for name in ("torch_scatter", "torch_sparse")):
    sys.exit(77)
import fastsparse_pyg
fastsparse_pyg.enable()
import fastsparse_pyg.compat
print(fastsparse_pyg.compat.install())
"""
    done = run_python(code)
    if done.returncode == 77:
        pytest.skip("torch_scatter or torch_sparse is installed")
    assert done.stdout == "{'torch_scatter': True, 'torch_sparse': True}\n", done.stderr


def test_every_hook_fits_this_pyg():
    from fastsparse_core.replacement import problems

    assert problems(hook for hooks in table.HOOKS.values() for hook in hooks) == []


# ---------------------------------------------------------------- other code that watches calls


class Named(torch.Tensor):
    """A subclass whose class results have too."""


def outcome(call):
    """Class, dtype, shape and values of a result, or class and message of an error."""
    try:
        out = call()
    except Exception as error:
        return type(error), str(error).partition("\n")[0]
    values = out.detach().as_subclass(torch.Tensor).double()
    return type(out), out.dtype, out.requires_grad, values


def watched_calls():
    """Calls by name; each is made several times, so that structures are kept."""
    torch.manual_seed(0)
    index, edge_index = torch.randint(SEGMENTS, (ROWS,)), torch.randint(300, (2, 5000))
    rows, x = torch.randn(ROWS, 4), torch.randn(300, 8)
    coo = torch.sparse_coo_tensor(edge_index, torch.rand(5000), (300, 300)).coalesce()
    csr, layer, attention = coo.to_sparse_csr(), GCNConv(8, 4), GATConv(8, 4)
    return {
        "scatter": (lambda rows: scatter(rows, index, 0, SEGMENTS, "max"), rows),
        "softmax": (lambda rows: softmax(rows, index), rows),
        "pool": (lambda rows: global_mean_pool(rows, index, SEGMENTS), rows),
        "GCNConv": (lambda x: layer(x, edge_index), x),
        "GATConv": (lambda x: attention(x, edge_index), x),
        "coo": (lambda x: torch.sparse.mm(coo, x), x),
        "coo @": (lambda x: coo @ x, x),
        "csr @": (lambda x: csr @ x, x),
    }


WATCHERS = {
    "autocast": lambda call, x: torch.autocast("cpu", torch.bfloat16)(call)(x),
    "subclass": lambda call, x: call(x.as_subclass(Named)),
    "compile": lambda call, x: torch.compile(call, backend="eager")(x),
    "vmap": lambda call, x: torch.func.vmap(call)(torch.stack([x, 2 * x])),
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).square().sum())(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,))[1],
    "inference": lambda call, x: torch.inference_mode()(call)(x),
    "parameter": lambda call, x: call(torch.nn.Parameter(x)),
    "float64": lambda call, x: call(x.double()),
    "checkpoint": lambda call, x: torch.utils.checkpoint.checkpoint(
        call, x.clone().requires_grad_(), use_reentrant=False
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize("name", watched_calls())
def test_watched_calls_give_what_they_give_without(name, watcher):
    results = []
    for is_enabled in (False, True):
        if is_enabled:
            fastsparse_pyg.enable()
        try:
            call, x = watched_calls()[name]
            for _ in range(3):
                found = outcome(lambda call=call, x=x: WATCHERS[watcher](call, x))
            results.append(found)
        finally:
            fastsparse_pyg.disable()
            torch.compiler.reset()
    plain, ours = results
    if watcher == "autocast" and plain[0] is NotImplementedError:
        return  # PyG has no 16-bit product, but FastSparse has
    if watcher == "autocast" and name in ("GCNConv", "GATConv"):
        plain = plain[0], torch.bfloat16, *plain[2:]  # docs/precision_determinism.md
    assert ours[:-1] == plain[:-1]
    if isinstance(plain[-1], torch.Tensor):
        bound = {"rtol": 0.05, "atol": 0.05} if watcher == "autocast" else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(ours[-1], plain[-1], **bound)


def test_notebooks():
    """Cells share names, and are compiled one by one."""
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactive.InteractiveShell.instance()
    cells = (
        "import torch, fastsparse_pyg\nfrom torch_geometric.utils import scatter",
        "fastsparse_pyg.enable(report=True)",
        "index = torch.randint(500, (6000,))\nfor _ in range(3): scatter(torch.rand(6000, 2), index)",
        "import fastsparse_core\nfound = str(fastsparse_core.report())",
    )
    try:
        for cell in cells:
            assert shell.run_cell(cell).success
        assert hasattr(shell.user_ns["scatter"], "__wrapped__")
        assert "computed 2 of 3 calls" in shell.user_ns["found"]
    finally:
        fastsparse_pyg.disable()
        interactive.InteractiveShell.clear_instance()


class AttentionByHand(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, q=x, k=x, x=x)

    def message(self, q_i, k_j, x_j, index, size_i):
        return softmax((q_i * k_j).sum(-1), index, num_nodes=size_i).view(-1, 1) * x_j


class SumByHand(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, index, dim_size=None):
        return scatter(inputs, index, 0, dim_size, "sum")


def test_messages_that_call_replaced_functions_are_traced(enabled, graph):
    x, edge_index = graph
    scores = (x[edge_index[1]] * x[edge_index[0]]).sum(-1)
    total = torch.zeros(300).index_add(0, edge_index[1], scores.exp())
    weights = scores.exp() / total[edge_index[1]]
    expected = torch.zeros_like(x).index_add(0, edge_index[1], weights[:, None] * x[edge_index[0]])
    layer = AttentionByHand("sum")
    for _ in range(3):
        torch.testing.assert_close(layer(x, edge_index), expected)
    assert set(calls_of("AttentionByHand")) == {"attention"}
    layer = SumByHand()
    expected = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
    for _ in range(3):
        torch.testing.assert_close(layer(x, edge_index), expected)
    assert not any("per edge" in by for by in calls_of("SumByHand"))
