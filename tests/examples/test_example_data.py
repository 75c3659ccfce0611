"""Datasets of the examples: the planted graph, .npz files, the frameworks' loaders, splits and features."""

from __future__ import annotations

import gzip
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import data, framework_data
from common.errors import ExampleError


def small_planted(seed: int = 0) -> data.NodeDataset:
    return data.planted_partition(seed, num_nodes=300, num_edges=4000, num_classes=3, num_features=8)


def write_npz(path: Path, **content: Any) -> Path:
    base: dict[str, Any] = {
        "num_nodes": np.int64(5),
        "name": "tiny",
        "storage": "once",
        "edge_index": np.array([[0, 1, 2, 2, 3, 3], [1, 2, 2, 1, 4, 4]], dtype=np.int32),
        "y": np.array([0, 1, 1, -1, 0]),
    }
    merged = {**base, **content}
    np.savez(path, **{key: value for key, value in merged.items() if value is not None})
    return path


def test_planted_graph_is_undirected_simple_and_drawn_from_its_seed() -> None:
    graph = small_planted()
    source, target = graph.edge_index
    key = set(zip(source.tolist(), target.tolist(), strict=True))
    assert len(key) == graph.num_edges
    assert key == {(b, a) for a, b in key}
    assert all(a != b for a, b in key)
    again, other = small_planted(), small_planted(1)
    assert torch.equal(graph.edge_index, again.edge_index)
    assert torch.equal(graph.x, again.x)
    assert not torch.equal(graph.y, other.y)


def test_planted_graph_has_the_promised_size_and_communities() -> None:
    graph = data.planted_partition()
    assert graph.num_nodes == 20_000
    assert abs(graph.num_edges - 400_000) < 4_000
    assert torch.bincount(graph.y).tolist() == [2_000] * 10
    source, target = graph.edge_index
    inside = (graph.y[source] == graph.y[target]).float().mean().item()
    assert inside == pytest.approx(0.3 + 0.7 / 10, abs=0.01)


def test_random_splits_cover_labelled_nodes_once_and_follow_the_seed() -> None:
    graph = small_planted()
    y = graph.y.clone()
    y[:50] = -1
    split = data.random_split(y, (0.6, 0.2), seed=3)
    total = split.train.int() + split.val.int() + split.test.int()
    assert torch.equal(total, (y >= 0).int())
    assert [int(mask.sum()) for mask in (split.train, split.val, split.test)] == [150, 50, 50]
    assert torch.equal(split.train, data.random_split(y, (0.6, 0.2), seed=3).train)
    assert not torch.equal(split.train, data.random_split(y, (0.6, 0.2), seed=4).train)
    assert not torch.equal(graph.split(0, 0).train, graph.split(1, 0).train)
    assert "seed 0" in graph.split_description(0)


@pytest.mark.parametrize(("storage", "noted"), [("once", False), ("both", False), ("directed", True)])
def test_npz_edges_become_undirected_without_loops_or_duplicates(
    tmp_path: Path, storage: str, noted: bool
) -> None:
    graph = data.load_npz(write_npz(tmp_path / "tiny.npz", storage=storage))
    pairs = sorted(map(tuple, graph.edge_index.t().tolist()))
    assert pairs == [(0, 1), (1, 0), (1, 2), (2, 1), (3, 4), (4, 3)]
    assert graph.name == "tiny"
    assert graph.num_classes == 2
    assert graph.x is None
    assert any("directed" in note for note in graph.notes) == noted


def test_npz_with_row_pointers_equals_npz_with_edges(tmp_path: Path) -> None:
    edges = data.load_npz(write_npz(tmp_path / "a.npz"))
    rows = write_npz(
        tmp_path / "b.npz",
        edge_index=None,
        rowptr=np.array([0, 1, 2, 4, 6, 6]),
        col=np.array([1, 2, 2, 1, 4, 4], dtype=np.int32),
    )
    assert torch.equal(edges.edge_index, data.load_npz(rows).edge_index)


