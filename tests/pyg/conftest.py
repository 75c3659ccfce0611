"""Starts every test with an empty cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    """No test sees another's structures or counters."""
    import fastsparse_pyg

    fastsparse_pyg.clear_cache()
    yield
    fastsparse_pyg.clear_cache()


@pytest.fixture(autouse=True)
def kernels_for_few_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have few edges, for which layers of several kernels run PyG's code on a GPU."""
    from fastsparse_pyg.nn import base

    monkeypatch.setattr(base, "FEW_EDGES_ON_GPU", -1)


@pytest.fixture
def kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if PyG's own code runs in place of the kernels."""
    from pyg_cases import no_original

    no_original(monkeypatch)
