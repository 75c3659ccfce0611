"""What the rules know of a GPU: its sizes, and where one kernel overtakes another on it.

Sizes come from the device's properties. The crossovers were measured: `gpu_profiles/` has a file for every
GPU that was, and the user's cache folder those that ``python -m fastsparse_core.tune`` has measured. Any
other GPU gets the H200's, scaled by its own sizes.
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

#: Files of measured GPUs, by name.
MEASURED = Path(__file__).parent / "gpu_profiles"
#: The GPU that others are scaled from.
_KNOWN_BEST = "nvidia_h200"


def _constant(scales_with: str = "") -> Any:
    """A measured constant; ``scales_with``: the size that it grows with on a GPU that was not measured."""
    return field(metadata={"scales_with": scales_with})


@dataclass(frozen=True)
class GpuProfile:
    """Sizes of a GPU and crossovers of the kernels on it.

    Attributes:
        name: as PyTorch gives it.
        source: where the constants are from: ``"measured"``, ``"scaled from ..."``, ``"tuned ..."``.
        num_sms: multiprocessors.
        shared_memory: bytes that a block of threads may have.
        l2_bytes: size of the L2.
        bandwidth: of the memory, in bytes a millisecond.
        few_edges: edges below which a product takes about as long as its launch.
        few_per_row: entries per row below which sddmm and ssd's backward work from CSR.
        shared: vectors per edge up to which flashsparse beats csr in float32 on large graphs.
        narrow: features up to which csr's gather in float32 moves half of what it could.
        short_product_bytes: bytes of a head up to which sddmm works from CSR.
        least_rows: rows from which GraphSAGE's linear maps in one kernel beat cuBLAS in float32.
        most_gathered: edges per row up to which that kernel sums neighbours too.
        many_products: of numbers in a 16-bit product of matrices, from which zeros behind rows that are not
            multiples of 16 bytes save more than they cost.
        long_group_edges: edges from which ssd's edge groups are long.
        long_group_rows: entries per row from which they are.
        few_kept: features per kept one from which ssd's backward works from CSR where rows are short.
        gathered_often: edges per source from which ssd packs kept entries.
        many_sources: sources from which their kept entries outgrow the L2.
        kept_result_bytes: results up to which all stay in the L2 while a gradient streams through.
        surely_kept_bytes: what of a block of sources stays there where not all of it does.
        miss_rate: bytes a millisecond that reductions lose where they miss the L2.
        gradient_rate: bytes a millisecond that ssd's gradient is read at.
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
        """Groups of lanes that it keeps resident in the CSR kernels, about."""
        return 96 * self.num_sms

    @functools.cached_property
    def resident_warps(self) -> int:
        """Warps that it keeps resident in the tensor-core kernels, about."""
        return 32 * self.num_sms

    @functools.cached_property
    def resident_panels(self) -> int:
        """Blocks of threads that it keeps resident in ssd's backward."""
        return 3 * self.num_sms

    def constants(self) -> dict[str, float]:
        """The measured constants by name."""
        return {each.name: getattr(self, each.name) for each in measured_fields()}


def measured_fields() -> list[dataclasses.Field[Any]]:
    """The fields of a profile that are measured, not asked of the device."""
    return [each for each in dataclasses.fields(GpuProfile) if "scales_with" in each.metadata]


def file_name(gpu: str) -> str:
    """The name of a GPU as that of a file: of all H100s with the same memory, for instance, one."""
    words = re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")
    return words.removesuffix("_80gb_hbm3").removesuffix("_sxm")


def cache_folder() -> Path:
    """Where profiles of this user's machines are."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "fastsparse" / "gpu_profiles"


def read(path: Path) -> GpuProfile:
    """A stored profile. Constants that this version no longer has are ignored.

    Raises:
        ValueError: the file holds something else; it says what to do.
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
    """Stores a profile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(profile), indent=2) + "\n")


def scaled(known: GpuProfile, sizes: Mapping[str, Any]) -> GpuProfile:
    """Estimates the profile of a GPU that was not measured from that of another GPU.

    What a crossover grows with, multiprocessors, L2 or bandwidth, decides how it is scaled; ratios, such as
    entries per row, stay.

    Args:
        known: a measured profile.
        sizes: `name`, `num_sms`, `shared_memory`, `l2_bytes` and `bandwidth` of the other.
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
    """What a device says of itself, as `scaled` takes it."""
    properties = torch.cuda.get_device_properties(device)
    known = read(MEASURED / f"{_KNOWN_BEST}.json")
    bits, kilohertz = getattr(properties, "memory_bus_width", 0), getattr(properties, "memory_clock_rate", 0)
    return {
        "name": properties.name,
        "num_sms": properties.multi_processor_count,
        "shared_memory": getattr(properties, "shared_memory_per_block_optin", 48 * 1024),
        "l2_bytes": getattr(properties, "L2_cache_size", 0) or known.l2_bytes,
        # Two transfers per clock; if PyTorch does not know the clock, bandwidth is scaled by the number of
        # multiprocessors.
        "bandwidth": float(2 * kilohertz * bits // 8)
        or known.bandwidth * properties.multi_processor_count / known.num_sms,
    }


_override: GpuProfile | None = None


def profile_of(device: torch.device) -> GpuProfile:
    """The profile that decides on a device; on the CPU, where sizes alone are read, the H200's."""
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
    """Lets another profile decide within, on every device: for measuring and for tests.

    Args:
        profile: the profile; None: what decides so far, or on the CPU.
        **changes: fields that differ from it.
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
    """Whether a GPU, and this build for it, have products of warpgroups, as only architecture 9.0 has."""
    built = str(_C.build_info()["cuda_archs"]).replace("+PTX", "").split(";")
    return "90" in built and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
