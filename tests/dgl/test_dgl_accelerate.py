"""Models of DGL's layers on the drop-ins: same numbers, same objects, and back."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dgl_cases import (
    TOLERANCE,
    Results,
    assert_close,
    dgl,
    fastsparse_dgl,
    features,
    homogeneous,
    outputs_and_gradients,
    random_edges,
    terms_of_gradients,
)
from hook_cases import enabled
from torch import Tensor, nn

import fastsparse_dgl.nn as layers
from fastsparse_core import call_report
from fastsparse_dgl import accelerate, restore
from fastsparse_dgl.nn.sage_conv import NO_LSTM

original = dgl.nn.pytorch
DROP_INS = layers.DROP_INS


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)
    fastsparse_dgl.clear_cache()
    yield
    fastsparse_dgl.clear_cache()


LAYERS: dict[str, Callable[[], Any]] = {
    "AGNNConv": lambda: original.AGNNConv(),
    "DotGatConv": lambda: original.DotGatConv(6, 4, 2),
    "GATConv": lambda: original.GATConv(6, 4, 2),
    "GATv2Conv": lambda: original.GATv2Conv(6, 4, 2),
    "GINConv": lambda: original.GINConv(nn.Linear(6, 4), "mean", learn_eps=True),
    "GraphConv": lambda: original.GraphConv(6, 4, activation=torch.relu),
    "SAGEConv": lambda: original.SAGEConv(6, 4, "pool"),
}

#: Layers with edge features. test_dgl_edge_layers.py and test_dgl_pna_conv.py test them.
WITH_EDGES = ["EGATConv", "EdgeGATConv", "GINEConv", "PNAConv"]
if hasattr(original, "GatedGCNConv"):  # since DGL 2.0
    WITH_EDGES.append("GatedGCNConv")


def drop_ins_of(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules() if type(module) in DROP_INS.values()]


def test_the_table_is_complete():
    """Every exported drop-in has its original in the table."""
    exported = {getattr(fastsparse_dgl, name) for name in fastsparse_dgl.__all__ if name.startswith("Fast")}
    replacing = {klass for klass in exported if klass.__bases__[-1].__module__.startswith("dgl.")}
    assert set(DROP_INS.values()) == replacing
    assert {klass.__name__ for klass in DROP_INS} == {*LAYERS, *WITH_EDGES, "HeteroGraphConv"}
    assert all(drop_in.__name__ == f"Fast{klass.__name__}" for klass, drop_in in DROP_INS.items())


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer(name, device):
    graph, layer = homogeneous(), LAYERS[name]()
    feat = features(graph, 6)
    expected = outputs_and_gradients(layer, graph, feat, {}, "cpu")
    terms = terms_of_gradients(layer, graph, feat, {})
    layer.to(device)
    parameters, names = list(layer.parameters()), list(layer.state_dict())
    (row,) = accelerate(layer, show=False).rows
    assert (row.original, row.drop_in, row.reason) == (name, f"Fast{name}", "")
    assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))
    assert list(layer.state_dict()) == names
    assert_close(outputs_and_gradients(layer, graph, feat, {}, device), expected, TOLERANCE, terms)
    assert fastsparse_dgl.cache_info().misses == 1
    restore(layer)
    assert type(layer) is getattr(original, name)
    assert_close(outputs_and_gradients(layer, graph, feat, {}, "cpu"), expected, TOLERANCE)
    assert fastsparse_dgl.cache_info().misses == 1


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(name, how):
    graph, layer = homogeneous(), LAYERS[name]()
    accelerate(layer, show=False)
    again = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    assert type(again) is type(layer)
    assert torch.equal(again(graph, features(graph, 6)), layer(graph, features(graph, 6)))
    restore(again)
    assert type(again) is getattr(original, name)


class Model(nn.Module):
    """Layers in a list, in DGL's own Sequential, and at two places."""

    def __init__(self) -> None:
        super().__init__()
        shared = original.GraphConv(6, 6)
        self.stack = nn.ModuleList([shared, original.SAGEConv(6, 6, "mean")])
        self.sequence = original.Sequential(original.GATConv(6, 3, 2), nn.Flatten())
        self.again = shared

    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        for layer in self.stack:
            feat = layer(graph, feat).tanh()
        return self.again(graph, self.sequence[1](self.sequence[0](graph, feat)))


