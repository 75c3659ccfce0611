"""Every layer of dgl.nn.pytorch with `enable()`: outputs and gradients are DGL's own on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dgl_cases import bipartite, block, dgl, homogeneous
from hook_cases import AWAY, assert_same, enabled_for, moved, tensors_of
from test_dgl_operators import heterogeneous
from torch import Tensor, nn

layers = dgl.nn.pytorch

N, E = 30, 120


def x(width: int, rows: int = N, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def positive(width: int, seed: int = 1) -> Tensor:
    return torch.rand(E, width, generator=torch.Generator().manual_seed(seed)) + 0.5


def kinds(rows: int, count: int, seed: int = 2) -> Tensor:
    return torch.randint(count, (rows,), generator=torch.Generator().manual_seed(seed))


def two() -> Any:
    return dgl.batch([homogeneous(seed=1), homogeneous(seed=2)])


def loopless() -> Any:
    return dgl.remove_self_loop(homogeneous())


def many_neighbours() -> Any:
    """Four to seven different ones for each node.

    Roots of the moments of a single message, or of two, are roots of zero: their derivatives are rounding
    errors over rounding errors, and two correct programs do not agree in them.
    """
    dst = torch.arange(N).repeat(7)
    src = (dst + torch.tensor([1, 3, 8, 12, 17, 20, 26]).repeat_interleave(N)) % N
    kept = torch.arange(7).repeat_interleave(N) < 4 + dst % 4
    return dgl.graph((src[kept], dst[kept]), num_nodes=N)


#: Layer, graph, inputs and, if it is not `layer(graph, *inputs)`, the call.
Case = tuple[Callable[[], nn.Module], Callable[[], Any], tuple[Any, ...]]

pna = {
    "aggregators": ["mean", "max", "min", "std", "var", "sum", "moment3"],
    "scalers": ["identity", "amplification"],
}
towers = {"delta": 2.5, "num_towers": 2}
twirls = {"input_d": 5, "output_d": 3, "hidden_d": 4, "prop_step": 2}

CONVOLUTIONS: dict[str, Case] = {
    "GraphConv": (lambda: layers.GraphConv(5, 3), homogeneous, (x(5),)),
    "GraphConv, weights": (
        lambda: layers.GraphConv(3, 5, "right"),
        homogeneous,
        (x(3), None, positive(1)[:, 0]),
    ),
    "GraphConv, block": (lambda: layers.GraphConv(5, 3), block, (x(5, block().num_src_nodes()),)),
    "GraphConv, bipartite": (lambda: layers.GraphConv(5, 3, "left"), bipartite, ((x(5, 17), x(5, 23)),)),
    "EdgeWeightNorm": (lambda: layers.EdgeWeightNorm(), homogeneous, (positive(1)[:, 0],)),
    "GATConv": (lambda: layers.GATConv(5, 3, 2, residual=True), homogeneous, (x(5),)),
    "GATConv, weights": (lambda: layers.GATConv(5, 3, 2), homogeneous, (x(5), positive(1)[:, 0])),
    "GATConv, bipartite": (lambda: layers.GATConv((5, 4), 3, 2), bipartite, ((x(5, 17), x(4, 23)),)),
    "GATv2Conv": (lambda: layers.GATv2Conv(5, 3, 2), homogeneous, (x(5),)),
    "EdgeGATConv": (lambda: layers.EdgeGATConv(5, 4, 3, 2), homogeneous, (x(5), positive(4))),
    "EGATConv": (lambda: layers.EGATConv(5, 4, 3, 6, 2), homogeneous, (x(5), positive(4))),
    "HGTConv": (
        lambda: layers.HGTConv(6, 3, 2, 2, 3, dropout=0.0),
        homogeneous,
        (x(6), kinds(N, 2), kinds(E, 3)),
    ),
    "TAGConv": (lambda: layers.TAGConv(5, 3), homogeneous, (x(5),)),
    "RelGraphConv": (lambda: layers.RelGraphConv(5, 3, 4), homogeneous, (x(5), kinds(E, 4))),
    "RelGraphConv, basis": (
        lambda: layers.RelGraphConv(16, 12, 4, "basis", 2),
        homogeneous,
        (x(16), kinds(E, 4), positive(1)),
    ),
    "RelGraphConv, bdd": (
        lambda: layers.RelGraphConv(6, 4, 4, "bdd", 2, layer_norm=True),
        homogeneous,
        (x(6), kinds(E, 4)),
    ),
    **{
        f"SAGEConv, {kind}": (lambda kind=kind: layers.SAGEConv(5, 3, kind), homogeneous, (x(5),))
        for kind in ("mean", "gcn", "pool", "lstm")
    },
    "SGConv": (lambda: layers.SGConv(5, 3, k=2), homogeneous, (x(5),)),
    "APPNPConv": (lambda: layers.APPNPConv(3, 0.2), homogeneous, (x(5),)),
    **{
        f"GINConv, {kind}": (
            lambda kind=kind: layers.GINConv(nn.Linear(5, 3), kind, learn_eps=True),
            homogeneous,
            (x(5),),
        )
        for kind in ("sum", "max", "mean")
    },
    "GINEConv": (lambda: layers.GINEConv(nn.Linear(5, 3)), homogeneous, (x(5), positive(5))),
    "GatedGraphConv": (lambda: layers.GatedGraphConv(5, 5, 2, 3), homogeneous, (x(5), kinds(E, 3))),
    "GatedGCNConv": (lambda: layers.GatedGCNConv(5, 4, 3), homogeneous, (x(5), positive(4))),
    "GMMConv": (lambda: layers.GMMConv(5, 3, 2, 4, "mean", residual=True), homogeneous, (x(5), positive(2))),
    "ChebConv": (lambda: layers.ChebConv(5, 3, 3), homogeneous, (x(5),)),
    "AGNNConv": (lambda: layers.AGNNConv(), homogeneous, (x(5),)),
    **{
        f"NNConv, {kind}": (
            lambda kind=kind: layers.NNConv(5, 3, nn.Linear(2, 15), kind),
            homogeneous,
            (x(5), positive(2)),
        )
        for kind in ("sum", "mean", "max")
    },
    "EdgeConv": (lambda: layers.EdgeConv(5, 3), homogeneous, (x(5),)),
    "EdgeConv, norm": (lambda: layers.EdgeConv(5, 3, batch_norm=True), homogeneous, (x(5),)),
    "AtomicConv": (
        lambda: layers.AtomicConv(torch.ones(3), torch.ones(3), torch.ones(3), torch.tensor([1.0, 2.0])),
        homogeneous,
        (kinds(N, 2)[:, None].float() + 1, positive(1)),
    ),
    "CFConv": (lambda: layers.CFConv(5, 4, 6, 3), homogeneous, (x(5), positive(4))),
    "DotGatConv": (lambda: layers.DotGatConv(5, 3, 2), homogeneous, (x(5),)),
    "TWIRLSConv": (lambda: layers.TWIRLSConv(**twirls), homogeneous, (x(5),)),
    "TWIRLSConv, attention": (
        lambda: layers.TWIRLSConv(**twirls, attention=True, attn_bef=True, precond=False),
        homogeneous,
        (x(5),),
    ),
    "TWIRLSUnfoldingAndAttention": (
        lambda: layers.TWIRLSUnfoldingAndAttention(5, 1, 1, 3, attn_aft=1),
        homogeneous,
        (x(5),),
    ),
    "GCN2Conv": (lambda: layers.GCN2Conv(5, 2), homogeneous, (x(5), x(5, seed=4))),
    "EGNNConv": (
        lambda: layers.EGNNConv(5, 6, 3, 2),
        loopless,
        (x(5), x(3, seed=5), positive(2)[: loopless().num_edges()]),
    ),
    "PNAConv": (
        lambda: layers.PNAConv(6, 4, **pna, **towers, edge_feat_size=2),
        many_neighbours,
        (x(6), x(2, many_neighbours().num_edges(), seed=1)),
    ),
    "DGNConv": (
        lambda: layers.DGNConv(6, 4, ["dir1-av", "dir1-dx", "sum"], ["identity"], **towers),
        homogeneous,
        (x(6), None, x(2, seed=5)),
    ),
    "GroupRevRes": (lambda: layers.GroupRevRes(layers.GraphConv(3, 3, bias=True)), homogeneous, (x(6),)),
    "LabelPropagation": (
        lambda: layers.LabelPropagation(3, 0.5, clamp=False, normalize=True),
        homogeneous,
        (kinds(N, 4),),
    ),
    "Sequential": (
        lambda: layers.Sequential(layers.GraphConv(5, 4), layers.GraphConv(4, 3)),
        homogeneous,
        (x(5),),
    ),
    "SumPooling": (layers.SumPooling, two, (x(5, 60),)),
    "AvgPooling": (layers.AvgPooling, two, (x(5, 60),)),
    "MaxPooling": (layers.MaxPooling, two, (x(5, 60),)),
    "SortPooling": (lambda: layers.SortPooling(3), two, (x(5, 60),)),
    "WeightAndSum": (lambda: layers.WeightAndSum(5), two, (x(5, 60),)),
    "GlobalAttentionPooling": (lambda: layers.GlobalAttentionPooling(nn.Linear(5, 1)), two, (x(5, 60),)),
    "Set2Set": (lambda: layers.Set2Set(5, 2, 1), two, (x(5, 60),)),
    "SetTransformerEncoder": (lambda: layers.SetTransformerEncoder(6, 2, 3, 8), two, (x(6, 60),)),
    "SetTransformerDecoder": (lambda: layers.SetTransformerDecoder(6, 2, 3, 8, 1, 2), two, (x(6, 60),)),
}

#: Layers without a DGLGraph, or with several types. The call is `layer(graph, *inputs)` of the objects made
#: here.
OTHERS: dict[str, Case] = {
    "HeteroGraphConv": (
        lambda: Named(
            layers.HeteroGraphConv(
                {kind: layers.GraphConv(3, 2) for kind in ("follows", "near", "rates")}, "sum"
            )
        ),
        lambda: with_loops(heterogeneous()),
        ({"user": x(3, 6), "item": x(3, 5)},),
    ),
    "HeteroLinear": (
        lambda: Bare(layers.HeteroLinear({"a": 5, "b": 4}, 3)),
        homogeneous,
        ({"a": x(5), "b": x(4)},),
    ),
    "TypedLinear": (lambda: Bare(layers.TypedLinear(5, 3, 4)), homogeneous, (x(5), kinds(N, 4))),
    "TypedLinear, sorted": (
        lambda: Bare(layers.TypedLinear(16, 12, 4, "basis", 2), sorted_by_type=True),
        homogeneous,
        (x(16), kinds(N, 4).sort().values),
    ),
    "JumpingKnowledge": (
        lambda: Bare(layers.JumpingKnowledge("lstm", 5, 2)),
        homogeneous,
        ([x(5), x(5, seed=1)],),
    ),
    "EdgePredictor": (lambda: Bare(layers.EdgePredictor("cos")), homogeneous, (x(5), x(5, seed=1))),
    "TransE": (lambda: Bare(layers.TransE(4, 5)), homogeneous, (x(5), x(5, seed=1), kinds(N, 4))),
    "TransR": (lambda: Bare(layers.TransR(4, 3, 5)), homogeneous, (x(5), x(5, seed=1), kinds(N, 4))),
    "KNNGraph": (lambda: GraphOf(layers.KNNGraph(3)), homogeneous, (x(3),)),
    "SegmentedKNNGraph": (lambda: GraphOf(layers.SegmentedKNNGraph(3), [10, 20]), homogeneous, (x(3),)),
    "RadiusGraph": (lambda: GraphOf(layers.RadiusGraph(1.5)), homogeneous, (x(3),)),
    "DegreeEncoder": (
        lambda: Bare(layers.DegreeEncoder(5, 4)),
        homogeneous,
        (torch.stack([kinds(N, 9)[None], kinds(N, 9, 3)[None]]),),
    ),
    "BiasedMHA": (lambda: Bare(layers.BiasedMHA(6, 2, attn_drop=0.0)), homogeneous, (x(6).view(2, 15, 6),)),
    "GraphormerLayer": (
        lambda: Bare(layers.GraphormerLayer(6, 8, 2, dropout=0.0, attn_dropout=0.0)),
        homogeneous,
        (x(6).view(2, 15, 6),),
    ),
    "EGTLayer": (
        lambda: Bare(layers.EGTLayer(6, 4, 2, 1)),
        homogeneous,
        (x(6).view(2, 15, 6), torch.ones(2, 15, 15, 4)),
    ),
    "SpatialEncoder": (
        lambda: Bare(layers.SpatialEncoder(3, 2)),
        homogeneous,
        (kinds(N, 5).view(2, 15, 1).expand(2, 15, 15).clone(),),
    ),
    "DenseGraphConv": (lambda: Bare(layers.DenseGraphConv(5, 3)), homogeneous, (torch.ones(N, N), x(5))),
}

#: Classes of dgl.nn.pytorch without a case, and why.
WITHOUT = {
    "CuGraphGATConv": "needs pylibcugraphops", "CuGraphRelGraphConv": "needs pylibcugraphops",
    "CuGraphSAGEConv": "needs pylibcugraphops", "DeepWalk": "walks of a graph on the CPU",
    "MetaPath2Vec": "walks of a graph on the CPU", "HeteroEmbedding": "embeddings alone",
    "GNNExplainer": "trains masks: below", "HeteroGNNExplainer": "as GNNExplainer",
    "PGExplainer": "as GNNExplainer", "HeteroPGExplainer": "as GNNExplainer",
    "SubgraphX": "as GNNExplainer", "HeteroSubgraphX": "as GNNExplainer",
    "LapPosEncoder": "dense", "PathEncoder": "dense", "SpatialEncoder3d": "dense", "DenseChebConv": "dense",
    "DenseSAGEConv": "dense", "WeightBasis": "parameters alone, in TypedLinear",
}  # fmt: skip


def with_loops(graph: Any) -> Any:
    """No node without an edge of the types that end in it, which GraphConv refuses."""
    for kind in graph.canonical_etypes:
        nodes = torch.arange(graph.num_nodes(kind[2]))
        graph.add_edges(nodes % graph.num_nodes(kind[0]), nodes, etype=kind)
    return graph


class Bare(nn.Module):
    """A layer that takes no graph."""

    def __init__(self, layer: nn.Module, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = layer, options

    def forward(self, graph: Any, *inputs: Any) -> Any:
        return self.layer(*inputs, **self.options)


class Named(Bare):
    """One that takes a dictionary by node type."""

    def forward(self, graph: Any, *inputs: Any) -> Any:
        return self.layer(graph, *inputs)


class GraphOf(nn.Module):
    """One that makes a graph."""

    def __init__(self, layer: nn.Module, *more: Any) -> None:
        super().__init__()
        self.layer, self.more = layer, more

    def forward(self, graph: Any, *inputs: Any) -> Any:
        made = self.layer(*inputs, *self.more)
        assert made.device == inputs[0].device
        src, dst = made.edges()
        return (src * made.num_nodes() + dst).sort().values


def floats(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Inputs with their floating tensors changed."""
    if isinstance(item, Tensor):
        return change(item) if item.is_floating_point() else item
    if isinstance(item, dict):
        return {key: floats(part, change) for key, part in item.items()}
    return type(item)(floats(part, change) for part in item) if isinstance(item, (list, tuple)) else item


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """PyTorch's inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def results(make: Case, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Outputs and the gradients of inputs and parameters, on the CPU."""
    layer, graph, inputs = make
    inputs = floats(inputs, lambda it: it.to(dtype))
    torch.manual_seed(0)
    module = layer().to(dtype)
    torch.manual_seed(1)
    module, made, inputs = module.to(device), graph().to(device), moved(inputs, device)
    with default_dtype(dtype):  # for tensors that a layer makes itself
        outputs = tensors_of(module(made, *inputs))
    kept = [out.detach().clone() for out in outputs]  # GroupRevRes frees its output in the backward pass
    total = None
    for nth, out in enumerate(outputs):
        assert str(out.device).startswith(device), out.device
        if out.requires_grad:
            upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(nth)).to(out)
            term = (out * upstream).sum()
            total = term if total is None else total + term
    leaves = [leaf for leaf in tensors_of(inputs) if leaf.requires_grad] + list(module.parameters())
    if total is not None:
        total.backward()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [tensor.detach().cpu() for tensor in kept + gradients]


