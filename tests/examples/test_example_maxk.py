"""examples/maxk.py end to end on tiny inputs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import example_runs
import maxk
import pytest
import torch
from common.errors import ExampleError

NAMES = {
    ("pyg", "gcn"): ("FastGCNConv", "FastMaxKGCNConv"),
    ("pyg", "sage"): ("FastSAGEConv", "FastMaxKSAGEConv"),
    ("dgl", "gcn"): ("FastGraphConv", "FastMaxKGraphConv"),
    ("dgl", "sage"): ("FastSAGEConv", "FastMaxKSAGEConv"),
}


run = partial(example_runs.run, maxk)


@pytest.mark.parametrize(("framework", "operator"), [("pyg", "gcn"), ("dgl", "sage")])
@pytest.mark.parametrize("recompute", [False, True])
def test_relu_and_every_k_train(framework: str, operator: str, recompute: bool) -> None:
    arguments = ["--operator", operator, "--epochs", "3", "--runs", "2", "--k", "8", "32"]
    log, results, out = run(*arguments, *["--recompute"] * recompute, framework=framework)
    relu, sparse = NAMES[framework, operator]
    extra = ", recompute" if recompute else ""
    titles = [f"{sparse}, k = 8{extra}", f"{sparse}, k = 32{extra}"]
    assert [result.layer for result in results] == [f"{relu}, ReLU", *titles]
    assert len({tuple(result.runs[0].loss) for result in results}) == 3
    for text in ("test accuracy", "stored activations", "share of ReLU's", titles[1]):
        assert text in out
    stored = {name: sum(sizes) for name, sizes in log["stored_bytes"].items()}
    assert all(len(sizes) == 3 for sizes in log["stored_bytes"].values())
    # A kept entry takes 5 bytes, and on the CPU 4 more for the mask of the dropout; a dense row of sums 4 of
    # each of its 64 numbers.
    assert stored["8"] == 3 * 34 * (8 * 9 + (0 if recompute else 64 * 4))
    assert stored["8"] < stored["relu"] / (8 if recompute else 1)


def test_stored_bytes_at_the_papers_width() -> None:
    log, _, _ = run("--hidden", "256", "--epochs", "1", "--runs", "1", "--k", "32", "--recompute")
    for sparse, relu in zip(log["stored_bytes"]["32"], log["stored_bytes"]["relu"], strict=True):
        assert sparse <= relu / 4


def test_relu_can_be_left_out() -> None:
    log, results, _ = run("--epochs", "2", "--runs", "1", "--k", "64", "--no-relu")
    assert [result.conv for result in results] == ["64"]
    assert list(log["stored_bytes"]) == ["64"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_runs(precision: str) -> None:
    _, results, _ = run("--epochs", "2", "--runs", "1", "--no-relu", "--k", "16", "--precision", precision)
    assert torch.isfinite(torch.tensor(results[0].runs[0].loss)).all()


def test_json_and_plot_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "log.json", tmp_path / "curves.png"
    run("--epochs", "2", "--runs", "1", "--k", "8", "--json", str(path), "--plot", str(picture))
    stored = json.loads(path.read_text())
    assert list(stored["stored_bytes"]) == ["relu", "8"]
    assert stored["layers"][1]["speed_up"] > 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_bad_k(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExampleError, match="--k 65: the layers are only 64 wide"):
        run("--k", "65", "--epochs", "1", "--no-relu")
    with pytest.raises(SystemExit):
        run("--k", "0")
    assert "--k" in capsys.readouterr().err


def test_more_kept_entries_than_columns_are_refused_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maxk, "train_and_report", lambda *_, **__: pytest.fail("training began"))
    with pytest.raises(ExampleError, match="--k 64: the layers are only 32 wide"):
        run("--hidden", "32", "--k", "64")
    with pytest.raises(ExampleError, match="--k 65: the layers are only 64 wide"):
        run("--k", "65")


def test_default_numbers_of_kept_entries_follow_the_width() -> None:
    _, results, _ = run("--hidden", "16", "--epochs", "1", "--runs", "1")
    assert [result.conv for result in results] == ["relu", "8", "16"]
