"""Where PyG's own code must run, it does, says why once, and gives the original's numbers."""

from __future__ import annotations

import types

import pytest
import torch
from pyg_cases import close, random_graph, same, simple_graph
from pyg_layer_cases import ATTENTION, PLAIN
from torch import nn
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.nn import GCNConv, GINConv, SAGEConv
from torch_geometric.nn.aggr import MedianAggregation, SumAggregation

from fastsparse_core import Adjacency
from fastsparse_pyg import (
    FastGCNConv,
    FastGINConv,
    FastSAGEConv,
    prepare,
)


@pytest.fixture(params=PLAIN, ids=lambda case: case.name)
def layers(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    return request.param.pair()


def test_explain_mode(layers, reasons):
    """An edge mask changes the output as it changes that of the original, which was used before."""
    reference, layer = layers
    edge_index = simple_graph(num_nodes=20, num_edges=50)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    x = torch.randn(20, 6)
    plain = reference(x, edge_index)
    mask = torch.randn(edge_index.size(1))
    for module in (reference, layer):
        set_masks(module, mask, edge_index)
    explained = reference(x, edge_index)
    assert not torch.allclose(explained, plain)
    close(layer(x, edge_index), explained)
    assert "explain mode" in reasons.text
    assert {record.levelname for record in reasons.records} == {"INFO"}  # INFO, because the user chose it
    for module in (reference, layer):
        clear_masks(module)
    close(layer(x, edge_index), plain, 2e-5)


def test_explain_mode_of_a_user_s_subclass():
    class Mine(FastGCNConv):
        pass

    reference, layer = GCNConv(4, 6), Mine(4, 6)
    layer.load_state_dict(reference.state_dict())
    edge_index, x = simple_graph(num_nodes=20, num_edges=50), torch.randn(20, 4)
    for module in (reference, layer):
        set_masks(module, torch.linspace(-3, 3, 50), edge_index)
    close(layer(x, edge_index), reference(x, edge_index))


def test_explain_mode_with_an_adjacency():
    edge_index, x = random_graph(20, num_edges=50), torch.randn(20, 4)
    reference, layer = SAGEConv(4, 6), FastSAGEConv(4, 6)
    layer.load_state_dict(reference.state_dict())
    mask = torch.randn(edge_index.size(1))
    for module in (reference, layer):
        set_masks(module, mask, edge_index)
    close(layer(x, Adjacency.from_coo(edge_index[1], edge_index[0], (20, 20))), reference(x, edge_index))
    with pytest.raises(ValueError, match="mask"):
        layer(x, Adjacency.from_coo(edge_index[1], edge_index[0], (20, 20), self_loops="replace"))


def test_gnn_explainer():
    edge_index, x = simple_graph(num_nodes=20, num_edges=50), torch.randn(20, 4)
    explainer = Explainer(
        FastGCNConv(4, 3),
        GNNExplainer(epochs=3),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
    )
    explanation = explainer(x, edge_index, index=1)
    assert explanation.edge_mask.abs().sum() > 0


@pytest.mark.parametrize(
    "name",
    [
        "propagate_forward_pre",
        "propagate_forward",
        "message_forward_pre",
        "message_forward",
        "aggregate_forward_pre",
        "aggregate_forward",
    ],
)
def test_hooks_run(layers, reasons, name):
    reference, layer = layers
    edge_index, x = random_graph(20, num_edges=50), torch.randn(20, 6)
    called = []
    handle = getattr(layer, f"register_{name}_hook")(lambda *args: called.append(args[0]))
    close(layer(x, edge_index), reference(x, edge_index), 2e-5)
    assert called == [layer]
    close(layer(x, prepare(edge_index, 20)), reference(x, edge_index), 2e-5)
    handle.remove()
    close(layer(x, edge_index), reference(x, edge_index), 2e-5)
    assert called == [layer, layer]
    assert reasons.text.count("hook") == 1
    assert {record.levelname for record in reasons.records} == {"INFO"}  # INFO, because the user chose it


@pytest.mark.filterwarnings("ignore:Sparse")
def test_message_and_aggregate_hook_runs():
    edge_index, x = simple_graph(20, 50), torch.randn(20, 4)
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(50), (20, 20)).to_sparse_csr()
    layer = FastSAGEConv(4, 6)
    called = []
    layer.register_message_and_aggregate_forward_hook(lambda *args: called.append(1))
    layer(x, matrix)
    assert called == [1]


