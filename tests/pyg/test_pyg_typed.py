"""The layers of typed edges against PyG's: outputs, every gradient over the options, and fallbacks."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch_geometric
from torch_geometric import nn as pyg
from torch_geometric.nn import HGTConv, RGATConv, RGCNConv

from fastsparse_core import Adjacency
from fastsparse_core.fused.relational_attention import relational_attention
from fastsparse_core.grouped_product import grouped_product
from fastsparse_core.relations import Relations
from fastsparse_pyg import (
    FastFastRGCNConv,
    FastHGTConv,
    FastRGATConv,
    FastRGCNConv,
    accelerate,
    cache_info,
    compat,
    restore,
)
from fastsparse_pyg.compat.torch_sparse import SparseTensor
from fastsparse_pyg.nn import DROP_INS, rgat_conv, rgcn_conv
from fastsparse_pyg.relations import relations_of

NODES, EDGES, RELATIONS = 30, 300, 5


def graph(device, num_src=NODES, num_dst=NODES):
    """Edges in any order; relation 4 has none, destination 0 only one, repeated edges."""
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(0, num_src, (EDGES,), generator=generator)
    dst = torch.randint(1, num_dst, (EDGES,), generator=generator)
    dst[7] = 0
    kind = torch.randint(0, RELATIONS - 1, (EDGES,), generator=generator)
    return torch.stack([src, dst]).to(device), kind.to(device)


def pair_of_layers(original, drop_in, device, *args, **options):
    ours = drop_in(*args, **options).to(device, torch.float64)
    theirs = original(*args, **options).to(device, torch.float64)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def assert_same(layers, inputs, *args, **options):
    """Outputs and gradients of two layers are equal."""
    results = []
    for layer in layers:
        out = layer(*args, **options)
        outs = (
            list(out.values())
            if isinstance(out, dict)
            else [out]
            if torch.is_tensor(out)
            else [out[0], out[1][1]]
        )
        total = sum((it * torch.arange(it.numel(), device=it.device).view_as(it) / 50).sum() for it in outs)
        wanted = [*inputs, *layer.parameters()]
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
        results.append(
            outs + [torch.zeros_like(it) if g is None else g for it, g in zip(wanted, grads, strict=True)]
        )
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- RGCN

DECOMPOSITIONS = ({}, {"num_bases": 3}, {"num_blocks": 2})


@pytest.mark.parametrize("way", ["at once", "transforms first", "sums first"])
@pytest.mark.parametrize("decomposition", DECOMPOSITIONS, ids=["full", "bases", "blocks"])
@pytest.mark.parametrize("aggr", ["mean", "add", "max", "min"])
def test_rgcn(device, monkeypatch, aggr, decomposition, way):
    monkeypatch.setattr(Relations, "transforms_first", lambda *_: way == "transforms first")
    if way != "at once":
        monkeypatch.setattr(rgcn_conv, "FEW_PAIRS", 0)
    for bipartite, root_weight, bias in itertools.product([False, True], [False, True], [False, True]):
        channels, num_dst = ((8, 6), 20) if bipartite else (8, NODES)
        edge_index, kind = graph(device, num_dst=num_dst)
        layers = pair_of_layers(
            RGCNConv,
            FastRGCNConv,
            device,
            channels,
            4,
            RELATIONS,
            aggr=aggr,
            root_weight=root_weight,
            bias=bias,
            **decomposition,
        )
        x = torch.randn(NODES, 8, dtype=torch.float64, device=device, requires_grad=True)
        if bipartite:
            other = torch.randn(num_dst, 6, dtype=torch.float64, device=device, requires_grad=True)
            assert_same(layers, [x, other], (x, other), edge_index, kind)
        else:
            assert_same(layers, [x], x, edge_index, kind)


@pytest.mark.parametrize("aggr", ["mean", "max"])
@pytest.mark.parametrize("decomposition", DECOMPOSITIONS[:2], ids=["full", "bases"])
def test_rgcn_of_indices(device, decomposition, aggr):
    edge_index, kind = graph(device)
    layers = pair_of_layers(RGCNConv, FastRGCNConv, device, NODES, 4, RELATIONS, aggr=aggr, **decomposition)
    order = torch.randperm(NODES, device=device)
    for x in (None, order, (None, order), (order, torch.arange(NODES, device=device))):
        assert_same(layers, [], x, edge_index, kind)
    before = cache_info().misses
    layers[1](order, edge_index, kind)
    order[:2] = order[:2].flip(0).clone()
    assert_same(layers, [], order, edge_index, kind)
    assert cache_info().misses == before + 1


@pytest.mark.parametrize("decomposition", DECOMPOSITIONS, ids=["full", "bases", "blocks"])
@pytest.mark.parametrize("aggr", ["mean", "add"])
def test_rgcn_by_a_matrix_per_edge(device, aggr, decomposition):
    edge_index, kind = graph(device)
    classes = (pyg.FastRGCNConv, FastFastRGCNConv)
    layers = pair_of_layers(*classes, device, 8, 4, RELATIONS, aggr=aggr, **decomposition)
    x = torch.randn(NODES, 8, dtype=torch.float64, device=device, requires_grad=True)
    assert_same(layers, [x], x, edge_index, kind)
    ours, theirs = (layer.bfloat16() for layer in layers)
    half = ours(x.bfloat16(), edge_index, kind)
    assert half.dtype == theirs(x.bfloat16(), edge_index, kind).dtype
    with pytest.raises(AssertionError):  # like PyG's layer
        FastFastRGCNConv(8, 4, RELATIONS, aggr="max")(x.float(), edge_index, kind)


@pytest.mark.parametrize("decomposition", DECOMPOSITIONS, ids=["full", "bases", "blocks"])
@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_rgcn_without_edges(device, aggr, decomposition):
    """As a batch may come: every matrix gets the gradient 0."""
    edge_index, kind = (each[..., :0] for each in graph(device))
    layers = pair_of_layers(RGCNConv, FastRGCNConv, device, (8, 8), 4, RELATIONS, aggr=aggr, **decomposition)
    x, other = (torch.randn(n, 8, dtype=torch.float64, device=device, requires_grad=True) for n in (NODES, 3))
    assert_same(layers, [x, other], (x, other), edge_index, kind)


def test_rgcn_by_a_matrix_per_edge_of_indices(device):
    """PyG's own code runs, with this layer's messages and not those of the other form of RGCN."""
    edge_index, kind = graph(device)
    FastRGCNConv(NODES, 4, RELATIONS).to(device)(None, edge_index, kind)
    layers = pair_of_layers(pyg.FastRGCNConv, FastFastRGCNConv, device, NODES, 4, RELATIONS)
    assert_same(layers, [], None, edge_index, kind)
    swapped = copy.deepcopy(layers[0])
    accelerate(swapped, show=False)
    assert_same((layers[0], swapped), [], None, edge_index, kind)


@pytest.mark.parametrize("wrong", [RELATIONS, -1])
@pytest.mark.parametrize("options", [{}, {"num_bases": 2}], ids=str)
@pytest.mark.parametrize("indices", [False, True])
@pytest.mark.parametrize("original", [RGCNConv, pyg.FastRGCNConv, RGATConv])
def test_edges_of_unknown_types_have_no_matrix(device, original, wrong, options, indices):
    if indices and original is not RGCNConv:
        pytest.skip("features that are indices are RGCNConv's, or run PyG's own code")
    edge_index, kind = graph(device)
    kind[3] = wrong
    x = None if indices else torch.randn(NODES, 8, device=device)
    width = NODES if indices else 8
    if not indices:
        FastRGCNConv(8, 4, RELATIONS, num_blocks=2).to(device)(x, edge_index, kind)  # leaves them out
    layer = DROP_INS[original](width, 4, RELATIONS, **options).to(device)
    for _ in range(2):
        with pytest.raises(IndexError, match=f"edge_type: expected types from 0 to {RELATIONS - 1}"):
            layer(x, edge_index, kind)
    if device == "cpu":
        with pytest.raises((IndexError, RuntimeError)):
            original(width, 4, RELATIONS, **options)(x, edge_index, kind)


def test_types_that_pyg_does_not_count_are_left_out(device, monkeypatch):
    edge_index, kind = graph(device)
    kind[3] = RELATIONS
    monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", False)
    layers = pair_of_layers(RGCNConv, FastRGCNConv, device, 8, 4, RELATIONS)
    assert_same(layers, [], torch.randn(NODES, 8, dtype=torch.float64, device=device), edge_index, kind)


def test_rgcn_of_few_nodes_is_one_product(device, monkeypatch):
    """And has second derivatives."""
    edge_index, kind = graph(device)
    x = torch.randn(NODES, 4, dtype=torch.float64, device=device, requires_grad=True)
    layer = FastRGCNConv(4, 3, RELATIONS).to(device, torch.float64)
    monkeypatch.setattr(rgcn_conv, "grouped_product", None)
    assert torch.autograd.gradgradcheck(
        lambda x, *_: layer(x, edge_index, kind), (x, layer.weight, layer.root)
    )
    with pytest.raises(TypeError, match="NoneType"), torch.autocast(x.device.type, torch.bfloat16):
        layer(x, edge_index, kind)


@pytest.mark.parametrize("which", [0, 1], ids=["RGCN", "FastRGCN"])
@pytest.mark.parametrize("options", [{}, {"num_bases": 2}, {"bias": False}, {"root_weight": False}], ids=str)
@pytest.mark.parametrize("casts", [True, False], ids=["autocast", "bfloat16"])
def test_rgcn_of_few_nodes_in_16_bits(device, monkeypatch, which, options, casts):
    """One product under autocast too; results and gradients have PyG's dtypes."""
    original, drop_in = ((RGCNConv, FastRGCNConv), (pyg.FastRGCNConv, FastFastRGCNConv))[which]
    exact, ours = pair_of_layers(original, drop_in, device, 8, 4, RELATIONS, **options)
    theirs = original(8, 4, RELATIONS, **options).to(device)
    theirs.load_state_dict(exact.state_dict())
    ours, theirs = (each.to(torch.float32 if casts else torch.bfloat16) for each in (ours, theirs))
    edge_index, kind = graph(device)
    x = torch.randn(NODES, 8, device=device).to(ours.weight.dtype).requires_grad_()
    with torch.autocast(device, torch.bfloat16, enabled=casts):
        expected = theirs(x, edge_index, kind)
        monkeypatch.setattr(rgcn_conv, "grouped_product", None)
        out = ours(x, edge_index, kind)
    assert out.dtype == expected.dtype
    grad = torch.randn_like(expected)
    found = torch.autograd.grad(out, [x, *ours.parameters()], grad)
    exact_x = x.detach().double().requires_grad_()
    exact.load_state_dict(ours.state_dict())
    wanted = exact(exact_x, edge_index, kind)
    gradients = torch.autograd.grad(wanted, [exact_x, *exact.parameters()], grad.double())
    for got, right in zip((out, *found), (wanted, *gradients), strict=True):
        assert (got.double() - right).norm() <= 2e-2 * right.norm()
    assert [each.dtype for each in found] == [each.dtype for each in (x, *ours.parameters())]


