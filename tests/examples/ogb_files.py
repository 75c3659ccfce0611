"""Small datasets in OGB's own layouts on disk, as its archives have them."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas

CLASSES = {"ogbn-arxiv": 40, "ogbn-products": 47, "ogbn-papers100M": 172}


def write_csv(path: Path, rows: np.ndarray | Sequence) -> None:
    """A table as OGB writes it: packed, without a header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_csv(path, header=False, index=False, compression="gzip")


def write_split(folder: Path, kind: str, parts: dict[str, np.ndarray]) -> None:
    for part, ids in parts.items():
        write_csv(folder / "split" / kind / f"{part}.csv.gz", ids)


def split_of(size: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Half of the ids to train on, a quarter each to choose by and to test on."""
    order = generator.permutation(size)
    return dict(zip(("train", "valid", "test"), np.split(order, [size // 2, size * 3 // 4]), strict=True))


def start(root: Path, name: str) -> Path:
    """The folder of a dataset with the files next to raw/ and split/."""
    folder = root / name.replace("-", "_")
    (folder / "mapping").mkdir(parents=True)
    (folder / "raw").mkdir()
    (folder / "mapping" / "README.md").write_text("what the numbers of nodes stand for\n")
    (folder / "RELEASE_v1.txt").write_text("")
    return folder


def communities(nodes: int, edges: int, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Labels below 4, edges (2, edges) that mostly stay among equals, and features that hint at the label."""
    y = generator.integers(0, 4, nodes)
    members = [np.flatnonzero(y == label) for label in range(4)]
    source = generator.integers(0, nodes, edges)
    partner = np.array([generator.choice(members[label]) for label in y[source]])
    target = np.where(generator.random(edges) < 0.8, partner, generator.integers(0, nodes, edges))
    x = np.eye(4, 8)[y] + generator.normal(0, 1, (nodes, 8))
    return y, np.stack([source, target]), x.astype(np.float32)


def write_nodes(root: Path, name: str, nodes: int = 120, edges: int = 500) -> Path:
    """ogbn-arxiv or ogbn-products: tables of edges, features and labels."""
    generator = np.random.default_rng(0)
    folder = start(root, name)
    y, edge_index, x = communities(nodes, edges, generator)
    raw = folder / "raw"
    write_csv(raw / "edge.csv.gz", edge_index.T)
    write_csv(raw / "node-feat.csv.gz", x)
    write_csv(raw / "node-label.csv.gz", y)
    write_csv(raw / "num-node-list.csv.gz", [nodes])
    write_csv(raw / "num-edge-list.csv.gz", [edges])
    if name == "ogbn-arxiv":
        write_csv(raw / "node_year.csv.gz", generator.integers(1990, 2020, nodes))
    kind = {"ogbn-arxiv": "time", "ogbn-products": "sales_ranking"}[name]
    write_split(folder, kind, split_of(nodes, generator))
    return folder


def write_proteins(root: Path, nodes: int = 90, edges: int = 400) -> Path:
    """ogbn-proteins: features of edges, 112 binary labels, and the species under its old name."""
    generator = np.random.default_rng(0)
    folder = start(root, "ogbn-proteins")
    y, edge_index, _ = communities(nodes, edges, generator)
    raw = folder / "raw"
    write_csv(raw / "edge.csv.gz", edge_index.T)
    hint = np.eye(4, 8)[y[edge_index[0]]] + np.eye(4, 8)[y[edge_index[1]]]
    write_csv(raw / "edge-feat.csv.gz", (hint + generator.random((edges, 8))).astype(np.float32))
    write_csv(raw / "node-label.csv.gz", (y[:, None] == np.arange(112) % 4).astype(int))
    write_csv(raw / "species.csv.gz", generator.choice([3702, 9606], nodes))
    write_csv(raw / "num-node-list.csv.gz", [nodes])
    write_csv(raw / "num-edge-list.csv.gz", [edges])
    write_split(folder, "species", split_of(nodes, generator))
    return folder


def write_papers(root: Path, nodes: int = 200, edges: int = 900) -> Path:
    """ogbn-papers100M: arrays in .npz files; most nodes have no label and are in no part."""
    generator = np.random.default_rng(0)
    folder = start(root, "ogbn-papers100M")
    y, edge_index, x = communities(nodes, edges, generator)
    np.savez_compressed(
        folder / "raw" / "data.npz",
        edge_index=edge_index,
        node_feat=x,
        node_year=generator.integers(1990, 2020, (nodes, 1)),
        num_nodes_list=np.array([nodes]),
        num_edges_list=np.array([edges]),
    )
    label = np.full((nodes, 1), np.nan, np.float32)
    known = generator.permutation(nodes)[: nodes // 2]
    label[known, 0] = y[known]
    np.savez_compressed(folder / "raw" / "node-label.npz", node_label=label)
    parts = split_of(known.size, generator)
    write_split(folder, "time", {part: known[place] for part, place in parts.items()})
    return folder


def write_molecules(root: Path, graphs: int = 60) -> Path:
    """ogbg-molhiv: many small graphs in one table; the class is whether most atoms are of the first kind."""
    generator = np.random.default_rng(0)
    folder = start(root, "ogbg-molhiv")
    sizes = generator.integers(3, 9, graphs)
    sizes[5] = 1
    y = np.arange(graphs) % 2
    codes = [
        np.where(generator.random(n) < 0.85, label, 1 - label) for n, label in zip(sizes, y, strict=True)
    ]
    atoms = np.zeros((sizes.sum(), 9), int)
    atoms[:, 0] = np.concatenate(codes)
    atoms[:, 2] = generator.integers(0, 3, len(atoms))
    rings = [np.stack([np.arange(n), (np.arange(n) + 1) % n], 1)[: n if n > 2 else 0] for n in sizes]
    edges = np.concatenate(rings)
    raw = folder / "raw"
    write_csv(raw / "edge.csv.gz", edges)
    write_csv(raw / "edge-feat.csv.gz", generator.integers(0, 2, (len(edges), 3)))
    write_csv(raw / "node-feat.csv.gz", atoms)
    write_csv(raw / "graph-label.csv.gz", y)
    write_csv(raw / "num-node-list.csv.gz", sizes)
    write_csv(raw / "num-edge-list.csv.gz", [len(ring) for ring in rings])
    with gzip.open(folder / "mapping" / "mol.csv.gz", "wt") as file:
        file.write("HIV_active,smiles,mol_id\n")
    write_split(folder, "scaffold", split_of(graphs, generator))
    return folder


WRITERS = {
    "ogbn-arxiv": lambda root: write_nodes(root, "ogbn-arxiv"),
    "ogbn-products": lambda root: write_nodes(root, "ogbn-products"),
    "ogbn-proteins": write_proteins,
    "ogbn-papers100M": write_papers,
    "ogbg-molhiv": write_molecules,
}