def test_npz_features_dense_and_sparse_are_the_same(tmp_path: Path) -> None:
    x = np.array([[1, 0, 2], [0, 0, 0], [0, 3, 0], [4, 0, 0], [0, 5, 6]], dtype=np.uint8)
    dense = data.load_npz(write_npz(tmp_path / "dense.npz", x=x))
    row, column = np.nonzero(x)
    sparse = data.load_npz(
        write_npz(
            tmp_path / "sparse.npz",
            x_indptr=np.concatenate([[0], np.cumsum(np.bincount(row, minlength=5))]),
            x_indices=column.astype(np.uint16),
            x_data=x[row, column],
            x_shape=np.array([5, 3]),
        )
    )
    assert dense.x.dtype == torch.float32
    assert torch.equal(dense.x, torch.from_numpy(x).float())
    assert torch.equal(dense.x, sparse.x)


@pytest.mark.parametrize("splits", [1, 3])
def test_npz_splits_are_kept_and_unlabelled_nodes_left_out(tmp_path: Path, splits: int) -> None:
    train = np.zeros((5, splits), dtype=bool)
    train[:2] = True
    val, test = np.roll(train, 2, axis=0), np.zeros_like(train)
    test[4] = True
    masks = {"train_mask": train, "val_mask": val, "test_mask": test}
    if splits == 1:
        masks = {key: mask[:, 0] for key, mask in masks.items()}
    graph = data.load_npz(write_npz(tmp_path / "tiny.npz", **masks))
    assert len(graph.given_splits) == splits
    assert graph.split(splits, 0) is graph.given_splits[0]
    assert graph.split(0, 0).val.tolist() == [False, False, True, False, False]
    assert ("public split, 2/1/1" if splits == 1 else "3 given splits") in graph.split_description(0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"y": None}, "has no y: this example trains on node labels"),
        ({"edge_index": None}, r"has no edge_index \(or rowptr and col\)"),
        ({"edge_index": np.array([[0], [5]])}, "has edges between nodes 0 to 5, but only 5 nodes"),
        ({"edge_index": np.array([[0], [-1]])}, "has edges between nodes -1 to 0"),
        ({"x": np.ones((4, 2))}, "has 4 rows of features for 5 nodes"),
        ({"y": np.zeros((5, 2))}, r"labels of shape \(5, 2\)"),
        ({"y": np.zeros(5)}, "has 1 classes"),
    ],
)
def test_npz_that_cannot_be_trained_on_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ExampleError, match=message):
        data.load_npz(write_npz(tmp_path / "tiny.npz", **content))


def test_file_that_is_no_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.npz"
    path.write_text("not a zip archive")
    with pytest.raises(ExampleError, match=r"broken\.npz could not be read"):
        data.load_npz(path)
    with pytest.raises(ExampleError, match="there is no such file"):
        data.load_dataset(str(tmp_path / "absent.npz"), tmp_path, "pyg")


def test_root_is_searched_with_hyphens_or_underscores(tmp_path: Path) -> None:
    write_npz(tmp_path / "my_graph.npz")
    assert data.load_dataset("my-graph", tmp_path, "pyg").num_nodes == 5
    assert data.load_dataset("my_graph", tmp_path, "dgl").num_nodes == 5