def test_rgcn_of_other_graphs(device):
    edge_index, kind = graph(device)
    layers = pair_of_layers(RGCNConv, FastRGCNConv, device, 8, 4, RELATIONS)
    x = torch.randn(NODES, 8, dtype=torch.float64, device=device)
    expected = layers[0](x, edge_index, kind)
    adj = Adjacency.from_coo(edge_index[1], edge_index[0], (NODES, NODES))
    torch.testing.assert_close(layers[1](x, adj, kind), expected)
    torch.testing.assert_close(layers[1](x, edge_index.int(), kind.int()), expected)
    unknown = torch.where(kind == 2, RELATIONS, kind)  # PyG leaves such edges out if it does not count types
    blocks = pair_of_layers(RGCNConv, FastRGCNConv, device, 8, 4, RELATIONS, num_blocks=2)
    assert_same(blocks, [], x, edge_index, unknown)
    torch.testing.assert_close(
        layers[1](x, edge_index[:, :0], kind[:0]), layers[0](x, edge_index[:, :0], kind[:0])
    )
    backwards = pair_of_layers(RGCNConv, FastRGCNConv, device, 8, 4, RELATIONS, flow="target_to_source")
    assert_same(backwards, [], x, edge_index, kind)
    matrix = SparseTensor.from_edge_index(edge_index.flip(0), kind, (NODES, NODES))
    with pytest.raises(ValueError, match=r"got SparseTensor; call fastsparse_pyg.compat.install\(\)"):
        layers[1](x, matrix)
    with pytest.raises(IndexError, match="from 0 to 19"):
        layers[1](x[:20], edge_index, kind)
    with pytest.raises(ValueError, match=r"edge_type: expected one type for each of 300 edges"):
        layers[1](x, edge_index, kind[:-1])


