"""What the drop-in layers have in common, against DGL's layers."""

from __future__ import annotations

import copy
import io
import pickle
import re
from pathlib import Path

import pytest
import torch
from cuda_graphs import check_replays
from dgl_cases import (
    GRAPHS,
    SINGLE,
    TOLERANCE,
    DGLError,
    bipartite,
    block,
    dgl,
    fastsparse_dgl,
    features,
    homogeneous,
    layer_pair,
    pair,
    restricted,
    weights,
)
from dgl_layer_cases import (
    ATTENTION,
    CASES,
    LAYERS,
    NOT_REPLAYED,
    WANTS_EDGES,
    WIDTH,
    WITH_ATTENTION,
    Case,
    WithAttention,
    allowing_zero,
    check,
    check_layer,
    each_case,
    inputs,
    layers,
    small_bipartite,
)
from digits import SCALES, Problem, check_digits
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from fastsparse_core import Adjacency
from fastsparse_dgl.nn import DROP_INS

#: The part about DGL's layers.
COMPILE_PAGE = (Path(__file__).parents[2] / "docs" / "compile_layers.md").read_text().split("\n## DGL\n")[-1]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ATTENTION)
def test_large_features_cost_no_more_digits_than_the_original(name, scale):
    """On the CPU. Kernels for GPUs derive the softmax from the stored result, with fewer digits."""

    def make(seed: int) -> Problem:
        graph = homogeneous(seed=seed)
        fast, reference = layer_pair(LAYERS[name][0], *LAYERS[name][1])
        x = scale * features(graph, WIDTH, seed=seed)
        return Problem(reference, fast, [x], lambda conv, given, _: conv(graph, *given))

    check_digits(make)


@pytest.mark.parametrize("graph_name", GRAPHS)
@pytest.mark.parametrize("name", ATTENTION)
def test_parity(name, graph_name, device):
    graph = GRAPHS[graph_name]()
    single = graph_name in SINGLE
    check(layers(name, pair_of_widths=not single), graph, inputs(name, graph, single), device)


@pytest.mark.parametrize("graph_name", SINGLE)
@pytest.mark.parametrize("name", ATTENTION)
def test_pair_on_graphs_that_take_one_tensor(name, graph_name, device):
    graph = GRAPHS[graph_name]()
    check(layers(name, pair_of_widths=True), graph, inputs(name, graph, False), device)


@pytest.mark.parametrize("graph_name", GRAPHS)
@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_attention(name, graph_name, device):
    graph = GRAPHS[graph_name]()
    single = graph_name in SINGLE
    fast, reference = layers(name, pair_of_widths=not single)
    feat = inputs(name, graph, single)
    check((WithAttention(fast), WithAttention(reference)), graph, feat, device)
    on_device = feat.to(device) if single else tuple(item.to(device) for item in feat)
    out, attention = fast(graph, on_device, get_attention=True)
    assert out.shape == (graph.num_dst_nodes(), 3, 4)
    assert attention.shape == (graph.num_edges(), 3, 1)
    torch.testing.assert_close(out, fast(graph, on_device))


@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_returning_the_attention_changes_no_bit(name, device):
    graph, layer = homogeneous(), layers(name)[0].to(device)
    feat = inputs(name, graph).to(device)
    assert torch.equal(layer(graph, feat, get_attention=True)[0], layer(graph, feat))


class InPlace(nn.Module):
    """A layer whose result is written to, and used again."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, graph, feat):
        return torch.relu_(self.layer(graph, feat)) * 2


@pytest.mark.parametrize("name", ATTENTION)
def test_result_may_be_written_to(name, device):
    graph = homogeneous()
    options = {"bias": False} if name == "gat" else {}
    fast, reference = layers(name, **options)
    check((InPlace(fast), InPlace(reference)), graph, inputs(name, graph), device)


@pytest.mark.parametrize("name", ATTENTION)
def test_second_derivatives(name, device):
    graph, layer = homogeneous(), layers(name)[0].to(device).double()
    feat = inputs(name, graph).to(device).double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda feat: layer(graph, feat), (feat,), fast_mode=True)


@pytest.mark.parametrize("layout", ["coo", "csc", "csr"])
@pytest.mark.parametrize("name", WANTS_EDGES)
def test_restricted_formats(name, layout, device):
    """DGL's own layer needs COO for some; ours takes any."""
    check_layer(name, homogeneous(), device, restricted(layout))


