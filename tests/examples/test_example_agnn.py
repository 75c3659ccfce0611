"""examples/agnn.py, and what the examples of one graph have in common: both layers train alike, and learn."""

from __future__ import annotations

from types import ModuleType

import agnn
import gat
import gcn
import maxk
import pytest
import torch
from common.training import Recipe
from example_runs import need, run


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_both_layers_train_alike(framework: str) -> None:
    _, results, _ = run(agnn, "--epochs", "8", "--runs", "2", "--layers", "3", framework=framework)
    assert [result.layer for result in results] == ["AGNNConv", "FastAGNNConv"]
    for reference, fast in zip(results[0].runs, results[1].runs, strict=True):
        losses = (torch.tensor(each.loss) for each in (fast, reference))
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert results[0].runs[0].loss != results[0].runs[1].loss


@pytest.mark.parametrize(
    ("example", "arguments", "share", "layer"),
    [
        (agnn, "--epochs 60 --conv fast", 0.7, "FastAGNNConv"),
        (gat, "--epochs 60 --conv fast --attention gat", 0.7, "FastGATConv"),
        (gat, "--epochs 60 --conv fast --attention gatv2", 0.7, "FastGATv2Conv"),
        (gcn, "--epochs 60 --conv fast", 0.6, "Fast"),
        (maxk, "--epochs 40 --no-relu --k 16", 0.6, "FastMaxK"),
    ],
    ids=str,
)
@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_training_learns(
    example: ModuleType, arguments: str, share: float, layer: str, framework: str
) -> None:
    _, results, page = run(example, *arguments.split(), "--runs", "1", framework=framework)
    curve = results[0].runs[0].loss
    assert sum(curve[-5:]) < share * sum(curve[:5])
    assert layer in page


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_all_but_the_first_temperature_are_trained(framework: str) -> None:
    need(framework)
    for conv in ("reference", "fast"):
        model, _ = agnn.make_model(framework, conv, 7, 3, Recipe(layers=3, hidden=5))
        assert [len(list(one.parameters())) for one in model.convs] == [0, 1, 1]
        assert model.first_layer() is model.lin_in
