"""examples/ogb_node.py and ogb_graph.py with OGB's real loaders and Evaluators, on files in OGB's layouts."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import ogb_files
import ogb_graph
import ogb_node
import pytest
import torch
import torch.nn.functional as F
from common import frameworks, long_run, node_models, ogb_data, ogb_tasks, sampling
from common.errors import ExampleError
from common.training import LayerResult
from example_runs import need
from rich.console import Console
from simulated_graphs import simulate

from fastsparse_core import capture

if importlib.util.find_spec("ogb") is None:  # not importorskip: importing ogb asks the network
    pytest.skip("needs ogb", allow_module_level=True)

FRAMEWORKS = ("pyg", "dgl")
LEADERBOARD = Path(__file__).with_name("leaderboard_gcn.py")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No network and no questions; one thread, for these graphs are tiny."""

    connect = socket.socket.connect

    def local(self: socket.socket, address: object) -> None:
        assert self.family == socket.AF_UNIX, f"something went to the network: {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("ogb asked a question"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All datasets, as unpacked archives."""
    root = tmp_path_factory.mktemp("archives")
    for write in ogb_files.WRITERS.values():
        write(root)
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """The same, for one test."""
    return shutil.copytree(written, tmp_path / "data")


def node(root: Path, *arguments: str) -> tuple[dict, LayerResult]:
    small = ["--root", str(root), "--hidden", "16", "--layers", "2", "--device", "cpu", "--batch-size", "20"]
    fan = ["--fanouts", "5,5"]
    log, (result,) = ogb_node.main([*small, *fan, *arguments], Console(file=io.StringIO()))
    return log, result


def graph(root: Path, *arguments: str) -> tuple[dict, LayerResult]:
    small = ["--root", str(root), "--hidden", "16", "--layers", "2", "--device", "cpu", "--batch-size", "10"]
    log, (result,) = ogb_graph.main([*small, *arguments], Console(file=io.StringIO()))
    return log, result


# ---------------------------------------------------------------- loaders


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", [name for name in ogb_files.WRITERS if name.startswith("ogbn")])
def test_node_datasets_load_twice(root: Path, name: str, framework: str) -> None:
    """The second time, loaders read what they saved the first time."""
    need(framework)
    first, second = (ogb_tasks.load_nodes(name, root, framework, download=False) for _ in range(2))
    for part in ("edge_index", "x", "y"):
        assert torch.equal(getattr(first, part), getattr(second, part))
    raw = root / name.replace("-", "_") / "raw"
    if name == "ogbn-papers100M":
        edges = np.load(raw / "data.npz")["edge_index"]
        label = np.load(raw / "node-label.npz")["node_label"]
    else:
        edges = np.loadtxt(raw / "edge.csv.gz", dtype=int, delimiter=",").T
        label = np.loadtxt(raw / "node-label.csv.gz", delimiter=",", ndmin=2)
    want = {(int(a), int(b)) for a, b in edges.T if a != b}
    want |= {(b, a) for a, b in want}
    assert set(map(tuple, first.edge_index.t().tolist())) == want
    assert torch.equal(first.y, torch.from_numpy(np.nan_to_num(label, nan=-1)).long().reshape(first.y.shape))
    assert first.num_nodes == len(label)
    assert first.x.dtype == torch.float32
    assert first.num_outputs == ogb_files.CLASSES.get(name, 112)
    for ids in first.split.values():
        assert (first.y[ids] >= 0).all()


