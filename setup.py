"""Builds the extension module ``fastsparse_core._C``.

The CPU half is always built. The CUDA half is built if the build finds nvcc and an architecture to build for.
The extension includes no PyTorch header and links the CUDA runtime statically, so one build works with every
PyTorch version. setuptools can neither run nvcc, nor compile in parallel, nor cache objects by content.
Functions in this file do that, and a small ``build_ext`` calls them.

Environment variables:

- ``FASTSPARSE_CUDA_ARCHS``: CUDA architectures, for example ``90``, ``80;90`` or ``80;90+PTX``. ``all`` means
  ``DEFAULT_ARCHS``, with PTX for the last of them. ``none`` builds only the CPU half. By default, the
  architectures of this machine's GPUs are built, and without a GPU only the CPU half.
- ``FASTSPARSE_PROGRESS``: a file to which the progress messages are also written, because pip hides the
  output of a build unless it is called with ``-v``.
- ``FASTSPARSE_LINKER``: the command that links the objects; default: the C++ compiler. ``.ci/wheel`` sets a
  linker that links against an older glibc than this machine's. ``LDFLAGS`` must then name the C++ libraries.
- ``FASTSPARSE_CPP=1``: also builds ``libfastsparse_cpp.so``, the library for C++ programs, next to the
  extension. This needs an installed PyTorch 2.10 or newer, and ``pip install --no-build-isolation``.
- ``CUDA_HOME``, ``CUDA_PATH``, ``CXX``, ``CXXFLAGS``, ``LDFLAGS``, ``NVCC_PREPEND_FLAGS``,
  ``NVCC_APPEND_FLAGS`` and ``MAX_JOBS`` (compilers that run at a time) have their usual meaning.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
KERNELS = ROOT / "kernels"
SYSTEM_TOOLKIT = Path("/usr/local/cuda")
OLDEST_ARCH = 80  # the first architecture with the warp-wide reductions that the kernels use
DEFAULT_ARCHS = ("80", "86", "89", "90", "100", "120")
#: Architectures that are compiled with their own features (90a), which later architectures do not have: the
#: kernels use Hopper's wgmma.
WITH_OWN_FEATURES = {"90"}
#: Groups of CUDA files that are compiled together, with the CPU seconds that one architecture takes. This
#: saves time, because nvcc takes 1.3 seconds even for an empty file, and templates that several files
#: instantiate are compiled once. To avoid clashes of names, each file has a namespace `..._detail`. A file
#: that is not listed here is compiled alone.
CUDA_UNITS = {
    ("attention_bsb_backward",): 42,
    ("attention_bsb", "multi_aggregate", "multi_aggregate_backward"): 31,
    (
        "additive_attention",
        "additive_attention_backward",
        "attention_layer",
        "attention_layer_parts",
        "batch_norm",
        "gatv2_attention",
        "gatv2_attention_backward",
        "head_outer",
        "sddmm_csr",
        "segment_reduce",
        "sum_of_rows",
        "weight_gradient",
    ): 30,
    (
        "cbsr",
        "compress",
        "gather_graphs",
        "group_rows",
        "hybrid_rows",
        "inspect",
        "mask_rows",
        "maxk",
        "maxk_16_bits",
        "place_batch",
        "row_split",
        "sample_neighbors",
        "ssd_backward",
        "ssd_slots",
    ): 28,
    (
        "spmm_csr",
        "spmm_csr_transposed",
        "spmm_extremum",
        "spmm_extremum_backward",
        "spmm_hr",
        "spmm_resident",
        "spmm_tca",
        "ssd",
    ): 29,
    ("aggregate_linear", "aggregate_linear_backward", "sddmm_bsb", "spmm_bsb"): 22,
    (
        "edge_attention",
        "edge_attention_backward",
        "edge_messages",
        "edge_messages_backward",
        "edge_softmax",
    ): 21,
}
CUDA_SECONDS = 5  # for a CUDA file that is not listed above
#: CPU seconds of the C++ files that take longer than a second.
CPU_SECONDS = {
    "binding": 9,
    "attention_blocks": 3,
    "attention_csr_backward": 3,
    "spmm_csr": 3,
    "edge_messages": 2,
    "multi_aggregate": 2,
    "segment_reduce": 2,
}
COMMON = ["-DNDEBUG", "-Ikernels/include"]
HEADER_SUFFIXES = {".h", ".hpp", ".cuh"}
#: The source of the operators for C++ programs, and the library that is built from it.
CPP_SOURCE, CPP_LIBRARY = KERNELS / "torch_operators.cpp", "libfastsparse_cpp.so"
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


# --------------------------------------------------------------------------------------------- CUDA toolkit


def find_nvcc(env: Mapping[str, str], site_dirs: Iterable[str | Path]) -> Path | None:
    """Finds nvcc.

    Args:
        env: Environment with ``CUDA_HOME``, ``CUDA_PATH`` and ``PATH``, in this order.
        site_dirs: Folders that may hold the pip packages of NVIDIA's compiler (``nvidia/*/bin/nvcc``).

    Returns:
        The path of nvcc, or None.
    """
    candidates = [Path(env[name], "bin", "nvcc") for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    on_path = shutil.which("nvcc", path=env.get("PATH", ""))
    if on_path:
        candidates.append(Path(on_path))
    for site_dir in site_dirs:
        candidates.extend(sorted(Path(site_dir).glob("nvidia/*/bin/nvcc"), reverse=True))
    candidates.append(SYSTEM_TOOLKIT / "bin" / "nvcc")
    return next((path for path in candidates if path.is_file() and os.access(path, os.X_OK)), None)


def site_dirs() -> list[str]:
    """Returns the folders of pip packages, including the environment's when pip builds in isolation."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys([*sys.path, paths["purelib"], paths["platlib"]]))


