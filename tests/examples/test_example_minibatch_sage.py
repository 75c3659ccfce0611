"""GraphSAGE on sampled neighbours, end to end and tiny, in both frameworks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import minibatch_sage
import pytest
import torch.nn.functional as F
from common.errors import ExampleError
from rich.console import Console
from simulated_graphs import simulate

from fastsparse_core import capture

TINY = ["--epochs", "2", "--runs", "1", "--hidden", "16", "--batch-size", "128", "--device", "cpu"]


def run_example(framework: str, *arguments: str) -> tuple[dict, list]:
    pytest.importorskip(f"fastsparse_{framework}", exc_type=ImportError)
    return minibatch_sage.main(["--framework", framework, *TINY, *arguments], Console(quiet=True))


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_both_layers_train_alike(framework: str, tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    log, results = run_example(framework, "--fanouts", "5,3", "--json", str(path))
    assert [result.conv for result in results] == ["reference", "fast"]
    reference, fast = (result.runs[0] for result in results)
    assert len(fast.loss) == len(fast.val) == 2
    assert fast.loss == pytest.approx(reference.loss, rel=1e-3)
    assert fast.scores["accuracy"] == pytest.approx(reference.scores["accuracy"], abs=0.02)
    assert fast.loss[1] < fast.loss[0]
    for times in log["batches"].values():
        assert times["sampling_ms"] > 0
        assert times["gather_ms"] > 0
        assert times["step_ms"] > 0
    assert json.loads(path.read_text())["batches"] == log["batches"]


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_captured_steps_train_alike(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch)
    monkeypatch.setattr(F, "dropout", lambda x, *_: x)  # replays draw other numbers
    seen: list[Any] = []
    monkeypatch.setattr(
        minibatch_sage,
        "captured",
        lambda step, wanted: seen.append(capture(step)) or seen[-1] if wanted else step,
    )
    losses = []
    for words in ([], ["--capture"]):
        arguments = ["--fanouts", "3,2", "--batch-size", "32", "--conv", "fast"]
        losses.append(run_example(framework, *arguments, *words)[1][0].runs[0].loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert seen[0].captured.is_recorded


def test_as_many_layers_as_fanouts() -> None:
    log, _ = run_example("pyg", "--conv", "fast", "--fanouts", "3,2,2", "--epochs", "1")
    assert log["settings"]["recipe"]["layers"] == 3
    with pytest.raises(ExampleError, match="--fanouts 3,2: expected one number for each of --layers 3"):
        run_example("pyg", "--fanouts", "3,2", "--layers", "3")
