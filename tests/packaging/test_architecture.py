"""What the linter of imports cannot see: modules of the core take nothing from its `__init__`."""

from __future__ import annotations

import ast
from pathlib import Path

CORE = Path(__file__).parents[2] / "kernels" / "fastsparse_core"
#: What `from fastsparse_core import ...` may name inside: the extension and modules.
MODULES = {
    "_C",
    *(path.stem for path in CORE.glob("*.py")),
    *(path.name for path in CORE.iterdir() if path.is_dir()),
}


def test_modules_of_the_core_do_not_import_its_public_names() -> None:
    for path in CORE.rglob("*.py"):
        if path == CORE / "__init__.py" or path.name == "self_check.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "fastsparse_core":
                assert {alias.name for alias in node.names} <= MODULES, path