#: Layers that the pretended device does not support: recurrent cells, storages freed by hand, as_tensor.
NOT_PRETENDED = (
    "SAGEConv, lstm", "GatedGraphConv", "Set2Set", "JumpingKnowledge", "GroupRevRes", "SetTransformerDecoder",
)  # fmt: skip


@pytest.mark.slow  # test_dgl_operators.py has the tests for a quick run
@pytest.mark.parametrize("device", ["cpu", *AWAY])
@pytest.mark.parametrize("name", [*CONVOLUTIONS, *OTHERS])
def test_layer(name: str, device: str) -> None:
    if name in NOT_PRETENDED and device == "pretended:0":
        pytest.skip("PyTorch code that the pretended device lacks")
    check(name, device)


def errors_of_rounding(case: Case, exact: list[Tensor]) -> list[float]:
    """The largest errors of DGL's own code in float32, over inputs that differ in their last bits.

    One run is not enough: the rounding errors of a sum that cancels to zero may be zero by chance.
    """
    layer, graph, inputs = case

    def error(seed: int) -> list[float]:
        generator = torch.Generator().manual_seed(seed)

        def nudge(it: Tensor) -> Tensor:
            steps = torch.randint(3, it.shape, generator=generator) - 1
            # Whole numbers are types, or constant on purpose.
            return torch.where(it == it.round(), it, it * (1 + steps * torch.finfo(it.dtype).eps))

        found = results((layer, graph, floats(inputs, nudge)), "cpu")
        return [
            float((got - want).abs().max()) if want.numel() else 0.0
            for got, want in zip(found, exact, strict=True)
        ]

    return [max(errors) for errors in zip(*map(error, range(4)), strict=True)]


