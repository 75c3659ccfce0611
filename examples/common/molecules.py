"""Molecules with kinds of atoms and bonds: random ones, or from OGB's raw files without the ogb package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .data import Split
from .errors import ExampleError
from .graph_data import GraphDataset

#: Numbers of kinds of atoms and of bonds in random molecules.
_ATOMS, _BONDS = 4, 3


def drawn_molecules(num_graphs: int = 4000, seed: int = 0) -> GraphDataset:
    """Makes random molecules whose class can be learned only with the bonds; nothing is downloaded.

    A molecule is a random tree of 8 to 24 atoms of 4 kinds. In four of five molecules, another bond closes a
    ring. A bond is single, double or aromatic. The class is 1 if more double bonds than the median join atoms
    of the kinds 0 and 1. Neither the kinds of the atoms nor the counts of the bonds alone show the class.

    Args:
        num_graphs: Number of graphs.
        seed: Seed of all random numbers.
    """
    generator = np.random.default_rng(seed)
    sizes = generator.integers(8, 25, num_graphs)
    node_ptr = np.concatenate([[0], sizes.cumsum()])
    place = np.arange(node_ptr[-1]) - np.repeat(node_ptr[:-1], sizes)
    child = np.flatnonzero(place > 0)
    # Each atom is bound to one of the five atoms before it, which gives long chains with branches.
    parent = child - 1 - (generator.random(child.size) * np.minimum(place[child], 5)).astype(int)
    ring = np.flatnonzero(generator.random(num_graphs) < 0.8)
    one = node_ptr[ring] + (generator.random(ring.size) * (sizes[ring] - 5)).astype(int)
    edges = np.stack([np.concatenate([child, one + 5]), np.concatenate([parent, one])])
    edges = np.unique(edges, axis=1)
    codes = generator.choice(_ATOMS, node_ptr[-1], p=[0.4, 0.3, 0.2, 0.1])
    bonds = generator.choice(_BONDS, edges.shape[1], p=[0.4, 0.4, 0.2])
    ends = np.sort(codes[edges], axis=0)
    counted = (bonds == 1) & (ends[0] == 0) & (ends[1] == 1)
    count = np.add.reduceat(
        counted[np.argsort(edges[0], kind="stable")].astype(int), _starts(edges[0], node_ptr)
    )
    y = torch.from_numpy((count > np.median(count)).astype(np.int64))
    return from_bonds(
        "molecules",
        torch.from_numpy(edges),
        torch.from_numpy(bonds)[:, None],
        torch.from_numpy(node_ptr),
        torch.from_numpy(codes)[:, None],
        y,
        None,
    )


def _starts(first: np.ndarray, node_ptr: np.ndarray) -> np.ndarray:
    """Returns the position of every graph's first bond. Bonds must be sorted by first end."""
    return np.searchsorted(np.sort(first), node_ptr[:-1])


def read_ogb_molecules(name: str, root: Path) -> GraphDataset:
    """Reads the raw files of an ``ogbg-mol*`` dataset with one binary class, bonds included.

    Args:
        name: The dataset, whose folder in `root` is called so with underscores, as OGB's archives unpack.
        root: Folder of datasets.

    Raises:
        ExampleError: A file is missing, or the task is not a single one with two classes.
    """
    folder = root / name.replace("-", "_")
    if not (folder / "raw").is_dir():
        raise ExampleError(
            f"--dataset {name}: expected OGB's raw files in {folder / 'raw'}, found none; unpack the archive "
            f"that OGB offers for {name} there (docs/ogb.md), or use --dataset molecules, without files."
        )

    def table(path: str) -> Tensor:
        file = folder / f"{path}.csv.gz"
        if not file.is_file():
            raise ExampleError(f"--dataset {name}: expected {file}, which OGB's archive has.")
        return torch.from_numpy(np.loadtxt(file, delimiter=",", ndmin=2, dtype=np.float64)).long()

    y = table("raw/graph-label")
    if y.size(1) != 1 or not set(y.unique().tolist()) <= {0, 1}:
        raise ExampleError(f"--dataset {name}: expected one label per molecule, 0 or 1.")
    sizes, bonds = table("raw/num-node-list").flatten(), table("raw/num-edge-list").flatten()
    node_ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    edges = table("raw/edge").t() + node_ptr[:-1].repeat_interleave(bonds)
    kinds = (
        [entry.name for entry in sorted((folder / "split").iterdir())] if (folder / "split").is_dir() else []
    )
    if not kinds:
        raise ExampleError(f"--dataset {name}: expected a split in {folder / 'split'}, found none.")
    masks = []
    for part in ("train", "valid", "test"):
        mask = torch.zeros(y.size(0), dtype=torch.bool)
        mask[table(f"split/{kinds[0]}/{part}").flatten()] = True
        masks.append(mask)
    codes, edge_codes = table("raw/node-feat"), table("raw/edge-feat")
    return from_bonds(name, edges, edge_codes, node_ptr, codes, y.flatten(), Split(*masks))


def from_bonds(
    name: str,
    bonds: Tensor,
    bond_codes: Tensor,
    node_ptr: Tensor,
    codes: Tensor,
    y: Tensor,
    given_split: Split | None,
) -> GraphDataset:
    """Makes the dataset from bonds (2, B) of the disjoint union; both directions get a bond's codes."""
    edges = torch.cat([bonds, bonds.flip(0)], dim=1)
    order = torch.argsort(edges[1] * codes.size(0) + edges[0])
    edges = edges[:, order]
    edge_ptr = torch.searchsorted(edges[1].contiguous(), node_ptr)
    edge_codes = torch.cat([bond_codes, bond_codes])[order]
    return GraphDataset(name, edges, edge_ptr, node_ptr, codes, y, given_split, edge_codes)
