"""FastGCNConv against GCNConv: outputs, all gradients, every option and input kind."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from cuda_graphs import moved
from pyg_cases import as_kind, close, gradients, random_graph, same, simple_graph
from torch_geometric.nn import AGNNConv, GCNConv, SAGEConv

from fastsparse_core import Adjacency
from fastsparse_pyg import FastAGNNConv, FastGCNConv, FastSAGEConv, cache_info, restore


def weights(
    kind: str, num_edges: int, device: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor | None:
    if kind == "none":
        return None
    weight = torch.rand(num_edges, generator=torch.Generator().manual_seed(2)).to(device, dtype) + 0.1
    if kind == "column":
        weight = weight[:, None]
    return weight.requires_grad_(kind in ("trainable", "column"))


@pytest.mark.parametrize("kind", ["csr", "coo", "SparseTensor"])
@pytest.mark.parametrize(
    "options", [{}, {"improved": True}, {"add_self_loops": False}, {"normalize": False}], ids=str
)
@pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR")
@pytest.mark.usefixtures("kernels_only")
def test_weighted_matrix_with_loops(device, kind, options):
    """A matrix brings its own values, and loops are added to those that are there; edge_weight is ignored."""
    edge_index = random_graph(device=device)
    weight = weights("constant", edge_index.size(1), device)
    graph = as_kind(kind, edge_index, 40, 40, weight)
    reference, layer = (conv(6, 9, **options).to(device) for conv in (GCNConv, FastGCNConv))
    x = torch.randn(40, 6, device=device, requires_grad=True)
    same(reference, layer, lambda conv: conv(x, graph, weight), [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_weights_twice(device: str, dtype: torch.dtype) -> None:
    """Degrees included, and of a node whose weights add up to 0, whose root is taken for 0."""
    edge_index = random_graph(device=device)
    edge_index = torch.cat([edge_index, torch.tensor([[0, 1], [40, 40]], device=device)], 1)
    weight = torch.rand(edge_index.size(1), device=device, dtype=dtype).add(0.1)
    weight[-2], weight[-1] = -1.0, 1.0
    x = torch.randn(41, 6, device=device, dtype=dtype, requires_grad=True)
    reference, layer = (conv(6, 9, add_self_loops=False).to(device, dtype) for conv in (GCNConv, FastGCNConv))
    layer.load_state_dict(reference.state_dict())
    found = []
    for conv in (reference, layer):
        given = weight.clone().requires_grad_()
        out = conv(x, edge_index, given)
        once = torch.autograd.grad(out.square().sum(), (x, given), create_graph=True)
        kept = once[1][:-2]  # the square root of 0 makes the others NaN
        twice = torch.autograd.grad(once[0].square().sum() + kept.square().sum(), (x, given))
        (plain,) = torch.autograd.grad(conv(x, edge_index, given).square().sum(), given)
        found.append((out, once[0], kept, plain[:-2], twice[0], twice[1][:-2]))
    for got, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernels_only")
def test_trainable_matrix_values(device):
    edge_index = simple_graph(device=device)
    layer = FastGCNConv(6, 9).to(device)
    x = torch.randn(40, 6, device=device)
    weight = torch.rand(edge_index.size(1), device=device, requires_grad=True)
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), weight, (40, 40), is_coalesced=True)
    no_loops = FastGCNConv(6, 9, add_self_loops=False).to(device)
    no_loops.load_state_dict(layer.state_dict())
    (got,) = gradients(no_loops(x, matrix), [weight])
    (expected,) = gradients(no_loops(x, edge_index, weight), [weight])
    close(got, expected)


@pytest.mark.usefixtures("kernels_only")
def test_csc_matrix(device):
    edge_index = simple_graph(device=device)
    x = torch.randn(40, 6, device=device)
    matrix = as_kind("csc", edge_index, 40, 40)
    with pytest.raises(NotImplementedError, match="CSC"):
        FastGCNConv(6, 3).to(device)(x, matrix)
    layer = FastGCNConv(6, 3, normalize=False).to(device)
    close(layer(x, matrix), layer(x, edge_index))


@pytest.mark.usefixtures("kernels_only")
def test_rectangular_matrix_without_normalisation(device):
    edge_index = random_graph(30, 20, device=device)
    reference, layer = (conv(6, 9, normalize=False).to(device) for conv in (GCNConv, FastGCNConv))
    x = torch.randn(30, 6, device=device, requires_grad=True)
    matrix = as_kind("csr", edge_index, 30, 20)
    same(reference, layer, lambda conv: conv(x, matrix), [x])


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.usefixtures("kernels_only")
def test_sparse_features(device, layout):
    edge_index = random_graph(device=device)
    dense = torch.randn(40, 6, device=device) * (torch.rand(40, 6, device=device) < 0.3)
    x = dense.to_sparse_coo() if layout == "coo" else dense.to_sparse_csr()
    layer = FastGCNConv(6, 9).to(device)
    close(layer(x, edge_index), layer(dense, edge_index))


@pytest.mark.usefixtures("kernels_only")
def test_mixed_dtypes_promote_like_the_original(device):
    """Gradients of features and edge weights, and for AGNN of features and its parameter."""
    edge_index = random_graph(device=device)
    for x_dtype, other in itertools.permutations([torch.float32, torch.float64, torch.bfloat16], 2):
        reference, layer = (conv(4, 6).to(device, x_dtype) for conv in (GCNConv, FastGCNConv))
        layer.load_state_dict(reference.state_dict())
        x = torch.randn(40, 4, device=device).to(x_dtype)
        weight = torch.rand(edge_index.size(1), device=device).to(other)
        tolerance = 1e-5 if torch.bfloat16 not in (x_dtype, other) else 5e-2
        try:
            expected = reference(x, edge_index, weight)
        except RuntimeError:
            continue  # PyG itself refuses this mixture
        close(layer(x, edge_index, weight), expected, tolerance)
    for x_dtype, other in ((torch.float16, torch.float32), (torch.float32, torch.float64)):
        reference, layer = (conv().to(device, other) for conv in (AGNNConv, FastAGNNConv))
        x = torch.randn(40, 6, device=device).to(x_dtype)
        close(layer(x, edge_index), reference(x, edge_index), 3e-3 if x_dtype == torch.float16 else 1e-5)


def test_integer_weights(device):
    edge_index = random_graph(device=device)
    layer = FastGCNConv(4, 6).to(device)
    x = torch.randn(40, 4, device=device)
    weight = torch.randint(1, 4, (edge_index.size(1),), device=device)
    close(layer(x, edge_index, weight), layer(x, edge_index, weight.float()))


@pytest.mark.parametrize("options", [{}, {"add_self_loops": False}], ids=str)
def test_degrees_zero_negative_infinite_and_nan(device, options):
    """The normalisation's special values land where the original puts them."""
    edge_index = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0], [1, 2, 3, 4, 5, 6, 0, 3]], device=device)
    weight = torch.tensor([1.0, 0.0, -3.0, float("nan"), float("inf"), 0.5, 2.0, 1.0], device=device)
    reference, layer = (conv(3, 4, **options).to(device) for conv in (GCNConv, FastGCNConv))
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(9, 3, device=device)
    for one in (weight, weight.clone().requires_grad_()):
        close(layer(x, edge_index, one), reference(x, edge_index, one))


