"""``python -m fastsparse_core.doctor``: checks the installation of FastSparse.

The report shows versions, GPUs, the CPU and CUDA parts of the extension, and a self-check of every operator
on every device. For each problem, one line tells how to solve it. ``--json`` prints the report as JSON. The
exit code is 0 if FastSparse can be used, else 1. Without the package rich and without ``--json``, the doctor
prints only the problems, and the exit code is 1.

A missing or broken package must not stop the doctor. So errors of ``import torch`` are caught, and PyG, DGL
and other packages are imported in separate processes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fastsparse_core.doctor_report import Key, Problem, Report, as_json, print_tables
from fastsparse_core.self_check import Check, check_operators, first_line

_OLDEST_ARCH = 80
#: Major version of CUDA -> the first driver that supports it. This driver runs programs of all minor
#: versions. Errors of the extension have the same numbers (`old_driver_text` in
#: kernels/include/fastsparse/on_device.h).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
#: Command that builds FastSparse again, without pip's cache, which may contain a build without CUDA kernels.
_REBUILD = "python -m pip install --force-reinstall --no-deps --no-cache-dir fastsparse-gnn"
_REBUILD += " (or, in a checkout, -e .)"


@dataclass(frozen=True)
class Component:
    """A package that FastSparse works with.

    Attributes:
        title: name of the package in the report.
        distribution: name of the package for pip.
        probe: Python code that imports the package.
        cure: advice for the user if the import fails.
        breaks: True if FastSparse cannot be used if the import fails.
    """

    title: str
    distribution: str
    probe: str
    cure: str
    breaks: bool = False


COMPONENTS = (
    Component(
        "PyG",
        "torch_geometric",
        "import torch_geometric",
        "python -m pip install --upgrade torch_geometric",
        breaks=True,
    ),
    Component(
        "DGL",
        "dgl",
        # The plugin is imported first, because it makes DGL 2.x importable under a newer PyTorch.
        "import contextlib\nwith contextlib.suppress(Exception):\n    import fastsparse_dgl\nimport dgl",
        "python -m pip install dgl==2.1.0 packaging pandas, and import fastsparse_dgl before dgl",
        breaks=True,
    ),
    Component(
        "torch-scatter",
        "torch_scatter",
        "import torch_scatter",
        "rebuild it for this PyTorch (python -m pip install --force-reinstall --no-build-isolation --no-deps "
        "torch-scatter) or uninstall it: it is optional",
    ),
    Component(
        "ogb",
        "ogb",
        # ogb asks the network for a newer version of itself unless `outdated` cannot be imported.
        "import sys\nsys.modules['outdated'] = None\nimport ogb",
        "python -m pip install --upgrade ogb",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Examines this environment and prints the report.

    Args:
        arguments: command-line arguments; None: the arguments of this process.

    Returns:
        The exit code: 0 if FastSparse can be used, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="fastsparse doctor", description="Shows what is installed and checks whether it works."
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    wants_json = parser.parse_args(arguments).json
    report = examine()
    if wants_json:
        print(as_json(report))
        return 0 if report.usable else 1
    try:
        print_tables(report)
    except ImportError:
        report.problems.append(
            Problem("rich-missing", "rich is missing", "python -m pip install rich", breaks=True)
        )
        for problem in report.problems:
            print(f"{problem.what} [{problem.key}]\n    cure: {problem.cure}")
    return 0 if report.usable else 1


def examine() -> Report:
    """Examines this environment; never raises.

    Returns:
        The findings.
    """
    report = Report()
    report.versions.append(("Python", platform.python_version(), "ok"))
    torch = _examine_torch(report)
    _examine_components(report)
    build_info = _examine_extension(report, torch)
    if torch is not None:
        _examine_gpus(report, torch, build_info)
        if build_info is not None:
            _examine_profiles(report, torch)
            _examine_operators(report, torch, build_info)
    return report


# ---------------------------------------------------------------------------------------- installation


def _installed_version(distribution: str) -> str | None:
    """Version in a package's metadata, even if the package cannot be imported; None: not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _examine_torch(report: Report) -> Any | None:
    """Imports PyTorch; returns the module, or None after reporting why the import failed."""
    try:
        torch = importlib.import_module("torch")
        torch.zeros(1)
    except Exception as error:
        installed = _installed_version("torch")
        report.versions.append(("PyTorch", installed or "-", "broken" if installed else "not installed"))
        report.problems.append(
            Problem(
                "torch-broken",
                f"PyTorch cannot be imported: {first_line(error)}",
                f"python -m pip install {'--force-reinstall ' if installed else ''}'torch>=2.6'",
                breaks=True,
            )
        )
        return None
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    report.versions.append(("PyTorch", f"{torch.__version__}, {built_for}", "ok"))
    major, minor = (int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if (major, minor) < (2, 6):
        report.problems.append(
            Problem(
                "torch-old",
                f"PyTorch {torch.__version__} is older than 2.6, the oldest supported version",
                "python -m pip install --upgrade 'torch>=2.6'",
            )
        )
    return torch


def _probe(component: Component) -> str:
    """Imports a component in a separate process, so that a crash does not end the doctor.

    Returns:
        An empty string, or the reason why the import failed.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-W", "ignore", "-c", component.probe]
    try:
        done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return first_line(error)
    if done.returncode == 0:
        return ""
    return first_line(done.stderr) if done.stderr.strip() else f"the import ended with {done.returncode}"


def _examine_components(report: Report) -> None:
    """Reports the versions of `COMPONENTS`, and problems of those that cannot be imported."""
    versions = [_installed_version(component.distribution) for component in COMPONENTS]
    installed = [component for component, version in zip(COMPONENTS, versions, strict=True) if version]
    with ThreadPoolExecutor() as pool:
        reasons = dict(
            zip((component.title for component in installed), pool.map(_probe, installed), strict=True)
        )
    for component, version in zip(COMPONENTS, versions, strict=True):
        reason = reasons.get(component.title)
        if version is None:
            report.versions.append((component.title, "-", "not installed (optional)"))
        elif reason:
            report.versions.append((component.title, version, "broken"))
            what = f"{component.title} {version} cannot be imported: {reason}"
            report.problems.append(Problem("import-failed", what, component.cure, component.breaks))
        else:
            report.versions.append((component.title, version, "ok"))
    if not {"PyG", "DGL"} & reasons.keys():
        report.problems.append(
            Problem(
                "no-framework",
                "neither PyG nor DGL is installed, so FastSparse has no layers",
                "python -m pip install 'fastsparse-gnn[pyg]' or 'fastsparse-gnn[dgl]'",
            )
        )


def _examine_extension(report: Report, torch: Any | None) -> dict[str, Any] | None:
    """Imports the extension; returns its build_info(), or None after reporting why the import failed.

    Without PyTorch, the import is not tried, because the extension uses PyTorch's OpenMP library.
    """
    version = _installed_version("fastsparse-gnn")
    report.versions.append(
        ("fastsparse-gnn", version or "-", "ok" if version else "not installed: a checkout")
    )
    try:
        info: dict[str, Any] = importlib.import_module("fastsparse_core._C").build_info()
    except Exception as error:
        if torch is None:
            report.build.append(("both halves", "not examined: they need PyTorch"))
            return None
        report.build.append(("CPU half", "missing"))
        report.build.append(("CUDA half", "missing"))
        what = f"the extension fastsparse_core._C cannot be imported: {first_line(error)}"
        report.problems.append(Problem("extension-missing", what, _REBUILD, breaks=True))
        return None
    threads = "OpenMP" if info["openmp"] else "one thread: its compiler had no OpenMP"
    report.build.append(("CPU half", f"built ({info['compiler']}, {threads})"))
    built = "not built"
    if info["cuda"]:
        major, minor = divmod(info["cuda_version"] // 10, 100)
        built = f"built with CUDA {major}.{minor} for architectures {info['cuda_archs']}"
    report.build.append(("CUDA half", built))
    return info


# ------------------------------------------------------------------------------------------------ GPUs


def covers(built: str, arch: str) -> bool:
    """Tells whether a build contains code that runs on a GPU's architecture.

    Args:
        built: ``build_info()["cuda_archs"]``, for example ``"80;90+PTX"``.
        arch: architecture of the GPU, for example ``"89"``.

    Returns:
        True if the build has machine code for the same major version and the same or an older minor version,
        or PTX for the same or an older architecture.
    """
    for entry in filter(None, built.split(";")):
        digits, _, ptx = entry.partition("+")
        same_major = digits[:-1] == arch[:-1] and int(digits) <= int(arch)
        if same_major or (ptx and int(digits) <= int(arch)):
            return True
    return False


def _gpus_of_driver() -> list[tuple[str, str, str]]:
    """Name, architecture and driver of every GPU that nvidia-smi lists, even if PyTorch finds none."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        printed = subprocess.run(command, text=True, capture_output=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = re.findall(r"^(.+), (\d+)\.(\d+), ([\d.]+)\s*$", printed, re.M)
    return [(name, major + minor, driver) for name, major, minor, driver in found]


def _drivers() -> str:
    """Part of a message: the oldest driver for each major version of CUDA."""
    return ", ".join(f"CUDA {major} needs {driver} or newer" for major, driver in OLDEST_DRIVER.items())


def _examine_gpus(report: Report, torch: Any, build_info: dict[str, Any] | None) -> None:
    """Reports the GPUs, and GPUs that PyTorch or this build cannot use."""
    if not torch.cuda.is_available():
        needed = OLDEST_DRIVER.get(int((torch.version.cuda or "0").partition(".")[0]), 0)
        found = _gpus_of_driver()
        report.gpus += [(name, arch, "-", "not usable by this PyTorch") for name, arch, _ in found]
        driver = found[0][2] if found else ""
        if found and int(driver.partition(".")[0]) < needed:
            cure = f"update the driver, or install a PyTorch that is built for an older CUDA: {_drivers()}"
            what = f"PyTorch (CUDA {torch.version.cuda}) needs driver {needed} or newer, not {driver}"
            report.problems.append(Problem("driver-old", what, cure))
        elif found:
            cure = "install a PyTorch whose CUDA version this driver supports (nvidia-smi shows it)"
            what = "there is a GPU, but torch.cuda.is_available() is False"
            report.problems.append(Problem("gpu-unusable", what, cure))
        return
    archs = set()
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        arch = f"{device.major}{device.minor}"
        archs.add(arch)
        if build_info is None or not build_info["cuda"]:
            status = "CUDA half not built"
        else:
            status = "ok" if covers(build_info["cuda_archs"], arch) else "not built for this architecture"
        name = f"cuda:{index} {device.name}"
        report.gpus.append((name, arch, f"{device.total_memory / 2**30:.0f} GiB", status))
    if build_info is None:
        return
    too_old = sorted(arch for arch in archs if int(arch) < _OLDEST_ARCH)
    if too_old:
        what = f"the kernels need GPUs of architecture {_OLDEST_ARCH} or newer, not {';'.join(too_old)}"
        report.problems.append(Problem("gpu-old", what, "keep tensors on the CPU or on another GPU"))
    archs.difference_update(too_old)
    wanted = ";".join(sorted(archs, key=int))
    if not build_info["cuda"] and archs:
        report.problems.append(
            Problem(
                "cuda-half-missing",
                "there is a GPU, but FastSparse was built without CUDA kernels, usually because nvcc was not "
                "found",
                f"python -m pip install nvidia-cuda-nvcc nvidia-cuda-cccl (or nvcc on PATH), then {_REBUILD}",
            )
        )
    elif not all(covers(build_info["cuda_archs"], arch) for arch in archs):
        what = f"built for architectures {build_info['cuda_archs']}, but the GPUs here are {wanted}"
        cure = f"FASTSPARSE_CUDA_ARCHS='{wanted}' {_REBUILD}"
        report.problems.append(Problem("gpu-not-covered", what, cure, breaks=True))


def _examine_profiles(report: Report, torch: Any) -> None:
    """Reports every GPU's profile, which decides which kernels run on the GPU."""
    from fastsparse_core import gpu

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            profile = gpu.profile_of(torch.device("cuda", index))
        except ValueError as error:
            cure = "delete that file, or run `python -m fastsparse_core.tune`"
            report.problems.append(Problem("gpu-profile", str(error), cure, breaks=True))
            continue
        sizes = f"{profile.num_sms} SMs, L2 {profile.l2_bytes / 2**20:.0f} MiB"
        report.profiles.append((f"cuda:{index} {profile.name}", profile.source, sizes))


# ------------------------------------------------------------------------------------------- operators


def _examine_operators(report: Report, torch: Any, build_info: dict[str, Any]) -> None:
    """Runs every operator's self-check on the CPU and on every GPU."""
    devices = ["cpu"]
    if build_info["cuda"] and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability
        gpus = range(torch.cuda.device_count())
        devices += [f"cuda:{index}" for index in gpus if capability(index) >= divmod(_OLDEST_ARCH, 10)]
    for device in devices:
        report.checks += check_operators(device)
    for check in report.checks:
        if check.passed:
            continue
        what = f"{check.operator} on {check.device}: "
        if check.error is None:
            what += check.message
        else:
            what += f"differs from the reference by {check.error:.1e}"
        key, cure = _kind_of_failure(check)
        if key == "driver-old" and any(problem.key == key for problem in report.problems):
            continue  # the old driver was reported before, as the cause of all these failures
        report.problems.append(Problem(key, what, cure, breaks=True))


def _kind_of_failure(check: Check) -> tuple[Key, str]:
    """Key of the problem that made a self-check fail, and advice for the user in one line."""
    if "needs driver" in check.message:
        return "driver-old", f"update the driver, or build with the nvcc of an older CUDA: {_drivers()}"
    if "no kernel image" in check.message:
        return (
            "no-kernel-image",
            f"FASTSPARSE_CUDA_ARCHS=90 {_REBUILD}, with this GPU's architecture instead of 90",
        )
    if "out of memory" in check.message:
        cure = "free some GPU memory (nvidia-smi shows which process uses it) and run the doctor again"
        return "out-of-memory", cure
    return "check-failed", f"{_REBUILD}; if that does not help, report this output"


if __name__ == "__main__":
    sys.exit(main())