def test_rgcn_in_float32_and_half(device):
    edge_index, kind = graph(device)
    ours, theirs = (kind_of(8, 16, RELATIONS).to(device) for kind_of in (FastRGCNConv, RGCNConv))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(NODES, 8, device=device)
    torch.testing.assert_close(ours(x, edge_index, kind), theirs(x, edge_index, kind), rtol=1e-4, atol=1e-5)
    half, expected = ours.bfloat16()(x.bfloat16(), edge_index, kind), theirs(x, edge_index, kind)
    assert half.dtype == torch.float32  # as in PyG, which adds to float32 zeros
    torch.testing.assert_close(half, expected, rtol=0.1, atol=0.1)
    ours.float()
    with torch.autocast(device, dtype=torch.bfloat16):
        out = ours(x, edge_index, kind)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=0.1, atol=0.1)
    assert all(torch.equal(ours(x, edge_index, kind), ours(x, edge_index, kind)) for _ in range(2))


# ---------------------------------------------------------------- RGAT


@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@pytest.mark.parametrize("mode", ["additive-self-attention", "multiplicative-self-attention"])
@pytest.mark.parametrize("mod", [None, "additive", "scaled", "f-additive", "f-scaled"])
@pytest.mark.parametrize("every_pair", [False, True], ids=["pairs with edges", "every pair"])
def test_rgat(device, monkeypatch, every_pair, mechanism, mode, mod):
    monkeypatch.setattr(
        FastRGATConv, "_takes_every_pair", lambda _, x, weight: every_pair and weight.dim() == 3
    )
    edge_index, kind = graph(device)
    features = torch.randn(EDGES, 3, dtype=torch.float64, device=device)
    x = torch.randn(NODES, 8, dtype=torch.float64, device=device, requires_grad=True)
    cases = [
        ({}, True, None, None),
        ({}, False, None, None),
        ({"num_bases": 3}, False, features, None),
        ({"num_blocks": 2}, True, features, True),
        ({}, True, features[:, 0], False),
    ]
    for decomposition, concat, edge_attr, with_weights in cases:
        edge_dim = None if edge_attr is None else edge_attr[:, None].flatten(1).size(1)
        layers = pair_of_layers(
            RGATConv,
            FastRGATConv,
            device,
            8,
            6,
            RELATIONS,
            heads=2,
            mod=mod,
            attention_mechanism=mechanism,
            attention_mode=mode,
            dim=2 if mode[0] == "m" else 1,
            concat=concat,
            edge_dim=edge_dim,
            bias=concat,
            **decomposition,
        )
        assert_same(layers, [x], x, edge_index, kind, edge_attr, return_attention_weights=with_weights)