@pytest.mark.parametrize("name", LAYERS)
def test_zero_in_degree_allowed(name, device):
    graph = dgl.graph((torch.tensor([0, 1, 2, 2, 4]), torch.tensor([1, 2, 3, 1, 1])), num_nodes=6)
    check_layer(name, graph, device, **allowing_zero(name))


@pytest.mark.parametrize("name", WANTS_EDGES)
def test_zero_in_degree_raises_dgls_kind_of_error(name, device):
    graph = dgl.graph((torch.tensor([0, 1]), torch.tensor([1, 2])))
    fast, reference = layers(name)
    feat = inputs(name, graph)
    with pytest.raises(DGLError):
        reference(graph, feat)
    for _ in range(2):
        with pytest.raises(DGLError, match="zero in-degree.*allow_zero_in_degree=True"):
            fast.to(device)(graph, feat.to(device))
    if name != "dotgat":
        fast.set_allow_zero_in_degree(True)
        fast(graph, feat.to(device))


@pytest.mark.parametrize("nodes", [0, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_no_edges(name, nodes, device):
    graph = dgl.graph(([], []), num_nodes=nodes)
    if name not in ("sage pool", "gin max") and (nodes or name in ATTENTION):
        check_layer(name, graph, device, **allowing_zero(name))
        return
    # DGL wrongly adds a gradient of a maximum to node 0, and its sums over no nodes fail.
    fast, reference = layers(name, **allowing_zero(name))
    feat = inputs(name, graph).to(device).requires_grad_()
    out = fast.to(device)(graph, feat)
    assert out.size(0) == nodes
    if nodes:
        torch.testing.assert_close(out.detach().cpu(), reference(graph, feat.detach().cpu()).detach())
        own = fast.fc_self(feat) if name == "sage pool" else fast.apply_func((1 + fast.eps) * feat)
        expected = torch.autograd.grad(own.sum(), feat)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), feat), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_float64(name, device):
    graph = homogeneous()
    fast, reference = layers(name)
    feat = inputs(name, graph).double()
    check((fast.double(), reference.double()), graph, feat, device, tolerance=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_half_precision(name, dtype, device):
    graph = homogeneous()
    fast, reference = layers(name)
    feat = inputs(name, graph)
    expected = reference(graph, feat)
    found = fast.to(device, dtype)(graph, feat.to(device, dtype))
    assert found.dtype == dtype
    error = (found.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert error < 0.03


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_autocast(name, attention, device):
    graph = homogeneous()
    fast, reference = layers(name)
    options = {"get_attention": True} if attention and name in WITH_ATTENTION else {}
    feat = inputs(name, graph)
    expected = reference(graph, feat)
    fast = fast.to(device)
    leaf = feat.to(device).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        found = fast(graph, leaf, **options)
    found = found[0] if options else found
    error = (found.detach().cpu().double() - expected.double()).norm() / expected.double().norm()
    assert error < 0.03
    found.float().sum().backward()
    assert leaf.grad.dtype == torch.float32
    for parameter in fast.parameters():
        assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("name", LAYERS)
def test_adjacency_in_place_of_the_graph(name, device):
    graph = homogeneous()
    src, dst = graph.edges()
    adjacency = Adjacency.from_coo(dst, src, (30, 30)).to(device)
    check_layer(name, graph, device, adjacency)
    if name in WITH_ATTENTION:
        made = tuple(WithAttention(layer) for layer in layers(name))
        check(made, graph, inputs(name, graph), device, fast_graph=adjacency)
    options = {} if name in ATTENTION else {"edge_weight": weights(graph)}
    if options:
        made = layers(name)
        check(made, graph, inputs(name, graph), device, fast_graph=adjacency, tolerance=TOLERANCE, **options)


@pytest.mark.parametrize("name", LAYERS)
def test_adjacency_of_a_block(name, device):
    graph = block()
    adjacency = fastsparse_dgl.prepare(graph, device)
    assert adjacency.shape == (12, graph.num_src_nodes())
    check_layer(name, graph, device, adjacency)


@pytest.mark.parametrize("as_blocks", [False, True])
@pytest.mark.parametrize("name", ATTENTION)
def test_relations_of_a_heterograph(name, as_blocks, device):
    """HeteroGraphConv hands each layer one relation of a graph with several edge types, and a pair."""
    generator = torch.Generator().manual_seed(2)
    edges = {
        relation: tuple(torch.randint(9, (40,), generator=generator) for _ in range(2))
        for relation in (("a", "x", "b"), ("b", "y", "a"), ("a", "z", "a"))
    }
    graph = dgl.heterograph(edges, num_nodes_dict={"a": 9, "b": 9})
    if as_blocks:
        seeds = {"a": torch.arange(5), "b": torch.arange(4)}
        graph = dgl.to_block(dgl.in_subgraph(graph, seeds), seeds)
    widths = (7, 7) if name == "agnn" else (7, 5)
    feat = {
        node: torch.randn(graph.num_src_nodes(node), width, generator=generator)
        for node, width in zip("ab", widths, strict=True)
    }
    made = {"fast": {}, "reference": {}}
    for relation, (source, destination) in {"x": (0, 1), "y": (1, 0), "z": (0, 0)}.items():
        arguments = (1.5,) if name == "agnn" else ((widths[source], widths[destination]), 4, 3)
        fast, reference = layer_pair(LAYERS[name][0], *arguments, allow_zero_in_degree=True)
        made["fast"][relation], made["reference"][relation] = fast, reference
    results = []
    for kind, target in (("fast", device), ("reference", "cpu")):
        model = dgl.nn.HeteroGraphConv(made[kind]).to(target)
        leaves = {node: item.to(target).requires_grad_() for node, item in feat.items()}
        out = model(graph, leaves)
        sum(item.square().sum() for item in out.values()).backward()
        gradients = [leaf.grad for leaf in leaves.values()] + [item.grad for item in model.parameters()]
        results.append([*(out[node] for node in "ab"), *gradients])
    for found, expected in zip(*results, strict=True):
        # DotGatConv does not use one of its matrices for a relation from a node type to itself.
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_copies_and_pickles(name):
    graph = homogeneous()
    fast, _ = layers(name)
    feat = inputs(name, graph)
    expected = fast(graph, feat)
    saved = io.BytesIO()
    torch.save(fast, saved)
    saved.seek(0)
    for again in (
        copy.deepcopy(fast),
        pickle.loads(pickle.dumps(fast)),
        torch.load(saved, weights_only=False),
    ):
        assert type(again) is type(fast)
        assert torch.equal(again(graph, feat), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_same_class_parameters_and_repr(name):
    layer_class, arguments, _ = LAYERS[name]
    torch.manual_seed(0)
    fast = layer_class(*arguments)
    original = next(base for base in layer_class.__mro__ if base.__module__.startswith("dgl."))
    torch.manual_seed(0)
    reference = original(*arguments)
    assert isinstance(fast, original)
    assert repr(fast) == repr(reference).replace(original.__name__, layer_class.__name__)
    assert fast.state_dict().keys() == reference.state_dict().keys()
    for key, item in reference.state_dict().items():
        assert torch.equal(fast.state_dict()[key], item)
    reference.load_state_dict(fast.state_dict())


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@each_case(CASES)
def test_compile_with_an_adjacency(case):
    """As the table of docs/compile_layers.md says: without graph breaks, and at most twice for all sizes."""
    (_, fast), frames = case.pair(6, 4), []

    def backend(module: torch.fx.GraphModule, given: list[torch.Tensor]) -> object:
        frames.append([str(node.target) for node in module.graph.nodes])
        return aot_eager(module, given)

    compiled = torch.compile(case.run, fullgraph=True, dynamic=True, backend=backend)
    for nodes in (30, 70, 150):
        ends = torch.randint(0, nodes, (2, 4 * nodes), generator=torch.Generator().manual_seed(nodes))
        graph = dgl.add_self_loop(dgl.graph((ends[0], ends[1]), num_nodes=nodes))
        adjacency, feat = fastsparse_dgl.prepare(graph), features(graph, 6).requires_grad_()
        given = [adjacency, feat, *case.rest(graph, 6)]
        wanted = [each for each in (*given[1:], *fast.parameters()) if each.requires_grad]
        results = []
        for call in (compiled, case.run):
            out = call(fast, *given)
            parts = out if isinstance(out, tuple) else (out,)
            total = sum(part.square().sum() for part in parts)
            results.append((*parts, *torch.autograd.grad(total, wanted, allow_unused=True)))
        # The sums have two orders. Gradients of scores cancel, so their error is relative to the terms (both
        # have the same error against float64).
        for ours, theirs in zip(*results, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                largest = theirs.detach().abs().max().clamp(min=1e-3)
                torch.testing.assert_close(ours / largest, theirs / largest)
    assert len(frames) <= 2
    assert all(any(each.startswith("fastsparse.") for each in names) for names in frames)
    kind = {"": "", "weight": " with edge weights"}.get(case.edges, " with edge features")
    assert f"| `{case.name}`{kind} | yes | yes |" in COMPILE_PAGE


def test_the_page_about_compilation_lists_every_drop_in():
    assert {each.__name__ for each in DROP_INS} <= set(re.findall(r"^\| `(\w+)`", COMPILE_PAGE, re.MULTILINE))


@pytest.mark.parametrize("name", LAYERS)
def test_no_input_and_no_graph_is_changed(name):
    graph = homogeneous()
    fast, _ = layers(name)
    feat = inputs(name, graph)
    before = feat.clone()
    fast(graph, feat)
    assert torch.equal(feat, before)
    assert not graph.ndata
    assert not graph.edata


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("sage pool", "gin max")])
def test_nan_features_reach_the_same_nodes(name, device):
    graph = homogeneous()
    fast, reference = layers(name)
    feat = inputs(name, graph)
    feat[4] = float("nan")
    expected = reference(graph, feat).isnan()
    found = fast.to(device)(graph, feat.to(device)).isnan()
    assert torch.equal(found.cpu(), expected)
    assert expected.any()
    assert not expected.all()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("rows", [29, 31])
@pytest.mark.parametrize("name", LAYERS)
def test_wrong_number_of_rows(name, rows, device):
    fast, reference = layers(name)
    feat = torch.ones(rows, WIDTH)
    if name in ATTENTION:
        with pytest.raises(DGLError):
            reference(homogeneous(), feat)
    with pytest.raises(DGLError, match=r"source node \(30 rows\), got shape"):
        fast.to(device)(homogeneous(), feat.to(device))


@pytest.mark.parametrize("name", ATTENTION)
def test_wrong_number_of_destination_rows(name, device):
    graph = small_bipartite()
    fast, reference = layers(name, pair_of_widths=True)
    source, destination = inputs(name, graph, False)
    with pytest.raises(DGLError):
        reference(graph, (source, destination[1:]))
    with pytest.raises(DGLError, match=r"destination node \(23 rows\), got shape"):
        fast.to(device)(graph, (source.to(device), destination[1:].to(device)))


@pytest.mark.parametrize("sizes", [(17, 23), (23, 17)])
@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("graph")])
def test_bipartite_graphs_need_a_pair(name, sizes, device):
    graph = bipartite(*sizes)
    fast, reference = layers(name)
    if name in ATTENTION:
        with pytest.raises((DGLError, KeyError)):
            reference(graph, features(graph, WIDTH))
    message = "pass a pair" if name in ATTENTION else f"one row per destination node \\({sizes[1]} rows"
    with pytest.raises(DGLError, match=message):
        fast.to(device)(graph, features(graph, WIDTH).to(device))


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "agnn"])
def test_wrong_width(name, device):
    for layer in layers(name):
        target = device if isinstance(layer, LAYERS[name][0]) else "cpu"
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer.to(target)(homogeneous(), torch.ones(30, 8, device=target))


