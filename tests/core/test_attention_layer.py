"""Attention layers as one node against their operators one after the other, and calls that need these."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from cases import DTYPES, TOLERANCE, edge_lists, ragged, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fastsparse_core import Adjacency, additive_attention, attention, gatv2_attention, policy, reference
from fastsparse_core.fused import attention_on_cuda
from fastsparse_core.fused.attention_layer import ADDITIVE, DOT_PRODUCT, GATV2, attention_layer
from fastsparse_core.fused.attention_on_cuda import stacked
from fastsparse_core.fused.head_scores import edge_scores, head_scores, map_to_scores
from fastsparse_core.structure.incidence import edge_ends

KINDS = ("gat", "gatv2", "gatv2 shared", "dot", "dot with skip")
MAPS = dict(zip(KINDS, (1, 2, 1, 3, 4), strict=True)) | {"edge gat": 1}
#: Kinds, and kernels of dot products on CUDA. New structures are read by rows.
CALLS = [(kind, "") for kind in KINDS] + [("dot", "blocks"), ("dot with skip", "blocks")]
calls = pytest.mark.parametrize(("kind", "kernel"), CALLS)
F_IN = 6


def structure(device: str, nodes: int = 70, edges: int = 400) -> Adjacency:
    generator = torch.Generator().manual_seed(0)
    row, col = torch.randint(nodes, (2, edges), generator=generator).to(device)
    return Adjacency.from_coo(row, col, (nodes, nodes))


class Layer:
    """Parameters of a layer, which is computed as one node or by its operators."""

    def __init__(self, kind, heads, width, dtype, device, *, mean=False, bias=True, dropout_p=0.0):
        torch.manual_seed(1)
        options = {"dtype": dtype, "device": device}
        map_bias = kind not in ("gat", "edge gat", "dot")
        self.kind, self.heads, self.width = kind, heads, width
        self.options = {"heads": heads, "mean": mean, "dropout_p": dropout_p}
        self.options["scale"] = width**-0.5 if kind.startswith("dot") else 0.2
        self.maps = [nn.Linear(F_IN, heads * width, bias=map_bias, **options) for _ in range(MAPS[kind])]
        count = {"gat": 2, "edge gat": 2, "gatv2": 1, "gatv2 shared": 1}.get(kind, 0)
        self.vectors = [torch.randn(1, heads, width, **options).requires_grad_() for _ in range(count)]
        columns = width if mean else heads * width
        self.bias = torch.randn(columns, **options).requires_grad_() if bias else None

        self.edges = None
        self.edge_vector = torch.randn(1, heads, width, **options).requires_grad_()

    def with_edges(self, adj: Adjacency, edge_width: int, *, wanted: bool) -> Layer:
        """Adds features of edges in the dtype of the parameters; returns the layer."""
        weight = self.maps[0].weight
        options = {"dtype": weight.dtype, "device": weight.device}
        features = torch.randn(adj.num_values, edge_width, requires_grad=wanted, **options)
        self.edges = features, nn.Linear(edge_width, weight.size(0), bias=False, **options)
        return self

    def parameters(self):
        found = [*self.vectors, *chain.from_iterable(one.parameters() for one in self.maps)]
        if self.edges is not None:
            features, edge_map = self.edges
            found += [edge_map.weight, *([features] if features.requires_grad else [])]
            found += [self.edge_vector] if self.kind in ("gat", "edge gat") else []
        return found if self.bias is None else [*found, self.bias]

    def as_one(self, adj: Adjacency, x: Tensor) -> Tensor:
        scores = {"gat": ADDITIVE, "edge gat": ADDITIVE, "gatv2": GATV2, "gatv2 shared": GATV2}
        score, edges = scores.get(self.kind, DOT_PRODUCT), self.edges
        if edges is not None and score is ADDITIVE:
            features, edge_map = edges
            edges = features, edge_map, map_to_scores(edge_map.weight, self.edge_vector)
            if self.kind == "gat":
                edges = features, None, edges[2]
        options = self.options | {"edges": edges}
        out = attention_layer(score, adj, x, self.maps, self.vectors, self.bias, **options)
        assert out is not None
        return out

    def by_operators(self, adj: Adjacency, x: Tensor) -> Tensor:
        ends = [one(x) for one in self.maps]
        p, scale = self.options["dropout_p"], self.options["scale"]
        edges = {}
        if self.edges is not None:
            edges = {"edge_attr": self.edges[0], "edge_weight": self.edges[1].weight}
        if self.kind == "gat":
            src, dst = head_scores(ends[0], *self.vectors)
            of_edges = None
            if self.edges is not None:
                features, edge_map = self.edges
                of_edges = edge_scores(features, edge_map.weight, self.edge_vector)
            out = additive_attention(adj, dst, src, ends[0], scale, of_edges, p)
        elif self.kind == "edge gat":
            (src, dst), (source, target) = head_scores(ends[0], *self.vectors), edge_ends(adj)
            of_edges = edge_scores(edges["edge_attr"], edges["edge_weight"], self.edge_vector)
            score = torch.nn.functional.leaky_relu(src[source] + dst[target] + of_edges, scale)
            zeros = torch.zeros_like(ends[0])
            out = attention(adj, zeros, ends[0], ends[0], 1.0, score, p, heads=self.heads, **edges)
        elif self.kind.startswith("gatv2"):
            att = self.vectors[0].view(self.heads, self.width)
            out = gatv2_attention(adj, ends[-1], ends[0], att, scale, p, **edges)
        else:
            key, value, query, *skips = ends
            out = attention(adj, query, key, value, scale, None, p, heads=self.heads, **edges)
            out = out + skips[0] if skips else out
        if self.options["mean"]:
            out = out.unflatten(1, (self.heads, self.width)).mean(1)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def prepared(adj: Adjacency, kernel: str) -> Adjacency:
    """The structure; for kernels on blocks, with blocks, so that "auto" chooses these kernels."""
    if kernel == "blocks":
        if not adj.col.is_cuda:
            pytest.skip("the CPU has one kernel")
        assert adj.try_bsb()
        assert adj.t().try_bsb()
    return adj


def both(layer: Layer, adj: Adjacency, x: Tensor, grad: Tensor | None = None, seed: int = 3):
    """Result and gradients of the node and of the operators, for the same upstream gradient."""
    leaves = [x, *layer.parameters()] if x.requires_grad else layer.parameters()
    found = []
    for call in (layer.as_one, layer.by_operators):
        torch.manual_seed(seed)
        out = call(adj, x)
        grad = torch.randn_like(out) if grad is None else grad.expand_as(out)
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    return found


def assert_close(found, tolerance, floor=0.0):
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        # Some gradients cancel: a bias of keys changes all scores of a row by the same amount.
        error = (got.double() - want.double()).norm() / max(
            float(want.detach().double().norm()), floor, 1e-30
        )
        assert error <= tolerance or got.numel() == 0


@given(
    edges=edge_lists().filter(lambda it: it.shape[0] == it.shape[1]),
    call=st.sampled_from(CALLS),
    heads=st.sampled_from([1, 3, 4]),
    width=st.sampled_from([1, 4, 8, 20, 40]),
    dtype=st.sampled_from(DTYPES),
    mean=st.booleans(),
    bias=st.booleans(),
    needs_x=st.booleans(),
)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_equals_the_operators(device, poisoned_memory, edges, call, heads, width, dtype, mean, bias, needs_x):
    """No nodes, no edges, repeated edges, heavy rows; a gradient that is one row for all."""
    kind, kernel = call
    if device == "cuda" and dtype == torch.float64:
        dtype = torch.float32
    if device == "cuda":
        width = {1: 8, 4: 16, 20: 24}.get(width, width) if kind.startswith("dot") else width
        bias = True  # otherwise the caller may not edit the result
    layer = Layer(kind, heads, width, dtype, device, mean=mean, bias=bias)
    adj = edges.adjacency(device)
    if kernel and device == "cuda" and adj.num_edges:
        prepared(adj, kernel)
    x = torch.randn(adj.num_src, F_IN, dtype=dtype, device=device, requires_grad=needs_x)
    tolerance = 30 * TOLERANCE[dtype]
    assert_close(both(layer, adj, x), tolerance, floor=1.0)
    one_row = torch.randn(width if mean else heads * width, dtype=dtype, device=device)
    assert_close(both(layer, adj, x, one_row), tolerance, floor=1.0)


@pytest.mark.parametrize("kind", ["gat", "edge gat", "gatv2", "dot", "dot with skip"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", [False, True])
def test_features_of_edges_join_on_the_cpu(poisoned_memory, kind, dtype, wanted):
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(40, (2, 300), generator=generator)
    loops = Adjacency.from_coo(*ends, (40, 40), self_loops="replace")  # not every value has an entry
    for adj in (ragged(600, "cpu"), loops, structure("cpu", 5, 0)):
        layer = Layer(kind, 3, 10, dtype, "cpu", dropout_p=0.3).with_edges(adj, 5, wanted=wanted)
        x = torch.randn(adj.num_src, F_IN, dtype=dtype, requires_grad=True)
        assert_close(both(layer, adj, x), 30 * TOLERANCE[dtype], floor=1.0)


@pytest.mark.parametrize("kind", ["gat", "edge gat", "gatv2", "dot with skip"])
def test_second_derivatives_with_features_of_edges(kind):
    adj = structure("cpu", 5, 12)
    layer = Layer(kind, 2, 3, torch.float64, "cpu").with_edges(adj, 2, wanted=True)
    x = torch.randn(5, F_IN, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    found = []
    for call in (layer.as_one, layer.by_operators):
        first = torch.autograd.grad(call(adj, x).square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(each.square().sum() for each in first), leaves))
    assert_close(found, 1e-9, floor=1.0)


def reference_of(
    layer: Layer, adj: Adjacency, x: Tensor, grad: Tensor, seed: int
) -> tuple[list[Tensor], list[float]]:
    """The result and gradients in float64, computed from the outputs of the linear maps; and allowed errors.

    The gradient of a bias sums rounded numbers. Random rounding errors add up to their norm.
    """
    ends = [one(x).detach().double().requires_grad_() for one in layer.maps]
    key, value, query, *skips = (end.unflatten(1, (layer.heads, layer.width)) for end in ends)
    p, scale = layer.options["dropout_p"], layer.options["scale"]
    out = reference.attention(adj, query, key, value, scale, dropout_p=p, seed=seed)
    out = sum(skips, out).flatten(1)
    grads = torch.autograd.grad(out, ends, grad.double())
    of_x = sum(each @ one.weight.double() for each, one in zip(grads, layer.maps, strict=True))
    found, rounded = [out, of_x], [0.0, 0.0]
    for each, one in zip(grads, layer.maps, strict=True):
        found += [each.t() @ x.detach().double()] + ([] if one.bias is None else [each.sum(0)])
        rounded += [0.0] + ([] if one.bias is None else [float(each.norm())])
    return found, rounded


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width"), [(1, 64), (4, 32), (16, 8), (3, 40), (2, 136), (1, 256)])
@pytest.mark.parametrize("algorithm", [pytest.param("csr", marks=pytest.mark.gpu), "fused3s"])
def test_dot_products_equal_the_reference(device, poisoned_memory, algorithm, heads, width, dtype, dropout_p):
    """Rows of no, few and 600 entries, the values in another order than the rows'."""
    if device == "cpu" and (algorithm == "csr" or width > 64):
        pytest.skip("by operators, and one loop for all widths")
    layer = Layer("dot with skip", heads, width, dtype, device, bias=False, dropout_p=dropout_p)
    adj = ragged(4000, device)
    x = torch.randn(adj.num_src, F_IN, dtype=dtype, device=device, requires_grad=True)
    torch.manual_seed(3)
    seed = int(torch.randint(2**63 - 1, ())) if dropout_p else 0
    torch.manual_seed(3)
    with policy.algorithms(attention=algorithm):
        out = layer.as_one(adj, x)
        grad = torch.randn_like(out)
        found = [out, *torch.autograd.grad(out, [x, *layer.parameters()], grad)]
    if device == "cuda":
        assert adj.has_bsb == (algorithm == "fused3s")
    wanted, rounded = reference_of(layer, adj, x, grad, seed)
    for got, want, noise in zip(found, wanted, rounded, strict=True):
        assert got.dtype == dtype
        error = (got.double() - want).norm()
        # The gradient of the keys' bias is 0 except for rounding.
        assert error <= TOLERANCE[dtype] * (8 * want.norm().clamp_min(1.0) + noise)