def test_hook_on_the_aggregation_runs():
    edge_index, x = random_graph(20, num_edges=50), torch.randn(20, 4)
    layer = FastSAGEConv(4, 6)
    called = []
    layer.aggr_module.register_forward_hook(lambda *args: called.append(1))
    layer(x, edge_index)
    assert called == [1]
    layer = FastSAGEConv(4, 6)
    layer.aggr_module.register_full_backward_hook(lambda *args: called.append(2))
    layer(x.requires_grad_(), edge_index).sum().backward()
    assert called == [1, 2]


@pytest.mark.parametrize("name", ["gcn", "agnn"])
def test_decomposed_layers(name, reasons):
    edge_index, x = random_graph(20, num_edges=50), torch.randn(20, 6, requires_grad=True)
    case = {"gcn": PLAIN[0], "agnn": ATTENTION[-1]}[name]
    reference, layer = case.pair(decomposed_layers=2)
    same(reference, layer, lambda conv: conv(x, edge_index), [x])
    assert reasons.text.count("decomposed_layers > 1. Use decomposed_layers=1") == 1


@pytest.mark.parametrize("aggr", ["lstm", "median", "mul", "std", ["mean", "max"], "softmax"], ids=str)
def test_unsupported_aggregations(aggr, reasons):
    edge_index = random_graph(20, num_edges=50)
    edge_index = edge_index[:, edge_index[1].sort(stable=True).indices]
    x = torch.randn(20, 4, requires_grad=True)
    reference, layer = SAGEConv(4, 6, aggr=aggr), FastSAGEConv(4, 6, aggr=aggr)
    same(reference, layer, lambda conv: conv(x, edge_index), [x])
    (record,) = reasons.records
    assert record.levelname == "WARNING"
    assert "has no kernel. Use aggr='sum' or 'mean' or 'max' or 'min'" in record.message
    adj = Adjacency.from_coo(edge_index[1], edge_index[0], (20, 20))
    close(layer(x, adj), reference(x, edge_index))


def _refuses():
    raise RuntimeError("expected something else")


def _needs_a_full_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("fault", "is_told"),
    [(_refuses, False), (_needs_a_full_gpu, True), (lambda: torch.empty(1 << 50, dtype=torch.uint8), True)],
    ids=["refused", "GPU", "CPU"],
)
def test_calls_that_run_out_of_memory_say_that_a_kernel_is_missing(fault, is_told, reasons):
    class Median(MedianAggregation):
        def forward(self, *args, **kwargs):
            return fault()

    layer = FastSAGEConv(4, 6, aggr=Median())
    with pytest.raises(RuntimeError):
        layer(torch.randn(20, 4), random_graph(20, num_edges=50))
    assert ("FastSAGEConv falls back to PyG's implementation" in reasons.text) == is_told


@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_gcn_with_another_aggregation(aggr):
    edge_index, x = random_graph(20, num_edges=50), torch.randn(20, 4, requires_grad=True)
    weight = torch.rand(edge_index.size(1), requires_grad=True)
    reference, layer = GCNConv(4, 6, aggr=aggr), FastGCNConv(4, 6, aggr=aggr)
    same(reference, layer, lambda conv: conv(x, edge_index, weight), [x, weight])


