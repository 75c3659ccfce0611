"""FastMaxKGCNConv and FastMaxKSAGEConv against the originals on MaxK's dense features."""

from __future__ import annotations

import pytest
import torch
from pyg_cases import KINDS, as_kind, close, random_graph, same, simple_graph
from pyg_layer_cases import SAGE_OPTIONS
from torch import nn
from torch_geometric.nn import GCNConv, SAGEConv

from fastsparse_core import CBSR, MaxK, algorithms
from fastsparse_core.ops.ssd import ssd_op
from fastsparse_pyg import FastGCNConv, FastMaxKGCNConv, FastMaxKSAGEConv, FastSAGEConv, prepare

RECOMPUTE = pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])


def dense(x):
    """MaxK with k = 5 by plain PyTorch, differentiable."""
    if isinstance(x, tuple):
        return tuple(None if part is None else dense(part) for part in x)
    kept = x.topk(5, dim=-1).indices
    return torch.zeros_like(x).scatter(-1, kept, x.gather(-1, kept))


class OnMaxK(nn.Module):
    """The original layer behind MaxK, with the original's parameter names."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x, *args, **kwargs):
        return self.conv(dense(x), *args, **kwargs)

    def state_dict(self):
        return self.conv.state_dict()

    def named_parameters(self, *args, **kwargs):
        return self.conv.named_parameters(*args, **kwargs)


def pair(
    family: str, num_in, num_out: int, device: str, *, recompute: bool = False, **options
) -> tuple[OnMaxK, nn.Module]:
    original, fast = {"gcn": (GCNConv, FastMaxKGCNConv), "sage": (SAGEConv, FastMaxKSAGEConv)}[family]
    reference = OnMaxK(original(num_in, num_out, **options)).to(device)
    return reference, fast(num_in, num_out, k=5, recompute=recompute, **options).to(device)


@pytest.fixture(params=["gcn", "sage"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"improved": True},
        {"add_self_loops": False},
        {"normalize": False},
        {"cached": True},
        {"flow": "target_to_source"},
    ],
    ids=str,
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [(8, 4), (8, 8), (8, 20)], ids=str)
@RECOMPUTE
@pytest.mark.usefixtures("kernels_only")
def test_gcn(device, options, weighted, width, recompute):
    edge_index = random_graph(device=device)
    reference, layer = pair("gcn", *width, device, recompute=recompute, **options)
    for requires_grad in (True, False):
        x = torch.randn(40, width[0], device=device, requires_grad=requires_grad)
        weight = None
        if weighted:
            weight = torch.rand(edge_index.size(1), device=device, requires_grad="cached" not in options)
        inputs = [x] if weight is None else [x, weight]
        same(reference, layer, lambda conv, x=x, weight=weight: conv(x, edge_index, weight), inputs)
        if "cached" in options:
            break


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("options", SAGE_OPTIONS, ids=str)
@RECOMPUTE
@pytest.mark.usefixtures("kernels_only")
def test_sage(device, options, aggr, recompute):
    edge_index = random_graph(device=device)
    reference, layer = pair("sage", 8, 6, device, recompute=recompute, aggr=aggr, **options)
    for requires_grad in (True, False):
        x = torch.randn(40, 8, device=device, requires_grad=requires_grad)
        same(reference, layer, lambda conv, x=x: conv(x, edge_index), [x])


@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("with_dst", [True, False])
@RECOMPUTE
@pytest.mark.usefixtures("kernels_only")
def test_bipartite_sage(device, aggr, with_dst, recompute):
    edge_index = random_graph(30, 20, device=device)
    reference, layer = pair("sage", (8, 6), 4, device, recompute=recompute, aggr=aggr)
    x_src = torch.randn(30, 8, device=device, requires_grad=True)
    x_dst = torch.randn(20, 6, device=device, requires_grad=True) if with_dst else None
    inputs = [x_src, *([x_dst] if with_dst else [])]
    same(reference, layer, lambda conv: conv((x_src, x_dst), edge_index, size=(30, 20)), inputs)


@pytest.mark.parametrize("kind", [*KINDS, "csc"])
def test_input_kinds(device, family, kind):
    """As our layers on dense features, whose input kinds are compared with the originals elsewhere."""
    if (family, kind) == ("gcn", "csc"):
        pytest.skip("neither GCNConv nor ours normalises this layout")
    reference, layer = pair(family, 8, 4, device)
    reference.conv = (FastGCNConv if family == "gcn" else FastSAGEConv)(8, 4).to(device)
    x = torch.randn(40, 8, device=device, requires_grad=True)
    graph = as_kind(kind, simple_graph(device=device), 40, 40)
    same(reference, layer, lambda conv: conv(x, graph), [x])


@RECOMPUTE
@pytest.mark.usefixtures("kernels_only")
def test_takes_sparse_features(device, family, recompute):
    edge_index = random_graph(device=device)
    reference, layer = pair(family, 8, 4, device, recompute=recompute)
    x = torch.randn(40, 8, device=device, requires_grad=True)
    same(
        reference,
        layer,
        lambda conv: conv(x, edge_index),
        [x],
        fast_call=lambda conv: conv(MaxK(5).compress(x), edge_index),
    )


@RECOMPUTE
def test_rows_are_aggregated_once_or_twice_in_a_step(device, family, recompute, monkeypatch):
    """64 features, so that kept entries are few enough for their own kernel on a GPU."""
    reference, layer = pair(family, 64, 4, device, recompute=recompute)
    launched, launch = [], ssd_op.kernel
    monkeypatch.setattr(ssd_op, "kernel", lambda *x: launched.append(1) or launch(*x))
    x, edge_index = torch.randn(40, 64, device=device, requires_grad=True), random_graph(device=device)
    same(reference, layer, lambda conv: conv(x, edge_index), [x])
    assert len(launched) == 1 + recompute
    assert layer.recompute == recompute


def test_sparse_features_where_the_original_runs(family):
    edge_index = random_graph()
    reference, layer = pair(family, 8, 4, "cpu")
    layer.load_state_dict(reference.state_dict())
    calls = []
    layer.register_propagate_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(40, 8)
    close(layer(MaxK(5).compress(x), edge_index), reference(x, edge_index))
    close(layer(x, edge_index), reference(x, edge_index))
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["lin_l", "lin_r", "lin"])
def test_hooks_of_the_linear_layers_run(device, name):
    """Then the linear maps are not taken together with the aggregation; results stay."""
    edge_index = random_graph(device=device)
    reference, layer = pair("gcn" if name == "lin" else "sage", 8, 4, device)
    seen = []
    getattr(layer, name).register_forward_hook(lambda _, inputs, out: seen.append(out.shape))
    x = torch.randn(40, 8, device=device, requires_grad=True)
    same(reference, layer, lambda conv: conv(x, edge_index), [x])
    assert seen[0] == (40, 4)


@pytest.mark.parametrize("case", ["pair", "hook on lin_l", "hook on lin"])
def test_a_weight_written_before_the_backward_pass_is_an_error(device, case):
    family, width = ("gcn", 8) if case == "hook on lin" else ("sage", (8, 8) if case == "pair" else 8)
    _, layer = pair(family, width, 4, device)
    linear = layer.lin if family == "gcn" else layer.lin_l
    if case != "pair":
        linear.register_forward_hook(lambda *_: None)
    x = torch.randn(40, 8, device=device, requires_grad=True)
    out = layer((x, x.detach().clone()) if case == "pair" else x, random_graph(device=device))
    with torch.no_grad():
        linear.weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_a_hook_reads_is_noticed_too(device, family):
    """The hook runs once, in the forward pass, and autograd saves what it reads."""
    _, layer = pair(family, 8, 4, device)
    linear = layer.lin if family == "gcn" else layer.lin_l
    scale, runs = torch.rand(8, device=device), []
    linear.register_forward_pre_hook(lambda _, inputs: runs.append(1) or inputs[0] * scale)
    x = torch.randn(40, 8, device=device, requires_grad=True)
    layer(x, random_graph(device=device)).sum().backward()
    assert len(runs) == 1
    out = layer(x, random_graph(device=device))
    scale.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@RECOMPUTE
def test_pairs_store_no_dense_rows_of_the_sources(recompute):
    """Their sums are stored where they are not to be computed again."""
    _, layer = pair("sage", (64, 6), 4, "cpu", recompute=recompute)
    x_src, x_dst = torch.randn(30, 64, requires_grad=True), torch.randn(20, 6)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: shapes.append(saved.shape) or saved, id):
        layer((MaxK(5).compress(x_src), x_dst), random_graph(30, 20), size=(30, 20))
    assert (30, 5) in shapes
    assert ((20, 64) in shapes) == (not recompute)
    assert (30, 64) not in shapes


def test_batched_features(device):
    edge_index = random_graph(device=device)
    reference, layer = pair("gcn", 8, 4, device)
    x = torch.randn(3, 40, 8, device=device, requires_grad=True)
    same(reference, layer, lambda conv: conv(x, edge_index), [x])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(device, family, dtype):
    edge_index = random_graph(device=device)
    reference, layer = pair(family, 8, 4, device)
    x = torch.randn(40, 8, device=device).to(dtype)
    layer.load_state_dict(reference.state_dict())
    got = layer.to(dtype)(x, edge_index)
    assert got.dtype == dtype
    expected = reference.to(dtype).double()(x.double(), edge_index)  # equally rounded weights
    close(got.double(), expected, 1e-10 if dtype == torch.float64 else 2e-2, 1.0)


def test_autocast(device, family):
    edge_index = random_graph(device=device)
    reference, layer = pair(family, 8, 4, device)
    x = torch.randn(40, 8, device=device, requires_grad=True)
    layer.load_state_dict(reference.state_dict())
    with torch.autocast(device, torch.bfloat16):
        got = layer(x, edge_index)
    assert got.dtype == torch.bfloat16
    close(got.float(), reference(x, edge_index), 3e-2, 1.0)
    got.float().sum().backward()
    assert x.grad.norm() > 0


def test_weights_of_a_wider_dtype(device):
    edge_index = random_graph(device=device)
    reference, layer = pair("gcn", 8, 4, device)
    x = torch.randn(40, 8, device=device, requires_grad=True)
    weight = torch.rand(edge_index.size(1), dtype=torch.float64, device=device)
    same(reference, layer, lambda conv: conv(x, edge_index, weight), [x])


def test_lazy_width(family):
    layer = (FastMaxKGCNConv if family == "gcn" else FastMaxKSAGEConv)(-1, 4, k=5)
    edge_index = random_graph()
    x = torch.randn(40, 8)
    out = layer(x, edge_index)
    reference, _ = pair(family, 8, 4, "cpu")
    reference.conv.load_state_dict(layer.state_dict())
    close(out, reference(x, edge_index))
    with pytest.raises(ValueError, match="k: expected at most 3, the width of x, got 5"):
        layer(torch.randn(40, 3), edge_index)


def test_parameters_are_the_originals(family):
    reference, layer = pair(family, 8, 4, "cpu")
    assert list(layer.state_dict()) == list(reference.state_dict())
    assert isinstance(layer, GCNConv if family == "gcn" else SAGEConv)
    assert repr(layer).startswith(type(layer).__name__)


def test_compiles_with_an_adjacency(family):
    torch._dynamo.reset()
    _, layer = pair(family, 8, 4, "cpu")
    graph = prepare(simple_graph(), 40, add_self_loops=family == "gcn").prepare()
    x = torch.randn(40, 8, requires_grad=True)
    expected = layer(x, graph)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(x, graph)
    close(out, expected)
    close(torch.autograd.grad(out.square().sum(), x)[0], torch.autograd.grad(expected.square().sum(), x)[0])


def test_bad_input(family):
    cls = FastMaxKGCNConv if family == "gcn" else FastMaxKSAGEConv
    with pytest.raises(ValueError, match="k: expected at least 1 kept entry"):
        cls(8, 4, k=0)
    with pytest.raises(ValueError, match="k: expected at most 8, the width of the input, got 9"):
        cls(8, 4, k=9)
    with pytest.raises(TypeError, match="k: expected an int, got str"):
        cls(8, 4, k="5")
    layer, edge_index = cls(8, 4, k=5), random_graph()
    with pytest.raises(IndexError):
        layer(torch.randn(20, 8), edge_index)
    kept = MaxK(5).compress(torch.randn(20, 8))
    with pytest.raises(IndexError):
        layer(CBSR(kept.values, kept.ids, 8), edge_index)


@pytest.mark.parametrize("given", [False, True], ids=["features", "CBSR"])
@pytest.mark.parametrize("layer", [FastMaxKGCNConv, FastMaxKSAGEConv])
def test_rows_that_ssd_would_write_out_take_the_dense_layer(layer, given):
    x, edge_index = torch.randn(20, 16), torch.randint(20, (2, 60))
    conv = layer(16, 8, k=4)
    dense = conv.maxk(x)
    with algorithms(ssd="densify"):
        out = conv(conv.maxk.compress(x) if given else x, edge_index)
    assert torch.equal(out, super(layer, conv).forward(dense, edge_index))