def test_a_model_trains_the_same_way(device):
    graph = homogeneous()
    feat = features(graph, 6).to(device)
    reference = Model()
    model = copy.deepcopy(reference).to(device)
    report = accelerate(model, show=False)
    assert [row.paths for row in report.swapped] == [("stack.0", "again"), ("stack.1",), ("sequence.0",)]
    assert model.again is model.stack[0]
    losses: list[list[float]] = []
    for one, x in ((reference, feat.cpu()), (model, feat)):
        optimiser = torch.optim.Adam(one.parameters(), lr=0.01)
        losses.append([])
        for _ in range(5):
            optimiser.zero_grad()
            loss = one(graph, x).square().mean()
            loss.backward()
            optimiser.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)


# ---------------------------------------------------------------- heterogeneous models

RELATIONS = [("user", "rates", "item"), ("item", "rated-by", "user"), ("user", "follows", "user")]
COUNTS = {"user": 17, "item": 23}


def hetero_graph(seed: int = 0) -> Any:
    edges = {
        (source, name, target): random_edges(COUNTS[source], COUNTS[target], 70, seed + number)
        for number, (source, name, target) in enumerate(RELATIONS)
    }
    return dgl.heterograph(edges, num_nodes_dict=COUNTS)


def hetero_features(device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    feat = {name: torch.randn(count, 5, generator=generator) for name, count in COUNTS.items()}
    return {name: part.to(device).requires_grad_() for name, part in feat.items()}


class OneHead(nn.Module):
    """Attention without the dimension of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = original.GATConv((5, 5), 5, 1)

    def forward(self, graph: Any, feat: Any) -> Tensor:
        return self.layer(graph, feat).squeeze(1)


class HeteroModel(nn.Module):
    def __init__(self, aggregate: str = "sum") -> None:
        super().__init__()
        kinds = [lambda: original.GraphConv(5, 5), lambda: original.SAGEConv(5, 5, "mean"), OneHead]
        self.layers = nn.ModuleList(
            original.HeteroGraphConv(
                {name: kind() for (_, name, _), kind in zip(RELATIONS, kinds, strict=True)}, aggregate
            )
            for _ in range(2)
        )

    def forward(self, graph: Any, feat: dict[str, Tensor]) -> dict[str, Tensor]:
        for layer in self.layers:
            feat = {name: part.tanh() for name, part in layer(graph, feat).items()}
        return feat


def hetero_results(model: nn.Module, graph: Any, device: str) -> Results:
    model = model.to(device)
    model.zero_grad()
    feat = hetero_features(device)
    out = model(graph, feat)
    sum(part.square().sum() for part in out.values()).backward()
    found: Results = {f"out[{name}]": part.detach() for name, part in out.items()}
    found.update({f"feat[{name}]": part.grad for name, part in feat.items()})
    # Copies, because moving the module would also move these gradients.
    found.update({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    return found


def hetero_close(found: Results, expected: Results) -> None:
    """Compares with errors relative to the largest entry, or to 1, the size of usual gradients.

    If all scores of a row are on one side of GAT's leaky ReLU, the exact gradient of the destination's score
    is 0, and the computed one is only a rounding error.
    """
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        scale = max(want.abs().max().item(), 1.0)
        torch.testing.assert_close(found[name].cpu(), want, rtol=0, atol=TOLERANCE * scale, msg=name)


@pytest.mark.parametrize("aggregate", ["sum", "mean", "max", "stack"])
def test_heterogeneous_model(aggregate, device):
    graph, model = hetero_graph(), HeteroModel(aggregate)
    if aggregate == "stack":  # adds a dimension, so there is no second layer
        model.layers = model.layers[:1]
    expected = hetero_results(model, graph, "cpu")
    report = accelerate(model, show=False)
    assert not report.left
    assert drop_ins_of(model)[:4] == ["FastHeteroGraphConv", "FastGraphConv", "FastSAGEConv", "FastGATConv"]
    hetero_close(hetero_results(model, graph, device), expected)
    restore(model)
    assert drop_ins_of(model) == []
    hetero_close(hetero_results(model, graph, "cpu"), expected)


def test_every_edge_type_is_converted_once(device):
    """Two layers, three edge types, epochs of forward and backward: three misses, and no more."""
    graph, model = hetero_graph(), HeteroModel()
    accelerate(model, show=False)
    for epoch in range(4):
        hetero_results(model, graph, device)
        info = fastsparse_dgl.cache_info()
        assert (info.misses, info.entries, info.stale) == (3, 3, 0)
        assert info.hits == 6 * epoch + 3


def test_drop_ins_in_dgls_own_wrapper_are_converted_every_time():
    """What FastHeteroGraphConv is for: DGL makes slices that cannot be recognised."""
    graph, model = hetero_graph(), HeteroModel()
    accelerate(model, show=False)
    for layer in model.layers:
        layer.__class__ = original.HeteroGraphConv
    for _ in range(2):
        hetero_results(model, graph, "cpu")
    assert fastsparse_dgl.cache_info().misses == 12


def test_prepared_edge_types_are_found():
    graph, model = hetero_graph(), HeteroModel()
    accelerate(model, show=False)
    for _, name, _ in RELATIONS:
        fastsparse_dgl.prepare(graph, etype=name)
    hetero_results(model, graph, "cpu")
    assert fastsparse_dgl.cache_info().misses == 3


def test_a_changed_edge_type_is_noticed():
    graph, model = hetero_graph(), HeteroModel()
    reference = copy.deepcopy(model)
    accelerate(model, show=False)
    hetero_results(model, graph, "cpu")
    for change in (
        lambda: graph.add_edges([3, 4], [5, 5], etype="follows"),
        lambda: graph.remove_edges([0, 7], etype="rates"),
    ):
        change()
        expected = hetero_results(reference, graph, "cpu")
        hetero_close(hetero_results(model, graph, "cpu"), expected)
    gc.collect()
    assert fastsparse_dgl.cache_info().entries == 3


def test_a_changed_slice_is_its_own_graph():
    """Changing a slice in place leaves the graph, and the slices made of it later, as they are."""
    graph = hetero_graph()
    part = fastsparse_dgl.caching.relation(graph, "follows")
    before = fastsparse_dgl.prepare(part)
    assert before.num_edges == 70
    part.add_edges([0], [1])
    assert fastsparse_dgl.prepare(part).num_edges == 71
    assert fastsparse_dgl.prepare(graph, etype="follows") is before


def test_entries_die_with_the_graph():
    graph, model = hetero_graph(), HeteroModel()
    accelerate(model, show=False)
    hetero_results(model, graph, "cpu")
    local = graph.local_var()
    del graph
    gc.collect()
    assert fastsparse_dgl.cache_info().entries == 3
    hetero_results(model, local, "cpu")
    assert fastsparse_dgl.cache_info().misses == 3
    del local
    gc.collect()
    assert fastsparse_dgl.cache_info().entries == 0
    assert len(fastsparse_dgl.caching._relations) == 0


def test_many_short_lived_heterographs():
    model = HeteroModel()
    reference = copy.deepcopy(model)
    accelerate(model, show=False)
    for seed in range(20):
        graph = hetero_graph(seed)
        expected = hetero_results(reference, graph, "cpu")
        hetero_close(hetero_results(model, graph, "cpu"), expected)
    del graph
    gc.collect()
    assert fastsparse_dgl.cache_info().entries == 0


def test_without_the_private_handle(monkeypatch):
    graph, model = hetero_graph(), HeteroModel()
    expected = hetero_results(model, graph, "cpu")
    accelerate(model, show=False)
    monkeypatch.setattr(fastsparse_dgl.caching, "_HANDLE", "_absent")
    hetero_close(hetero_results(model, graph, "cpu"), expected)
    assert fastsparse_dgl.cache_info().misses == 0


def test_heterogeneous_blocks_and_pairs():
    graph = hetero_graph()
    seeds = {"user": torch.arange(6), "item": torch.arange(4)}
    block = dgl.to_block(dgl.in_subgraph(graph, seeds), seeds)
    layer = original.HeteroGraphConv(
        {name: original.SAGEConv(5, 3, "mean") for _, name, _ in RELATIONS}, "sum"
    )
    feat = {name: part.detach()[block.srcdata[dgl.NID][name]] for name, part in hetero_features().items()}
    both = (feat, {name: part[: block.num_dst_nodes(name)] for name, part in feat.items()})
    expected = layer(block, feat)
    accelerate(layer, show=False)
    for inputs in (feat, both):
        for _ in range(2):
            out = layer(block, inputs)
            assert out.keys() == expected.keys()
            for name, part in out.items():
                torch.testing.assert_close(part, expected[name], rtol=1e-5, atol=1e-5)
    assert fastsparse_dgl.cache_info().misses == 3


def test_arguments_of_the_layers_within():
    graph = hetero_graph()
    layer = original.HeteroGraphConv({"rates": original.GraphConv(5, 3)})
    weight = torch.rand(graph.num_edges("rates"), generator=torch.Generator().manual_seed(2))
    part = graph["rates"]
    results = []
    for _ in range(2):
        results += [
            layer(part, hetero_features(), mod_args={"rates": (None, weight)})["item"],
            layer(part, hetero_features(), mod_kwargs={"rates": {"edge_weight": weight}})["item"],
        ]
        accelerate(layer, show=False)
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-5, atol=1e-5)


def test_constructed_as_a_drop_in():
    layer = fastsparse_dgl.FastHeteroGraphConv({name: original.GraphConv(5, 3) for _, name, _ in RELATIONS})
    reference = copy.deepcopy(layer)
    restore(reference)
    assert type(reference) is original.HeteroGraphConv
    assert str(layer).replace("Fast", "") == str(reference)
    graph = hetero_graph()
    found, expected = layer(graph, hetero_features()), reference(graph, hetero_features())
    assert {name: part.tolist() for name, part in found.items()} == {
        name: part.tolist() for name, part in expected.items()
    }


# ---------------------------------------------------------------- layers that are not replaced, and why


class OnlyConstructed(original.GraphConv):
    def __init__(self) -> None:
        super().__init__(6, 4)


class OwnForward(original.GraphConv):
    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        return 2 * super().forward(graph, feat)


class OfDropIn(fastsparse_dgl.FastSAGEConv):
    pass


STAYS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own forward": (lambda: OwnForward(6, 4), "a subclass of GraphConv with its own forward"),
    "no kernel": (lambda: original.SAGEConv(6, 4, "lstm"), "aggregator_type='lstm' has no kernel"),
    "no drop-in": (lambda: original.ChebConv(6, 4, 2), "has no drop-in"),
    "drop-in": (lambda: fastsparse_dgl.FastGraphConv(6, 4), "is a drop-in already"),
    "of a drop-in": (lambda: OfDropIn(6, 4, "mean"), "is a drop-in already"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays(name):
    make, reason = STAYS[name]
    layer = make()
    before = type(layer)
    (row,) = accelerate(nn.Sequential(layer), show=False).rows
    assert (row.paths, row.reason) == (("0",), reason)
    assert type(layer) is before


def test_subclass_with_a_constructor_only():
    graph, layer = homogeneous(), OnlyConstructed()
    expected = layer(graph, features(graph, 6))
    assert [row.original for row in accelerate(layer, show=False).swapped] == ["OnlyConstructed"]
    torch.testing.assert_close(layer(graph, features(graph, 6)), expected, rtol=1e-5, atol=1e-5)
    restore(layer)
    assert type(layer) is OnlyConstructed


def test_hooks_training_mode_and_attributes():
    graph, model = homogeneous(), Model().eval()
    layer = model.stack[0]
    layer.mine = "kept"
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    accelerate(model, show=False)
    model(graph, features(graph, 6))
    assert calls == [1, 1]
    assert layer.mine == "kept"
    assert not any(module.training for module in model.modules())


def test_the_report_is_printed(capsys):
    model = nn.ModuleList([original.GraphConv(6, 4), original.ChebConv(6, 4, 2)])
    report = accelerate(model)
    assert capsys.readouterr().out == f"{report}\n"
    assert "FastGraphConv" in str(report)
    assert len(accelerate(model, show=False).swapped) == 0
    assert capsys.readouterr().out == ""


def test_not_a_module():
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got NoneType"):
        accelerate(None)
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got dict"):
        restore({})


# ---------------------------------------------------------------- enable()


@pytest.mark.parametrize("name", LAYERS)
def test_enabled_layers_become_drop_ins_at_their_first_call(name):
    layer, graph = LAYERS[name](), homogeneous()
    kind = type(layer)
    expected = layer(graph, features(graph, 6))
    with enabled(report=True):
        assert type(layer) is kind
        torch.testing.assert_close(layer(graph, features(graph, 6)), expected, rtol=1e-4, atol=1e-5)
        assert type(layer) is DROP_INS[kind]
        (row,) = (row for row, _ in call_report.report().rows if row.call == kind.__name__)
        assert row.by == type(layer)._kernel
        for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
            assert type(other) is kind
            torch.testing.assert_close(other(graph, features(graph, 6)), expected, rtol=1e-4, atol=1e-5)
    assert type(layer) is kind
    assert "__call__" not in vars(kind)


def test_enabled_layers_that_stay_are_reported():
    graph, layer = homogeneous(), original.SAGEConv(6, 4, "lstm")
    expected = layer(graph, features(graph, 6))
    with enabled(report=True):
        torch.testing.assert_close(layer(graph, features(graph, 6)), expected, rtol=1e-4, atol=1e-5)
        assert type(layer) is original.SAGEConv
        (row,) = (row for row, _ in call_report.report().rows if row.call == "SAGEConv")
    assert (row.by, row.reason) == ("DGL", NO_LSTM.message)


def test_the_report_counts_what_the_script_calls():
    def inner():
        kinds = {"rates": "lstm", "rated-by": "mean", "follows": "mean"}
        return {name: original.SAGEConv(5, 3, kind) for name, kind in kinds.items()}

    class Stacked(original.HeteroGraphConv):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    with enabled(report=True):
        original.HeteroGraphConv(inner())(hetero_graph(), hetero_features())
        assert "computed 2 of 3 calls" in str(call_report.report())  # one for each relation
        callers = {(row.call, row.by): row.caller for row, _ in call_report.report().rows}
        assert callers["SAGEConv", "spmm"] == callers["SAGEConv", "DGL"] == ""
        assert callers["update_all", "DGL"] == "SAGEConv"
        Stacked(inner())(hetero_graph(), hetero_features())
        assert "computed 4 of 7 calls" in str(call_report.report())  # and the subclass itself


def test_accelerate_and_restore_rule_over_enable():
    graph, layer = homogeneous(), original.SAGEConv(6, 4, "mean")
    with enabled():
        layer(graph, features(graph, 6))
        restore(layer)
        layer(graph, features(graph, 6))
        assert type(layer) is original.SAGEConv
        accelerate(layer, show=False)
    assert type(layer) is fastsparse_dgl.FastSAGEConv


def test_layers_can_be_left_out_of_enable(monkeypatch):
    monkeypatch.setenv("FASTSPARSE_DISABLE", "layers")
    graph, layer = homogeneous(), original.SAGEConv(6, 4, "mean")
    with enabled():
        layer(graph, features(graph, 6))
        assert type(layer) is original.SAGEConv


def test_layers_without_a_drop_in_say_what_serves_them():
    with pytest.raises(AttributeError, match=r"RelGraphConv has no drop-in; after enable\(\)"):
        _ = fastsparse_dgl.FastRelGraphConv
    with pytest.raises(AttributeError, match="no attribute 'FastNothing'$"):
        _ = fastsparse_dgl.FastNothing
    assert not hasattr(fastsparse_dgl, "RelGraphConv")