def test_of_repeated_self_loops_the_last_counts():
    """As PyG on the CPU; the overwritten loop gets no gradient."""
    edge_index = torch.tensor([[0, 1, 1, 2], [1, 1, 1, 0]])
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    reference, layer = GCNConv(3, 4), FastGCNConv(3, 4)
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(3, 3)
    out = layer(x, edge_index, weight)
    close(out, reference(x, edge_index, weight))
    (gradient,) = gradients(out, [weight])
    assert gradient[1] == 0
    assert gradient[2] != 0


# ---------------------------------------------------------------- cached=True


@pytest.mark.parametrize("weight_kind", ["none", "constant"])
@pytest.mark.parametrize("kind", ["edge_index", "csr", "SparseTensor", "Adjacency"])
def test_cached_keeps_the_first_graph(device, kind, weight_kind):
    edge_index = random_graph(device=device) if kind == "edge_index" else simple_graph(device=device)
    weight = weights(weight_kind, edge_index.size(1), device)
    graph = as_kind(kind, edge_index, 40, 40, weight)
    weight = None if kind == "csr" else weight
    fresh, layer = FastGCNConv(4, 6).to(device), FastGCNConv(4, 6, cached=True).to(device)
    layer.load_state_dict(fresh.state_dict())
    x = torch.randn(40, 4, device=device)
    first = layer(x, graph, weight)
    close(first, fresh(x, graph, weight))
    other = as_kind(kind, simple_graph(seed=5, device=device), 40, 40)
    close(layer(x, other), first)

    name = "_cached_adj_t" if kind == "SparseTensor" else "_cached_edge_index"
    assert getattr(layer, name) is not None
    close(copy.deepcopy(layer)(x, other), first)
    close(pickle.loads(pickle.dumps(layer))(x, other), first)
    layer.reset_parameters()
    assert getattr(layer, name) is None
    layer.load_state_dict(fresh.state_dict())
    close(layer(x, other), fresh(x, other))


