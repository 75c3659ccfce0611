"""What `setup.py build_ext`, `pip wheel .` and an sdist give."""

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from fastsparse_core import doctor

CHECKOUT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
VERSION = re.search(r'^version = "(.+)"$', (CHECKOUT / "pyproject.toml").read_text(), re.MULTILINE)[1]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
# In a process of its own: loads an extension from a file, without its package and so without torch.
LOAD = """
import ctypes, importlib.machinery, importlib.util, sys
ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)  # which comes with torch, else
loader = importlib.machinery.ExtensionFileLoader("fastsparse_core._C", sys.argv[1])
module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
loader.exec_module(module)
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "numpy")]
print(module.build_info())
"""


def elf(*command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run([*map(str, command)], text=True, capture_output=True, check=True).stdout


def assert_torch_free(extension):
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", elf("readelf", "--dynamic", "--wide", extension))
    assert needed
    allowed = re.compile(r"(libstdc\+\+|libm|libgcc_s|libomp|libc|libdl|librt|libpthread|ld-linux.*)\.so")
    assert [name for name in needed if not allowed.match(name)] == []
    wanted = elf("nm", "--dynamic", "--undefined-only", "--demangle", extension)
    assert re.findall(r"\b(?:torch|c10|at::|cudaLaunch|THP)\S*", wanted) == []


def test_the_extension_in_use_is_torch_free_and_exports_only_its_entry_point():
    spec = importlib.util.find_spec("fastsparse_core._C")
    assert_torch_free(spec.origin)
    exported = elf("nm", "--dynamic", "--defined-only", "--format=posix", spec.origin)
    # Weak and unique symbols of the C++ library's templates are shared by the language's rules.
    names = [line.split()[0] for line in exported.splitlines() if line.split()[1] not in "VWu"]
    assert names == ["PyInit__C"]


def test_there_is_one_openmp_runtime_and_it_is_the_one_of_torch():
    """With its number of threads: as many are busy in a kernel as `torch.set_num_threads` says."""
    code = """
import os, re
import torch
from fastsparse_core import Adjacency, spmm
def runtimes():
    return sorted(set(re.findall(r"/\\S*lib(?:gomp|omp|iomp5)[-.]\\S*", open("/proc/self/maps").read())))
before = runtimes()
torch.set_num_threads(1)
row = torch.arange(4096).repeat_interleave(32)
adjacency = Adjacency.from_coo(row, (row * 7919 + torch.arange(row.numel())) % 4096, (4096, 4096))
x = torch.randn(4096, 64)
tasks = lambda: len(os.listdir("/proc/self/task"))
spmm(adjacency, x)
alone = tasks()
torch.set_num_threads(3)
spmm(adjacency, x)
assert runtimes() == before, (before, runtimes())
assert len(before) == 1, before
assert tasks() - alone == 2, (alone, tasks())
"""
    kernels = Path(importlib.util.find_spec("fastsparse_core").origin).parents[1]
    env = {**os.environ, "PYTHONPATH": str(kernels)}
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr


def test_build_in_place_says_that_it_is_cpu_only_and_compiles_nothing_twice(checkout_copy, run_build):
    first = run_build("setup.py", "build_ext", "--inplace", cwd=checkout_copy)
    assert "fastsparse-gnn: building the CPU half only: FASTSPARSE_CUDA_ARCHS=none" in first
    assert (checkout_copy / "kernels" / "fastsparse_core" / f"_C{SUFFIX}").is_file()
    second = run_build("setup.py", "build_ext", "--inplace", cwd=checkout_copy)
    assert "fastsparse-gnn: 0 files compiled" in second


OLD_DRIVER = """
#include <iostream>
#include "fastsparse/on_device.h"
int main() {
#ifdef FASTSPARSE_WITH_CUDA
  try {
    fastsparse::on_device(0, [] { return 0; });
  } catch (const fastsparse::CudaError& error) {
    std::cout << fastsparse::text_of(error) << std::endl;
  }
#else
  for (int version : {11080, 12090, 13000})
    std::cout << fastsparse::old_driver_text(version, 12020) << std::endl;
#endif
}
"""


@pytest.fixture
def old_driver(tmp_path):
    """Compiles and runs OLD_DRIVER with a driver that reports CUDA 12.2; its lines."""

    def run(*options):
        source, driver = tmp_path / "old_driver.cpp", tmp_path / "driver.c"
        source.write_text(OLD_DRIVER)
        include = CHECKOUT / "kernels" / "include"
        command = ["c++", "-std=c++17", f"-I{include}", source, *options, "-o", tmp_path / "old_driver"]
        subprocess.run(command, check=True)
        driver.write_text("int cuDriverGetVersion(int* version) { *version = 12020; return 0; }\n")
        command = ["cc", "-shared", "-fPIC", driver, "-o", tmp_path / "libcuda.so.1"]
        subprocess.run(command, check=True)
        env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
        return subprocess.run(
            [tmp_path / "old_driver"], env=env, text=True, capture_output=True, check=True
        ).stdout.splitlines()

    return run


def test_the_error_of_an_old_driver_names_the_one_that_is_needed(old_driver):
    versions = {11: "11.8", 12: "12.9", 13: "13.0"}
    assert versions.keys() == doctor.OLDEST_DRIVER.keys()
    assert old_driver() == [
        "the NVIDIA driver is too old: it supports CUDA 12.2, and this build of FastSparse (CUDA "
        f"{versions[major]}) needs driver {driver} or newer; update the driver, or build FastSparse with an "
        "older nvcc"
        for major, driver in doctor.OLDEST_DRIVER.items()
    ]


def test_the_first_call_of_cuda_under_an_old_driver(old_driver, setup_py):
    cuda = setup_py.find_cuda({**os.environ, "FASTSPARSE_CUDA_ARCHS": "90"})
    if not isinstance(cuda, setup_py.Cuda) or "release 13" not in cuda.version:
        pytest.skip("needs CUDA 13")
    include_dirs = [f"-I{folder}" for folder in cuda.include_dirs]
    libraries = [str(cuda.static_runtime), "-ldl", "-lrt", "-lpthread"]
    (said,) = old_driver("-DFASTSPARSE_WITH_CUDA", *include_dirs, *libraries)
    assert said.startswith("the NVIDIA driver is too old: it supports CUDA 12.2, and this build")
    assert "needs driver 580 or newer" in said


@pytest.fixture(scope="module")
def wheel(checkout_copy, run_build, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    run_build("-m", "pip", "wheel", ".", *options, "--wheel-dir", folder, cwd=checkout_copy)
    (path,) = folder.glob(f"fastsparse_gnn-{VERSION}-*.whl")
    return path


def test_wheel_holds_the_three_packages_and_nothing_else(wheel, checkout_copy):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    plugins = ("fastsparse_pyg", "fastsparse_dgl", "fastsparse_run")
    plugins = {name for name in plugins if (checkout_copy / name).is_dir()}
    assert tops == {"fastsparse_core", f"fastsparse_gnn-{VERSION}.dist-info"} | plugins
    assert f"fastsparse_core/_C{SUFFIX}" in names
    for package, source in {
        "fastsparse_core": checkout_copy / "kernels" / "fastsparse_core",
        **{plugin: checkout_copy / plugin for plugin in plugins},
    }.items():
        modules = {f"{package}/{path.relative_to(source).as_posix()}" for path in source.rglob("*.py")}
        assert modules <= set(names)
        assert f"{package}/py.typed" in names
    kinds = {Path(name).suffix for name in names if ".dist-info/" not in name and not name.endswith("/")}
    assert kinds == {".py", ".pyi", ".typed", ".so", ".json"}  # the last: profiles of GPUs
    assert f"fastsparse_gnn-{VERSION}.dist-info/licenses/LICENSE" in names


def test_wheel_metadata(wheel):
    text = zipfile.ZipFile(wheel).read(f"fastsparse_gnn-{VERSION}.dist-info/METADATA").decode()
    metadata = email.message_from_string(text)
    extras = {"pyg", "dgl", "ogb", "scatter", "bench", "docs", "test", "all"}
    assert set(metadata.get_all("Provides-Extra")) == extras
    assert metadata["Requires-Python"] == ">=3.10"
    requires = [line for line in metadata.get_all("Requires-Dist") if "extra" not in line]
    assert sorted(requires) == ["numpy", "rich", "torch>=2.6"]
    (dgl,) = (line for line in metadata.get_all("Requires-Dist") if line.startswith("dgl"))
    assert 'python_version < "3.13"' in dgl


def test_wheel_works_without_the_torch_that_was_present_at_build_time(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    extension = tmp_path / "fastsparse_core" / f"_C{SUFFIX}"
    assert_torch_free(extension)
    # -I -S: no site-packages, so no torch of any version can be found.
    command = [sys.executable, "-I", "-S", "-c", LOAD, str(extension)]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "'cuda': False" in done.stdout


def test_sdist_holds_all_sources(checkout_copy, run_build, tmp_path):
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    run_build("-c", code, cwd=checkout_copy)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kernels = checkout_copy / "kernels"
    sources = {".cpp", ".cu", ".h", ".cuh", ".py"}
    wanted = {
        path.relative_to(checkout_copy).as_posix() for path in kernels.rglob("*") if path.suffix in sources
    }
    assert wanted <= names
    tops = {name.partition("/")[0] for name in names if name}
    metadata = {"PKG-INFO", "setup.cfg", "fastsparse_gnn.egg-info"}
    files = {"setup.py", "pyproject.toml", "README.md", "LICENSE"}
    packages = {"kernels", "fastsparse_pyg", "fastsparse_dgl", "fastsparse_run"}
    assert tops == packages | files | metadata
    assert not [name for name in names if re.search(r"\.(so|o|pyc|png)$|benchmarks/.*\.json$", name)]
