"""Results as JSON: what was measured, on which machine, from which sources."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "numpy", "torch_geometric", "dgl", "triton")

#: Suffixes of sources. The digest covers only these, and no files that a build creates.
SOURCE_SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".py"}


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine(device: torch.device) -> dict[str, Any]:
    """The hardware that a benchmark on `device` runs on."""
    facts: dict[str, Any] = {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if hasattr(os, "getloadavg"):
        # Readers can see whether other work on the machine distorted the CPU times.
        facts["load_average"] = round(os.getloadavg()[0], 2)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "gpu_memory_gb": round(properties.total_memory / 1e9, 1),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"),
            "cuda": torch.version.cuda,
        }
    return facts


def software() -> dict[str, str]:
    """Versions of Python and of the packages that matter, as far as they are installed."""
    installed = {package: _version(package) for package in PACKAGES}
    return {
        "python": platform.python_version(),
        **{name: v for name, v in installed.items() if v is not None},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def kernels_digest(folder: Path = REPOSITORY / "kernels") -> str:
    """SHA-256 over path and content of the sources below `folder`: tells whether a result is current."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in SOURCE_SUFFIXES and path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def source(commit: str | None = None) -> dict[str, Any]:
    """The commit measured (with "+" if files differ from it) and the digest of ``kernels/``.

    Args:
        commit: The commit, where the working tree is a copy without its history.
    """
    if commit is None:
        commit = _output("git", "rev-parse", "HEAD")
        if commit and _output("git", "status", "--porcelain", "--untracked-files=no", "--", "kernels"):
            commit += "+"
    return {"commit": commit, "kernels_digest": kernels_digest()}


def slug(name: str) -> str:
    """A name for a folder: letters, digits, dots and hyphens."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower().replace("(r)", "").replace("(tm)", "")).strip("-")


class Recorder:
    """Collects the cells of one benchmark and writes them after each, so that a time limit loses little.

    Args:
        name: The benchmark, and the stem of its file.
        device: The device on which it runs.
        settings: The arguments it ran with.
        root: Folder of results; the file is ``root/<machine>/<name>.json``.
        commit: The commit measured, where git cannot tell.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        settings: dict[str, Any],
        root: Path = RESULTS,
        commit: str | None = None,
    ) -> None:
        facts = machine(device)
        self.path = root / slug(facts.get("gpu", facts["cpu"])) / f"{name}.json"
        self.record: dict[str, Any] = {
            "schema": SCHEMA,
            "name": name,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": facts,
            "software": software(),
            "source": source(commit),
            "settings": settings,
            "notes": [],
            "cells": [],
        }

    def note(self, text: str) -> None:
        """Adds a sentence that the reader of the numbers needs."""
        self.record["notes"].append(text)

    def add(self, **cell: Any) -> dict[str, Any]:
        """Adds one measurement and writes the file."""
        cell.setdefault("status", "ok")
        self.record["cells"].append(cell)
        self.write()
        return cell

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(dumps(self.record))
        partial.replace(self.path)


def dumps(record: dict[str, Any]) -> str:
    """A record as JSON with one cell per line, which keeps differences between commits readable."""
    head = {key: value for key, value in record.items() if key != "cells"}
    cells = ",\n".join("  " + json.dumps(cell, allow_nan=False) for cell in record["cells"])
    return json.dumps(head, indent=1, allow_nan=False)[:-2] + f',\n "cells": [\n{cells}\n ]\n}}\n'


def load(path: Path) -> dict[str, Any]:
    """Reads a record and checks it.

    Raises:
        ValueError: The file is no record of this schema.
    """
    record = json.loads(path.read_text())
    problems = problems_of(record)
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")
    return record


def problems_of(record: Any) -> list[str]:
    """The reasons why a value is not a record of this schema; empty if it is one."""
    expected = {
        "schema": int,
        "name": str,
        "date": str,
        "machine": dict,
        "software": dict,
        "source": dict,
        "settings": dict,
        "notes": list,
        "cells": list,
    }
    if not isinstance(record, dict):
        return [f"expected an object, got {type(record).__name__}"]
    problems = [f"{key} is missing" for key in expected if key not in record]
    problems += [
        f"{key} should be {kind.__name__}, is {type(record[key]).__name__}"
        for key, kind in expected.items()
        if key in record and not isinstance(record[key], kind)
    ]
    if not problems:
        if record["schema"] != SCHEMA:
            problems.append(f"schema is {record['schema']}, this code reads {SCHEMA}")
        problems += [
            f"cell {i} has no status"
            for i, cell in enumerate(record["cells"])
            if not isinstance(cell, dict) or "status" not in cell
        ]
    return problems