@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_one_tensor_for_a_pair_of_widths(name):
    """GATv2 has the two matrices either way, the others have no matrix for it."""
    graph = homogeneous()
    for layer in layers(name, pair_of_widths=True):
        error = RuntimeError if name == "gatv2" else AttributeError
        with pytest.raises(error):
            layer(graph, features(graph, 7))


@pytest.mark.parametrize("graph", [None, torch.ones(2, 3, dtype=torch.int64), "graph"])
@pytest.mark.parametrize("name", LAYERS)
def test_not_a_graph(name, graph):
    with pytest.raises(DGLError, match="graph: expected a DGLGraph"):
        layers(name)[0](graph, torch.ones(30, 7))


NOT_FEATURES = [None, [1.0], (torch.ones(30, 7),), (torch.ones(30, 7),) * 3, torch.tensor(1.0), (None, None)]
#: Other layers take the sources alone, or have other errors.
NO_PAIRS = [(torch.ones(30, 7), None), (torch.ones(30, 7), torch.tensor(1.0))]


@pytest.mark.parametrize(
    ("name", "feat"),
    [(name, feat) for name in LAYERS for feat in NOT_FEATURES + NO_PAIRS * (name in ATTENTION)],
)
def test_not_features(name, feat):
    with pytest.raises(DGLError, match="feat: expected a"):
        layers(name)[0](homogeneous(), feat)