def test_root_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTSPARSE_DATA", "/some/folder")
    assert data.default_root() == Path("/some/folder")
    monkeypatch.delenv("FASTSPARSE_DATA")
    assert data.default_root() == Path("data")


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_unknown_dataset_names_the_known_ones(tmp_path: Path, framework: str) -> None:
    with pytest.raises(ExampleError, match="Known names: planted, karate, cora"):
        data.load_dataset("no-such-graph", tmp_path, framework)


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
@pytest.mark.parametrize("name", ["cora", "amazon-computers", "coauthor-physics", "ogbn-arxiv"])
def test_missing_files_are_named_and_nothing_is_downloaded(
    tmp_path: Path, framework: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if framework == "dgl":
        pytest.importorskip("fastsparse_dgl")
    if name.startswith("ogbn"):
        pytest.importorskip("ogb")
    else:
        pytest.importorskip("torch_geometric" if framework == "pyg" else "dgl")
    import socket

    def no_network(*args: object, **kwargs: object) -> None:
        raise AssertionError("a loader went to the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    with pytest.raises(ExampleError, match="--download") as refusal:
        data.load_dataset(name, tmp_path, framework)
    assert str(tmp_path) in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_pyg_loader_reads_files_that_are_there(tmp_path: Path) -> None:
    pytest.importorskip("torch_geometric")
    raw = tmp_path / "minesweeper" / "raw"
    raw.mkdir(parents=True)
    write_heterophilous(raw / "minesweeper.npz")
    graph = data.load_dataset("minesweeper", tmp_path, "pyg")
    assert graph.num_nodes == 5
    assert graph.num_edges == 6
    assert len(graph.given_splits) == 2


def test_dgl_loader_reads_files_that_are_there(tmp_path: Path) -> None:
    pytest.importorskip("fastsparse_dgl")
    if not hasattr(framework_data.import_dgl().data, "MinesweeperDataset"):
        with pytest.raises(ExampleError, match=r"the installed DGL has no dgl\.data\.MinesweeperDataset"):
            data.load_dataset("minesweeper", tmp_path, "dgl")
        return
    with pytest.raises(ExampleError) as refusal:
        data.load_dataset("minesweeper", tmp_path, "dgl")
    # Some versions of DGL add a hash to the folder's name: the message must name the folder that is read.
    folder = Path(re.search(rf"{tmp_path}/minesweeper(_\w+)?/", str(refusal.value)).group())
    folder.mkdir()
    write_heterophilous(folder / "minesweeper.npz")
    graph = data.load_dataset("minesweeper", tmp_path, "dgl")
    assert graph.num_nodes == 5
    assert graph.num_edges == 6
    assert len(graph.given_splits) == 2


def write_heterophilous(path: Path) -> None:
    """The layout in which the heterophilous graphs are published."""
    masks = np.zeros((2, 5), dtype=bool)
    masks[:, :2] = True
    np.savez(
        path,
        node_features=np.eye(5, dtype=np.float32),
        node_labels=np.array([0, 1, 0, 1, 1]),
        edges=np.array([[0, 1], [1, 2], [3, 4]]),
        train_masks=masks,
        val_masks=np.roll(masks, 2, axis=1),
        test_masks=np.roll(masks, 3, axis=1),
    )


def test_karate_of_each_framework() -> None:
    pytest.importorskip("torch_geometric")
    graph = data.load_dataset("karate", Path("nowhere"), "pyg")
    assert (graph.num_nodes, graph.num_edges, graph.num_classes) == (34, 156, 4)
    pytest.importorskip("fastsparse_dgl")
    graph = data.load_dataset("karate", Path("nowhere"), "dgl")
    assert (graph.num_nodes, graph.num_edges, graph.num_classes) == (34, 156, 2)


def write_ogb(root: Path, nodes: int = 12) -> None:
    """A small ogbn-arxiv in OGB's own layout."""
    folder = root / "ogbn_arxiv"
    (folder / "raw").mkdir(parents=True)
    (folder / "split" / "time").mkdir(parents=True)
    (folder / "RELEASE_v1.txt").write_text("")

    def write(name: str, rows: list[list[float]]) -> None:
        with gzip.open(folder / name, "wt") as file:
            file.writelines(",".join(str(value) for value in row) + "\n" for row in rows)

    write("raw/edge.csv.gz", [[i, (i + 1) % nodes] for i in range(nodes)])
    write("raw/node-feat.csv.gz", [[i / nodes] * 4 for i in range(nodes)])
    write("raw/node-label.csv.gz", [[i % 3] for i in range(nodes)])
    write("raw/node_year.csv.gz", [[2010 + i] for i in range(nodes)])
    write("raw/num-node-list.csv.gz", [[nodes]])
    write("raw/num-edge-list.csv.gz", [[nodes]])
    for part, where in (("train", range(6)), ("valid", range(6, 9)), ("test", range(9, nodes))):
        write(f"split/time/{part}.csv.gz", [[i] for i in where])


def test_ogb_loader_reads_its_own_layout_twice(tmp_path: Path) -> None:
    pytest.importorskip("ogb")
    write_ogb(tmp_path)
    for _ in range(2):
        graph = data.load_dataset("ogbn-arxiv", tmp_path, "pyg")
        assert (graph.num_nodes, graph.num_edges, graph.num_classes) == (12, 24, 3)
        assert "public split, 6/3/3" in graph.split_description(0)
        assert graph.x.shape == (12, 4)


def test_ogb_folder_without_its_release_file_does_not_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ogb")
    write_ogb(tmp_path)
    (tmp_path / "ogbn_arxiv" / "RELEASE_v1.txt").unlink()
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("ogb asked a question"))
    with pytest.raises(ExampleError, match=r"RELEASE_v1\.txt"):
        data.load_dataset("ogbn-arxiv", tmp_path, "dgl")


def test_ogb_download_that_was_asked_for_does_not_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ogb")
    fetched = []

    def fetch(url: str, folder: str) -> str:
        fetched.append(url)
        raise ConnectionError("no network in tests")

    monkeypatch.setitem(sys.modules, "outdated", None)
    monkeypatch.setattr("ogb.nodeproppred.dataset.download_url", fetch)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("ogb asked a question"))
    with pytest.raises(ConnectionError):
        data.load_dataset("ogbn-products", tmp_path, "pyg", download=True)
    assert fetched


