"""How the examples are run on tiny inputs."""

from __future__ import annotations

import io
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

KARATE = ("--dataset", "karate", "--device", "cpu")


def need(framework: str) -> None:
    pytest.importorskip(f"fastsparse_{framework}", exc_type=ImportError)


def run(
    example: ModuleType, *arguments: str, framework: str = "pyg", tiny: tuple[str, ...] = KARATE
) -> tuple[dict[str, Any], list[Any], str]:
    """What an example's command gives: its log, a result for every layer, and what it prints."""
    need(framework)
    page = io.StringIO()
    log, results = example.main(["--framework", framework, *tiny, *arguments], Console(file=page, width=160))
    return log, results, page.getvalue()
