"""Loads datasets with PyG's, DGL's and OGB's own loaders.

These loaders download missing files, some after a prompt. The examples call a loader only if the files are on
disk, or if the user passed --download. Otherwise the error names the missing files and their folder.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import ogb_data
from .errors import ExampleError

#: Name of a dataset -> (class in torch_geometric.datasets, argument `name` of the class)
PYG_LOADERS = {
    "cora": ("Planetoid", "Cora"),
    "citeseer": ("Planetoid", "CiteSeer"),
    "pubmed": ("Planetoid", "PubMed"),
    "roman-empire": ("HeterophilousGraphDataset", "Roman-empire"),
    "amazon-ratings": ("HeterophilousGraphDataset", "Amazon-ratings"),
    "minesweeper": ("HeterophilousGraphDataset", "Minesweeper"),
    "tolokers": ("HeterophilousGraphDataset", "Tolokers"),
    "questions": ("HeterophilousGraphDataset", "Questions"),
    "amazon-computers": ("Amazon", "Computers"),
    "amazon-photo": ("Amazon", "Photo"),
    "coauthor-cs": ("Coauthor", "CS"),
    "coauthor-physics": ("Coauthor", "Physics"),
}

#: Name of a dataset -> class in dgl.data
DGL_LOADERS = {
    "cora": "CoraGraphDataset",
    "citeseer": "CiteseerGraphDataset",
    "pubmed": "PubmedGraphDataset",
    "roman-empire": "RomanEmpireDataset",
    "amazon-ratings": "AmazonRatingsDataset",
    "minesweeper": "MinesweeperDataset",
    "tolokers": "TolokersDataset",
    "questions": "QuestionsDataset",
    "amazon-computers": "AmazonCoBuyComputerDataset",
    "amazon-photo": "AmazonCoBuyPhotoDataset",
    "coauthor-cs": "CoauthorCSDataset",
    "coauthor-physics": "CoauthorPhysicsDataset",
}

OGB_DATASETS = ("ogbn-arxiv", "ogbn-products")

#: The arguments of `data.from_parts` besides the name.
Parts = dict[str, Any]


def import_dgl() -> Any:
    """Imports DGL after fastsparse_dgl, without which importing DGL 2.1 fails with newer PyTorch versions."""
    importlib.import_module("fastsparse_dgl")
    return importlib.import_module("dgl")


def known_names(framework: str) -> list[str]:
    """Returns the names of datasets that `load` accepts for a framework."""
    return ["karate", *(PYG_LOADERS if framework == "pyg" else DGL_LOADERS), *OGB_DATASETS]


def load(name: str, root: Path, framework: str, *, download: bool) -> Parts:
    """Loads `name` with the framework's loader, or with OGB's for ``ogbn-*``.

    Raises:
        ExampleError: The name is unknown, or its files are not under `root` and `download` is not set.
    """
    key = name.lower().replace("_", "-")
    if key not in known_names(framework):
        raise ExampleError(
            f"--dataset {name}: there is no {root / (name + '.npz')}, and {framework} has no such loader."
            f" Known names: planted, {', '.join(known_names(framework))}; or give the path of an .npz file."
            " Set --root or the environment variable FASTSPARSE_DATA to the folder that holds the .npz files."
        )
    if key.startswith("ogbn-"):
        return _from_ogb(key, root, download)
    return _from_pyg(key, root, download) if framework == "pyg" else _from_dgl(key, root, download)


def _refuse(name: str, root: Path, missing: str, loader: str) -> NoReturn:
    """Raises an error if a loader would start a download without permission."""
    raise ExampleError(
        f"--dataset {name}: neither {root / (name.replace('-', '_') + '.npz')} nor {missing} exists."
        f" Put the .npz file or the files of {loader} there, set --root (or FASTSPARSE_DATA) to the folder"
        " that holds them, or add --download to let that loader fetch them."
    )


def _offline(cls: type, missing: Callable[[Any], str | None], refuse: Callable[[str], NoReturn]) -> type:
    """Makes a subclass of a loader that raises an error instead of downloading.

    Both frameworks call ``_download`` if there is no processed file. So the loader itself decides which files
    it needs.

    Args:
        cls: The loader.
        missing: Names the files that a loader needs and does not find, or None.
        refuse: Function that raises the error about missing files.
    """

    def _download(self: Any) -> None:
        if (files := missing(self)) is not None:
            refuse(files)

    return type(cls.__name__, (cls,), {"_download": _download})


def _from_pyg(name: str, root: Path, download: bool) -> Parts:
    datasets = importlib.import_module("torch_geometric.datasets")
    if name == "karate":
        data = datasets.KarateClub()[0]
        note = "Zachary's karate club, as shipped with PyG (4 classes, one-hot features)"
        return {"edge_index": data.edge_index, "y": data.y, "x": data.x, "notes": (note,)}
    class_name, argument = PYG_LOADERS[name]
    title = f"torch_geometric.datasets.{class_name}"
    cls = getattr(datasets, class_name)

    def missing(dataset: Any) -> str | None:
        absent = [path for path in dataset.raw_paths if not Path(path).is_file()]
        return ", ".join(absent) or None

    if not download:
        cls = _offline(cls, missing, lambda files: _refuse(name, root, files, title))
    data = cls(str(root), argument)[0]
    masks = tuple(data[part] for part in ("train_mask", "val_mask", "test_mask") if part in data)
    return {
        "edge_index": data.edge_index,
        "y": data.y,
        "x": data.x,
        "masks": masks or None,
        "notes": (f"loaded by {title}",),
    }


def _from_dgl(name: str, root: Path, download: bool) -> Parts:
    datasets = importlib.import_module(f"{import_dgl().__name__}.data")
    if name == "karate":
        graph = datasets.KarateClubDataset()[0]
        note = "Zachary's karate club, as shipped with DGL (2 classes, no features)"
        return {"edge_index": torch.stack(graph.edges()), "y": graph.ndata["label"], "notes": (note,)}
    title = f"dgl.data.{DGL_LOADERS[name]}"
    cls = getattr(datasets, DGL_LOADERS[name], None)
    if cls is None:
        raise ExampleError(f"--dataset {name}: the installed DGL has no {title}; newer versions do.")

    def missing(dataset: Any) -> str | None:
        folder = Path(dataset.raw_path)
        return None if folder.is_dir() and any(folder.iterdir()) else f"{folder}/"

    if not download:
        cls = _offline(cls, missing, lambda files: _refuse(name, root, files, title))
    graph = cls(raw_dir=str(root), verbose=False)[0]
    parts = ("train_mask", "val_mask", "test_mask")
    masks = tuple(graph.ndata[part] for part in parts if part in graph.ndata)
    return {
        "edge_index": torch.stack(graph.edges()),
        "y": graph.ndata["label"],
        "x": graph.ndata["feat"],
        "masks": masks or None,
        "notes": (f"loaded by {title}",),
    }


def _from_ogb(name: str, root: Path, download: bool) -> Parts:
    dataset = ogb_data.open_dataset(name, root, "plain", download=download)
    graph, labels = dataset[0]
    label: Tensor = torch.tensor(labels).flatten()
    return {
        "edge_index": torch.from_numpy(graph["edge_index"]),
        "y": torch.where(label.isnan(), torch.full_like(label, -1), label).long(),
        "x": torch.from_numpy(graph["node_feat"]),
        "masks": ogb_data.split_masks(dataset, graph["num_nodes"]),
        "directed": name == "ogbn-arxiv",
        "notes": ("loaded by ogb.nodeproppred.NodePropPredDataset",),
    }
