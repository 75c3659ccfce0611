"""The functions of setup.py: architectures, finding nvcc, compiling with a cache by content."""

import email
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from setuptools.errors import CompileError

KNOWN = ["80", "86", "89", "90", "100", "120"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", (["90"], [])),
        ("80;90", (["80", "90"], [])),
        ("90, 80", (["80", "90"], [])),
        ("8.0 9.0", (["80", "90"], [])),
        ("90;100;100", (["90", "100"], [])),
        ("80;12.0+PTX", (["80", "120"], ["120"])),
        (" 90+ptx ", (["90"], ["90"])),
    ],
)
def test_parse_archs(setup_py, text, expected):
    assert setup_py.parse_archs(text) == expected


@pytest.mark.parametrize("text", ["sm_90", "hopper", "9", "80;;90;", "90-PTX"])
def test_parse_archs_says_what_was_expected(setup_py, text):
    with pytest.raises(ValueError, match="FASTSPARSE_CUDA_ARCHS.*expected architectures such as '90'"):
        setup_py.parse_archs(text)


@pytest.mark.parametrize(
    ("requested", "visible", "known", "expected"),
    [
        ("90", ["80"], KNOWN, (["90"], [])),
        ("", ["90", "90"], KNOWN, (["90"], [])),
        ("", ["90", "80"], KNOWN, (["80", "90"], [])),
        ("all", ["90"], KNOWN, (["80", "86", "89", "90", "100", "120"], ["120"])),
        ("ALL", [], KNOWN[:4], (["80", "86", "89", "90"], ["90"])),
        ("all", [], ["87", "88"], (["88"], ["88"])),
        # a GPU newer than nvcc, alone or together with one that it knows: PTX must cover it
        ("", ["120"], KNOWN[:4], (["90"], ["90"])),
        ("", ["80", "120"], KNOWN[:4], (["80", "90"], ["90"])),
        ("", ["88"], KNOWN, (["86"], ["86"])),
        # nothing that could run here
        ("", [], KNOWN, ([], [])),
        ("", ["75"], KNOWN, ([], [])),
    ],
)
def test_choose_archs(setup_py, requested, visible, known, expected):
    assert setup_py.choose_archs(requested, visible, known) == expected


def test_choose_archs_rejects_what_nvcc_cannot_build(setup_py):
    with pytest.raises(ValueError, match=r"support 80;86;89, not 90;100; remove the latter"):
        setup_py.choose_archs("80;90;100", [], KNOWN[:3])