@pytest.mark.parametrize("name", LAYERS)
def test_several_edge_types(name):
    edges = (torch.tensor([0, 1]), torch.tensor([1, 0]))
    graph = dgl.heterograph({("a", "x", "a"): edges, ("a", "y", "a"): edges})
    fast, _ = layers(name)
    with pytest.raises(DGLError, match="Edge type name must be specified"):
        fast(graph, torch.ones(2, 7))
    assert fast(graph["y"], torch.ones(2, 7)).shape[0] == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_adjacency_on_another_device(name):
    adjacency = fastsparse_dgl.prepare(homogeneous())
    message = (
        "features: expected a tensor on cpu like the graph, got one on cuda:0; "
        "move the features with .to('cpu'), or the graph with .to('cuda:0')"
    )
    with pytest.raises(DGLError, match=re.escape(message)):
        layers(name)[0].cuda()(adjacency, torch.ones(30, 7, device="cuda"))


@pytest.mark.parametrize("name", LAYERS)
def test_features_on_a_device_without_memory(name):
    graph, (fast, _) = homogeneous(), layers(name)
    message = "features: expected a tensor on cpu like the graph, got one on meta; move the features with .to"
    for given in (graph, fastsparse_dgl.prepare(graph)):
        with pytest.raises(DGLError, match=re.escape(f"{message}('cpu')") + "$"):
            fast.to("meta")(given, inputs(name, graph).to("meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_graph_on_the_cpu_is_moved_once(name):
    """PyPI's DGL is built without CUDA, so this is how its users train on a GPU."""
    graph = homogeneous()
    fast, _ = layers(name)
    feat = inputs(name, graph).cuda()
    fast = fast.cuda()
    before = fastsparse_dgl.cache_info().misses
    for _ in range(3):
        fast(graph, feat)
    assert fastsparse_dgl.cache_info().misses == before + 1


def test_destination_features_of_another_width_than_dgl_can_compare():
    graph = small_bipartite()
    for layer in layers("agnn"):
        with pytest.raises(DGLError):
            layer(graph, pair(graph, 7, 5))


# ---------------------------------------------------------------- dtypes under autocast

#: Results have autocast's dtype, but the original's results are float32.
OURS = {"GraphConv", "AGNNConv", "EdgeGATConv"}
#: The original multiplies float32 attention by values in 16 bits, which DGL's products refuse.
FAILS = {"GATConv", "GATv2Conv", "EGATConv"}


def test_every_drop_in_has_a_case():
    named = {each.__name__ for each in DROP_INS} - {"HeteroGraphConv"}  # it contains other layers
    assert named <= {case.name for case in CASES}


def test_the_page_names_the_layers_whose_dtype_is_another():
    page = Path(__file__).resolve().parents[2] / "docs" / "precision_determinism.md"
    rows = [row for row in page.read_text().splitlines() if row.startswith("| DGL")]
    assert set(re.findall(r"`Fast(\w+)`", " ".join(rows))) == OURS | FAILS


@each_case(CASES)
def test_dtypes_of_results_under_autocast(case: Case):
    graph = dgl.add_self_loop(homogeneous())
    feat, rest = torch.randn(30, 16, requires_grad=True), case.rest(graph, 16)
    found: list[torch.dtype | None] = []
    for layer in case.pair(16, 16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            try:
                out = case.run(layer, graph, feat, *rest)
            except DGLError:
                assert type(layer) in DROP_INS
                assert case.name in FAILS
                found.append(None)
                continue
        out = out[0] if isinstance(out, tuple) else out
        found.append(out.dtype)
        (grad,) = torch.autograd.grad(out.sum(), feat)
        assert grad.dtype == torch.float32
    if case.name in OURS | FAILS:
        assert found == [torch.float32 if case.name in OURS else None, torch.bfloat16]
    else:
        assert found[0] == found[1]


@pytest.mark.gpu
@each_case({case.name: case for case in reversed(CASES) if case.name not in NOT_REPLAYED}.values())
def test_a_training_step_is_replayed(case: Case) -> None:
    graph = dgl.add_self_loop(homogeneous())
    x, rest = features(graph, 16).cuda().detach(), [each.cuda().detach() for each in case.rest(graph, 16)]

    def run(layer: torch.nn.Module) -> torch.Tensor:
        result = case.run(layer, graph, x, *rest)
        return result[0] if isinstance(result, tuple) else result

    check_replays(lambda: case.pair(16, 16)[1].cuda(), run)