def report(message: str) -> None:
    """Prints a progress message, and appends it to the file ``FASTSPARSE_PROGRESS``, if that is set."""
    line = f"fastsparse-gnn: {message}"
    print(line, flush=True)
    if os.environ.get("FASTSPARSE_PROGRESS"):
        with contextlib.suppress(OSError), open(os.environ["FASTSPARSE_PROGRESS"], "a") as progress:
            progress.write(line + "\n")


def output_of(*command: str | Path) -> str:
    """Returns a command's output on stdout and stderr, or an empty string if it cannot run or fails."""
    try:
        done = subprocess.run(list(map(str, command)), text=True, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr


def parse_archs(text: str) -> tuple[list[str], list[str]]:
    """Parses ``FASTSPARSE_CUDA_ARCHS``.

    Args:
        text: Architectures separated by ``;``, ``,`` or blanks, each as ``90`` or ``9.0``, with ``+PTX``
            if PTX is also needed.

    Returns:
        (architectures for machine code, architectures for PTX), each as digits in ascending order.

    Raises:
        ValueError: An entry is not an architecture.
    """
    machine_code, ptx = set(), set()
    for entry in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(\d+)\.?(\d)(\+PTX)?", entry, re.IGNORECASE)
        if not match:
            raise ValueError(
                f"FASTSPARSE_CUDA_ARCHS={text!r}: expected architectures such as '90' or '80;90+PTX', "
                f"'all', or 'none' for a build without CUDA; got {entry!r}"
            )
        arch = match[1] + match[2]
        machine_code.add(arch)
        if match[3]:
            ptx.add(arch)
    return sorted(machine_code, key=int), sorted(ptx, key=int)


def choose_archs(
    requested: str, visible: Sequence[str], supported: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Chooses the CUDA architectures to build for.

    Args:
        requested: ``FASTSPARSE_CUDA_ARCHS``, or an empty string.
        visible: Architectures of the GPUs of this machine.
        supported: Architectures that this nvcc and the kernels support; at least one.

    Returns:
        (architectures for machine code, architectures for PTX); both are empty if no GPU is supported.

    Raises:
        ValueError: A requested architecture is not supported.
    """

    def known(archs: Iterable[str]) -> list[str]:
        return [arch for arch in archs if arch in supported]

    if requested.lower() == "all":
        machine_code = known(DEFAULT_ARCHS) or [max(supported, key=int)]
        return machine_code, machine_code[-1:]
    if requested:
        machine_code, ptx = parse_archs(requested)
        unknown = [arch for arch in machine_code if arch not in supported]
        if unknown:
            raise ValueError(
                f"FASTSPARSE_CUDA_ARCHS={requested!r}: the kernels and this nvcc support "
                f"{';'.join(supported)}, not {';'.join(unknown)}; remove the latter or install another nvcc"
            )
        return machine_code, ptx
    machine_code = set(known(visible))
    # If this nvcc does not know a GPU's architecture, the driver compiles the PTX of the newest older one.
    older = [[arch for arch in supported if int(arch) < int(gpu)] for gpu in visible if gpu not in supported]
    ptx = {max(archs, key=int) for archs in older if archs}
    return sorted(machine_code | ptx, key=int), sorted(ptx, key=int)


def visible_gpu_archs() -> list[str]:
    """Returns the architectures of this machine's GPUs, as digits."""
    printed = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    return [major + minor for major, minor in re.findall(r"^(\d+)\.(\d+)\s*$", printed, re.MULTILINE)]


@dataclass(frozen=True)
class Cuda:
    """The CUDA toolkit, and the architectures to build for."""

    nvcc: Path
    version: str
    include_dirs: list[str]
    static_runtime: Path
    machine_code: list[str]
    ptx: list[str]

    @property
    def archs(self) -> str:
        """The architectures as ``build_info()`` shows them, for instance ``80;90+PTX``."""
        return ";".join(arch + ("+PTX" if arch in self.ptx else "") for arch in self.machine_code)

    @property
    def gencode(self) -> list[str]:
        """Options that make nvcc compile for these architectures."""
        exact = [arch + ("a" if arch in WITH_OWN_FEATURES else "") for arch in self.machine_code]
        flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in exact]
        return flags + [f"-gencode=arch=compute_{arch},code=compute_{arch}" for arch in self.ptx]


def find_cuda(env: Mapping[str, str]) -> Cuda | str:
    """Finds the CUDA toolkit and decides what to build with it.

    Args:
        env: The environment.

    Returns:
        A `Cuda`, or the reason (one line) why only the CPU half can be built.

    Raises:
        ValueError: ``FASTSPARSE_CUDA_ARCHS`` cannot be understood or built.
    """
    requested = env.get("FASTSPARSE_CUDA_ARCHS", "").strip()
    if requested.lower() == "none":
        return "FASTSPARSE_CUDA_ARCHS=none"
    nvcc = find_nvcc(env, site_dirs())
    if nvcc is None:
        return f"no nvcc in CUDA_HOME, CUDA_PATH, PATH, pip packages or {SYSTEM_TOOLKIT}"

    # nvcc may be a wrapper or a link, so a dry run has to find its headers and libraries.
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty.cu")
        empty.touch()
        plan = output_of(nvcc, "-dryrun", "-c", empty)
    settings = dict(re.findall(r"^#\$ (\w+)=(.*)$", plan, re.MULTILINE))
    if "TOP" not in settings:
        return f"{nvcc} does not run"
    top = Path(settings["TOP"].strip()).resolve()
    include_dirs = re.findall(
        r'"(?:-I)?(/[^"]+)"', settings.get("INCLUDES", "") + settings.get("SYSTEM_INCLUDES", "")
    )
    library_dirs = re.findall(r'"-L([^"]+)"', settings.get("LIBRARIES", ""))
    runtimes = [Path(folder, "libcudart_static.a") for folder in (*library_dirs, top / "lib64", top / "lib")]
    static_runtime = next((path.resolve() for path in runtimes if path.is_file()), None)
    if static_runtime is None:
        return f"{nvcc} comes without libcudart_static.a"

    version = output_of(nvcc, "--version")
    listed = re.findall(r"compute_(\d+)", output_of(nvcc, "--list-gpu-arch"))
    if re.search(r"release 11\.", version):  # CUDA 11 supports architecture 90, but not 90a
        listed = [arch for arch in listed if arch not in WITH_OWN_FEATURES]
    supported = sorted((arch for arch in listed if int(arch) >= OLDEST_ARCH), key=int)
    if not supported:
        return f"{nvcc} builds for no architecture from {OLDEST_ARCH} on"
    visible = visible_gpu_archs()
    machine_code, ptx = choose_archs(requested, visible, supported)
    if not machine_code:
        gpus = f"the GPUs here are too old ({', '.join(visible)})" if visible else "no GPU here"
        return f"{gpus}; to build anyway, set FASTSPARSE_CUDA_ARCHS to 90 or all, for example"
    return Cuda(nvcc, version, include_dirs, static_runtime, machine_code, ptx)


# ---------------------------------------------------------------------------------- compiling, with a cache


@dataclass(frozen=True)
class Job:
    """A source file and how to compile it.

    Attributes:
        source: The file, below `ROOT`.
        others: More files, which are compiled with the source as if their text came before it.
        command: Compiler and flags, without input and output.
        include_dirs: Folders outside this repository, searched as system headers. The key of the cache
            contains `versions` instead of these paths, because pip's isolated builds use another folder every
            time.
        versions: Versions that the object depends on: of the compiler, pybind11 and Python.
        seconds: Seconds that one core takes for one architecture.
    """

    source: Path
    command: list[str]
    include_dirs: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    seconds: float = 1

    def files(self) -> list[Path]:
        """Returns the sources and the headers of this repository that they include, directly or not."""
        found = [self.source, *self.others]
        for file in found:
            for name in INCLUDE.findall(file.read_text(encoding="utf-8")):
                candidates = [(folder / name).resolve() for folder in (file.parent, KERNELS / "include")]
                header = next((path for path in candidates if path.is_file()), None)
                if header and header not in found:
                    found.append(header)
        return found

    def expected_seconds(self) -> float:
        """Returns roughly the seconds on one core. Each further architecture adds two thirds of the first."""
        archs = sum(flag.startswith("-gencode") for flag in self.command)
        return self.seconds * (archs + 0.5 if archs > 1 else 1.5) / 1.5

    def weight(self) -> tuple[float, int]:
        """Returns a sorting key: the expected time, then the size of `files`, because times are rough."""
        return self.expected_seconds(), sum(file.stat().st_size for file in self.files())

    @property
    def name(self) -> str:
        """The name in progress messages."""
        more = f" and {len(self.others)} more" if self.others else ""
        return f"{self.source.relative_to(ROOT)}{more}"

    def object_name(self) -> str:
        """Returns the name of the cached object, with a digest of everything that the object depends on."""
        parts = [
            digest_of(self.files()),
            *(part.encode() for part in self.command),
            b"versions",
            *(version.encode() for version in self.versions),
        ]
        digest = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts))
        return f"{self.source.stem}-{digest.hexdigest()[:32]}.o"

    def compile(self, target: Path) -> float:
        """Compiles into a temporary file, which is renamed to `target` when it is complete.

        Returns:
            The seconds it took.

        Raises:
            CompileError: The compiler failed; the message contains its output.
        """
        unfinished = target.with_suffix(f".{os.getpid()}.o")
        search = [flag for folder in self.include_dirs for flag in ("-isystem", folder)]
        before = [flag for file in self.others for flag in ("-include", str(file.relative_to(ROOT)))]
        command = [
            *self.command,
            *search,
            *before,
            "-c",
            str(self.source.relative_to(ROOT)),
            "-o",
            str(unfinished),
        ]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            unfinished.unlink(missing_ok=True)
            hint = ""
            if self.source.suffix == ".cu":
                hint = "\nFASTSPARSE_CUDA_ARCHS=none installs the CPU half only."
            raise CompileError(f"{shlex.join(command)}\n{done.stdout}{hint}")
        if done.stdout.strip():
            print(done.stdout.strip(), flush=True)
        unfinished.replace(target)
        return time.perf_counter() - start