@pytest.mark.parametrize("weight_kind", ["none", "constant"])
@pytest.mark.parametrize("kind", ["edge_index", "csr"])
def test_cached_form_is_the_original_s(device, kind, weight_kind):
    """The private attribute with the cache has the value that PyG's code would store."""
    edge_index = random_graph(device=device)
    weight = weights(weight_kind, edge_index.size(1), device)
    graph = as_kind(kind, edge_index, 40, 40, weight)
    reference, layer = (conv(4, 6, cached=True).to(device) for conv in (GCNConv, FastGCNConv))
    x = torch.randn(40, 4, device=device)
    reference(x, graph, weight)
    layer(x, graph, weight)
    (expected, expected_weight), (got, got_weight) = reference._cached_edge_index, layer._cached_edge_index
    if kind == "edge_index":
        assert torch.equal(got, expected)
        close(got_weight, expected_weight)
    else:
        assert got_weight is expected_weight is None
        close(got.to_dense(), expected.to_dense())


def test_cached_form_filled_by_pyg_is_used(device):
    """A hook makes PyG's code run first; the kernels take over its cache when the hook is gone, and back."""
    edge_index = random_graph(device=device)
    weight = weights("constant", edge_index.size(1), device)
    layer = FastGCNConv(4, 6, cached=True).to(device)
    x = torch.randn(40, 4, device=device)
    handle = layer.register_message_forward_hook(lambda module, inputs, output: None)
    first = layer(x, edge_index, weight)
    handle.remove()
    other = simple_graph(seed=5, device=device)
    close(layer(x, other), first)
    handle = layer.register_message_forward_hook(lambda module, inputs, output: None)
    close(layer(x, other), first)


# ---------------------------------------------------------------- Adjacency


@pytest.mark.usefixtures("kernels_only")
def test_adjacency_without_loops_gets_no_second_structure(device, monkeypatch):
    def refuse(*args):
        raise AssertionError("a structure with loops is built")

    monkeypatch.setattr("fastsparse_pyg.graph.with_self_loops", refuse)
    edge_index = simple_graph(device=device)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    graph = Adjacency.from_coo(edge_index[1], edge_index[0], (40, 40))
    graph = Adjacency.from_csr(graph.rowptr, graph.col, (40, 40))
    reference, layer = GCNConv(6, 9).to(device), FastGCNConv(6, 9).to(device)
    layer.load_state_dict(reference.state_dict())
    results = []
    for conv, edges in ((reference, edge_index), (layer, graph)):
        x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        out = conv(x, edges)
        results.append([out, *gradients(out, [x, conv.lin.weight, conv.bias])])
    for got, expected in zip(*results, strict=True):
        close(expected, got)
    with pytest.raises(ValueError, match="expected 40 source"):
        layer(x[:39], graph)


