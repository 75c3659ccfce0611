"""The doctor's report, and functions that print it as tables or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from fastsparse_core.self_check import Check

#: Kinds of problems; docs/troubleshooting.md has a section for each, under this name.
Key = Literal[
    "torch-broken",
    "torch-old",
    "import-failed",
    "no-framework",
    "extension-missing",
    "gpu-unusable",
    "gpu-old",
    "cuda-half-missing",
    "gpu-not-covered",
    "gpu-profile",
    "driver-old",
    "no-kernel-image",
    "out-of-memory",
    "check-failed",
    "rich-missing",
]


@dataclass(frozen=True)
class Problem:
    """A problem of the installation.

    Attributes:
        key: kind of the problem, a heading of docs/troubleshooting.md.
        what: the problem, in one line.
        cure: advice how to solve the problem, in one line.
        breaks: True if FastSparse cannot be used until the problem is solved.
    """

    key: Key
    what: str
    cure: str
    breaks: bool = False


#: Field of a `Report` -> titles of the columns of its table.
_COLUMNS = {
    "versions": ("component", "version", "status"),
    "gpus": ("GPU", "architecture", "memory", "status"),
    "profiles": ("GPU", "constants", "sizes"),
    "build": ("half", "status"),
}


@dataclass
class Report:
    """Everything that the doctor found. Each list has the rows of one table (`_COLUMNS`)."""

    versions: list[tuple[str, str, str]] = field(default_factory=list)
    gpus: list[tuple[str, str, str, str]] = field(default_factory=list)
    profiles: list[tuple[str, str, str]] = field(default_factory=list)
    build: list[tuple[str, str]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """True if FastSparse can be used, perhaps with restrictions."""
        return not any(problem.breaks for problem in self.problems)


def as_json(report: Report) -> str:
    """Text of a JSON object: ``usable``, the rows of every table by column, ``checks`` and ``problems``."""
    tables = {
        name: [dict(zip(map(str.lower, columns), row, strict=True)) for row in getattr(report, name)]
        for name, columns in _COLUMNS.items()
    }
    checks = [asdict(check) | {"passed": check.passed} for check in report.checks]
    for check in checks:
        if check["error"] is not None and not math.isfinite(check["error"]):
            check["error"] = None  # JSON has no NaN
    problems = [asdict(problem) for problem in report.problems]
    return json.dumps({"usable": report.usable, **tables, "checks": checks, "problems": problems}, indent=2)


def print_tables(report: Report) -> None:
    """Prints the report as tables, with the package rich.

    Raises:
        ImportError: rich is not installed.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()

    def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        grid = Table(*columns, title=title, title_justify="left")
        for row in rows:
            grid.add_row(*map(escape, row))
        console.print(grid)

    table("Versions", _COLUMNS["versions"], report.versions)
    if report.gpus:
        table("GPUs", _COLUMNS["gpus"], report.gpus)
    else:
        console.print("GPUs: none")
    if report.profiles:
        table("Choice of kernels (GPU profile)", _COLUMNS["profiles"], report.profiles)
    table("Extension fastsparse_core._C", _COLUMNS["build"], report.build)
    if report.checks:
        rows = [
            (
                check.operator,
                check.device,
                "ok" if check.passed else "FAILED",
                "-" if check.error is None else f"{check.error:.1e}",
                f"{check.milliseconds:.1f}",
            )
            for check in report.checks
        ]
        table("Self-check, forward and backward", ("operator", "device", "result", "error", "ms"), rows)
    for problem in report.problems:
        kind = "[bold red]broken[/]" if problem.breaks else "[bold yellow]note[/]"
        named = escape(f"{problem.what} [{problem.key}]")
        console.print(f"{kind}: {named}", soft_wrap=True, highlight=False)
        console.print(f"    cure: {escape(problem.cure)}", soft_wrap=True, highlight=False)
    if report.problems:
        console.print("more in docs/troubleshooting.md, under the names in brackets")
    if report.usable:
        console.print("[bold green]usable[/]")
    else:
        console.print("[bold red]not usable until the problems above are solved[/]")