def digest_of(files: Iterable[Path]) -> bytes:
    """Returns a digest over the names and contents of files."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.digest()


def headers() -> list[Path]:
    """Returns all headers of this repository."""
    return sorted(path for path in KERNELS.rglob("*") if path.suffix in HEADER_SUFFIXES)


def sources(cuda: bool) -> list[Path]:
    """Returns the files to compile."""
    found = [*sorted(KERNELS.glob("cpu/*.cpp")), KERNELS / "binding.cpp"]
    return [*sorted(KERNELS.glob("cuda/*.cu")), *found] if cuda else found


def units(cuda: bool) -> list[tuple[list[Path], float]]:
    """Returns the groups of files that are compiled together, with the seconds that each group takes."""
    alone = {source: source.suffix for source in sources(cuda)}
    found = []
    for names, seconds in CUDA_UNITS.items():
        together = [file for name in names if (file := KERNELS / "cuda" / f"{name}.cu") in alone]
        for file in together:
            del alone[file]
        if together:
            found.append((together, float(seconds)))
    for file, suffix in alone.items():
        seconds = CUDA_SECONDS if suffix == ".cu" else CPU_SECONDS.get(file.stem, 1)
        found.append(([file], float(seconds)))
    return found


def compile_all(jobs: Sequence[Job], cache: Path, workers: int) -> list[Path]:
    """Compiles the files that are not in the cache, several at a time, the longest first.

    Args:
        jobs: The compilations.
        cache: Folder of the objects, named by their content.
        workers: Compilers to run at a time.

    Returns:
        The objects, in the order of the jobs.
    """
    cache.mkdir(parents=True, exist_ok=True)
    objects = [cache / job.object_name() for job in jobs]
    missing = [(job, target) for job, target in zip(jobs, objects, strict=True) if not target.exists()]
    # Long files come first, so that no core has to wait for a long file at the end.
    missing.sort(key=lambda pair: pair[0].weight(), reverse=True)

    if missing:
        minutes = sum(job.expected_seconds() for job, _ in missing) / 60 / max(1, min(workers, len(missing)))
        at_a_time = f"{workers} at a time" if workers > 1 else "one after the other"
        report(f"compiling {len(missing)} files, {at_a_time}: about {max(1, round(minutes))} min")
    done = itertools.count(1)

    def build(missing_one: tuple[Job, Path]) -> None:
        job, target = missing_one
        seconds = job.compile(target)
        report(f"{next(done)}/{len(missing)} {job.name} ({seconds:.0f} s)")

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(build, missing))  # `list` raises the error of a failed compilation
    report(f"{len(missing)} files compiled, {len(jobs) - len(missing)} from the cache")
    return objects


def openmp_flags(cxx: Sequence[str]) -> list[str]:
    """Returns ``["-fopenmp"]`` if the compiler can build with it (Apple's clang cannot), else nothing."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n")
        probe = [*cxx, "-fopenmp", str(source), "-o", str(Path(folder, "probe"))]
        try:
            return ["-fopenmp"] if subprocess.run(probe, capture_output=True).returncode == 0 else []
        except OSError as error:
            raise CompileError(
                f"no C++ compiler: {cxx[0]} does not run ({error}); install one or set CXX"
            ) from error


def host_command(cxx: Sequence[str]) -> list[str]:
    """Returns the C++ compiler with the options of all C++ files."""
    # No -march: the kernels are compiled for AVX2 and for any CPU, and choose at run time. No code
    # reads errno or the floating-point flags, so the options below let compilers vectorise branches.
    host = [*cxx, "-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", *COMMON]
    return [*host, "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *openmp_flags(cxx)]


def find_torch() -> Path:
    """Returns the folder of the installed PyTorch.

    Raises:
        CompileError: There is none, or one without the headers of the stable ABI.
    """
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec and spec.origin else Path()
    if not (folder / "include" / "torch" / "csrc" / "stable" / "ops.h").is_file():
        raise CompileError(
            "FASTSPARSE_CPP: install PyTorch 2.10 or newer and build with --no-build-isolation"
        )
    return folder


def plan_cpp(cxx: Sequence[str], cuda: Cuda | None, env: Mapping[str, str]) -> Job:
    """Returns the compilation of the operators for C++ programs."""
    # The headers of PyTorch 2.13 are written in C++20.
    command = [*host_command(cxx), "-std=c++20", "-O1", *shlex.split(env.get("CXXFLAGS", ""))]
    torch = find_torch()
    include_dirs = [str(torch / "include")]
    versions = [output_of(*cxx, "--version"), (torch / "version.py").read_text(encoding="utf-8")]
    if cuda:
        command.append("-DFASTSPARSE_WITH_CUDA")
        include_dirs += cuda.include_dirs
        versions.append(cuda.version)
    return Job(CPP_SOURCE, command, include_dirs, versions, seconds=4)


def plan(cxx: Sequence[str], cuda: Cuda | None, env: Mapping[str, str]) -> list[Job]:
    """Lists the compilations.

    Args:
        cxx: The C++ compiler, with its own arguments.
        cuda: The CUDA toolkit, or None for the CPU half only.
        env: The environment, for ``CXXFLAGS`` and nvcc's own variables.

    Returns:
        One job for each of `units`.
    """
    import pybind11

    host = host_command(cxx)
    # The binding only fills in structures: -O1 saves a third of its compilation and costs 0.05 us per call.
    binding = [*host, "-O1"]
    cxx_flags = shlex.split(env.get("CXXFLAGS", ""))
    cxx_version = output_of(*cxx, "--version")

    jobs = []
    for (*others, source), seconds in units(cuda is not None):
        if source.suffix == ".cu":
            assert cuda is not None
            host_compiler = ["-ccbin", cxx[0]] if len(cxx) == 1 else []  # nvcc accepts no arguments here
            command = [str(cuda.nvcc), *host_compiler, "-std=c++17", *COMMON, "--expt-relaxed-constexpr"]
            # nvcc's -O is for host code, which only launches kernels. Kernels are compiled with -O3 anyway.
            command += [*cuda.gencode, "-O1"]
            command += ["-Xcompiler=-fPIC,-fvisibility=hidden,-Wall", "-Wno-deprecated-gpu-targets"]
            extra = [env.get("NVCC_PREPEND_FLAGS", ""), env.get("NVCC_APPEND_FLAGS", "")]
            versions = [cuda.version, cxx_version, *extra]
            jobs.append(Job(source, command, versions=versions, others=others, seconds=seconds))
            continue
        command, include_dirs, versions = [*host, *cxx_flags], [], [cxx_version]
        if source.name == "binding.cpp":
            command = [*binding, *cxx_flags]
            include_dirs += [pybind11.get_include(), sysconfig.get_paths()["include"]]
            versions += [pybind11.__version__, sys.version]
            if cuda:
                include_dirs += cuda.include_dirs
                versions.append(cuda.version)
                command += ["-DFASTSPARSE_WITH_CUDA", f'-DFASTSPARSE_CUDA_ARCHS="{cuda.archs}"']
        jobs.append(Job(source, command, include_dirs, versions, seconds=seconds))
    return jobs


def link(
    cxx: Sequence[str],
    objects: Sequence[Path],
    cuda: Cuda | None,
    target: Path,
    env: Mapping[str, str],
    torch: Path | None = None,
) -> None:
    """Links the objects to the extension module, or to the library for C++ programs.

    Args:
        cxx: The C++ compiler.
        objects: Compiled files.
        cuda: The CUDA toolkit, or None without CUDA.
        target: The file to write.
        env: Environment variables.
        torch: Folder of PyTorch, which the library for C++ programs links to; None for the extension module.

    Raises:
        CompileError: The linker failed; the message contains its output.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.split(env.get("FASTSPARSE_LINKER", "")) or list(cxx)
    command += [*map(str, objects), "-o", str(target)]
    if "clang" in output_of(*cxx, "--version"):
        command += openmp_flags(cxx)
    # GCC's OpenMP runtime is not linked. PyTorch ships its own copy under another name, and has loaded it
    # with global symbols before the extension is imported. Linking would load a second runtime.
    with tempfile.TemporaryDirectory() as folder:
        if sys.platform == "darwin":
            command += ["-bundle", "-undefined", "dynamic_lookup"]
        else:
            # Exports only the module's entry, so that symbols of the static CUDA runtime do not clash with
            # PyTorch's.
            exports = Path(folder, "exports")
            exports.write_text("{ global: PyInit_*; local: *; };\n" if torch is None else "{ local: *; };\n")
            command += ["-shared", f"-Wl,--version-script={exports}", "-Wl,--as-needed"]
        if torch is not None:
            command += [f"-L{torch / 'lib'}", "-ltorch_cpu"]
        if cuda:
            command += [str(cuda.static_runtime), "-ldl", "-lrt", "-lpthread"]
        command += shlex.split(env.get("LDFLAGS", ""))
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise CompileError(f"{shlex.join(command)}\n{done.stdout}")


# ----------------------------------------------------------------------------------------------- setuptools


class BuildExt(build_ext):
    """Builds the extension with the functions above."""

    def copy_extensions_to_source(self) -> None:
        """Copies the compiled files next to the sources, for an editable installation."""
        super().copy_extensions_to_source()
        library = Path(self.build_lib, "fastsparse_core", CPP_LIBRARY)
        if library.is_file():
            shutil.copy2(library, KERNELS / "fastsparse_core")

    def build_extension(self, ext: Extension) -> None:
        """Builds one extension module (there is only one)."""
        if sys.platform == "win32":
            raise CompileError("the C++ kernels are written for GCC and Clang: on Windows, install under WSL")
        env = os.environ
        cxx = shlex.split(env.get("CXX", "")) or ["c++"]
        found = find_cuda(env)
        cuda = found if isinstance(found, Cuda) else None
        if cuda:
            report(f"building the CPU half and the CUDA half for {cuda.archs} with {cuda.nvcc}")
        else:
            report(f"building the CPU half only: {found}")
        workers = int(env.get("MAX_JOBS") or os.cpu_count() or 1)
        jobs, target = plan(cxx, cuda, env), Path(self.get_ext_fullpath(ext.name))
        wants_cpp = env.get("FASTSPARSE_CPP", "") not in ("", "0")
        if wants_cpp:
            jobs.append(plan_cpp(cxx, cuda, env))
        objects = compile_all(jobs, ROOT / "build" / "objects", workers)
        of_jobs = list(zip(jobs, objects, strict=True))
        extension = [made for job, made in of_jobs if job.source != CPP_SOURCE]
        link(cxx, extension, cuda, target, env)
        if wants_cpp:
            library = [made for job, made in of_jobs if job.source.stem != "binding"]
            link(cxx, library, cuda, target.parent / CPP_LIBRARY, env, find_torch())
            report(f"built {CPP_LIBRARY} for C++ programs")


def repository(env: Mapping[str, str]) -> str:
    """Returns the web address of the repository whose workflow runs the build, or "" outside of workflows."""
    name = env.get("GITHUB_REPOSITORY", "")
    return name and f"{env.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}"


def project_urls(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the links that a package index shows."""
    address = repository(env)
    if not address:
        return {}
    files = f"{address}/blob/{env['GITHUB_REF_NAME']}"
    return {
        "Source": address,
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def readme(env: Mapping[str, str]) -> str:
    """Returns the README, with links and images that work on a package index if the repository is known."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    address = repository(env)

    def absolute(link: re.Match[str]) -> str:
        target = f"README.md{link['target']}" if link["target"].startswith("#") else link["target"]
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({address}/{kind}/{env['GITHUB_REF_NAME']}/{target})"

    local = r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!\w+:)[^)\s]+)\)"
    return re.sub(local, absolute, text) if address else text


def relative(paths: Iterable[Path]) -> list[str]:
    """Returns paths as setuptools wants them: relative to this file, with slashes."""
    return [path.relative_to(ROOT).as_posix() for path in paths]


if __name__ == "__main__":
    setup(
        packages=[
            *find_packages(str(KERNELS), include=["fastsparse_core", "fastsparse_core.*"]),
            *find_packages(str(ROOT), include=["fastsparse_pyg*", "fastsparse_dgl*", "fastsparse_run*"]),
        ],
        package_dir={"fastsparse_core": "kernels/fastsparse_core"},
        ext_modules=[
            Extension(
                "fastsparse_core._C", relative(sources(cuda=True)), depends=relative([*headers(), CPP_SOURCE])
            ),
        ],
        cmdclass={"build_ext": BuildExt},
        long_description=readme(os.environ),
        long_description_content_type="text/markdown",
        project_urls=project_urls(os.environ),
    )
