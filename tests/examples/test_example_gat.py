"""examples/gat.py end to end on tiny inputs."""

from __future__ import annotations

import functools

import gat
import pytest
import torch
from common import frameworks, training
from common.data import planted_partition
from common.errors import ExampleError
from common.training import Recipe
from example_runs import need, run


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("operator", ["gat", "gatv2"])
@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_both_layers_train_alike(framework: str, operator: str, residual: bool) -> None:
    """Without dropout: the layers drop different attention weights."""
    need(framework)
    recipe = Recipe(layers=3, hidden=8, heads=2, dropout=0.0, epochs=4, runs=1, residual=residual)
    graph = planted_partition(num_nodes=200, num_edges=2000, num_classes=3, num_features=6)
    make = functools.partial(gat.make_model, operator=operator)
    results = training.compare(
        graph,
        graph.x,
        ["reference", "fast"],
        lambda conv: make(framework, conv, 6, 3, recipe),
        lambda conv: frameworks.make_graph(framework, graph, conv, torch.device("cpu")),
        recipe,
        device=torch.device("cpu"),
        precision="fp32",
        seed=0,
    )
    name = {"gat": "GATConv", "gatv2": "GATv2Conv"}[operator]
    assert [result.layer for result in results] == [name, f"Fast{name}"]
    first, second = (torch.tensor(result.runs[0].loss) for result in results)
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)


def test_heads_share_the_width() -> None:
    need("pyg")
    recipe = Recipe(layers=3, hidden=12, heads=4)
    model, _ = gat.make_model("pyg", "fast", 7, 3, recipe)
    assert [tuple(conv.lin.weight.shape) for conv in model.convs] == [(12, 7), (12, 12), (3, 12)]
    single, _ = gat.make_model("pyg", "fast", 7, 3, Recipe(layers=1))
    assert [tuple(conv.lin.weight.shape) for conv in single.convs] == [(3, 7)]
    with pytest.raises(ExampleError, match="--hidden 12: expected a multiple of --heads 5"):
        run(gat, "--hidden", "12", "--heads", "5")
