"""examples/molecules.py end to end on tiny inputs, and its data."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import molecules
import ogb_files
import pytest
import torch
import torch.nn.functional as F
from common import cli, graph_training
from common.errors import ExampleError
from common.graph_data import GraphDataset
from common.molecules import drawn_molecules, read_ogb_molecules
from example_runs import need
from rich.console import Console
from simulated_graphs import simulate

from fastsparse_core import capture

TINY = ["--hidden", "8", "--heads", "2", "--layers", "1", "--epochs", "2", "--runs", "1", "--device", "cpu"]


def run(*arguments: str) -> tuple[dict, list, str]:
    page = io.StringIO()
    log, results = molecules.main(["--molecules", "60", *TINY, *arguments], Console(file=page, width=200))
    return log, results, page.getvalue()


def bond_codes(dataset: GraphDataset) -> dict[tuple[int, int], list[int]]:
    assert dataset.edge_codes is not None
    pairs = zip(*dataset.edge_index.tolist(), strict=True)
    return dict(zip(pairs, dataset.edge_codes.tolist(), strict=True))


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
@pytest.mark.parametrize("model", ["pna", "gps", "gine"])
def test_both_layers_train_alike(model: str, framework: str, tmp_path: Path) -> None:
    """From the same weights and batches."""
    need(framework)
    files = ["--json", str(tmp_path / "log.json"), "--plot", str(tmp_path / "curves.png")]
    _, results, page = run("--framework", framework, "--model", model, *files)
    (original,), (fast,) = (result.runs for result in results)
    assert fast.loss == pytest.approx(original.loss, rel=2e-3)
    assert results[1].layer.startswith("Fast")
    assert all(result.layer in page for result in results)
    assert json.loads((tmp_path / "log.json").read_text())["data"]["name"] == "molecules"
    assert (tmp_path / "curves.png").stat().st_size > 0


@pytest.mark.parametrize("model", ["gine", "gps"])
def test_captured_steps_train_alike(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need("pyg")
    simulate(monkeypatch)
    monkeypatch.setattr(F, "dropout", lambda x, *_: x)  # replays draw other numbers
    seen: list[Any] = []
    monkeypatch.setattr(cli, "captured", lambda step, _: seen.append(capture(step)) or seen[-1])
    monkeypatch.setattr(graph_training, "EVALUATED_AT_ONCE", 2)
    runs = []
    for words in ([], ["--capture"]):
        arguments = ["--model", model, "--conv", "fast", "--batch-size", "8", "--epochs", "6"]
        runs.append(run(*arguments, *words)[1][0].runs[0])
    assert runs[1].loss == pytest.approx(runs[0].loss, rel=1e-2)
    assert runs[1].val == pytest.approx(runs[0].val)
    assert [step.captured.status for step in seen] == ["replaying"] * 3  # validation, test, training
    with pytest.raises(ExampleError, match="--capture: expected --framework pyg"):
        run("--framework", "dgl", "--capture")


def test_drawn_molecules_are_connected_and_both_directions_share_a_bond() -> None:
    dataset = drawn_molecules(50, seed=3)
    codes = bond_codes(dataset)
    assert len(codes) == dataset.edge_index.size(1)
    assert all(codes[end, start] == kind for (start, end), kind in codes.items())
    graph_of_node = torch.repeat_interleave(dataset.node_ptr.diff())
    assert torch.equal(graph_of_node[dataset.edge_index[0]], graph_of_node[dataset.edge_index[1]])
    assert dataset.edge_ptr.diff().ge(2 * (dataset.node_ptr.diff() - 1)).all()
    batch = dataset.batch(torch.tensor([7, 2]))
    assert batch.edge_codes is not None
    first = dataset.edge_ptr[7]
    assert torch.equal(batch.edge_codes[0], dataset.edge_codes[first])
    assert torch.equal(drawn_molecules(50, seed=3).y, dataset.y)
    assert 0.2 < dataset.y.double().mean() < 0.8


def test_the_class_is_the_number_of_double_bonds_between_two_kinds() -> None:
    dataset = drawn_molecules(40)
    counts = [0] * 40
    graph_of_node = torch.repeat_interleave(dataset.node_ptr.diff()).tolist()
    kinds = dataset.codes.flatten().tolist()
    for (start, end), (bond,) in bond_codes(dataset).items():
        counts[graph_of_node[start]] += bond == 1 and {kinds[start], kinds[end]} == {0, 1} and start < end
    counted = torch.tensor(counts)
    assert torch.equal(dataset.y.bool(), counted > counted.double().quantile(0.5))


def test_ogbs_raw_files_without_ogb(tmp_path: Path) -> None:
    ogb_files.write_molecules(tmp_path)
    dataset = read_ogb_molecules("ogbg-molhiv", tmp_path)
    assert dataset.num_graphs == 60
    assert dataset.given_split is not None
    assert [int(mask.sum()) for mask in (dataset.given_split.train, dataset.given_split.val)] == [30, 15]
    codes = bond_codes(dataset)
    assert all(codes[end, start] == kind for (start, end), kind in codes.items())
    need("pyg")
    log, _, _ = run("--dataset", "ogbg-molhiv", "--root", str(tmp_path), "--model", "pna", "--conv", "fast")
    assert log["data"]["graphs"] == 60


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ExampleError, match="raw files"):
        read_ogb_molecules("ogbg-molhiv", tmp_path)
    folder = ogb_files.write_molecules(tmp_path)
    (folder / "raw" / "edge-feat.csv.gz").unlink()
    with pytest.raises(ExampleError, match=r"edge-feat\.csv\.gz"):
        read_ogb_molecules("ogbg-molhiv", tmp_path)


def test_heads_that_do_not_fit_are_named() -> None:
    need("pyg")
    with pytest.raises(ExampleError, match="multiple of --heads"):
        run("--model", "gps", "--heads", "3")