def test_overridden_methods(reasons):
    class Doubled(FastSAGEConv):
        def message(self, x_j: torch.Tensor) -> torch.Tensor:
            return 2 * x_j

    class Grandchild(Doubled):
        pass

    class Scaled(SumAggregation):
        def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
            return 2 * super().forward(*args, **kwargs)

    class Updated(FastGINConv):
        def update(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs + 1

    edge_index, x = random_graph(20, num_edges=50), torch.randn(20, 4)
    reference = SAGEConv(4, 6, aggr="sum", root_weight=False, bias=False)
    expected = 2 * reference(x, edge_index)
    for kind in (Doubled, Grandchild):
        layer = kind(4, 6, aggr="sum", root_weight=False, bias=False)
        layer.load_state_dict(reference.state_dict())
        close(layer(x, edge_index), expected)
    layer = FastSAGEConv(4, 6, aggr=Scaled(), root_weight=False, bias=False)
    layer.load_state_dict(reference.state_dict())
    close(layer(x, edge_index), expected)
    close(Updated(nn.Identity())(x, edge_index), GINConv(nn.Identity())(x, edge_index) + 1)
    assert "message() is overridden. Override it in a subclass of PyG's layer and call" in reasons.text
    assert "update() is overridden" in reasons.text


def test_overridden_propagate():
    class Mine(FastGINConv):
        def propagate(self, edge_index: torch.Tensor, size: object = None, **kwargs: object) -> torch.Tensor:
            return kwargs["x"][1] * 0

    x = torch.randn(20, 4)
    close(Mine(nn.Identity())(x, random_graph(20, num_edges=50)), x)


def test_method_replaced_on_the_instance():
    edge_index, x = random_graph(20, num_edges=50), torch.randn(20, 4)
    layer = FastGINConv(nn.Identity())
    before = layer(x, edge_index)
    layer.message = types.MethodType(lambda self, x_j: 0 * x_j, layer)
    close(layer(x, edge_index), x)
    del layer.message
    close(layer(x, edge_index), before)


def test_own_forward_of_a_user_s_subclass():
    class Mine(FastGCNConv):
        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return super().forward(x, edge_index).relu()

    edge_index, x = random_graph(20, num_edges=50), torch.randn(20, 4)
    reference, layer = GCNConv(4, 6), Mine(4, 6)
    layer.load_state_dict(reference.state_dict())
    close(layer(x, edge_index), reference(x, edge_index).relu())


@pytest.mark.filterwarnings("ignore:Sparse")
def test_fuse_switched_off_with_a_matrix():
    """The original then ignores the values of a matrix in SAGE."""
    edge_index, x = simple_graph(20, 50), torch.randn(20, 4)
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), torch.rand(50), (20, 20)).to_sparse_csr()
    reference, layer = SAGEConv(4, 6), FastSAGEConv(4, 6)
    layer.load_state_dict(reference.state_dict())
    reference.fuse = layer.fuse = False
    close(layer(x, matrix), reference(x, matrix))


def test_gcn_fallback_on_an_adjacency_with_loops():
    edge_index, x = random_graph(20, num_edges=50), torch.randn(20, 4)
    weight = torch.rand(edge_index.size(1))
    reference, layer = GCNConv(4, 6, aggr="mean"), FastGCNConv(4, 6, aggr="mean")
    layer.load_state_dict(reference.state_dict())
    for loops in ("keep", "replace"):
        adj = Adjacency.from_coo(edge_index[1], edge_index[0], (20, 20), self_loops=loops)
        close(layer(x, adj), reference(x, edge_index))
        close(layer(x, adj, weight), reference(x, edge_index, weight))


def test_fallback_on_a_rectangular_adjacency():
    edge_index, x = random_graph(20, 12, num_edges=50), torch.randn(20, 4)
    adj = Adjacency.from_coo(edge_index[1], edge_index[0], (12, 20))
    reference, layer = (conv((4, 3), 6, aggr="median") for conv in (SAGEConv, FastSAGEConv))
    layer.load_state_dict(reference.state_dict())
    close(layer((x, None), adj), reference((x, None), edge_index, (20, 12)))
    for layer in (
        FastSAGEConv((4, 3), 6, aggr="median", flow="target_to_source"),
        FastGCNConv(4, 6, normalize=False, aggr="max"),
    ):
        with pytest.raises(ValueError, match="square"):
            layer((x, None) if isinstance(layer, FastSAGEConv) else x, adj)


def test_integer_features():
    edge_index = random_graph(20, num_edges=50)
    x = torch.randint(0, 5, (20, 4))
    close(FastGINConv(nn.Identity())(x, edge_index), GINConv(nn.Identity())(x, edge_index))