def test_rgat_reads_edge_features_from_a_sparse_tensor(device):
    """RGCN reads the types of the edges there."""
    edge_index, kind = graph(device)
    order = (edge_index[1] * NODES + edge_index[0]).argsort(stable=True)
    edge_index, kind = edge_index[:, order], kind[order]
    features = torch.randn(EDGES, 3, dtype=torch.float64, device=device)
    x = torch.randn(NODES, 8, dtype=torch.float64, device=device, requires_grad=True)
    layers = pair_of_layers(RGATConv, FastRGATConv, device, 8, 6, RELATIONS, edge_dim=3)
    compat.install()
    try:
        matrix = torch_geometric.typing.SparseTensor.from_edge_index(
            edge_index.flip(0), features, (NODES, NODES), is_sorted=True
        )
        assert_same(layers, [x], x, matrix, kind)
        torch.testing.assert_close(layers[1](x, matrix, kind), layers[1](x, edge_index, kind, features))
    finally:
        compat.uninstall()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_rgat_of_few_nodes_is_one_node(device, monkeypatch, dropout, dtype):
    """Its dropout drops the same weights as the operators."""
    monkeypatch.setattr(FastRGATConv, "_takes_every_pair", lambda *_: True)
    edge_index, kind = graph(device)
    layer = FastRGATConv(4, 3, RELATIONS, heads=2, dropout=dropout).to(device, dtype)
    x = torch.randn(NODES, 4, device=device, dtype=dtype, requires_grad=True)
    seen = []

    def gradients():
        torch.manual_seed(0)
        out = layer(x, edge_index, kind)
        seen.append(out.grad_fn.next_functions[0][0].next_functions[0][0].name())
        return [out, *torch.autograd.grad(out.square().sum(), [x, layer.weight, layer.q, layer.k])]

    found = gradients()
    with monkeypatch.context() as patch:
        patch.setattr(rgat_conv, "relational_attention", lambda *_: None)
        expected = gradients()
    assert ["RelationalAttention" in name for name in seen] == [True, False]
    for ours, theirs in zip(found, expected, strict=True):
        limit = 1e-4 if dtype == torch.float32 else 0.1
        assert ours.dtype == dtype
        assert (ours - theirs).norm() < limit * theirs.norm()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_derivatives_of_rgat_of_few_nodes(dropout):
    """On the CPU, whose kernels know float64."""
    generator = torch.Generator().manual_seed(0)
    edge_index, kind = (torch.randint(0, 5, shape, generator=generator) for shape in ((2, 20), (20,)))
    layer = FastRGATConv(3, 2, 2, heads=2, dropout=dropout).double()
    relations = relations_of(edge_index, kind % 2, (5, 5), 2, layer.flow).with_every_pair
    x = torch.randn(5, 3, dtype=torch.float64)
    inputs = [each.detach().requires_grad_() for each in (x, layer.weight, layer.q, layer.k)]

    def result(*inputs):
        torch.manual_seed(0)
        return relational_attention(relations.from_pairs, relations.dst_pairs, *inputs, 0.2, dropout)

    assert torch.autograd.gradcheck(result, inputs)
    assert torch.autograd.gradgradcheck(result, inputs)
    frozen = [each.detach() for each in inputs[1:]]
    assert torch.autograd.gradcheck(lambda x: result(x, *frozen), inputs[:1])