def test_loops_are_added_to_an_adjacency_once(device):
    edge_index = random_graph(device=device)
    graph = Adjacency.from_coo(edge_index[1], edge_index[0], (40, 40))
    layer = FastGCNConv(4, 6).to(device)
    for _ in range(3):
        layer(torch.randn(40, 4, device=device), graph)
    assert cache_info().misses == 1
    del graph
    assert cache_info().entries == 0


# ---------------------------------------------------------------- linear map and aggregation in one


@pytest.mark.parametrize("width", [(8, 5), (5, 8), (8, 8)], ids=str)
def test_one_node_of_the_graph(device, width):
    """Without edge weights; features with gradient that are aggregated first take two."""
    layer = FastGCNConv(*width).to(device)
    edge_index = random_graph(device=device)
    x = torch.randn(40, width[0], device=device)
    assert type(layer(x, edge_index).grad_fn).__name__ == "_AggregateTransformBackward"
    name = type(layer(x.requires_grad_(), edge_index).grad_fn).__name__
    assert name == ("AddmmBackward0" if width[0] < width[1] else "_AggregateTransformBackward")
    weight = torch.rand(edge_index.size(1), device=device)
    assert type(layer(x, edge_index, weight).grad_fn).__name__ != "_AggregateTransformBackward"


@pytest.mark.parametrize("width", [(8, 4), (4, 8)], ids=str)
@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "float32")], ids=str)
@pytest.mark.usefixtures("kernels_only")
def test_cached_normalisation_serves_another_dtype(device, width, dtypes):
    first, second = (getattr(torch, name) for name in dtypes)
    edge_index = random_graph(device=device)
    fresh, layer = FastGCNConv(*width).to(device), FastGCNConv(*width, cached=True).to(device)
    layer.load_state_dict(fresh.state_dict())
    x = torch.randn(40, width[0], device=device)
    layer.to(first)(x.to(first), edge_index)
    layer, fresh = layer.to(second), fresh.to(second)
    torch.testing.assert_close(
        layer(x.to(second), edge_index), fresh(x.to(second), edge_index), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("width", [(8, 4), (4, 8)], ids=str)
@pytest.mark.parametrize("shape", [(1, -1), (1,), (), (40, 1)], ids=str)
def test_bias_of_another_shape(device, width, shape):
    """What the original adds to its result is added, or refused with a message."""
    reference, layer = (conv(*width).to(device) for conv in (GCNConv, FastGCNConv))
    layer.load_state_dict(reference.state_dict())
    bias = torch.randn([width[1] if size == -1 else size for size in shape], device=device)
    reference.bias, layer.bias = torch.nn.Parameter(bias.clone()), torch.nn.Parameter(bias.clone())
    edge_index, x = random_graph(device=device), torch.randn(40, width[0], device=device)
    expected = reference(x, edge_index)
    try:
        got = layer(x, edge_index)
    except ValueError as error:
        assert "bias: expected" in str(error)  # noqa: PT017
        return
    close(got, expected)
    got.sum().backward()
    expected.sum().backward()
    close(layer.bias.grad, reference.bias.grad)


@pytest.mark.parametrize("width", [(8, 4), (4, 8)], ids=str)
@pytest.mark.parametrize("change", ["forward", "global hook"])
def test_linear_layers_that_are_watched_are_called(device, width, change):
    layer = FastGCNConv(*width).to(device)
    edge_index, x = random_graph(device=device), torch.randn(40, width[0], device=device)
    expected, seen = layer(x, edge_index), []
    if change == "forward":
        original = layer.lin.forward
        layer.lin.forward = lambda x: 3 * original(x)
        torch.nn.init.zeros_(layer.bias)
        close(layer(x, edge_index), 3 * expected)
        return
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        close(layer(x, edge_index), expected)
    finally:
        handle.remove()
    assert layer.lin in seen


@pytest.mark.gpu
@pytest.mark.parametrize("amp", [False, True])
def test_a_training_step_as_a_cuda_graph(amp):
    """Replays train as steps do, up to the order in which products of matrices are summed."""
    edge_index, generator = random_graph(device="cuda"), torch.Generator().manual_seed(0)
    x = torch.randn(40, 16, generator=generator).cuda()
    label = torch.randint(4, (40,), generator=generator).cuda()

    def movement(captures):
        torch.manual_seed(0)
        model = torch.nn.ModuleList([FastGCNConv(16, 16), FastGCNConv(16, 4)]).cuda()

        def loss():
            with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                out = model[1](model[0](x, edge_index).relu(), edge_index)
                return torch.nn.functional.cross_entropy(out, label)

        return moved(model, loss, captures=captures)

    steps, replays = movement(False), movement(True)
    assert steps.norm() > 0
    assert (replays - steps).norm() <= (8e-3 if amp else 1e-5) * steps.norm()


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_in_batches(device, weighted):
    edge_index = random_graph(device=device)
    reference, layer = GCNConv(8, 4).to(device), FastGCNConv(8, 4).to(device)
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(40, 8, device=device, requires_grad=True)
    weight = torch.rand(edge_index.size(1), device=device) if weighted else None
    upstream = torch.randn(3, 40, 4, device=device)
    batches = [
        torch.autograd.grad(
            conv(x, edge_index, weight), [x, *conv.parameters()], upstream, is_grads_batched=True
        )
        for conv in (reference, layer)
    ]
    for expected, actual in zip(*batches, strict=True):
        close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["restore", "hook"])
