"""What the attention layers have in common: inputs, dropout, PyG's own code, torch.compile, bad input."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from digits import SCALES, Problem, check_digits
from pyg_cases import as_kind, close, gradients, random_graph, same, simple_graph
from pyg_layer_cases import ATTENTION, Case
from torch import Tensor, nn
from torch_geometric.nn import GATConv
from torch_geometric.nn.aggr import SumAggregation

from fastsparse_pyg import (
    FastAGNNConv,
    FastGATConv,
    cache_info,
    prepare,
)

FAMILIES = dict(zip(("gat", "gatv2", "transformer", "agnn"), ATTENTION, strict=True))
WITH_DROPOUT = ["gat", "gatv2", "transformer"]


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Case:
    return FAMILIES[request.param]


# ---------------------------------------------------------------- inputs


@pytest.mark.parametrize("kind", ["csr", "coo"])
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:Converting sparse tensor")
@pytest.mark.usefixtures("kernels_only")
def test_matrix_with_values_and_loops(device, family, kind):
    """The values of the matrix are ignored, and its self loops are replaced."""
    edge_index = random_graph(device=device)
    weight = torch.rand(edge_index.size(1), device=device) + 0.1
    graph = as_kind(kind, edge_index, 40, 40, weight)
    reference, layer = family.pair(device)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    same(reference, layer, lambda conv: conv(x, graph), [x], tolerance=2e-5, floor=1)


def test_one_structure_serves_all_layers(device):
    edge_index = random_graph(device=device)
    x = torch.randn(40, 6, device=device)
    for _ in range(2):
        for name in ("gat", "gatv2", "agnn"):
            FAMILIES[name].make(FAMILIES[name].fast, device)(x, edge_index)
    assert cache_info().misses == 1


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("name", "edge_dim"), [(name, None) for name in FAMILIES] + [(name, 3) for name in WITH_DROPOUT]
)
@pytest.mark.usefixtures("kernels_only")
def test_large_features_cost_no_more_digits_than_the_original(name, edge_dim, scale):
    """On the CPU. Kernels for GPUs derive the softmax from the stored result, with fewer digits."""
    options = {} if edge_dim is None else {"edge_dim": edge_dim}

    def make(seed: int) -> Problem:
        edge_index = random_graph(100, num_edges=1000, seed=seed)
        inputs = [scale * torch.randn(100, 6)]
        if edge_dim is not None:
            inputs.append(scale * torch.randn(edge_index.size(1), edge_dim))

        def call(conv: nn.Module, given: list[Tensor], where: str) -> Tensor:
            return conv(given[0], edge_index.to(where), *given[1:])

        return Problem(*FAMILIES[name].pair(**options), inputs, call)

    check_digits(make, ignore=["lin_key.bias"])


@pytest.mark.parametrize("name", WITH_DROPOUT)
@pytest.mark.usefixtures("kernels_only")
def test_scores_of_very_different_size(device, name):
    """Scores of +-1e4 do not overflow and do not hide others, compared with the original in float64.

    In float32, a score of 1e4 has an error of 1e-3, and so do the weights of neighbours with similar
    scores. Gradients of the attention's own parameters are differences of nearly equal numbers, also in the
    original, so they only have to be finite.
    """
    edge_index = random_graph(device=device)
    reference, layer = FAMILIES[name].pair(device)
    reference.double()
    x = (100 if name == "transformer" else 1e4) * torch.randn(40, 6, device=device)
    narrow, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    got, expected = layer(narrow, edge_index), reference(wide, edge_index)
    close(got.double(), expected, 1e-3)
    (got_gradient,), (expected_gradient,) = gradients(got, [narrow]), gradients(expected, [wide])
    assert (got_gradient - expected_gradient).norm() < 1e-2 * expected_gradient.norm()
    for gradient in gradients(layer(x, edge_index), list(layer.parameters())):
        assert gradient.isfinite().all()


def test_rows_without_edges(device, family):
    """Nodes 38 and 39 have none: no NaN, not in gradients either."""
    edge_index = random_graph(device=device)
    options = {"add_self_loops": False} if hasattr(family.make(family.fast), "add_self_loops") else {}
    reference, layer = family.pair(device, **options)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    same(reference, layer, lambda conv: conv(x, edge_index), [x], tolerance=2e-5, floor=1)
    if "add_self_loops" in options:
        bias = getattr(layer, "bias", None)
        expected = torch.zeros_like(layer(x, edge_index)[38:]) + (0 if bias is None else bias)
        assert torch.equal(layer(x, edge_index)[38:], expected)


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize("name", WITH_DROPOUT)
@pytest.mark.parametrize("p", [0.3, 0.8])
@pytest.mark.usefixtures("kernels_only")
def test_dropout_is_reproducible_and_unbiased(device, name, p):
    edge_index = random_graph(device=device)
    layer = FAMILIES[name].make(FAMILIES[name].fast, device, dropout=p)
    x = torch.randn(40, 6, device=device)
    torch.manual_seed(1)
    first, second = layer(x, edge_index), layer(x, edge_index)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(layer(x, edge_index), first)
    with torch.no_grad():
        draws = torch.stack([layer(x, edge_index) for _ in range(600)])
    layer.eval()
    expected = layer(x, edge_index)
    assert torch.equal(layer(x, edge_index), expected)
    error = (draws.mean(0) - expected).abs()
    # Five standard deviations of a mean of 600.
    assert (error <= 5 * draws.std(0) / 600**0.5 + 1e-5).all()


@pytest.mark.parametrize("name", WITH_DROPOUT)
@pytest.mark.usefixtures("kernels_only")
def test_dropout_has_the_gradient_of_the_mask_it_used(device, name):
    edge_index = random_graph(9, num_edges=25, device=device)
    layer = FAMILIES[name].make(FAMILIES[name].fast, device, dropout=0.5).double()
    x = torch.randn(9, 6, device=device, dtype=torch.float64, requires_grad=True)

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(2)
        return layer(x, edge_index)

    assert torch.autograd.gradcheck(seeded, (x,))


def without_terms(family: Case) -> dict[str, bool]:
    """Options with which a layer's result is the attention's, with nothing added."""
    names = inspect.signature(family.original.__init__).parameters
    return {name: False for name in ("bias", "root_weight") if name in names}


@pytest.mark.usefixtures("kernels_only")
def test_result_may_be_written_to(device, family):
    edge_index = random_graph(device=device)
    # In float64, because the exact gradient of the keys' biases is 0, and in float32 it is only rounding.
    reference, layer = (conv.double() for conv in family.pair(device, **without_terms(family)))
    x = torch.randn(40, 6, device=device, dtype=torch.float64, requires_grad=True)
    same(reference, layer, lambda conv: torch.relu_(conv(x, edge_index)) * 2, [x])


@pytest.mark.parametrize("name", WITH_DROPOUT)
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.usefixtures("kernels_only")
def test_returning_the_weights_changes_no_bit(device, name, hooked):
    """Nor how often hooks of the linear layers run; the weights have gradients of their own."""
    edge_index = random_graph(400, num_edges=6000, device=device)
    reference, layer = FAMILIES[name].pair(device)
    x = torch.randn(400, 6, device=device, requires_grad=True)
    runs: list[nn.Module] = []
    linear = [module for module in layer.children() if hasattr(module, "weight")]
    for module in linear if hooked else ():
        module.register_forward_hook(lambda module, *_: runs.append(module))
    plain, times = layer(x, edge_index), len(runs)
    out, (_, weights) = layer(x, edge_index, return_attention_weights=True)
    assert torch.equal(out, plain)
    assert len(runs) == 2 * times
    assert (times > 0) == hooked
    _, (_, expected) = reference(x, edge_index, return_attention_weights=True)
    got, wanted = (torch.autograd.grad(each.square().sum(), x)[0] for each in (weights, expected))
    close(got, wanted, 1e-4)


@pytest.mark.parametrize("name", WITH_DROPOUT)
@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_dropout_that_is_no_probability(name, p):
    """Refused as by the original."""
    for conv in FAMILIES[name].pair(dropout=p):
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            conv(torch.randn(40, 6), random_graph())


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_of_everything(name):
    reference, layer = FAMILIES[name].pair(dropout=1.0)
    x, edge_index = torch.randn(40, 6), random_graph()
    close(layer(x, edge_index), reference(x, edge_index))


# ---------------------------------------------------------------- PyG's own code


@pytest.mark.parametrize("name", ["gat", "gatv2"])
def test_edge_update_hooks_run(name):
    layer = FAMILIES[name].make(FAMILIES[name].fast)
    called = []
    layer.register_edge_update_forward_hook(lambda *args: called.append(1))
    layer(torch.randn(40, 6), random_graph())
    assert called == [1]


def test_overridden_methods(reasons):
    class Doubled(FastAGNNConv):
        def message(self, x_j: Tensor) -> Tensor:
            return 2 * x_j

    class Flat(FastGATConv):
        def edge_update(self, alpha_j: Tensor, alpha_i: Tensor) -> Tensor:
            return torch.ones_like(alpha_j)

    class Grandchild(Flat):
        pass

    class Scaled(SumAggregation):
        def forward(self, *args: object, **kwargs: object) -> Tensor:
            return 2 * super().forward(*args, **kwargs)

    edge_index, x = random_graph(), torch.randn(40, 6)
    layer = Doubled(add_self_loops=False)
    close(layer(x, edge_index), torch.zeros(40, 6).index_add(0, edge_index[1], 2 * x[edge_index[0]]))
    for kind in (Flat, Grandchild):
        layer = kind(6, 5, add_self_loops=False, bias=False)
        messages = layer.lin(x)[edge_index[0]]
        close(layer(x, edge_index), torch.zeros(40, 5).index_add(0, edge_index[1], messages))
    reference = GATConv(6, 5, bias=False)
    layer = FastGATConv(6, 5, bias=False, aggr=Scaled())
    layer.load_state_dict(reference.state_dict())
    close(layer(x, edge_index), 2 * reference(x, edge_index))
    assert "message() is overridden" in reasons.text
    assert "edge_update() is overridden" in reasons.text


def test_integer_features_are_refused_as_by_the_original(family):
    for conv in family.pair():
        with pytest.raises(RuntimeError):
            conv(torch.randint(0, 5, (40, 6)), random_graph())


# ---------------------------------------------------------------- torch.compile


def compiled_once(layer: nn.Module, frames: list) -> Callable[..., Tensor]:
    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        frames.append(module)
        return module.forward

    return torch.compile(layer, backend=backend, fullgraph=True)


@pytest.mark.parametrize("name", WITH_DROPOUT)
@pytest.mark.usefixtures("fresh_compiler")
def test_dropout_compiles_and_is_drawn_anew(device, name):
    layer = FAMILIES[name].make(FAMILIES[name].fast, device, dropout=0.5)
    adj = prepare(random_graph(device=device), 40, add_self_loops=True)
    frames = []
    compiled = compiled_once(layer, frames)
    x = torch.randn(40, 6, device=device)
    assert not torch.equal(compiled(x, adj), compiled(x, adj))
    assert len(frames) == 1


# ---------------------------------------------------------------- bad and unusual input


def test_size_that_does_not_fit(device):
    layer = FastGATConv(6, 5).to(device)
    x = torch.randn(12, 6, device=device)
    with pytest.raises(ValueError, match=r"expected 13 source rows as size=\(13, 12\) says, got 12"):
        layer(x, random_graph(12, num_edges=30, device=device), size=(13, 12))


def test_edge_features_on_another_device(device):
    if device == "cpu":
        pytest.skip("needs two devices")
    for name in WITH_DROPOUT:
        layer = FAMILIES[name].make(FAMILIES[name].fast, device, edge_dim=3)
        with pytest.raises(ValueError, match="edge_attr: expected device cuda:0"):
            layer(torch.randn(20, 6, device=device), simple_graph(20, 40, device=device), torch.randn(40, 3))


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_edge_features_without_edges(name, device):
    """As in a batch of single atoms."""
    reference, layer = FAMILIES[name].pair(device, edge_dim=5)
    x = torch.randn(3, 6, device=device)
    edges, features = torch.zeros(2, 0, dtype=torch.long, device=device), torch.zeros(0, 5, device=device)
    torch.testing.assert_close(layer(x, edges, features), reference(x, edges, features))
    assert layer(x[:0], edges, features).shape == (0, 10)


@pytest.mark.parametrize("name", ["gatv2", "transformer"])
def test_edge_features_run_fused_but_for_hooks_on_their_map(name, reasons):
    edge_index = random_graph()
    x, edge_attr = torch.randn(40, 6), torch.randn(edge_index.size(1), 3)
    layer = FAMILIES[name].make(FAMILIES[name].fast, edge_dim=3)
    expected = layer(x, edge_index, edge_attr)
    assert not reasons.records
    layer.lin_edge.register_forward_hook(lambda module, inputs, out: out)
    for _ in range(2):
        close(layer(x, edge_index, edge_attr), expected)
    assert reasons.text.count("stores a row of projected features for every edge") == 1