@calls
def test_same_bits_twice_and_without_gradients(device, kind, kernel):
    layer = Layer(kind, 4, 8, torch.float32, device)
    x = torch.randn(70, F_IN, device=device, requires_grad=True)
    adj = prepared(structure(device), kernel)
    leaves = [x, *layer.parameters()]
    runs = []
    for _ in range(2):
        out = layer.as_one(adj, x)
        runs.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    with torch.no_grad():
        runs.append([layer.as_one(adj, x)])
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert torch.equal(runs[0][0], runs[2][0])


@pytest.mark.parametrize("mean", [False, True])
@calls
def test_dropout_drops_the_same_weights(device, kind, kernel, mean):
    layer = Layer(kind, 2, 8, torch.float32, device, mean=mean, dropout_p=0.4)
    x = torch.randn(70, F_IN, device=device, requires_grad=True)
    adj = prepared(structure(device), kernel)
    assert_close(both(layer, adj, x), 2e-5, floor=1.0)


@calls
def test_nan_travels_along_edges_only(device, kind, kernel):
    layer = Layer(kind, 4, 8, torch.float32, device)
    x = torch.randn(70, F_IN, device=device)
    x[7, 2] = torch.nan
    x.requires_grad_()
    (out, grad_x, *_), (wanted, wanted_grad_x, *_) = both(layer, prepared(structure(device), kernel), x)
    for got, want in ((out, wanted), (grad_x, wanted_grad_x)):
        assert torch.equal(got.isnan(), want.isnan())
        assert not want.isnan().all()