def fake_nvcc(folder: Path, script: str = "exit 1") -> Path:
    """An executable called nvcc in `folder`/bin."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    return nvcc


@pytest.fixture
def no_system_toolkit(setup_py, monkeypatch, tmp_path):
    monkeypatch.setattr(setup_py, "SYSTEM_TOOLKIT", tmp_path / "nothing")


@pytest.mark.usefixtures("no_system_toolkit")
def test_find_nvcc(setup_py, tmp_path, monkeypatch):
    home = fake_nvcc(tmp_path / "home")
    on_path = fake_nvcc(tmp_path / "path")
    older = fake_nvcc(tmp_path / "site" / "nvidia" / "cu12")
    newer = fake_nvcc(tmp_path / "site" / "nvidia" / "cu13")
    site = [tmp_path / "missing", tmp_path / "site"]
    path = {"PATH": str(on_path.parent)}

    assert setup_py.find_nvcc({"CUDA_HOME": str(tmp_path / "home"), **path}, site) == home
    assert setup_py.find_nvcc({"CUDA_PATH": str(tmp_path / "home"), **path}, site) == home
    assert setup_py.find_nvcc({"CUDA_HOME": "/no/such/folder", **path}, site) == on_path
    assert setup_py.find_nvcc(path, site) == on_path
    assert setup_py.find_nvcc({"PATH": ""}, site) == newer
    newer.chmod(0o644)
    assert setup_py.find_nvcc({"PATH": ""}, site) == older
    assert setup_py.find_nvcc({"PATH": ""}, []) is None
    monkeypatch.setattr(setup_py, "SYSTEM_TOOLKIT", tmp_path / "home")
    assert setup_py.find_nvcc({"PATH": ""}, []) == home


@pytest.mark.usefixtures("no_system_toolkit")
def test_find_cuda_gives_the_reason_why_not(setup_py, tmp_path, monkeypatch):
    monkeypatch.setattr(setup_py, "site_dirs", list)
    assert setup_py.find_cuda({"FASTSPARSE_CUDA_ARCHS": "none"}) == "FASTSPARSE_CUDA_ARCHS=none"
    assert setup_py.find_cuda({"PATH": ""}).startswith("no nvcc in CUDA_HOME, CUDA_PATH, PATH, pip packages")
    broken = fake_nvcc(tmp_path / "broken")
    assert setup_py.find_cuda({"CUDA_HOME": str(tmp_path / "broken")}) == f"{broken} does not run"
    bare = fake_nvcc(tmp_path / "bare", f"echo '#$ TOP={tmp_path}/bare/bin/..'")
    reason = f"{bare} comes without libcudart_static.a"
    assert setup_py.find_cuda({"CUDA_HOME": str(tmp_path / "bare")}) == reason
    (tmp_path / "bare" / "lib64").mkdir()
    (tmp_path / "bare" / "lib64" / "libcudart_static.a").touch()
    bare.write_text(bare.read_text() + "echo compute_75\n")
    reason = f"{bare} builds for no architecture from 80 on"
    assert setup_py.find_cuda({"CUDA_HOME": str(tmp_path / "bare")}) == reason


@pytest.mark.usefixtures("no_system_toolkit")
@pytest.mark.parametrize("library_folder", ["lib", "lib64"])
def test_find_cuda_reads_nvccs_own_plan(setup_py, tmp_path, monkeypatch, library_folder):
    """With the layout of a toolkit (lib64) and that of the pip packages (lib, and no -L in the plan)."""
    toolkit = tmp_path / "toolkit"
    script = f"""case "$*" in
      *-dryrun*) echo '#$ TOP={toolkit}/bin/..'
                 echo '#$ INCLUDES="-I{toolkit}/include"  '
                 echo '#$ SYSTEM_INCLUDES="-isystem" "{toolkit}/include/cccl"  ' ;;
      *--list-gpu-arch*) printf 'compute_75\\ncompute_80\\ncompute_90\\n' ;;
      *--version*) echo 'release 99' ;;
    esac"""
    nvcc = fake_nvcc(toolkit, script)
    runtime = toolkit / library_folder / "libcudart_static.a"
    runtime.parent.mkdir()
    runtime.touch()
    monkeypatch.setattr(setup_py, "visible_gpu_archs", list)

    reason = setup_py.find_cuda({"CUDA_HOME": str(toolkit)})
    assert reason.startswith("no GPU here; to build anyway, set FASTSPARSE_CUDA_ARCHS")
    everywhere = {"CUDA_HOME": str(toolkit), "FASTSPARSE_CUDA_ARCHS": "all"}
    cuda = setup_py.find_cuda(everywhere)
    assert cuda.nvcc == nvcc
    assert cuda.static_runtime == runtime
    assert cuda.include_dirs == [f"{toolkit}/include", f"{toolkit}/include/cccl"]
    assert cuda.version == "release 99\n"
    assert cuda.archs == "80;90+PTX"
    assert cuda.gencode == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90,code=compute_90",
    ]

    # Before CUDA 12 nvcc does not know what only architecture 9.0 has.
    nvcc.write_text(nvcc.read_text().replace("release 99", "release 11.8"))
    assert setup_py.find_cuda(everywhere).archs == "80+PTX"


def test_visible_gpu_archs(setup_py, monkeypatch):
    monkeypatch.setattr(setup_py, "output_of", lambda *command: "9.0\n12.0\n")
    assert setup_py.visible_gpu_archs() == ["90", "120"]
    monkeypatch.setattr(setup_py, "output_of", lambda *command: "NVIDIA-SMI has failed: no driver")
    assert setup_py.visible_gpu_archs() == []


@pytest.fixture
def small_project(setup_py, tmp_path, monkeypatch):
    """A project of three sources and two headers in place of this one; only one source includes them."""
    kernels = tmp_path / "kernels"
    for name, text in {
        "include/project/answer.h": "#pragma once\nconstexpr int answer = 42;\n",
        "include/project/outer.h": '#include <cmath>\n  # include "project/answer.h"  // as in a novel\n',
        "cpu/one.cpp": '#include "project/outer.h"\n#include "math.h"\nint one() { return answer; }\n',
        "cpu/two.cpp": "int two() { return 2; }\n",
        "binding.cpp": "int binding() { return 0; }\n",
    }.items():
        (kernels / name).parent.mkdir(parents=True, exist_ok=True)
        (kernels / name).write_text(text)
    monkeypatch.setattr(setup_py, "ROOT", tmp_path)
    monkeypatch.setattr(setup_py, "KERNELS", kernels)
    return kernels


def test_objects_are_cached_by_content(setup_py, small_project, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FASTSPARSE_PROGRESS", str(tmp_path / "progress"))

    def build(flags="", version="1"):
        jobs = [
            setup_py.Job(source, ["c++", "-Ikernels/include", *flags.split()], versions=[version])
            for source in setup_py.sources(cuda=False)
        ]
        objects = setup_py.compile_all(jobs, tmp_path / "objects", workers=2)
        assert all(path.is_file() for path in objects)
        printed = capsys.readouterr().out
        assert (tmp_path / "progress").read_text().endswith(printed[printed.index("fastsparse-gnn: ") :])
        return int(printed.split(" files compiled")[0].split()[-1])

    assert build() == 3
    assert build() == 0
    (small_project / "cpu" / "two.cpp").write_text("int two() { return 3; }\n")
    assert build() == 1
    answer = small_project / "include" / "project" / "answer.h"
    answer.write_text("constexpr int answer = 43;\n")
    assert build() == 1, "only one file includes that header, and through another"
    assert build("-O1") == 3
    assert build("-O1", version="2") == 3
    assert build() == 0
    os.utime(small_project / "cpu" / "two.cpp", (0, 0))
    assert build() == 0


def test_a_source_depends_on_the_headers_that_it_includes(setup_py):
    """The scan agrees with the compiler, which needs nothing but the C++ library for these files."""
    for source in setup_py.KERNELS.glob("cpu/*.cpp"):
        command = ["c++", "-std=c++17", "-Ikernels/include", "-MM", str(source)]
        listed = subprocess.run(command, cwd=setup_py.ROOT, text=True, capture_output=True, check=True).stdout
        names = listed.replace("\\\n", " ").split()[1:]
        assert set(setup_py.Job(source, []).files()) == {(setup_py.ROOT / name).resolve() for name in names}
    attention = setup_py.Job(setup_py.KERNELS / "cuda" / "attention_bsb.cu", []).files()
    assert {"attention_tiles.cuh", "mma.cuh", "philox.h"} <= {file.name for file in attention}
    assert "wgmma.cuh" not in {file.name for file in attention}


def test_the_longest_file_is_compiled_first(setup_py, small_project, tmp_path, monkeypatch):
    (small_project / "cuda").mkdir()
    (small_project / "cuda" / "three.cu").write_text("int three() { return 3; }\n")
    (small_project / "cpu" / "two.cpp").write_text("int two() { return 2; }\n" + "// long\n" * 99)
    monkeypatch.setattr(setup_py, "CPU_SECONDS", {"binding": 3})
    order = []

    def compile(job, target):
        order.append(job.source.name)
        target.touch()
        return 0.0

    monkeypatch.setattr(setup_py.Job, "compile", compile)
    units = reversed(setup_py.units(cuda=True))
    jobs = [setup_py.Job(source, [], seconds=seconds) for (source,), seconds in units]
    objects = setup_py.compile_all(jobs, tmp_path / "objects", workers=1)
    assert order == ["three.cu", "binding.cpp", "two.cpp", "one.cpp"]
    assert [path.name.partition("-")[0] for path in objects] == [job.source.stem for job in jobs]


def test_every_source_is_compiled_once(setup_py):
    for cuda in (True, False):
        units = [source for together, _ in setup_py.units(cuda) for source in together]
        assert sorted(units) == sorted(setup_py.sources(cuda))
    named = [name for names in setup_py.CUDA_UNITS for name in names]
    assert {f"{name}.cu" for name in named} <= {path.name for path in setup_py.KERNELS.glob("cuda/*.cu")}
    names = {path.stem for path in setup_py.sources(cuda=False)}
    assert set(setup_py.CPU_SECONDS) <= names


def test_files_that_are_compiled_as_one(setup_py, small_project, tmp_path, capsys):
    """Both are in the object, a line says so, and a change to either compiles it again."""
    one, two = (small_project / "cpu" / f"{name}.cpp" for name in ("one", "two"))
    two.write_text("int two() { return one(); }\n")

    def build():
        job = setup_py.Job(two, ["c++", "-Ikernels/include"], others=[one])
        return setup_py.compile_all([job], tmp_path / "objects", workers=1)

    first = build()
    assert "cpu/two.cpp and 1 more" in capsys.readouterr().out
    assert build() == first
    one.write_text(one.read_text() + "int three() { return 3; }\n")
    assert build() != first


def test_a_failing_compilation_shows_the_compilers_words_and_leaves_no_object(
    setup_py, small_project, tmp_path
):
    (small_project / "cpu" / "two.cpp").write_text("int two() { return nonsense; }\n")
    jobs = [setup_py.Job(small_project / "cpu" / "two.cpp", ["c++"])]
    with pytest.raises(CompileError, match="nonsense"):
        setup_py.compile_all(jobs, tmp_path / "objects", workers=1)
    assert list((tmp_path / "objects").iterdir()) == []


def test_no_compiler_is_said_so(setup_py):
    with pytest.raises(CompileError, match="no C\\+\\+ compiler: /no/such/compiler does not run.*set CXX"):
        setup_py.openmp_flags(["/no/such/compiler"])


def test_plan_gives_each_source_what_it_needs(setup_py, tmp_path):
    cuda = setup_py.Cuda(Path("/x/nvcc"), "release 99", ["/x/include"], tmp_path, ["80", "90"], ["90"])
    jobs = {job.source.name: job for job in setup_py.plan(["c++"], cuda, {"CXXFLAGS": "-Werror -g"})}
    binding = jobs["binding.cpp"]
    assert '-DFASTSPARSE_CUDA_ARCHS="80;90+PTX"' in binding.command
    assert {"-DFASTSPARSE_WITH_CUDA", "-O1", "-fvisibility=hidden"} <= set(binding.command)
    assert binding.command.index("-O1") < binding.command.index("-Werror"), "CXXFLAGS have the last word"
    assert {"-O3", "-Werror", "-g"} <= set(jobs["spmm_csr.cpp"].command)
    assert sysconfig.get_paths()["include"] in binding.include_dirs
    for job in jobs.values():
        assert not any("march" in flag for flag in job.command)
        assert not any("torch" in folder for folder in job.include_dirs)
        if job.source.suffix == ".cu":
            assert job.command[0] == "/x/nvcc"
            assert set(cuda.gencode) <= set(job.command)
    without = {job.source.name: job for job in setup_py.plan(["c++"], None, {})}
    assert not any(name.endswith(".cu") for name in without)
    assert "-DFASTSPARSE_WITH_CUDA" not in without["binding.cpp"].command
    # Only the binding knows of CUDA: the other objects of the CPU half handle both builds.
    flags = {"CXXFLAGS": "-Werror -g"}
    for job in setup_py.plan(["c++"], None, flags):
        assert (job.object_name() == jobs[job.source.name].object_name()) == (job.source != binding.source)


def test_the_library_for_cpp_programs_needs_the_stable_headers(setup_py, tmp_path, monkeypatch):
    cuda = setup_py.Cuda(Path("/x/nvcc"), "release 99", ["/x/include"], tmp_path, ["90"], [])
    stable = tmp_path / "torch" / "include" / "torch" / "csrc" / "stable" / "ops.h"
    (tmp_path / "torch").mkdir()
    for name in ("__init__.py", "version.py"):
        (tmp_path / "torch" / name).write_text("__version__ = '2.9.0'\n")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CompileError, match="FASTSPARSE_CPP: install PyTorch 2.10 or newer"):
        setup_py.plan_cpp(["c++"], None, {})
    stable.parent.mkdir(parents=True)
    stable.touch()
    without, job = (setup_py.plan_cpp(["c++"], each, {"CXXFLAGS": "-Werror"}) for each in (None, cuda))
    assert job.source.name == "torch_operators.cpp"
    assert job.source not in setup_py.sources(cuda=True), "the extension contains no PyTorch code"
    assert job.include_dirs == [str(tmp_path / "torch" / "include"), "/x/include"]
    assert "-DFASTSPARSE_WITH_CUDA" in job.command
    assert "-DFASTSPARSE_WITH_CUDA" not in without.command


WORKFLOW = {"GITHUB_REPOSITORY": "someone/fastsparse", "GITHUB_REF_NAME": "v1.2.3"}


def test_the_readme_of_a_release_has_no_relative_links(setup_py):
    text, published = setup_py.readme({}), setup_py.readme(WORKFLOW)
    assert text == (setup_py.ROOT / "README.md").read_text()
    files = "https://github.com/someone/fastsparse"
    targets = re.findall(r"\]\(([^)]+)\)", published)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert f"]({files}/blob/v1.2.3/docs/installation.md#from-a-checkout)" in published
    (image,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", published)
    assert image == f"{files}/raw/v1.2.3/benchmarks/results/nvidia-h100-80gb-hbm3/programs_epochs.png"
    local = [target.removeprefix(f"{files}/") for target in targets if target.startswith(files)]
    paths = [re.sub(r"^(blob|raw)/v1.2.3/|#.*", "", target) for target in local]
    assert len(paths) > 20
    assert [path for path in paths if not (setup_py.ROOT / path).exists()] == []


def test_urls_of_a_release(setup_py):
    assert setup_py.project_urls({}) == {}
    urls = setup_py.project_urls(WORKFLOW)
    assert urls["Source"] == "https://github.com/someone/fastsparse"
    assert set(urls) == {"Source", "Documentation", "Changelog", "Issues"}
    for address in (urls["Documentation"], urls["Changelog"]):
        assert (setup_py.ROOT / address.partition("/blob/v1.2.3/")[2]).is_file()


def test_a_release_publishes_them(tmp_path):
    env = {**os.environ, **WORKFLOW}
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).resolve().parents[2], env=env, check=True)
    metadata = email.message_from_string((tmp_path / "fastsparse_gnn.egg-info" / "PKG-INFO").read_text())
    assert "Source, https://github.com/someone/fastsparse" in metadata.get_all("Project-URL")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "](https://github.com/someone/fastsparse/blob/v1.2.3/docs/results.md)" in metadata.get_payload()
