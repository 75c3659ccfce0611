"""FastMaxKGraphConv and FastMaxKSAGEConv against the originals on MaxK's dense features."""

from __future__ import annotations

import pytest
import torch
from dgl_cases import (
    GRAPHS,
    SINGLE,
    DGLError,
    bipartite,
    block,
    check_parity,
    dgl,
    fastsparse_dgl,
    features,
    homogeneous,
    pair,
    weights,
)
from torch import nn

from fastsparse_core import MaxK
from fastsparse_core.ops.ssd import ssd_op

FastMaxKGraphConv = fastsparse_dgl.FastMaxKGraphConv
FastMaxKSAGEConv = fastsparse_dgl.FastMaxKSAGEConv
K = 3
RECOMPUTE = pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])


def dense(feat):
    """MaxK by plain PyTorch, differentiable."""
    if isinstance(feat, tuple):
        return tuple(map(dense, feat))
    kept = feat.topk(K, dim=-1).indices
    return torch.zeros_like(feat).scatter(-1, kept, feat.gather(-1, kept))


class OnMaxK(nn.Module):
    """The original layer behind MaxK, with the original's parameter names."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, graph, feat, **options):
        return self.conv(graph, dense(feat), **options)

    def named_parameters(self, *args, **kwargs):
        return self.conv.named_parameters(*args, **kwargs)


def layers(family: str, *args, recompute: bool = False, **options):
    """Ours and the original, with equal parameters."""
    original = dgl.nn.pytorch.GraphConv if family == "gcn" else dgl.nn.pytorch.SAGEConv
    reference = original(*args, **options)
    ours = FastMaxKGraphConv if family == "gcn" else FastMaxKSAGEConv
    fast = ours(*args, k=K, recompute=recompute, **options)
    fast.load_state_dict(reference.state_dict())
    return fast, OnMaxK(reference)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("norm", ["both", "right", "left", "none"])
@pytest.mark.parametrize("weighted", [None, (), (1,)])
@RECOMPUTE
def test_graph_conv(name, norm, weighted, recompute, device):
    graph = GRAPHS[name]()
    feat = features(graph, 7) if name in SINGLE else pair(graph, 7, 7)
    options = {} if weighted is None else {"edge_weight": weights(graph, *weighted)}
    fast, reference = layers("gcn", 7, 4, recompute=recompute, norm=norm)
    if name not in SINGLE:  # the original does not use the destinations' features: no gradient to compare
        feat = feat[0]
    check_parity((fast, reference), graph, feat, device, **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, torch.relu])
@pytest.mark.parametrize("sizes", [(7, 4), (4, 7)])
def test_graph_conv_options(bias, activation, sizes, device):
    graph = homogeneous()
    check_parity(
        layers("gcn", *sizes, bias=bias, activation=activation), graph, features(graph, sizes[0]), device
    )


def test_external_weight(device):
    graph = homogeneous()
    weight = torch.randn(7, 4)
    check_parity(layers("gcn", 7, 4, weight=False), graph, features(graph, 7), device, weight=weight)
    with pytest.raises(DGLError, match="External weight is provided"):
        FastMaxKGraphConv(7, 4, K).to(device)(graph, features(graph, 7).to(device), weight.to(device))


@pytest.mark.parametrize("aggregator", ["mean", "gcn", "pool", "lstm"])
@pytest.mark.parametrize("name", GRAPHS)
@RECOMPUTE
def test_sage(name, aggregator, recompute, device):
    if aggregator == "lstm" and device != "cpu":
        pytest.skip("this case runs DGL's own code, and the wheel is built without CUDA")
    graph = GRAPHS[name]()
    feat = features(graph, 7) if name in SINGLE else pair(graph, 7, 7)
    check_parity(layers("sage", 7, 4, aggregator, recompute=recompute), graph, feat, device)


@pytest.mark.parametrize("aggregator", ["mean", "gcn"])
@pytest.mark.parametrize("weighted", [(), (1,)])
@pytest.mark.parametrize("bias", [True, False])
@RECOMPUTE
def test_sage_options(aggregator, weighted, bias, recompute, device):
    graph = homogeneous()
    options = {"bias": bias, "norm": nn.functional.normalize, "activation": nn.functional.elu}
    both = layers("sage", 7, 4, aggregator, recompute=recompute, **options)
    check_parity(both, graph, features(graph, 7), device, edge_weight=weights(graph, *weighted))


@pytest.mark.parametrize("graph", [bipartite(), block()])
def test_different_widths(graph, device):
    check_parity(layers("sage", (6, 5), 4, "mean"), graph, pair(graph, 6, 5), device)
    with pytest.raises(DGLError, match="feat: expected source and destination features of one width"):
        FastMaxKSAGEConv((6, 5), 4, "gcn", K)(graph, pair(graph, 6, 5))


@pytest.mark.parametrize("family", ["gcn", "sage"])
@RECOMPUTE
def test_rows_are_aggregated_once_or_twice_in_a_step(family, recompute, device, monkeypatch):
    """32 features, so that kept entries are few enough for their own kernel on a GPU."""
    graph = homogeneous()
    both = layers(family, 32, 4, *([] if family == "gcn" else ["mean"]), recompute=recompute)
    launched, launch = [], ssd_op.kernel
    monkeypatch.setattr(ssd_op, "kernel", lambda *x: launched.append(1) or launch(*x))
    check_parity(both, graph, features(graph, 32), device)
    assert len(launched) == 1 + recompute
    assert both[0].recompute == recompute


@RECOMPUTE
def test_what_the_gcn_aggregator_stores(recompute):
    """Kept entries, and dense rows unless they are computed again."""
    graph = fastsparse_dgl.prepare(homogeneous())
    layer = FastMaxKSAGEConv(32, 4, "gcn", K, recompute=recompute)
    kept = MaxK(K).compress(features(homogeneous(), 32).requires_grad_())
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: shapes.append(saved.shape) or saved, id):
        layer(graph, kept)
    assert (graph.num_src, K) in shapes
    assert ((graph.num_src, 32) in shapes) == (not recompute)


@pytest.mark.parametrize("family", ["gcn", "sage"])
def test_several_weights_per_edge(family, device):
    graph = homogeneous()
    args = (4, 7) if family == "gcn" else (4, 7, "mean")
    check_parity(layers(family, *args), graph, features(graph, 4), device, edge_weight=weights(graph, 4))


@pytest.mark.parametrize("family", ["gcn", "sage"])
def test_features_of_more_dimensions(family, device):
    graph = homogeneous()
    args = (7, 4) if family == "gcn" else (7, 4, "mean")
    check_parity(layers(family, *args), graph, features(graph, 7, 2), device)


@pytest.mark.parametrize("family", ["gcn", "sage"])
@pytest.mark.parametrize("graph", [homogeneous(), block()])
def test_takes_sparse_features_and_an_adjacency(family, graph, device):
    args = (7, 4) if family == "gcn" else (7, 4, "mean")
    fast, reference = layers(family, *args)
    expected = reference(graph, features(graph, 7))
    kept = MaxK(K).compress(features(graph, 7).to(device))
    adjacency = fastsparse_dgl.prepare(graph, device)
    torch.testing.assert_close(fast.to(device)(adjacency, kept).cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["fc_self", "fc_neigh"])
def test_hooks_of_the_linear_layers_run(name, device):
    """Then the linear maps are not taken together with the aggregation; results stay."""
    graph = homogeneous()
    fast, reference = layers("sage", 7, 4, "mean")
    seen = []
    getattr(fast, name).register_forward_hook(lambda _, inputs, out: seen.append(out.shape))
    check_parity((fast, reference), graph, features(graph, 7), device)
    assert seen[0] == (graph.num_nodes(), 4)


@pytest.mark.parametrize("case", ["pair", "hook", "gcn"])
@RECOMPUTE
def test_a_weight_written_before_the_backward_pass_is_an_error(case, recompute, device):
    graph = homogeneous().to(device) if device == "cpu" else fastsparse_dgl.prepare(homogeneous(), device)
    aggregator = "gcn" if case == "gcn" else "mean"
    layer = FastMaxKSAGEConv(7, 4, aggregator, K, recompute=recompute).to(device)
    if case == "hook":
        layer.fc_neigh.register_forward_hook(lambda *_: None)
    feat = features(homogeneous(), 7).to(device).requires_grad_()
    out = layer(graph, (feat, feat.detach().clone()) if case == "pair" else feat)
    with torch.no_grad():
        layer.fc_neigh.weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_dropout_is_of_the_kept_entries():
    graph = homogeneous()
    layer = FastMaxKSAGEConv(7, 4, "mean", K, feat_drop=0.5)
    feat = features(graph, 7)
    torch.manual_seed(0)
    first = layer(graph, feat)
    assert not torch.equal(first, layer(graph, feat))
    torch.manual_seed(0)
    assert torch.equal(first, layer(graph, feat))
    reference = FastMaxKSAGEConv(7, 4, "mean", K)
    reference.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer.eval()(graph, feat), reference(graph, feat))
    # The mean over many masks is close to the result without dropout.
    layer.train()
    mean = torch.stack([layer(graph, feat) for _ in range(600)]).mean(0)
    assert (mean - reference(graph, feat)).norm() < 0.1 * reference(graph, feat).norm()


@pytest.mark.parametrize("family", ["gcn", "sage"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(family, dtype, device):
    graph = homogeneous()
    args = (7, 4) if family == "gcn" else (7, 4, "mean")
    fast, reference = layers(family, *args)
    feat = features(graph, 7).to(dtype)
    found = fast.to(device, dtype)(graph, feat.to(device))
    assert found.dtype == dtype
    tolerance = 1e-10 if dtype == torch.float64 else 0.05
    expected = reference.double()(graph, feat.double())
    torch.testing.assert_close(found.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", ["gcn", "sage"])
def test_bad_input(family):
    graph = homogeneous()
    cls, args = (FastMaxKGraphConv, (7, 4)) if family == "gcn" else (FastMaxKSAGEConv, (7, 4, "mean"))
    with pytest.raises(ValueError, match="k: expected at least 1 kept entry"):
        cls(*args, k=0)
    with pytest.raises(DGLError, match="k: expected at most 7, the width of the input, got 8"):
        cls(*args, k=8)
    with pytest.raises(TypeError, match="k: expected an int, got float"):
        cls(*args, k=2.0)
    layer = cls(*args, k=K)
    with pytest.raises(DGLError, match=r"feat: expected one row per source node \(30 rows"):
        layer(graph, torch.randn(31, 7))
    with pytest.raises(DGLError, match="feat: expected a tensor"):
        layer(graph, "features")
    with pytest.raises(DGLError, match="edge_weight: expected one row per edge"):
        layer(graph, features(graph, 7), edge_weight=torch.ones(3))
    lonely = dgl.graph((torch.tensor([0]), torch.tensor([1])), num_nodes=3)
    if family == "gcn":
        with pytest.raises(DGLError, match="zero in-degree"):
            layer(lonely, torch.randn(3, 7))