@calls
def test_many_nodes(device, kind, kernel):
    """Sums over more rows than one task has."""
    layer = Layer(kind, 2, 8, torch.float32, device)
    x = torch.randn(3000, F_IN, device=device, requires_grad=True)
    adj = prepared(structure(device, 3000, 9000), kernel)
    assert_close(both(layer, adj, x), 2e-5, floor=1.0)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(kind, mean, dropout_p):
    layer = Layer(kind, 2, 3, torch.float64, "cpu", mean=mean, dropout_p=dropout_p)
    x = torch.randn(8, F_IN, dtype=torch.float64, requires_grad=True)
    adj = structure("cpu", 8, 20)
    leaves = [x, *layer.parameters()]

    def twice(call):
        torch.manual_seed(5)
        first = torch.autograd.grad(call(adj, x).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves)

    for got, want in zip(twice(layer.as_one), twice(layer.by_operators), strict=True):
        torch.testing.assert_close(got, want)


@calls
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(device, kind, kernel, dtype):
    layer = Layer(kind, 2, 8, torch.float32, device)
    adj = prepared(structure(device), kernel)
    with torch.autocast(device, dtype):
        for x in (torch.randn(70, F_IN, device=device), torch.randn(70, F_IN, device=device).to(dtype)):
            x.requires_grad_(x.dtype == dtype)
            found = both(layer, adj, x)
            assert found[0][0].dtype == dtype
            assert_close(found, 4 * TOLERANCE[dtype], floor=1.0)
        wide = torch.randn(70, F_IN, device=device, requires_grad=True)
        assert call(layer, adj, wide) is None  # second derivatives would need the uncast features


