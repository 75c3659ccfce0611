"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `gpu` where they cannot run; a test draws the same numbers alone as among others."""
    torch.manual_seed(0)
    if item.get_closest_marker("gpu"):
        from fastsparse_core import _C

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        if not _C.build_info()["cuda"]:
            pytest.skip("fastsparse_core was built without its CUDA half")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every device that the operators run on."""
    return request.param


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fills uninitialised memory with NaN (integers: their maximum), so that an unwritten output shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def stored_in_quads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Binary sparse blocks in quads, however cheap whole blocks are, and runs of several windows.

    The kernels then cut the last block of nearly every window, which small structures would not need.
    """
    monkeypatch.setattr("fastsparse_core.formats.bsb.vectors_together", lambda *_: 4)
    monkeypatch.setattr("fastsparse_core.choose.bounds.RESIDENT_WARPS", 4)


@pytest.fixture
def data_folder() -> Path:
    """Folder with real graphs as .npz files, named by FASTSPARSE_DATA."""
    folder = os.environ.get("FASTSPARSE_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs real graphs: set FASTSPARSE_DATA to their folder")
    return Path(folder)