@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
def test_rgat_drops_attention_weights(device, mechanism):
    edge_index, kind = graph(device)
    layer = FastRGATConv(8, 6, RELATIONS, attention_mechanism=mechanism, dropout=0.5).to(device)
    x = torch.randn(NODES, 8, device=device)
    whole = layer.eval()(x, edge_index, kind)
    layer.train()
    mean = torch.stack([layer(x, edge_index, kind) for _ in range(100)]).mean(0)
    assert (mean - whole).norm() < 0.3 * whole.norm()
    out, (_, alpha) = layer(x, edge_index, kind, return_attention_weights=True)
    assert not torch.equal(out, whole)
    sums = torch.zeros(NODES, 1, device=device).index_add(0, edge_index[1], alpha)
    if mechanism == "across-relation":
        assert torch.allclose(sums[edge_index[1]], torch.ones_like(alpha))
    with pytest.raises(IndexError, match="edge_type: expected types from 0 to 4"):
        layer(x, edge_index, kind + 2)


# ---------------------------------------------------------------- HGT

METADATA = (
    ["author", "paper", "venue"],
    [
        ("author", "writes", "paper"),
        ("paper", "cites", "paper"),
        ("paper", "rev_writes", "author"),
        ("venue", "publishes", "paper"),
    ],
)
SIZES = {"author": 20, "paper": 31, "venue": 4}


