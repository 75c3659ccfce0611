"""Starts every test with an empty cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def propagate_of_plain_layers() -> None:
    """Makes plain layers first: PyG generates `propagate` of a class from the options of its first layer.

    If that layer has several aggregations, later layers of the class do not use `message_and_aggregate`.
    """
    from torch_geometric.nn import GCNConv, GINConv, GraphConv, SAGEConv

    GCNConv(1, 1), GINConv(None), GraphConv(1, 1), SAGEConv(1, 1)


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    """No test sees another's structures or counters."""
    import fastsparse_pyg

    fastsparse_pyg.clear_cache()
    yield
    fastsparse_pyg.clear_cache()


@pytest.fixture(autouse=True)
def kernels_for_few_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the kernels for few edges on a GPU, too, where some layers would run PyG's code."""
    from fastsparse_pyg.nn import base

    monkeypatch.setattr(base, "FEW_EDGES_ON_GPU", -1)


@pytest.fixture
def kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if PyG's own code runs in place of the kernels."""
    from pyg_cases import no_original

    no_original(monkeypatch)
