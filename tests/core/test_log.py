"""What is logged once: log records and warnings."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import fastsparse_core
from fastsparse_core import _C, SlowPathWarning, device
from fastsparse_core.log import info_once, warn_once


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr("fastsparse_core.log.seen", set())


def run(script):
    """The warnings of a script, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "SlowPathWarning" in line]


def test_a_record_stays_due_while_logging_is_off(caplog):
    logger = logging.getLogger("fastsparse_core.test_log")
    with caplog.at_level(logging.WARNING, logger.name):
        info_once(logger, "a reason")
    assert not caplog.records
    with caplog.at_level(logging.INFO, logger.name):
        info_once(logger, "a reason")
        info_once(logger, "a reason")
        info_once(logger, "another")
    assert caplog.messages == ["a reason", "another"]


def test_a_warning_comes_once_and_names_the_users_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            warn_once("a reason")
        fastsparse_core.sddmm(
            fastsparse_core.Adjacency.from_coo(torch.tensor([0]), torch.tensor([0]), (1, 1)),
            torch.ones(1, 4),
            torch.ones(1, 4),
            algorithm="flashsparse",
        )
    assert [each.category for each in caught] == [SlowPathWarning] * 2
    assert [each.filename for each in caught] == [__file__] * 2
    assert str(caught[0].message) == "a reason"
    assert "'flashsparse' needs a GPU" in str(caught[1].message)


def test_a_script_is_the_user_too(tmp_path):
    """Its frame is the outermost one; an import has frames of Python's own in between."""
    (tmp_path / "imported.py").write_text(
        "from fastsparse_core.log import warn_once\n\nwarn_once('while a module is imported')\n"
    )
    script = tmp_path / "script.py"
    script.write_text("import torch_geometric.imported\ntorch_geometric.imported.warn_once('in a script')\n")
    (tmp_path / "torch_geometric").mkdir()
    (tmp_path / "torch_geometric" / "__init__.py").touch()
    (tmp_path / "imported.py").rename(tmp_path / "torch_geometric" / "imported.py")
    assert run(script) == [
        f"{script}:1: SlowPathWarning: while a module is imported",
        f"{script}:2: SlowPathWarning: in a script",
    ]


def test_a_trace_warns_and_the_compiled_code_does_not(fresh_compiler):
    logger = logging.getLogger("fastsparse_core")

    def double(x):
        warn_once(f"features of {x.dtype}")
        info_once(logger, "nothing")
        return 2 * x

    compiled = torch.compile(double, fullgraph=True, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SlowPathWarning)
        for _ in range(2):
            assert compiled(torch.ones(3)).tolist() == [2.0] * 3
    assert [str(each.message) for each in caught] == ["features of torch.float32"]
    assert [each.filename for each in caught] == [__file__]


@pytest.fixture
def cpu_half_beside_a_gpu(monkeypatch, tmp_path):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(device, "_HAS_CUDA_KERNELS", False)
    files = tuple(str(tmp_path / Path(pattern).name) for pattern in device._GPU_FILES)
    monkeypatch.setattr(device, "_GPU_FILES", files)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize("file", ["nvidia0", "nvidia12", "libcuda.so.1"])  # the last one is WSL's
def test_a_gpu_without_kernels_is_named(cpu_half_beside_a_gpu, file):
    (cpu_half_beside_a_gpu / "nvidia0").rename(cpu_half_beside_a_gpu / file)
    assert "has no CUDA kernels" in device.unusable_gpu()
    assert "python -m pip install nvidia-cuda-nvcc" in device.unusable_gpu()
    assert (
        "--no-cache-dir fastsparse-gnn" in device.unusable_gpu()
    )  # pip's cache has the build without kernels


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="CUDA is in use, so there is a GPU")
@pytest.mark.parametrize("why", ["kernels", "no file", "hidden", "a PyTorch for CPUs"])
def test_no_gpu_to_use_is_no_warning(cpu_half_beside_a_gpu, monkeypatch, why):
    if why == "kernels":
        monkeypatch.setattr(device, "_HAS_CUDA_KERNELS", True)
    elif why == "no file":
        (cpu_half_beside_a_gpu / "nvidia0").rename(cpu_half_beside_a_gpu / "nvidiactl")
    elif why == "hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    else:
        monkeypatch.setattr(torch.version, "cuda", None)
    assert device.unusable_gpu() == ""


def test_the_import_warns_and_leaves_cuda_alone(cpu_half_beside_a_gpu, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import glob, importlib.util, sys, types\n"
        "import torch\n"
        "torch.version.cuda, glob.glob = '13.0', lambda pattern: [pattern]\n"
        "torch.cuda.is_available = None\n"
        f"spec = importlib.util.spec_from_file_location('fastsparse_core._C', {_C.__file__!r})\n"
        "sys.modules[spec.name] = extension = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(extension)\n"
        "extension.build_info = lambda: {'cuda': False}\n"
        "import fastsparse_core\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    assert run(script) == [f"{script}:9: SlowPathWarning: {device.unusable_gpu()}"]


def test_an_old_name_works_and_warns_at_the_users_line():
    with pytest.warns(
        DeprecationWarning, match="CapturedStep is now fastsparse_core.capture; version"
    ) as said:
        from fastsparse_core import CapturedStep
    assert {warning.filename for warning in said} == {__file__}
    counter = torch.zeros(())
    step = CapturedStep(lambda: counter.add_(1), warm_up=2, stream=None)
    assert [float(step()) for _ in range(3)] == [1.0, 2.0, 3.0]
    with pytest.raises(AttributeError, match="module 'fastsparse_core' has no attribute 'CapturedSteps'"):
        fastsparse_core.CapturedSteps  # noqa: B018


def test_old_names_go_with_the_version_that_they_name():
    now = tuple(map(int, fastsparse_core.__version__.split(".")[:2]))
    for name, (_, new, last) in fastsparse_core._RENAMED.items():
        assert name not in fastsparse_core.__all__
        assert new in fastsparse_core.__all__
        assert now < tuple(map(int, last.split(".")))