def test_missing_ogb_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framework_data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExampleError, match="needs the ogb package"):
        data.load_dataset("ogbn-arxiv", tmp_path, "pyg")


def test_features_given_degree_and_learned() -> None:
    graph = small_planted()
    x, note = data.node_features(graph, "auto", normalise=False)
    assert torch.equal(x, graph.x)
    assert note == "8 given features"
    x, note = data.node_features(graph, "degree", normalise=False)
    torch.testing.assert_close(x.sum(dim=1), torch.ones(300))
    assert "degree" in note
    x, note = data.node_features(graph, "learned", normalise=False)
    assert x is None
    assert "learned" in note


def test_feature_rows_are_scaled_and_empty_rows_stay_zero(tmp_path: Path) -> None:
    x = np.array([[1, 3], [0, 0], [2, 2], [0, 1], [5, 0]])
    graph = data.load_npz(write_npz(tmp_path / "tiny.npz", x=x))
    scaled, note = data.node_features(graph, "given", normalise=True)
    assert scaled.tolist() == [[0.25, 0.75], [0, 0], [0.5, 0.5], [0, 1], [1, 0]]
    assert "scaled" in note


def test_missing_features_are_learned_unless_given_ones_are_asked_for(tmp_path: Path) -> None:
    graph = data.load_npz(write_npz(tmp_path / "tiny.npz"))
    x, note = data.node_features(graph, "auto", normalise=True)
    assert x is None
    assert "the data have none" in note
    with pytest.raises(ExampleError, match="--features learned or --features degree"):
        data.node_features(graph, "given", normalise=True)


@pytest.mark.parametrize(
    ("name", "nodes", "edges", "classes"),
    [("cora", 2708, 10556, 7), ("citeseer", 3327, 9104, 6), ("minesweeper", 10000, 78804, 2)],
)
def test_real_graphs_have_their_published_sizes(
    data_folder: Path, name: str, nodes: int, edges: int, classes: int
) -> None:
    graph = data.load_dataset(name, data_folder, "pyg")
    assert (graph.num_nodes, graph.num_edges, graph.num_classes) == (nodes, edges, classes)
    assert len(graph.given_splits) == (10 if name == "minesweeper" else 1)