def check(name: str, device: str) -> None:
    """Compares with DGL's own code on the CPU in float64.

    The tolerance is 2e-5 of a tensor's largest entry, plus four times the rounding error of DGL's own code in
    float32. If a sum cancels, as in the gradient of a bias before a softmax, only the rounding errors of its
    terms are left, and they depend on the order of the terms.
    """
    if name == "GatedGCNConv" and not hasattr(layers, name):
        pytest.skip("DGL 1.1.3 has no GatedGCNConv")
    case = CONVOLUTIONS.get(name) or OTHERS[name]
    own = results(case, "cpu")
    exact = results(case, "cpu", torch.float64)
    # Otherwise cuDNN's recurrent cells may be less accurate.
    with enabled_for(device), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = results(case, device)
    largest = max((float(tensor.abs().max()) for tensor in exact if tensor.numel()), default=1.0)
    for got, like, want, error in zip(found, own, exact, errors_of_rounding(case, exact), strict=True):
        assert (got.shape, got.dtype) == (like.shape, like.dtype)
        scale = max(float(want.abs().max()) if want.numel() else 0.0, 0.05 * largest)
        torch.testing.assert_close(got.to(want.dtype), want, rtol=0, atol=2e-5 * scale + 4 * error)


def test_every_layer_has_a_case() -> None:
    classes = {
        name
        for name, item in vars(layers).items()
        if isinstance(item, type) and issubclass(item, nn.Module) and item is not nn.Module
    }
    tested = {name.split(",")[0] for name in (*CONVOLUTIONS, *OTHERS)}
    assert classes - tested - set(WITHOUT) == set()


@pytest.mark.parametrize("device", ["cpu", *AWAY])
def test_explainer(device: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layers.GraphConv(5, 3, allow_zero_in_degree=True)

        def forward(self, graph: Any, feat: Tensor, eweight: Tensor | None = None) -> Tensor:
            return self.layer(graph, feat, edge_weight=eweight)

    def explained(where: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model().to(where)
        explainer = layers.GNNExplainer(model, 1, num_epochs=1, log=False)
        graph = homogeneous().to(where)
        _, sub, feat_mask, edge_mask = explainer.explain_node(3, graph, x(5).to(where))
        assert edge_mask.device == sub.device == feat_mask.device
        return [sub.edata[dgl.EID].cpu(), torch.tensor(feat_mask.shape), torch.tensor(edge_mask.shape)]

    expected = explained("cpu")
    with enabled_for(device):
        assert_same(explained(device), expected)
