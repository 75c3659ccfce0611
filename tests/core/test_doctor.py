"""The doctor: right results pass, what is missing or broken is named with its cure, nothing crashes it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fastsparse_core
from fastsparse_core import doctor
from fastsparse_core.self_check import Check

PACKAGE = Path(fastsparse_core.__file__).parent
OPERATORS = [
    "spmm sum",
    "spmm mean",
    "spmm max",
    "spmm min",
    "sddmm",
    "sddmm flashsparse",
    "edge_softmax",
    "scatter mean",
    "scatter max",
    "scatter std",
    "scatter_softmax",
    "attention",
    "additive_attention",
    "gatv2_attention",
    "attention_weights",
    "additive_attention_weights",
    "gatv2_attention_weights",
    "maxk and ssd",
    "attention edge_attr",
    "gatv2_attention edge_attr",
    "multi_aggregate",
    "gine_aggregate",
    "gated_aggregate",
    "gated_edges",
    "gine_aggregate edge_attr",
    "gated_aggregate edge_attr",
]


def run_doctor(*search_path):
    """Runs the doctor as a user does, with folders in front of the search path."""
    path = os.pathsep.join(map(str, [*search_path, *filter(None, sys.path)]))
    env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "160"}
    return subprocess.run(
        [sys.executable, "-m", "fastsparse_core.doctor"],
        env=env,
        text=True,
        capture_output=True,
        timeout=1800,
    )


@pytest.fixture
def report():
    return doctor.Report()


@pytest.mark.slow
def test_a_healthy_environment_is_usable(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    assert doctor.main([]) == 0
    printed, complaints = capsys.readouterr()
    assert printed.rstrip().endswith("usable")
    assert "Traceback" not in complaints
    for text in (
        "Python",
        "PyTorch",
        "PyG",
        "DGL",
        "torch-scatter",
        "ogb",
        "CPU half",
        "CUDA half",
        *OPERATORS,
    ):
        assert text in printed


def assert_operators_pass(device):
    doctor.check_operators(device)
    checks = doctor.check_operators(device)
    assert [check.operator for check in checks] == OPERATORS
    assert [check.message for check in checks if not check.passed] == []
    assert all(check.milliseconds > 0 for check in checks)


def test_operators_pass_on_the_cpu():
    assert_operators_pass("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_operators_pass_on_every_gpu():
    for index in range(torch.cuda.device_count()):
        assert_operators_pass(f"cuda:{index}")


@pytest.mark.parametrize("wrong", [1e-3, float("nan"), float("inf")])
@pytest.mark.parametrize("name", fastsparse_core.ops.__all__)  # every public operator is checked
def test_a_wrong_result_is_found(report, monkeypatch, name, wrong):
    right = getattr(fastsparse_core, name)

    def spoilt(first, *others, **options):
        if name == "maxk":  # its result has no gradient sums
            return right(first + wrong, *others, **options)
        out = right(first, *others, **options)
        of = out[0] if isinstance(out, tuple) else out
        bad = of + wrong * of.detach().abs().max().clamp(min=1)  # errors are relative to the largest number
        return (bad, *out[1:]) if isinstance(out, tuple) else bad

    monkeypatch.setattr(fastsparse_core, name, spoilt)
    doctor._examine_operators(report, torch, {"cuda": False})
    failed = [title for title in OPERATORS if name in title.split()]
    assert [check.operator for check in report.checks if not check.passed] == failed
    assert not report.usable
    assert len(report.problems) == len(failed)
    assert f"{failed[0]} on cpu: differs from the reference by" in report.problems[0].what
    assert "force-reinstall" in report.problems[0].cure


def test_a_wrong_gradient_is_found(report, monkeypatch):
    right = fastsparse_core.attention

    def without_gradient_of_keys(adj, q, k, v, **edges):
        return right(adj, q, k.detach(), v, **edges) + 0 * k.sum()

    monkeypatch.setattr(fastsparse_core, "attention", without_gradient_of_keys)
    doctor._examine_operators(report, torch, {"cuda": False})
    assert [check.operator for check in report.checks if not check.passed] == [
        "attention",
        "attention edge_attr",
    ]


@pytest.mark.parametrize(
    ("message", "key", "cure"),
    [
        ("this build needs driver 580 or newer", "driver-old", "CUDA 12 needs 525 or newer"),
        ("no kernel image is available for execution on the device", "no-kernel-image", "FASTSPARSE_CUDA_"),
        ("out of memory", "out-of-memory", "free some GPU memory"),
        ("something else", "check-failed", "force-reinstall"),
    ],
)
def test_a_failing_operator_is_a_result(report, monkeypatch, message, key, cure):
    def fail(*args, **options):
        raise RuntimeError(f"spmm_csr failed: {message}")

    monkeypatch.setattr(fastsparse_core, "spmm", fail)
    doctor._examine_operators(report, torch, {"cuda": False})
    assert report.problems[0].what == f"spmm sum on cpu: RuntimeError: spmm_csr failed: {message}"
    assert report.problems[0].key == key
    assert cure in report.problems[0].cure
    assert not report.usable


@pytest.mark.parametrize(
    ("built", "arch", "expected"),
    [
        ("90", "90", True),
        ("80;90", "86", True),
        ("80;90", "89", True),
        ("86", "80", False),
        ("90", "100", False),
        ("80;90+PTX", "100", True),
        ("90+PTX", "120", True),
        ("90+PTX", "80", False),
        ("100", "103", True),
        ("", "90", False),
    ],
)
def test_covers(built, arch, expected):
    assert doctor.covers(built, arch) is expected


def component(probe, distribution="pip", breaks=True):
    return doctor.Component("DGL", distribution, probe, "install it again", breaks)


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ("raise OSError('undefined symbol: _ZN3c10')", "OSError: undefined symbol: _ZN3c10"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("import os; os.abort()", "the import ended with"),
    ],
)
def test_a_framework_that_cannot_be_imported(report, monkeypatch, probe, reason):
    monkeypatch.setattr(doctor, "COMPONENTS", (component(probe),))
    doctor._examine_components(report)
    (problem,) = report.problems
    assert reason in problem.what
    assert problem.cure == "install it again"
    assert not report.usable
    assert report.versions[0][2] == "broken"


def test_an_optional_helper_that_cannot_be_imported_leaves_the_rest_usable(report, monkeypatch):
    monkeypatch.setattr(doctor, "COMPONENTS", (component("raise ImportError('x')", breaks=False),))
    doctor._examine_components(report)
    assert report.problems
    assert report.usable


def test_no_framework_at_all(report, monkeypatch):
    monkeypatch.setattr(doctor, "COMPONENTS", (component("", distribution="no-such-distribution"),))
    doctor._examine_components(report)
    (problem,) = report.problems
    assert "neither PyG nor DGL" in problem.what
    assert "fastsparse-gnn[pyg]" in problem.cure
    assert report.usable


def test_a_hanging_import_is_ended(monkeypatch):
    def expire(*args, **options):
        raise subprocess.TimeoutExpired("python", 120)

    monkeypatch.setattr(subprocess, "run", expire)
    assert "timed out" in doctor._probe(component("while True: pass"))


def torch_with(*gpus):
    """What the doctor uses of torch, with some GPUs."""
    properties = [
        SimpleNamespace(name="H200", major=major, minor=minor, total_memory=2**37) for major, minor in gpus
    ]
    version = SimpleNamespace(cuda="13.0")
    cuda = SimpleNamespace(
        is_available=lambda: bool(gpus),
        device_count=lambda: len(gpus),
        get_device_properties=lambda index: properties[index],
    )
    return SimpleNamespace(cuda=cuda, version=version)


def test_gpus_that_the_build_covers(report):
    doctor._examine_gpus(report, torch_with((9, 0), (8, 9)), {"cuda": True, "cuda_archs": "80;90"})
    assert report.gpus == [
        ("cuda:0 H200", "90", "128 GiB", "ok"),
        ("cuda:1 H200", "89", "128 GiB", "ok"),
    ]
    assert report.problems == []


def test_a_gpu_that_the_build_does_not_cover(report):
    doctor._examine_gpus(report, torch_with((12, 0)), {"cuda": True, "cuda_archs": "80;90"})
    assert report.gpus[0][3] == "not built for this architecture"
    assert report.problems[0].what == "built for architectures 80;90, but the GPUs here are 120"
    assert report.problems[0].cure.startswith("FASTSPARSE_CUDA_ARCHS='120' ")
    assert not report.usable


def test_a_gpu_that_is_too_old(report):
    doctor._examine_gpus(report, torch_with((7, 5), (9, 0)), {"cuda": True, "cuda_archs": "80;90"})
    (problem,) = report.problems
    assert problem.what == "the kernels need GPUs of architecture 80 or newer, not 75"
    assert report.usable


def test_a_gpu_and_no_cuda_half(report):
    doctor._examine_gpus(report, torch_with((9, 0)), {"cuda": False, "cuda_archs": ""})
    assert "nvcc was not found" in report.problems[0].what
    assert report.usable


def test_a_gpu_that_torch_cannot_use(report, monkeypatch):
    monkeypatch.setattr(doctor, "_gpus_of_driver", lambda: [("H200", "90", "580.65.06")])
    doctor._examine_gpus(report, torch_with(), {"cuda": False, "cuda_archs": ""})
    assert report.gpus == [("H200", "90", "-", "not usable by this PyTorch")]
    assert "torch.cuda.is_available() is False" in report.problems[0].what
    assert report.usable


@pytest.mark.parametrize(("cuda", "needed"), [("12.8", None), ("13.0", 580)])
def test_a_driver_that_is_too_old_for_pytorch(report, monkeypatch, cuda, needed):
    monkeypatch.setattr(doctor, "_gpus_of_driver", lambda: [("H200", "90", "535.104.05")])
    torch = torch_with()
    torch.version.cuda = cuda
    doctor._examine_gpus(report, torch, {"cuda": False, "cuda_archs": ""})
    (problem,) = report.problems
    assert problem.key == ("driver-old" if needed else "gpu-unusable")
    if needed:
        assert problem.what == "PyTorch (CUDA 13.0) needs driver 580 or newer, not 535.104.05"
        assert "CUDA 12 needs 525 or newer" in problem.cure


def test_a_driver_that_is_too_old_for_this_build_is_one_problem(report, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("failed: the NVIDIA driver is too old: this build needs driver 580 or newer")

    for name in ("spmm", "sddmm"):
        monkeypatch.setattr(fastsparse_core, name, fail)
    doctor._examine_operators(report, torch, {"cuda": False})
    assert [problem.key for problem in report.problems] == ["driver-old"]
    assert not report.usable


def test_the_report_for_programs(monkeypatch, capsys):
    report = doctor.Report(versions=[("Python", "3.11", "ok")], gpus=[("H200", "90", "-", "ok")])
    report.checks.append(Check("spmm sum", "cpu", float("nan"), 1.5))
    report.problems.append(doctor.Problem("check-failed", "spmm differs", "build again", breaks=True))
    monkeypatch.setattr(doctor, "examine", lambda: report)
    assert doctor.main(["--json"]) == 1
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed["usable"] is False
    assert printed["versions"] == [{"component": "Python", "version": "3.11", "status": "ok"}]
    assert printed["gpus"][0]["gpu"] == "H200"
    assert printed["checks"][0]["passed"] is False
    assert printed["problems"][0]["cure"] == "build again"
    assert {"profiles", "build"} <= set(printed)


def test_gpus_of_driver(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 9.0, 580.95.05'\necho 'NVIDIA L4, 8.9, 535.1'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert doctor._gpus_of_driver() == [
        ("NVIDIA H200", "90", "580.95.05"),
        ("NVIDIA L4", "89", "535.1"),
    ]
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert doctor._gpus_of_driver() == []


@pytest.fixture
def quick_frameworks(tmp_path):
    """Empty modules in place of the frameworks, whose imports take seconds."""
    for component in doctor.COMPONENTS:
        (tmp_path / f"{component.distribution}.py").touch()


@pytest.mark.usefixtures("quick_frameworks")
def test_torch_broken(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')\n")
    done = run_doctor(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    reason = "libtorch_cpu.so: cannot open shared object file"
    assert f"broken: PyTorch cannot be imported: {reason} [torch-broken]" in done.stdout
    assert "docs/troubleshooting.md" in done.stdout
    assert "cure: python -m pip install --force-reinstall 'torch>=2.6'" in done.stdout


@pytest.mark.usefixtures("quick_frameworks")
def test_without_torch_the_extension_is_not_blamed(monkeypatch):
    """It cannot be imported then, for it takes OpenMP from PyTorch; to install it again would not help."""

    def absent(name):
        reason = "No module named 'torch'" if name == "torch" else "undefined symbol: omp_get_thread_num"
        raise ImportError(reason)

    monkeypatch.setattr(doctor.importlib, "import_module", absent)
    monkeypatch.setattr(doctor, "_installed_version", lambda name: None)
    report = doctor.examine()
    broken = [problem for problem in report.problems if problem.breaks]
    assert [(problem.key, problem.cure) for problem in broken] == [
        ("torch-broken", "python -m pip install 'torch>=2.6'")
    ]
    assert report.build == [("both halves", "not examined: they need PyTorch")]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_frameworks")
def test_extension_missing(tmp_path):
    ignore = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "fastsparse_core", ignore=ignore)
    # An editable installation would find the module in the checkout if there were none at all.
    reason = "No module named 'fastsparse_core._C'"
    (tmp_path / "fastsparse_core" / "_C.py").write_text(f"raise ModuleNotFoundError({reason!r})\n")
    done = run_doctor(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"the extension fastsparse_core._C cannot be imported: {reason}" in done.stdout
    assert (
        "cure: python -m pip install --force-reinstall --no-deps --no-cache-dir fastsparse-gnn" in done.stdout
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quick_frameworks")
def test_extension_of_another_python_or_damaged(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "fastsparse_core", ignore=shutil.ignore_patterns("__pycache__"))
    (extension,) = (tmp_path / "fastsparse_core").glob("_C*.so")
    extension.write_bytes(b"not an ELF file")
    done = run_doctor(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the extension fastsparse_core._C cannot be imported" in done.stdout


def test_torch_too_old(report, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    doctor._examine_torch(report)
    assert "older than 2.6" in report.problems[0].what


def test_rich_missing(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", doctor.Report)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert doctor.main([]) == 1
    assert "rich is missing [rich-missing]\n    cure: python -m pip install rich" in capsys.readouterr().out