def typed_graph(device):
    return {
        key: torch.stack([torch.randint(0, SIZES[key[0]], (60,)), torch.randint(0, SIZES[key[2]], (60,))]).to(
            device
        )
        for key in METADATA[1]
    }


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("channels", [8, {"author": 8, "paper": 5, "venue": 3}], ids=["equal", "by_type"])
def test_hgt(device, heads, channels):
    edges = typed_graph(device)
    widths = channels if isinstance(channels, dict) else dict.fromkeys(SIZES, channels)
    x = {
        key: torch.randn(size, widths[key], dtype=torch.float64, device=device, requires_grad=True)
        for key, size in SIZES.items()
    }
    layers = pair_of_layers(HGTConv, FastHGTConv, device, channels, 8, METADATA, heads=heads)
    assert_same(layers, list(x.values()), x, edges)
    assert set(layers[1](x, edges)) == {"author", "paper"}
    some = dict(itertools.islice(edges.items(), 1, 3))  # PyG needs the order of the metadata
    assert_same(layers, list(x.values()), x, some)


def test_hgt_that_runs_pygs_code(device, reasons):
    edges = typed_graph(device)
    x = {key: torch.randn(size, 6, device=device) for key, size in SIZES.items()}
    lazy = FastHGTConv(-1, 8, METADATA, heads=2).to(device)
    first = lazy(x, edges)
    (record,) = reasons.records  # no warning, because only the first call falls back
    assert record.levelname == "INFO"
    assert record.message.endswith("a lazy linear layer that is not initialized yet")
    for key, out in lazy(x, edges).items():
        torch.testing.assert_close(out, first[key], rtol=1e-4, atol=1e-5)
    seen = []
    lazy.k_rel.register_forward_hook(lambda *_: seen.append(1))
    lazy(x, edges)
    assert seen
    structures = {
        kind: Adjacency.from_coo(pairs[1], pairs[0], (SIZES[kind[2]], SIZES[kind[0]]))
        for kind, pairs in edges.items()
    }
    for key, out in lazy(x, structures).items():
        torch.testing.assert_close(out, first[key], rtol=1e-4, atol=1e-5)
    with pytest.raises(IndexError, match="edge_index_dict: expected source indices from 0 to 2"):
        FastHGTConv(6, 8, METADATA).to(device)({**x, "venue": x["venue"][:3]}, edges)


# ---------------------------------------------------------------- what they share


def test_accelerate_and_restore():
    model = torch.nn.ModuleList([RGCNConv(8, 8, 3), RGATConv(8, 8, 3), HGTConv(8, 8, METADATA)])
    accelerate(model, show=False)
    assert [type(layer) for layer in model] == [FastRGCNConv, FastRGATConv, FastHGTConv]
    assert repr(copy.deepcopy(model)[0]) == "FastRGCNConv(8, 8, num_relations=3)"
    restore(model)
    assert [type(layer) for layer in model] == [RGCNConv, RGATConv, HGTConv]


@pytest.mark.parametrize("blocks", [None, 2])
def test_grouped_product(device, blocks):
    starts = (0, 3, 3, 4, 9)
    shape = (4, 6, 4) if blocks is None else (4, 2, 3, 2)
    x = torch.randn(9, 6, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    out = grouped_product(x, weight, starts)
    for group, (first, last) in enumerate(itertools.pairwise(starts)):
        matrix = weight[group] if blocks is None else torch.block_diag(*weight[group])
        torch.testing.assert_close(out[first:last], x[first:last] @ matrix)
    assert torch.autograd.gradcheck(lambda x, w: grouped_product(x, w, starts), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: grouped_product(x, w, starts), (x, weight))
    with pytest.raises(ValueError, match="x: expected 6 columns"):
        grouped_product(x[:, :5], weight, starts)
    with pytest.raises(ValueError, match="starts: expected 4 first rows, then 9"):
        grouped_product(x, weight, starts[:-1])
