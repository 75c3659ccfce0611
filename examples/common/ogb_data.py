"""OGB's own loaders and Evaluators on current software: no prompt, no look-up and no download unasked.

ogb 1.3.6 is older than the software that it runs on. This module contains all workarounds:

* its import asks the network for a newer version: the package it asks through is hidden meanwhile
* ``torch.load`` refuses the files that it has saved itself: the classes in them are allowed
* it asks on the terminal when ``RELEASE_v1.txt`` is missing or a download is large: both are settled before
* its loaders download whatever they miss: the files are looked for first
* it expects the folder ``processed`` to be there, as it is in OGB's own archives
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from .errors import ExampleError

#: library -> (module of a loader below ``ogb.nodeproppred`` or ``ogb.graphproppred``, prefix of its class)
LIBRARIES = {"plain": ("dataset", ""), "pyg": ("dataset_pyg", "Pyg"), "dgl": ("dataset_dgl", "Dgl")}

_ABSENT: Any = object()

#: Our names of the parts -> OGB's
PARTS = {"train": "train", "val": "valid", "test": "test"}


def open_dataset(name: str, root: Path, library: str, *, download: bool) -> Any:
    """Returns OGB's own dataset object.

    Args:
        name: ``ogbn-*`` or ``ogbg-*``.
        root: Folder that holds OGB's folders.
        library: ``pyg``, ``dgl`` or ``plain``: which of OGB's loaders.
        download: Whether the loader may fetch missing files.

    Raises:
        ExampleError: ogb or the library is not installed, the name is unknown, or files are missing and
            `download` is not set.
    """
    if importlib.util.find_spec("ogb") is None:
        raise ExampleError(f"--dataset {name} needs the ogb package: pip install 'fastsparse-gnn[ogb]'.")
    info = dataset_info(name)
    folder = _folder(name, root, library)
    _check_files(name, info, folder, download)
    module_name, prefix = LIBRARIES[library]
    try:
        module = import_ogb(f"ogb.{_level(name)}proppred.{module_name}")
    except ImportError as error:
        raise ExampleError(
            f"OGB's loader for {library} could not be imported: {error}."
            f" Install with pip install 'fastsparse-gnn[{library},ogb]'."
        ) from error

    def decide(url: str) -> bool:
        if not download:
            raise ExampleError(f"--dataset {name}: OGB's loader asks for {url}: add --download to let it.")
        return True

    with mock.patch.object(module, "decide_download", decide), allowed_classes(library):
        return getattr(module, f"{prefix}{_level(name).title()}PropPredDataset")(name, root=str(root))


def split_ids(dataset: Any) -> dict[str, Tensor]:
    """Returns the ids of ``train``, ``val`` and ``test`` in a dataset from `open_dataset`."""
    index = dataset.get_idx_split()
    return {ours: torch.as_tensor(index[theirs]) for ours, theirs in PARTS.items()}


def split_masks(dataset: Any, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the split as masks of shape (size,)."""
    train, val, test = (torch.zeros(size, dtype=torch.bool) for _ in PARTS)
    for mask, ids in zip((train, val, test), split_ids(dataset).values(), strict=True):
        mask[ids] = True
    return train, val, test


def import_ogb(module: str) -> Any:
    """Imports a part of ogb, hiding the package through which it would look for a newer version."""
    # None in `sys.modules` makes an import fail, so ogb assumes that the package is not installed.
    before = sys.modules.get("outdated", _ABSENT)
    sys.modules["outdated"] = None  # type: ignore[assignment]
    try:
        # ogb imports DGL. fastsparse_dgl must come first, because it makes DGL 2.1 importable.
        with contextlib.suppress(ImportError):
            importlib.import_module("fastsparse_dgl")
        return importlib.import_module(module)
    finally:
        if before is _ABSENT:
            del sys.modules["outdated"]
        else:
            sys.modules["outdated"] = before


def _level(name: str) -> str:
    return "graph" if name.startswith("ogbg-") else "node"


def dataset_info(name: str) -> dict[str, str]:
    """Returns the entry of a dataset in OGB's own table."""
    pandas = importlib.import_module("pandas")
    table = Path(import_ogb("ogb").__file__).parent / f"{_level(name)}proppred" / "master.csv"
    master = pandas.read_csv(table, index_col=0, keep_default_na=False, dtype=str)
    if name not in master:
        raise ExampleError(f"--dataset {name}: expected one of {', '.join(master)}.")
    return master[name].to_dict()


def _folder(name: str, root: Path, library: str) -> Path:
    """Returns the folder that OGB's loader will read; a folder for the library takes precedence."""
    folder = root / name.replace("-", "_")
    special = folder.with_name(f"{folder.name}_{library}")
    return special if special.is_dir() else folder


def _check_files(name: str, info: dict[str, str], folder: Path, download: bool) -> None:
    """Prepares the folder, so that OGB's loader neither asks questions nor downloads without permission."""
    if folder.is_dir() and not any(path.is_file() for path in folder.rglob("*")):
        shutil.rmtree(folder)  # an interrupted download leaves an incomplete folder
    missing = [str(path) for path in _needed(name, info, folder) if not path.is_file()]
    if missing and not download:
        what = ", ".join(missing) if folder.is_dir() else f"the folder {folder}"
        raise ExampleError(
            f"--dataset {name}: {what} does not exist. Download {info['url']}, unpack it and rename its"
            f" folder from {info['download_name']} to {folder}, set --root to the folder that holds it,"
            " or add --download to let OGB's loader download it."
        )
    if folder.is_dir():
        release = folder / f"RELEASE_v{info['version']}.txt"
        if not release.is_file():
            raise ExampleError(
                f"{folder} has no {release.name}, from which OGB reads the version of the data: remove the"
                " folder and download the data again."
            )
        (folder / "processed").mkdir(exist_ok=True)
        # The library-agnostic loader's cache of raw/ is a pickle of objects that torch.load refuses.
        (folder / "processed" / "data_processed").unlink(missing_ok=True)


def _needed(name: str, info: dict[str, str], folder: Path) -> Iterator[Path]:
    """Yields the files that OGB's loaders read."""
    level, raw = _level(name), folder / "raw"
    if info["binary"] == "True":
        yield from (raw / "data.npz", raw / f"{level}-label.npz")
    else:
        names = ["edge", "num-node-list", "num-edge-list", f"{level}-label"]
        names += ["node-feat"] * (info["has_node_attr"] == "True")
        names += ["edge-feat"] * (info["has_edge_attr"] == "True")
        names += [] if info["additional node files"] == "None" else info["additional node files"].split(",")
        for part in names:
            # In the archive of proteins, one file has another name; OGB renames it.
            other = raw / f"{part.removeprefix('node_')}.csv.gz"
            yield other if part == "node_species" and other.is_file() else raw / f"{part}.csv.gz"
    split = folder / "split" / info["split"]
    if not (split / "split_dict.pt").is_file():
        yield from (split / f"{part}.csv.gz" for part in PARTS.values())


@contextlib.contextmanager
def allowed_classes(library: str) -> Iterator[None]:
    """Lets ``torch.load`` read the files that OGB's loader for PyG saved."""
    if library != "pyg":
        yield
        return
    data = importlib.import_module("torch_geometric.data.data")
    storage = importlib.import_module("torch_geometric.data.storage")
    classes = [data.DataEdgeAttr, data.DataTensorAttr, storage.GlobalStorage]
    # The binary layout's number of nodes is a NumPy scalar.
    classes += [np.int64(0).__reduce__()[0], np.dtype, type(np.dtype(np.int64))]
    with torch.serialization.safe_globals(classes):
        yield