def call(layer: Layer, adj: Adjacency, x: Tensor, **options: object) -> Tensor | None:
    score = {"gat": ADDITIVE, "dot": DOT_PRODUCT, "dot with skip": DOT_PRODUCT}.get(layer.kind, GATV2)
    return attention_layer(
        score, adj, x, layer.maps, layer.vectors, layer.bias, **{**layer.options, **options}
    )


def test_what_runs_operator_by_operator():
    adj, x = structure("cpu"), torch.randn(70, F_IN)
    new = lambda: Layer("gat", 2, 8, torch.float32, "cpu")  # noqa: E731
    assert call(new(), adj, x) is not None
    assert call(new(), adj, x.double()) is None
    assert call(new(), adj, x.to_sparse()) is None
    assert call(new(), adj, x[:-1]) is None
    assert call(new(), adj, x.expand(1, -1, -1)) is None
    assert call(new(), Adjacency.from_coo(adj.row().long(), adj.col.long(), (71, 70)), x) is None
    with policy.algorithms(attention="unfused"):
        assert call(new(), adj, x) is None
    features, edge_map = torch.randn(400, 3), nn.Linear(3, 16, bias=False)
    joins = lambda kind, *edges: call(Layer(kind, 2, 8, torch.float32, "cpu"), adj, x, edges=edges)  # noqa: E731
    assert joins("dot", features, edge_map) is not None
    for kind in ("gat", "gatv2 shared"):
        assert joins(kind, features, edge_map) is None
    assert joins("gat", features, edge_map, torch.randn(2, 3)) is not None
    assert joins("gat", features, None, torch.randn(3, 3)) is None
    for edges in (
        (features[1:], edge_map),
        (features.double(), edge_map),
        (features, nn.Linear(3, 16)),
        (features, nn.Linear(3, 8, bias=False)),
    ):
        assert joins("dot", *edges) is None
    hooked = new()
    hooked.maps[0].register_forward_hook(lambda *_: None)
    assert call(hooked, adj, x) is None
    mixed = new()
    mixed.vectors[0] = mixed.vectors[0].double()
    assert call(mixed, adj, x) is None
    negative = new()
    negative.vectors[0] = torch.randn(1, 2, 8, dtype=torch.complex64).conj().imag
    assert call(negative, adj, x) is None
    frozen = new()
    frozen.maps[0].requires_grad_(False)
    assert call(frozen, adj, x) is None  # the caller may edit x before the backward pass
    for tensor in frozen.parameters():
        tensor.requires_grad_(False)
    assert not call(frozen, adj, x).requires_grad
    assert call(frozen, adj, x.requires_grad_()) is None


