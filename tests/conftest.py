"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# OpenMP's threads sleep while they wait. As many workers of pytest-xdist as cores, each with as many threads,
# would spend nine tenths of their time on waiting for each other otherwise.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # whose import reads that

#: Number of tests for GPUs that were left out, and why.
_left_out = pytest.StashKey[tuple[int, str]]()


def _why_no_gpu() -> str:
    from fastsparse_core import _C

    if not torch.cuda.is_available():
        return "no CUDA device"
    return "" if _C.build_info()["cuda"] else "fastsparse_core was built without its CUDA half"


def pytest_configure(config: pytest.Config) -> None:
    """Loads DGL where pytest-xdist collects the workers' warnings: it imports the module of each, DGL's too.

    DGL 2.1.0 cannot be imported with a current torchdata unless `fastsparse_dgl` is imported first.
    """
    found = find_spec("dgl")  # without DGL that may be the folder tests/dgl, which has no file of its own
    if config.getoption("numprocesses", None) and found is not None and found.origin is not None:
        with contextlib.suppress(ImportError):
            import fastsparse_dgl  # noqa: F401


def pytest_collectstart() -> None:
    """Collects no garbage while thousands of tests are found: nearly all that is made then stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Excludes existing objects from later garbage collections, which would take a second each."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests marked `gpu` where they cannot run."""
    reason = _why_no_gpu()
    if reason:
        without = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=without)
        config.stash[_left_out] = (len(without), reason)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands the number to the process that prints the summary, where pytest-xdist runs several."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(_left_out, (0, ""))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes it there; every worker collects all tests."""
    if "left_out" in getattr(node, "workeroutput", {}):
        node.config.stash[_left_out] = tuple(node.workeroutput["left_out"])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Ends with one line of what was left out and why."""
    left_out, reason = config.stash.get(_left_out, (0, ""))
    parts = [f"{left_out} for GPUs ({reason})"] if left_out else []
    skipped = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())
    )
    parts += [f"{count} skipped ({why})" for why, count in skipped.most_common()]
    if parts:
        terminalreporter.write_line(f"left out: {', '.join(parts)}")


def pytest_runtest_setup() -> None:
    """A test draws the same numbers alone as among others, from PyTorch, Python and NumPy."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (PyG draws there)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every device that the operators run on."""
    return request.param


@pytest.fixture
def reasons(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[pytest.LogCaptureFixture]:
    """Log records of FastSparse, including warnings, as in a new process."""
    from fastsparse_core import SlowPathWarning

    monkeypatch.setattr("fastsparse_core.log.seen", set())
    for package in ("fastsparse_core", "fastsparse_pyg", "fastsparse_dgl"):
        caplog.set_level("INFO", logger=package)
    show = warnings.showwarning

    def record(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if issubclass(category, SlowPathWarning):
            logging.getLogger("fastsparse_core").warning(message)
        else:
            show(message, category, *where)

    with warnings.catch_warnings():
        warnings.simplefilter("always", SlowPathWarning)
        monkeypatch.setattr(warnings, "showwarning", record)
        yield caplog


@pytest.fixture
def graphs_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device that a test runs on has CUDA graphs, or something like them."""
    from simulated_graphs import simulate

    monkeypatch.setattr("fastsparse_core.log.seen", set())
    if "device" not in request.fixturenames or request.getfixturevalue("device") == "cpu":
        simulate(monkeypatch)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Clears the caches of ``torch.compile`` before and after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.freeze()  # the compiler keeps 600,000 objects, which each later collection would visit, for a second


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
def stored_in_quads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Binary sparse blocks in quads, however cheap whole blocks are, and runs of several windows.

    The kernels then cut the last block of nearly every window, which small structures would not need.
    """
    monkeypatch.setattr("fastsparse_core.formats.bsb.vectors_together", lambda *_: 4)
    from fastsparse_core import gpu

    with gpu.use(resident_warps=4):
        yield


@pytest.fixture
def data_folder() -> Path:
    """Folder with real graphs as .npz files, named by FASTSPARSE_DATA."""
    folder = os.environ.get("FASTSPARSE_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs real graphs: set FASTSPARSE_DATA to their folder")
    return Path(folder)
