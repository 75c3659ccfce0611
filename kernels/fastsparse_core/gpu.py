"""Profiles of GPUs: sizes of a GPU, and the crossovers at which one kernel becomes faster than another.

Sizes come from the device's properties. Crossovers are measured: `gpu_profiles/` has a file for every
measured GPU, and ``python -m fastsparse_core.tune`` writes such files to the user's cache folder. All other
GPUs use the H200's crossovers, scaled by the sizes of the GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastsparse_core import _C

#: Folder with a file for every measured GPU.
MEASURED = Path(__file__).parent / "gpu_profiles"
#: File name of the GPU whose crossovers are scaled for GPUs that were not measured.
_KNOWN_BEST = "nvidia_h200"


def _constant(scales_with: str = "") -> Any:
    """A measured constant; on a GPU that was not measured, it is scaled in proportion to ``scales_with``."""
    return field(metadata={"scales_with": scales_with})


@dataclass(frozen=True)
class GpuProfile:
    """Sizes of a GPU and crossovers of the kernels on it.

    Attributes:
        name: name of the GPU in PyTorch.
        source: origin of the constants: ``"measured"``, ``"scaled from ..."`` or ``"tuned ..."``.
        num_sms: number of multiprocessors.
        shared_memory: largest shared memory of a thread block, in bytes.
        l2_bytes: size of the L2 cache, in bytes.
        bandwidth: memory bandwidth, in bytes per millisecond.
        few_edges: number of edges below which a product takes about as long as its launch.
        few_per_row: entries per row below which sddmm and ssd's backward pass use CSR.
        shared: vectors per edge up to which flashsparse is faster than csr, in float32 on large graphs.
        narrow: number of features up to which the float32 gather of csr reaches only half of the bandwidth.
        short_product_bytes: bytes per head up to which sddmm uses CSR.
        least_rows: number of rows from which one kernel for GraphSAGE's linear maps is faster than cuBLAS, in
            float32.
        most_gathered: edges per row up to which the kernel of ``least_rows`` also sums the neighbours.
        many_products: number of multiplications in a 16-bit matrix product from which padding rows to
            multiples of 16 bytes is faster.
        long_group_edges: number of edges from which ssd uses long edge groups.
        long_group_rows: entries per row from which ssd uses long edge groups.
        few_kept: features per kept entry from which ssd's backward pass uses CSR, if rows are short.
        gathered_often: edges per source from which ssd packs the kept entries.
        many_sources: number of sources from which the sources' kept entries exceed the L2 cache.
        kept_result_bytes: number of bytes up to which all results of ssd's backward pass stay in the L2 cache
            while the gradient is read.
        surely_kept_bytes: number of bytes of larger results that stay in the L2 cache.
        miss_rate: rate of reductions that miss the L2 cache, in bytes per millisecond.
        gradient_rate: rate at which ssd's gradient is read, in bytes per millisecond.
    """

    name: str
    source: str
    num_sms: int
    shared_memory: int
    l2_bytes: int
    bandwidth: float
    few_edges: float = _constant("num_sms")
    few_per_row: float = _constant()
    shared: float = _constant()
    narrow: float = _constant()
    short_product_bytes: float = _constant()
    least_rows: float = _constant("num_sms")
    most_gathered: float = _constant()
    many_products: float = _constant("num_sms")
    long_group_edges: float = _constant("num_sms")
    long_group_rows: float = _constant()
    few_kept: float = _constant()
    gathered_often: float = _constant()
    many_sources: float = _constant("l2_bytes")
    kept_result_bytes: float = _constant("l2_bytes")
    surely_kept_bytes: float = _constant("l2_bytes")
    miss_rate: float = _constant("bandwidth")
    gradient_rate: float = _constant("bandwidth")

    @functools.cached_property
    def resident_groups(self) -> int:
        """Approximate number of groups of lanes that are resident in the CSR kernels."""
        return 96 * self.num_sms

    @functools.cached_property
    def resident_warps(self) -> int:
        """Approximate number of warps that are resident in the tensor-core kernels."""
        return 32 * self.num_sms

    @functools.cached_property
    def resident_panels(self) -> int:
        """Number of thread blocks that are resident in ssd's backward pass."""
        return 3 * self.num_sms

    def constants(self) -> dict[str, float]:
        """The measured constants by name."""
        return {each.name: getattr(self, each.name) for each in measured_fields()}


def measured_fields() -> list[dataclasses.Field[Any]]:
    """The fields of a profile that are measured; all others come from the device's properties."""
    return [each for each in dataclasses.fields(GpuProfile) if "scales_with" in each.metadata]