def test_the_cache_of_16_bit_features_keeps_their_dtype(dtype, way):
    """PyG's code reads the cached weights, and expects the features' dtype, in which it would store them."""
    edge_index, x = random_graph(), torch.randn(40, 6).to(dtype)
    layer = FastGCNConv(6, 5, cached=True).to(dtype)
    expected = layer(x, edge_index)
    if way == "restore":
        restore(layer)
    else:
        layer.register_message_forward_hook(lambda *_: None)
    out = layer(x, edge_index)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)


def test_layers_of_both_kinds_on_one_weighted_matrix():
    """PyG's layers increase the version counter of a COO matrix without changing its values."""
    edge_index = random_graph().unique(dim=1)
    matrix = torch.sparse_coo_tensor(edge_index, torch.rand(edge_index.size(1)), (40, 40)).coalesce()
    x = torch.randn(40, 6)
    results = []
    for first, second in ((FastSAGEConv, GCNConv), (SAGEConv, GCNConv)):
        torch.manual_seed(0)
        layers = first(6, 5), second(6, 5)
        sum(layer(x, matrix).square().sum() for layer in layers).backward()
        results.append([parameter.grad for layer in layers for parameter in layer.parameters()])
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)


def test_a_negative_degree_gives_no_nan_to_a_node_that_nobody_gathers():
    edge_index = torch.tensor([[0, 1, 2, 0], [1, 2, 3, 2]])
    edge_weight = torch.tensor([1.0, 1.0, -2.0, 1.0])  # node 3: degree -2, and no outgoing edge
    gradients = []
    for layer in (GCNConv(6, 5, add_self_loops=False), FastGCNConv(6, 5, add_self_loops=False)):
        torch.manual_seed(0)
        x = torch.randn(4, 6, requires_grad=True)
        layer(x, edge_index, edge_weight)[:3].sum().backward()
        gradients.append(x.grad[3])
    assert torch.equal(gradients[0], torch.zeros(6))
    assert torch.equal(gradients[1], gradients[0])