def test_proteins_get_the_means_of_their_edges(root: Path) -> None:
    need("pyg")
    data = ogb_tasks.load_nodes("ogbn-proteins", root, "pyg", download=False)
    raw = root / "ogbn_proteins" / "raw"
    edges = np.loadtxt(raw / "edge.csv.gz", dtype=int, delimiter=",")
    feat = np.loadtxt(raw / "edge-feat.csv.gz", delimiter=",")
    total, count = np.zeros((data.num_nodes, 8)), np.zeros(data.num_nodes)
    for (a, b), row in zip(edges, feat, strict=True):
        for one in (a, b):
            total[one] += row
            count[one] += 1
    mean = total / np.maximum(count, 1)[:, None]
    torch.testing.assert_close(data.x, torch.from_numpy(mean).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_molecules_load_twice(root: Path, framework: str) -> None:
    need(framework)
    first, second = (ogb_tasks.load_graphs("ogbg-molhiv", root, framework, download=False) for _ in range(2))
    data = first.dataset
    assert torch.equal(data.edge_index, second.dataset.edge_index)
    raw = root / "ogbg_molhiv" / "raw"
    assert data.y.tolist() == np.loadtxt(raw / "graph-label.csv.gz", dtype=int).tolist()
    assert data.node_ptr.diff().tolist() == np.loadtxt(raw / "num-node-list.csv.gz", dtype=int).tolist()
    assert torch.equal(
        data.codes, torch.from_numpy(np.loadtxt(raw / "node-feat.csv.gz", dtype=int, delimiter=","))
    )
    # Rings: every atom of a molecule with three atoms or more has two neighbours.
    batch = data.batch(torch.tensor([3, 5, 59]))
    degree = torch.bincount(batch.edge_index[1], minlength=batch.graph_of_node.numel())
    assert degree.tolist() == [0 if size == 1 else 2 for size in batch.size for _ in range(size)]
    split = data.split(0)
    assert [int(mask.sum()) for mask in (split.train, split.val, split.test)] == [30, 15, 15]
    assert first.code_sizes[0] == 119


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_folder_made_for_the_framework_goes_first(root: Path, framework: str) -> None:
    need(framework)
    (root / "ogbn_arxiv").rename(root / f"ogbn_arxiv_{framework}")
    assert ogb_tasks.load_nodes("ogbn-arxiv", root, framework, download=False).num_nodes == 120


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", list(ogb_files.WRITERS))
def test_nothing_is_fetched_unasked(tmp_path: Path, name: str, framework: str) -> None:
    need(framework)
    with pytest.raises(ExampleError, match="--download") as refusal:
        ogb_data.open_dataset(name, tmp_path, framework, download=False)
    text = str(refusal.value)
    assert re.search(r"Download http://\S+\.zip, unpack it and rename its folder", text)
    assert str(tmp_path / name.replace("-", "_")) in text
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_missing_is_named(root: Path) -> None:
    need("pyg")
    (root / "ogbn_arxiv" / "split" / "time" / "valid.csv.gz").unlink()
    with pytest.raises(ExampleError, match=r"split/time/valid\.csv\.gz does not exist"):
        node(root, "--epochs", "1")


def test_a_folder_without_its_release_file_does_not_prompt(root: Path) -> None:
    need("pyg")
    (root / "ogbg_molhiv" / "RELEASE_v1.txt").unlink()
    with pytest.raises(ExampleError, match=r"RELEASE_v1\.txt"):
        graph(root, "--epochs", "1")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_download_that_was_asked_for(
    written: Path, tmp_path: Path, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OGB's own fetching and unpacking, with a local archive for the network; no question about sizes."""
    need(framework)
    source = tmp_path / "source"
    shutil.copytree(written / "ogbn_products", source / "products")
    archive = Path(shutil.make_archive(str(tmp_path / "products"), "zip", source, "products"))
    module = ogb_data.import_ogb(f"ogb.nodeproppred.dataset_{framework}")
    fetched = []

    def fetch(url: str, folder: str) -> str:
        fetched.append(url)
        return shutil.copy(archive, folder)

    monkeypatch.setattr(module, "download_url", fetch)
    data_root = tmp_path / "data"
    (data_root / "ogbn_products" / "raw").mkdir(parents=True)  # as an interrupted download leaves it
    for _ in range(2):
        data = ogb_tasks.load_nodes("ogbn-products", data_root, framework, download=True)
        assert data.num_nodes == 120
    assert len(fetched) == 1


def test_versions_are_not_looked_up() -> None:
    """In a separate process, because ogb checks its version only at its first import, which may be by DGL."""
    program = (
        "import sys; from common import ogb_data\n"
        "assert ogb_data.import_ogb('ogb.version').check_outdated is None\n"
        "assert 'outdated' not in sys.modules"
    )
    path = os.pathsep.join([str(Path(ogb_node.__file__).parent), *sys.path])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_all_neighbours_give_the_whole_graphs_results(root: Path, framework: str) -> None:
    """A batch with all neighbours of as many hops as there are layers computes what the whole graph does."""
    need(framework)
    data = ogb_tasks.load_nodes("ogbn-arxiv", root, framework, download=False)
    choice = ["--framework", framework, "--model", "sage", "--hidden", "8"]
    options, recipe = ogb_node.parse([*choice, "--layers", "2", "--fanouts", "1,1"])
    model, _ = node_models.MODELS["sage"].make(options, data, recipe)
    model.eval()
    cpu = torch.device("cpu")
    graph = frameworks.make_graph(framework, data, "fast", cpu, self_loops=False)
    expected = model([graph] * 2, data.x)
    drawn = sampling.Sampling(framework, data, "fast", cpu, self_loops=False)
    (batch,) = drawn.batches([sampling.ALL] * 2, torch.arange(7, 30), 50)
    found = model(batch.graphs, data.x[batch.nodes])[:23]
    torch.testing.assert_close(found, expected[7:30], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("model", ["sage", "maxk-sage", "gat", "gt"])
def test_layerwise_inference_equals_the_whole_graphs(root: Path, framework: str, model: str) -> None:
    need(framework)
    data = ogb_tasks.load_nodes("ogbn-products", root, framework, download=False)
    common = [
        "--framework",
        framework,
        "--model",
        model,
        "--hidden",
        "8",
        "--layers",
        "2",
        "--fanouts",
        "3,3",
    ]
    tasks = []
    for inference in ("full", "layerwise"):
        choice = ["--dataset", "ogbn-products", "--batching", "neighbor", "--batch-size", "50"]
        options, recipe = ogb_node.parse([*common, *choice, "--inference", inference])
        torch.manual_seed(0)
        task = ogb_node.NodeTask(options, data, recipe, torch.device("cpu"))
        task.training(0)
        task.model.eval()
        tasks.append(task)
    tasks[1].model.load_state_dict(tasks[0].model.state_dict())
    with torch.no_grad():
        expected = tasks[0].model(tasks[0].graphs, tasks[0].x)
        torch.testing.assert_close(tasks[1].layerwise_logits(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_batches_repeat_with_the_seed_and_differ_between_epochs(root: Path, framework: str) -> None:
    need(framework)
    data = ogb_tasks.load_nodes("ogbn-arxiv", root, framework, download=False)
    drawn = sampling.Sampling(framework, data, "fast", torch.device("cpu"), self_loops=True)
    for workers in (0, 2):
        loader = drawn.batches([3, 2], data.split["train"], 16, shuffle=True, workers=workers)
        epochs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            epochs.append([batch.nodes.clone() for batch in loader])
            assert len(epochs[-1]) == len(loader) == 4
        assert all(torch.equal(a, b) for a, b in zip(epochs[0], epochs[1], strict=True))
        assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[2]))


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("batching", ["full", "neighbor"])
@pytest.mark.parametrize("model", list(node_models.MODELS))
def test_drop_ins_train_like_the_originals(root: Path, framework: str, batching: str, model: str) -> None:
    """Same seeds, no dropout (the transformer's layers draw other masks): the same losses and scores."""
    need(framework)
    results = []
    for conv in ("fast", "reference"):
        arguments = ["--framework", framework, "--batching", batching, "--model", model, "--conv", conv]
        results.append(node(root, "--dataset", "ogbn-arxiv", *arguments, "--epochs", "3")[1])
    fast, reference = (result.runs[0] for result in results)
    assert results[0].layer != results[1].layer
    if model != "gt":
        # Batch norms amplify rounding.
        torch.testing.assert_close(
            torch.tensor(fast.loss), torch.tensor(reference.loss), rtol=5e-3, atol=1e-3
        )
    assert fast.loss[-1] < fast.loss[0]
    assert set(fast.scores) == {"accuracy"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ["ogbn-arxiv", "ogbn-products", "ogbn-proteins", "ogbn-papers100M"])
def test_node_training_learns(root: Path, framework: str, name: str) -> None:
    """From files to OGB's scores: communities and edges' features tell the classes."""
    need(framework)
    epochs = "30" if name == "ogbn-papers100M" else "60"
    arguments = ["--dataset", name, "--framework", framework, "--epochs", epochs, "--eval-every", "30"]
    log, result = node(root, *arguments, "--model", "sage", "--lr", "0.02")
    (run,) = result.runs
    (score,) = run.scores.values()
    assert score > 0.6
    parts = zip(run.waiting_ms, run.gather_ms, run.step_ms, strict=True)
    assert all(0 < waiting + gather < step for waiting, gather, step in parts)
    assert set(log["layers"][0]["scores"]) == {"roc_auc" if name == "ogbn-proteins" else "accuracy"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("model", list(ogb_graph.MODELS))
def test_graph_training_learns(root: Path, framework: str, model: str) -> None:
    need(framework)
    arguments = ["--framework", framework, "--model", model, "--epochs", "15", "--lr", "0.01"]
    _, result = graph(root, *arguments, "--heads", "2")
    assert result.runs[0].scores["roc_auc"] > 0.75
    assert result.runs[0].loss[-1] < 0.8 * result.runs[0].loss[0]


@pytest.mark.parametrize("main", [node, graph])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_under_autocast(root: Path, tmp_path: Path, main, precision: str) -> None:
    """Resumed once, so that the gradient scaler's state is kept too."""
    need("pyg")
    keep = ["--checkpoint", str(tmp_path / "model.pt"), "--resume", "--precision", precision]
    _, result = main(root, *keep, "--epochs", "2")
    _, result = main(root, *keep, "--epochs", "8")
    assert len(result.runs[0].loss) == 8
    assert result.runs[0].loss[-1] < result.runs[0].loss[0]
    assert bool(torch.load(tmp_path / "model.pt")["tensors"]["scaler"]) == (precision == "fp16")


@pytest.mark.parametrize(
    "choice",
    [
        (node, "--model", "gat", "--epochs", "25"),
        (node, "--model", "sage", "--batching", "neighbor", "--batch-size", "16", "--epochs", "4"),
        (graph, "--model", "gin", "--batch-size", "8", "--epochs", "6"),
    ],
    ids=["full", "neighbor", "graphs"],
)
def test_captured_steps_train_alike(root: Path, choice: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    need("pyg")
    simulate(monkeypatch)
    monkeypatch.setattr(F, "dropout", lambda x, *_: x)  # replays draw other numbers
    main, *arguments = choice
    seen: list = []
    monkeypatch.setattr(
        long_run, "captured", lambda step, wanted: seen.append(capture(step)) or seen[-1] if wanted else step
    )
    losses = [main(root, *arguments, *words)[1].runs[0].loss for words in ([], ["--capture"])]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert seen[0].captured.is_recorded


@pytest.mark.parametrize("model", ["sage", "gat"])
def test_blocks_that_stand_in_for_dgls(root: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with pip's DGL: the device's name is not the batch's, so batches are moved."""
    need("dgl")
    arguments = ["--framework", "dgl", "--batching", "neighbor", "--model", model, "--epochs", "2"]
    graphs_on = sampling.MiniBatch.graphs_on
    monkeypatch.setattr(
        sampling.MiniBatch, "graphs_on", lambda batch, conv, _: graphs_on(batch, conv, torch.device("cpu:0"))
    )
    losses = []
    for holds in (True, False):
        sampler = importlib.import_module("fastsparse_dgl.dataloading.neighbor_sampler")
        monkeypatch.setattr(sampler, "dgl_can_hold", lambda device, holds=holds: holds)
        _, result = node(root, *arguments, "--inference", "sampled")
        losses.append(result.runs[0].loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("batching", ["full", "neighbor"])
@pytest.mark.parametrize("model", list(node_models.MODELS))
def test_nodes_on_the_gpu(root: Path, framework: str, batching: str, model: str) -> None:
    need(framework)
    arguments = ["--framework", framework, "--batching", batching, "--model", model, "--epochs", "4"]
    _, result = node(root, *arguments, "--device", "cuda", "--deterministic")
    assert result.runs[0].loss[-1] < result.runs[0].loss[0]
    assert result.runs[0].peak_bytes > 0


@pytest.mark.gpu
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_graphs_on_the_gpu(root: Path, framework: str) -> None:
    need(framework)
    for model in ogb_graph.MODELS:
        arguments = ["--framework", framework, "--model", model, "--epochs", "4", "--device", "cuda"]
        _, result = graph(root, *arguments, "--heads", "2")
        assert torch.tensor(result.runs[0].loss).isfinite().all()


def test_what_is_left_behind(root: Path, tmp_path: Path) -> None:
    need("pyg")
    paths = {kind: tmp_path / f"log.{kind}" for kind in ("csv", "json", "png")}
    arguments = ["--csv", str(paths["csv"]), "--json", str(paths["json"]), "--plot", str(paths["png"])]
    log, result = node(root, *arguments, "--epochs", "5", "--runs", "2", "--eval-every", "2")
    rows = list(csv.DictReader(paths["csv"].open()))
    assert [(row["run"], row["epoch"]) for row in rows] == [(r, e) for r in "12" for e in "12345"]
    assert [bool(row["val"]) for row in rows] == [False, True, False, True, True] * 2
    assert [float(row["loss"]) for row in rows] == result.runs[0].loss + result.runs[1].loss
    stored = json.loads(paths["json"].read_text())
    assert stored["settings"]["recipe"]["epochs"] == 5
    assert stored["layers"][0]["runs"][1]["val"][0] is None
    assert stored["layers"][0]["runs"][1]["loss"] == log["layers"][0]["runs"][1]["loss"]
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    best = stored["layers"][0]["runs"][0]
    known = [score for score in best["val"] if score is not None]
    assert best["val"][best["best_epoch"]] == max(known)
    assert best["scores"]["accuracy"] == best["test"][best["best_epoch"]]


class Stopped(Exception):
    """Simulates a machine that disappears."""


def stop_after(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the training inside the epoch after so many."""
    original, calls = long_run.train_epoch, []

    def counted(*arguments: object) -> float:
        calls.append(1)
        loss = original(*arguments)
        if len(calls) > epochs:
            raise Stopped
        return loss

    monkeypatch.setattr(long_run, "train_epoch", counted)


RUNS = [
    (node, ("--model", "gat", "--batching", "full", "--framework", "pyg")),
    (node, ("--model", "gcn", "--batching", "neighbor", "--framework", "dgl")),
    (graph, ("--framework", "pyg")),
]


@pytest.mark.parametrize(
    ("main", "arguments"),
    RUNS,
    ids=lambda value: "-".join(value[1::2]) if isinstance(value, tuple) else value.__name__,
)
def test_resuming_gives_the_same_bits(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main, arguments: tuple[str, ...]
) -> None:
    """Two runs of four epochs; stopped in the second run, between two checkpoints."""
    need(arguments[-1])
    always = [*arguments, "--deterministic", "--epochs", "4", "--runs", "2"]
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    _, expected = main(root, *always, "--checkpoint", str(whole))
    assert not torch.are_deterministic_algorithms_enabled()
    keep = ["--checkpoint", str(parts), "--checkpoint-every", "2", "--csv", str(tmp_path / "log.csv")]
    with monkeypatch.context() as patch:
        stop_after(7, patch)
        with pytest.raises(Stopped):
            main(root, *always, *keep)
    assert len(torch.load(parts)["current"]["loss"]) == 2
    _, found = main(root, *always, *keep, "--resume")
    for one, other in zip(expected.runs, found.runs, strict=True):
        assert one.loss == other.loss
        assert (one.val, one.test, one.best_epoch) == (other.val, other.test, other.best_epoch)
    assert expected.runs[0].loss != expected.runs[1].loss
    tensors, others = (torch.load(path)["tensors"] for path in (whole, parts))
    assert all(torch.equal(tensors["model"][key], others["model"][key]) for key in others["model"])
    for key, entry in tensors["optimiser"]["state"].items():
        assert all(
            torch.equal(value, others["optimiser"]["state"][key][name]) for name, value in entry.items()
        )
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [float(row["loss"]) for row in rows] == [loss for run in expected.runs for loss in run.loss]


def test_a_finished_training_resumes_to_its_result_and_goes_on_if_asked(root: Path, tmp_path: Path) -> None:
    need("pyg")
    keep = ["--checkpoint", str(tmp_path / "model.pt"), "--resume"]
    _, first = node(root, *keep, "--epochs", "3")
    _, again = node(root, *keep, "--epochs", "3")
    assert again.runs[0].loss == first.runs[0].loss
    _, longer = node(root, *keep, "--epochs", "5")
    assert longer.runs[0].loss[:3] == first.runs[0].loss
    assert len(longer.runs[0].loss) == 5


def test_checkpoints_are_neither_overwritten_nor_mixed_up(root: Path, tmp_path: Path) -> None:
    need("pyg")
    path = tmp_path / "model.pt"
    keep = ["--checkpoint", str(path), "--epochs", "1"]
    node(root, *keep)
    with pytest.raises(ExampleError, match="add --resume"):
        node(root, *keep)
    with pytest.raises(ExampleError, match=r"hidden 16 \(now 8\), seed 0 \(now 3\)"):
        node(root, *keep, "--resume", "--hidden", "8", "--seed", "3")
    path.write_text("notes of somebody's, not a model\n")
    with pytest.raises(ExampleError, match="is not a checkpoint that --checkpoint wrote"):
        node(root, *keep, "--resume")
    with pytest.raises(ExampleError, match="name the file to continue from with --checkpoint"):
        node(root, "--resume")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "ogbn-papers100M", "--batching", "full"], "too large to train on as a whole"),
        (["--inference", "layerwise"], "expected full with --batching full"),
        (["--batching", "neighbor", "--inference", "layerwise"], "needs the degrees in the whole graph"),
        (["--batching", "neighbor", "--fanouts", "5"], "one number for each of --layers 2"),
        (["--model", "gat", "--heads", "3"], "expected a multiple of --heads 3"),
        (["--csv", "/no/such/folder/log.csv"], "--csv .* does not exist"),
        (["--device", "cuda:97"], "sees [0-9]+ CUDA devices"),
        (["--model", "sage", "--lr", "1e30"], "the loss became (nan|inf)"),
    ],
)
def test_what_the_user_can_mend(root: Path, arguments: list[str], message: str) -> None:
    need("pyg")
    with pytest.raises(ExampleError, match=message):
        node(root, "--epochs", "2", *arguments)


# ---------------------------------------------------------------- a leaderboard script


def run_script(source: str, arguments: list[str], capsys: pytest.CaptureFixture) -> np.ndarray:
    """Runs a script's text as ``__main__``; returns the losses it printed."""
    before = sys.argv
    sys.argv = ["leaderboard_gcn.py", *arguments]
    try:
        # What ogb 1.3.6 needs on this PyTorch, whatever layers the script uses.
        with ogb_data.allowed_classes("pyg"):
            exec(compile(source, str(LEADERBOARD), "exec"), {"__name__": "__main__"})
    finally:
        sys.argv = before
    out = capsys.readouterr().out
    return np.array([float(loss) for loss in re.findall(r"Loss: ([0-9.]+)", out)])


@pytest.mark.parametrize("option", [[], ["--use_sage"]], ids=["gcn", "sage"])
def test_a_leaderboard_script_runs_with_only_its_import_changed(
    root: Path, option: list[str], capsys: pytest.CaptureFixture
) -> None:
    fastsparse_pyg = pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    source = LEADERBOARD.read_text()
    line = "from torch_geometric.nn import GCNConv, SAGEConv"
    ours = "from fastsparse_pyg import FastGCNConv as GCNConv, FastSAGEConv as SAGEConv"
    changed = source.replace(line, ours)
    assert sum(a != b for a, b in zip(source.splitlines(), changed.splitlines(), strict=True)) == 1
    arguments = ["--root", str(root), "--epochs", "20", "--runs", "1", "--hidden_channels", "16", *option]
    arguments += ["--dropout", "0"]
    expected = run_script(source, arguments, capsys)
    before = fastsparse_pyg.cache_info()
    found = run_script(changed, arguments, capsys)
    assert fastsparse_pyg.cache_info().misses > before.misses  # it did run on our layers
    assert len(found) == 20
    assert found[-1] < 0.7 * found[0]
    np.testing.assert_allclose(found, expected, rtol=2e-2)
