"""examples/agnn.py end to end on tiny inputs."""

from __future__ import annotations

import io

import agnn
import pytest
import torch
from common.training import LayerResult, Recipe
from rich.console import Console

PACKAGES = {"pyg": "fastsparse_pyg", "dgl": "fastsparse_dgl"}


def run(*arguments: str, framework: str) -> list[LayerResult]:
    pytest.importorskip(PACKAGES[framework], exc_type=ImportError)
    console = Console(file=io.StringIO(), width=160)
    _, results = agnn.main(
        ["--framework", framework, "--dataset", "karate", "--device", "cpu", *arguments], console
    )
    return results


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_both_layers_train_alike(framework: str) -> None:
    results = run("--epochs", "8", "--runs", "2", "--layers", "3", framework=framework)
    assert [result.layer for result in results] == ["AGNNConv", "FastAGNNConv"]
    for reference, fast in zip(results[0].runs, results[1].runs, strict=True):
        torch.testing.assert_close(
            torch.tensor(fast.loss), torch.tensor(reference.loss), rtol=1e-4, atol=1e-5
        )
    assert results[0].runs[0].loss != results[0].runs[1].loss


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_training_learns(framework: str) -> None:
    curve = run("--epochs", "60", "--runs", "1", "--conv", "fast", framework=framework)[0].runs[0].loss
    assert curve[-1] < 0.7 * curve[0]


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_all_but_the_first_temperature_are_trained(framework: str) -> None:
    pytest.importorskip(PACKAGES[framework], exc_type=ImportError)
    for conv in ("reference", "fast"):
        model, _ = agnn.make_model(framework, conv, 7, 3, Recipe(layers=3, hidden=5))
        assert [len(list(one.parameters())) for one in model.convs] == [0, 1, 1]
        assert model.first_layer() is model.lin_in