def test_weights_may_be_written_before_the_backward_pass():
    """Only second derivatives need the weights, and they raise an error."""
    layer, adj, x = Layer("gatv2", 2, 8, torch.float32, "cpu"), structure("cpu"), torch.randn(70, F_IN)
    out = layer.as_one(adj, x)
    expected = torch.autograd.grad(layer.by_operators(adj, x).sum(), layer.maps[0].weight)[0]
    with torch.no_grad():
        layer.maps[0].weight.mul_(2)
    (found,) = torch.autograd.grad(out.sum(), layer.maps[0].weight, retain_graph=True)
    assert relative_error(found, expected) < 1e-5
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(out.sum(), layer.maps[0].weight, create_graph=True)


@calls
def test_result_may_be_written_to(device, kind, kernel):
    layer = Layer(kind, 2, 8, torch.float32, device)
    x = torch.randn(70, F_IN, device=device, requires_grad=True)
    adj = prepared(structure(device), kernel)
    grads = []
    for write in (torch.relu, torch.relu_):
        grads.append(torch.autograd.grad(write(layer.as_one(adj, x)).sum(), [x, *layer.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_batched_gradients(kind):
    layer, adj = Layer(kind, 2, 8, torch.float64, "cpu"), structure("cpu", 20, 50)
    x = torch.randn(20, F_IN, dtype=torch.float64, requires_grad=True)
    out = layer.as_one(adj, x)
    grads = torch.randn(3, *out.shape, dtype=torch.float64)
    (batched,) = torch.autograd.grad(out, x, grads, is_grads_batched=True, retain_graph=True)
    for got, grad in zip(batched, grads, strict=True):
        torch.testing.assert_close(got, torch.autograd.grad(out, x, grad, retain_graph=True)[0])


@pytest.mark.gpu
def test_rows_until_a_structure_is_used_often():
    """Then blocks, of both directions where gradients are wanted; the same result either way."""
    layer, adj = Layer("dot with skip", 2, 8, torch.float32, "cuda"), structure("cuda")
    x = torch.randn(70, F_IN, device="cuda", requires_grad=True)
    leaves = [x, *layer.parameters()]
    grad = torch.randn(70, 16, device="cuda")
    runs, seen = [], []
    for _ in range(policy.REUSE + 2):
        out = layer.as_one(adj, x)
        seen.append(adj.has_bsb)
        runs.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert seen == [False] * policy.REUSE + [True] * 2
    assert adj.t().has_bsb
    for run in runs[1 : policy.REUSE]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))
    assert_close((runs[0], runs[-1]), 2e-5, floor=1.0)


@pytest.mark.gpu
def test_heads_that_are_padded_are_the_operators():
    layer, adj = Layer("dot with skip", 2, 5, torch.float32, "cuda"), structure("cuda")
    assert call(layer, adj, torch.randn(70, F_IN, device="cuda")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("features", [1, 6, 64, 500])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_of_maps_are_stacked(given, features, bias):
    """As by torch.cat and a cast, to the bit, whatever their alignment."""
    options = {"dtype": given, "device": "cuda"}
    workspace = torch.randn(4, 24 * features + 1, **options)
    for weights in (torch.randn(4, 24, features, **options), workspace[:, 1:].unflatten(1, (24, features))):
        biases = list(torch.randn(4, 24, **options)) if bias else []
        for dtype in {given, torch.float16, torch.bfloat16}:
            call = SimpleNamespace(dtype=dtype, widths=(24,) * 4)
            found = stacked(call, [*weights, *biases])
            if given not in (dtype, torch.float32):
                assert found is None
                continue
            assert torch.equal(found[0], torch.cat(list(weights)).to(dtype))
            assert found[1] is None if not bias else torch.equal(found[1], torch.cat(biases).to(dtype))
    call = SimpleNamespace(dtype=given, widths=(24,) * 2)
    assert stacked(call, [weights[0].t().contiguous().t(), weights[1]]) is None or features == 1
    assert stacked(call, [weights[0], weights[1][:, 1:]]) is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("heads", "dtype"), [(1, torch.float64), (3, torch.float64), (4, torch.float32)])
def test_features_as_they_are(heads: int, dtype: torch.dtype, device: str):
    """Without linear maps, as in a message that someone wrote by hand."""
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("the kernel has no float64")
    adj, options = structure(device), {"dtype": dtype, "device": device}
    torch.manual_seed(0)
    leaves = [torch.randn(70, 4 * heads, **options), *(torch.randn(1, heads, 4, **options) for _ in "12")]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    found = []
    for is_one in (True, False):
        x, *vectors = leaves
        if is_one:
            out = attention_layer(ADDITIVE, adj, x, (), vectors, None, heads=heads, scale=0.2)
            assert out is not None
            assert "AttentionLayer" in str(out.grad_fn)
        else:
            src, dst = head_scores(x, *vectors)
            out = additive_attention(adj, dst, src, x, 0.2)
        first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(grad.cos().sum() for grad in first), leaves)
        found.append([out, *first, *second])
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) <= (1e-11 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_of_dot_products_serves_rows_and_blocks(dtype):
    """From rows: natural logarithms in float32. From blocks: logarithms to base 2 in float64."""
    nodes, heads, width = 5, 3, 12
    lse, result = torch.randn(nodes * heads), torch.randn(nodes, width).to(dtype)
    lse[0] = -torch.inf  # of a row without edges
    numbers = attention_on_cuda.numbers_of_state(DOT_PRODUCT, nodes, heads)
    stored = result.flatten().view(torch.float32)
    state = torch.cat([lse, torch.zeros(numbers - lse.numel()), stored])
    on_rows, on_blocks = (
        SimpleNamespace(
            score=DOT_PRODUCT,
            plan=SimpleNamespace(on_blocks=each),
            heads=heads,
            widths=(width,) * 3,
            dtype=dtype,
        )
        for each in (False, True)
    )
    state = attention_on_cuda.state_for_both(on_rows, state, nodes)
    known, behind = attention_on_cuda.kept_for(on_rows, state, None, nodes)
    assert torch.equal(known, lse)
    assert torch.equal(behind, result)
    assert attention_on_cuda.kept_for(on_blocks, state, None, nodes) == (state, None)
    to_base_2 = state[: 2 * lse.numel()].view(torch.float64)
    torch.testing.assert_close(to_base_2.exp2(), lse.double().exp())