def file_name(gpu: str) -> str:
    """File name, without extension, of a GPU's profile. Several variants of a GPU may share a file."""
    words = re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")
    return words.removesuffix("_80gb_hbm3").removesuffix("_sxm")


def cache_folder() -> Path:
    """Folder of the profiles that this user has measured with ``python -m fastsparse_core.tune``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "fastsparse" / "gpu_profiles"


def read(path: Path) -> GpuProfile:
    """Reads a stored profile. Constants that this version no longer has are ignored.

    Raises:
        ValueError: the file is not a profile of this version.
    """
    try:
        stored = json.loads(path.read_text())
        names = {each.name for each in dataclasses.fields(GpuProfile)}
        return GpuProfile(**{name: value for name, value in stored.items() if name in names})
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected a GPU profile of this version, got {error}; delete it or run "
            "`python -m fastsparse_core.tune` again"
        ) from error


def write(profile: GpuProfile, path: Path) -> None:
    """Writes a profile to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(profile), indent=2) + "\n")


def scaled(known: GpuProfile, sizes: Mapping[str, Any]) -> GpuProfile:
    """Estimates the profile of a GPU that was not measured from a measured GPU's profile.

    A crossover is scaled in proportion to the number of multiprocessors, the L2 cache or the bandwidth.
    Ratios, such as entries per row, do not change.

    Args:
        known: a measured profile.
        sizes: `name`, `num_sms`, `shared_memory`, `l2_bytes` and `bandwidth` of the GPU.
    """
    constants = {
        each.name: getattr(known, each.name)
        * (sizes[each.metadata["scales_with"]] / getattr(known, each.metadata["scales_with"]))
        if each.metadata["scales_with"]
        else getattr(known, each.name)
        for each in measured_fields()
    }
    return GpuProfile(**sizes, source=f"scaled from {known.name}", **constants)


def sizes_of(device: torch.device) -> dict[str, Any]:
    """Sizes from a device's properties, in the form that `scaled` takes."""
    properties = torch.cuda.get_device_properties(device)
    known = read(MEASURED / f"{_KNOWN_BEST}.json")
    bits, kilohertz = getattr(properties, "memory_bus_width", 0), getattr(properties, "memory_clock_rate", 0)
    return {
        "name": properties.name,
        "num_sms": properties.multi_processor_count,
        "shared_memory": getattr(properties, "shared_memory_per_block_optin", 48 * 1024),
        "l2_bytes": getattr(properties, "L2_cache_size", 0) or known.l2_bytes,
        # The memory transfers data twice per clock. If PyTorch does not report the clock, the H200's
        # bandwidth is scaled by the number of multiprocessors.
        "bandwidth": float(2 * kilohertz * bits // 8)
        or known.bandwidth * properties.multi_processor_count / known.num_sms,
    }


_override: GpuProfile | None = None


def profile_of(device: torch.device) -> GpuProfile:
    """The profile of a device. For the CPU, the H200's profile, because some rules also run on the CPU."""
    if _override is not None:
        return _override
    return _profile(-1 if device.type != "cuda" else device.index or 0)


@functools.cache
def _profile(index: int) -> GpuProfile:
    if index < 0:
        return read(MEASURED / f"{_KNOWN_BEST}.json")
    sizes = sizes_of(torch.device("cuda", index))
    name = file_name(sizes["name"])
    for folder in (cache_folder(), MEASURED):
        path = folder / f"{name}.json"
        if path.exists():
            return dataclasses.replace(read(path), **sizes)
    return scaled(read(MEASURED / f"{_KNOWN_BEST}.json"), sizes)


@contextmanager
def use(profile: GpuProfile | None = None, **changes: Any) -> Iterator[GpuProfile]:
    """Context in which all devices have one given profile, for measurements and tests.

    Args:
        profile: the profile; None: the profile of the enclosing context, or else of the CPU.
        **changes: values that replace fields of the profile, also ``resident_groups`` and similar.
    """
    global _override
    before = _override
    chosen = profile or before or _profile(-1)
    sizes = {name: value for name, value in changes.items() if name.startswith("resident_")}
    chosen = dataclasses.replace(chosen, **{key: each for key, each in changes.items() if key not in sizes})
    chosen.__dict__.update(sizes)
    _override = chosen
    try:
        yield chosen
    finally:
        _override = before


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Returns True if a GPU and this build support warpgroup matrix products (only architecture 9.0)."""
    built = str(_C.build_info()["cuda_archs"]).replace("+PTX", "").split(";")
    return "90" in built and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
