"""examples/graph_transformer.py end to end on tiny inputs, and its data and training for small graphs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import graph_transformer
import numpy as np
import pytest
import torch
from common import frameworks, graph_training, training
from common.data import planted_partition
from common.errors import ExampleError
from common.graph_data import GraphDataset, batches, find_graphs
from common.training import Recipe
from example_runs import need
from rich.console import Console

NAMES = {
    "pyg": ["PygGraphTransformerLayer", "GraphTransformerLayer"],
    "dgl": ["DglGraphTransformerLayer", "GraphTransformerLayer"],
}


def write_graphs(path: Path, num_graphs: int = 60, **changes: object) -> Path:
    """Small graphs whose class is the category that most nodes have; one has a single node and no edge."""
    generator = np.random.default_rng(0)
    sizes = generator.integers(3, 9, num_graphs)
    sizes[5] = 1
    ptr = np.concatenate([[0], sizes.cumsum()])
    y = generator.integers(0, 2, num_graphs)
    label = [np.where(generator.random(n) < 0.85, c, 1 - c) for n, c in zip(sizes, y, strict=True)]
    edges = [
        generator.integers(0, n, (2, 2 * n)) + start
        for n, start in zip(sizes, ptr[:-1], strict=True)
        if n > 1
    ]
    content = {
        "num_nodes": np.int64(ptr[-1]),
        "edge_index": np.concatenate(edges, 1).astype(np.int32),
        "graph_ptr": ptr,
        "graph_y": y,
        "x": np.stack([np.concatenate(label), generator.integers(0, 3, ptr[-1])], 1).astype(np.uint8),
        "graph_split": np.repeat([0, 1, 2], [num_graphs - 30, 15, 15]).astype(np.int8),
    }
    content.update(changes)
    np.savez(path, **{key: value for key, value in content.items() if value is not None})
    return path


def graphs(tmp_path: Path, **changes: object) -> GraphDataset:
    dataset = find_graphs(str(write_graphs(tmp_path / "tiny.npz", **changes)), tmp_path)
    assert dataset is not None
    return dataset


# ---------------------------------------------------------------- one graph


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_both_layers_train_alike(framework: str) -> None:
    """Without dropout: the layers drop different attention weights."""
    need(framework)
    recipe = Recipe(layers=2, hidden=8, heads=2, dropout=0.0, epochs=4, runs=1)
    graph = planted_partition(num_nodes=200, num_edges=2000, num_classes=3, num_features=6)
    results = training.compare(
        graph,
        graph.x,
        ["reference", "fast"],
        lambda conv: graph_transformer.make_model(framework, conv, 6, 3, recipe),
        lambda conv: frameworks.make_graph(framework, graph, conv, torch.device("cpu")),
        recipe,
        device=torch.device("cpu"),
        precision="fp32",
        seed=0,
    )
    assert [result.layer for result in results] == NAMES[framework]
    first, second = (torch.tensor(result.runs[0].loss) for result in results)
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_single_graph_through_the_command_line(framework: str) -> None:
    need(framework)
    out = io.StringIO()
    arguments = ["--framework", framework, "--dataset", "karate", "--device", "cpu"]
    _, results = graph_transformer.main(
        [*arguments, "--epochs", "40", "--runs", "1"], Console(file=out, width=160)
    )
    assert [result.layer for result in results] == NAMES[framework]
    for result in results:
        assert sum(result.runs[0].loss[-5:]) < 0.8 * sum(result.runs[0].loss[:5])


# ---------------------------------------------------------------- many small graphs


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_both_layers_classify_graphs_alike(framework: str, tmp_path: Path) -> None:
    need(framework)
    dataset = graphs(tmp_path)
    recipe = Recipe(layers=2, hidden=8, heads=2, dropout=0.0, epochs=3, runs=2, batch_size=8)
    results = graph_training.compare(
        dataset,
        ["reference", "fast"],
        lambda conv: graph_transformer.make_graph_model(framework, conv, dataset, recipe),
        lambda conv: lambda batch: frameworks.make_batch_graph(framework, batch, conv),
        recipe,
        device=torch.device("cpu"),
        precision="fp32",
        seed=0,
    )
    assert [result.layer for result in results] == NAMES[framework]
    for reference, fast in zip(results[0].runs, results[1].runs, strict=True):
        torch.testing.assert_close(
            torch.tensor(reference.loss), torch.tensor(fast.loss), rtol=1e-2, atol=1e-3
        )
        assert set(fast.scores) == {"accuracy", "roc_auc"}
    assert results[0].runs[0].loss != results[0].runs[1].loss


def test_graphs_through_the_command_line(tmp_path: Path) -> None:
    need("pyg")
    path, log_path = write_graphs(tmp_path / "tiny.npz"), tmp_path / "log.json"
    out = io.StringIO()
    arguments = ["--dataset", str(path), "--device", "cpu", "--epochs", "25", "--runs", "1", "--hidden", "16"]
    log, results = graph_transformer.main(
        [*arguments, "--heads", "2", "--json", str(log_path)], Console(file=out, width=160)
    )
    assert json.loads(log_path.read_text()) == json.loads(json.dumps(log))
    assert "60 graphs" in out.getvalue()
    assert "given split, 30/15/15 graphs" in out.getvalue()
    for result in results:
        assert result.runs[0].scores["roc_auc"] > 0.8  # the class of most nodes can be counted


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_graphs_under_autocast(precision: str, tmp_path: Path) -> None:
    need("pyg")
    path = write_graphs(tmp_path / "tiny.npz")
    arguments = ["--dataset", str(path), "--device", "cpu", "--epochs", "2", "--runs", "1"]
    _, results = graph_transformer.main(
        [*arguments, "--conv", "fast", "--precision", precision], Console(file=io.StringIO())
    )
    assert torch.tensor(results[0].runs[0].loss).isfinite().all()


def test_batches_are_the_chosen_graphs(tmp_path: Path) -> None:
    dataset = graphs(tmp_path)
    chosen = torch.tensor([7, 5, 0, 59])
    batch = dataset.batch(chosen)
    assert torch.equal(batch.y, dataset.y[chosen])
    start = 0
    for place, one in enumerate(chosen.tolist()):
        first, last = dataset.node_ptr[one], dataset.node_ptr[one + 1]
        size = int(last - first)
        assert batch.size[place] == size
        nodes = slice(start, start + size)
        assert (batch.graph_of_node[nodes] == place).all()
        assert torch.equal(batch.codes[nodes], dataset.codes[first:last])
        mine = (dataset.edge_index[1] >= first) & (dataset.edge_index[1] < last)
        of_batch = (batch.edge_index[1] >= start) & (batch.edge_index[1] < start + size)
        assert torch.equal(batch.edge_index[:, of_batch] - start, dataset.edge_index[:, mine] - first)
        start += size
    assert batch.edge_index.numel() == 0 or int(batch.edge_index.max()) < start


def test_shuffled_batches_hold_every_graph_once(tmp_path: Path) -> None:
    dataset = graphs(tmp_path)
    all_graphs = torch.arange(dataset.num_graphs)
    generator = torch.Generator().manual_seed(0)
    parts = list(batches(dataset, all_graphs, 16, generator=generator))
    assert [part.y.numel() for part in parts] == [16, 16, 16, 12]
    shuffled = torch.cat([part.size for part in parts])
    sizes = dataset.node_ptr.diff()
    assert not torch.equal(shuffled, sizes)
    assert torch.equal(shuffled.sort().values, sizes.sort().values)


def test_what_the_file_may_lack(tmp_path: Path) -> None:
    dataset = graphs(tmp_path, x=None, graph_split=None)
    assert dataset.codes.shape == (dataset.node_ptr[-1], 1)  # degrees
    first, second = dataset.split(0), dataset.split(1)
    assert not torch.equal(first.train, second.train)
    assert (first.train.int() + first.val.int() + first.test.int() == 1).all()
    label = np.arange(int(dataset.node_ptr[-1])) % 5
    assert graphs(tmp_path, x=None, node_label=label).code_sizes() == [5]
    with pytest.raises(ExampleError, match="graph_y"):
        find_graphs(str(write_graphs(tmp_path / "tiny.npz", graph_y=None)), tmp_path)
    (tmp_path / "broken.npz").write_bytes(b"nothing")
    with pytest.raises(ExampleError, match="could not be read"):
        find_graphs("broken", tmp_path)
    assert find_graphs("absent", tmp_path) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "3"], "expected a multiple of --heads 3"),
        (["--features", "degree"], "features of their own"),
        (["--json", "/no/such/folder/log.json"], "does not exist"),
        (["--device", "cuda:97"], "sees [0-9]+ CUDA devices"),
    ],
)
def test_what_the_user_can_mend(arguments: list[str], message: str, tmp_path: Path) -> None:
    need("pyg")
    path = write_graphs(tmp_path / "tiny.npz")
    with pytest.raises(ExampleError, match=message):
        graph_transformer.main(
            ["--dataset", str(path), "--epochs", "1", "--runs", "1", "--device", "cpu", *arguments],
            Console(file=io.StringIO()),
        )


def test_molhiv_file(data_folder: Path) -> None:
    dataset = find_graphs("molhiv", data_folder)
    assert dataset is not None
    assert dataset.num_graphs == 41127
    assert dataset.codes.size(1) == 9
    assert int(dataset.split(0).train.sum()) == 32901
    batch = dataset.batch(torch.tensor([41126, 3]))
    assert int(batch.edge_index.max()) < batch.graph_of_node.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_graphs_on_the_gpu(framework: str, tmp_path: Path) -> None:
    need(framework)
    path = write_graphs(tmp_path / "tiny.npz")
    conv = "both" if framework == "pyg" else "fast"
    arguments = ["--dataset", str(path), "--device", "cuda", "--epochs", "3", "--runs", "1", "--conv", conv]
    _, results = graph_transformer.main(["--framework", framework, *arguments], Console(file=io.StringIO()))
    assert all(result.runs[0].peak_bytes > 0 for result in results)
