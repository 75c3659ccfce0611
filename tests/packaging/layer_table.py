"""The tables of docs/layers.md, made of DROP_INS and of trials. As a script it writes the page."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fastsparse_dgl.nn
import fastsparse_pyg.nn
from benchmarks.pyg_layers import LAYERS, Inputs
from fastsparse_core.fallback import Reason, listening
from fastsparse_pyg import accelerate

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "layers.md"
_BLOCK = r"(?<=<!-- {} layers: python tests/packaging/layer_table.py -->\n\n).*?(?=\n\n)"
_WIDTH, _NODES, _EDGES = 8, 300, 6000


def _tried(name: str, change: Callable[[Inputs], Any]) -> str:
    """Returns "yes", "PyG" if the call falls back to PyG, or "-" if the layer refuses such features."""
    layer = LAYERS.get(name)
    if layer is None or "x" not in inspect.signature(layer.make(_WIDTH).forward).parameters:
        return "-"
    torch.manual_seed(0)
    model = torch.nn.ModuleList([layer.make(_WIDTH)])
    accelerate(model, show=False)
    inputs = Inputs.draw(torch.randint(_NODES, (2, _EDGES)), _NODES, _WIDTH, torch.float32)
    inputs.x = change(inputs)
    reasons: list[Reason] = []
    with warnings.catch_warnings(), listening(reasons.append):
        warnings.simplefilter("ignore")
        try:
            layer.call(layer.make(_WIDTH), inputs)
            layer.call(model[0], inputs)
        except Exception:
            return "-"
    return "PyG" if reasons else "yes"


def _table_of_tests(module: str) -> Any:
    """A module of the tests that has a table of layers."""
    tests = DOCS.parent / "tests"
    for folder in (tests, tests / "pyg", tests / "dgl"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return importlib.import_module(module)


def _under_autocast(name: str) -> str:
    """Returns "yes", or "PyG" if a call under autocast falls back to PyG."""
    reasons: list[Reason] = []
    for row in _table_of_tests("compiled_layers").ROWS:
        if row.name.partition(" ")[0] == name:
            with (
                warnings.catch_warnings(),
                listening(reasons.append),
                torch.autocast("cpu", torch.bfloat16),
            ):
                warnings.simplefilter("ignore")
                row.run(row.make(), *row.draw(_NODES))
    return "PyG" if reasons else "yes"


def _compiled(name: str) -> tuple[str, str]:
    """Whether PyG's layer compiles, and whether it can be exported, by docs/compile_layers.md."""
    of_pyg = (DOCS / "compile_layers.md").read_text().partition("\n## DGL\n")[0]
    rows = re.findall(rf"^\| `{name}`[^|]*\| (.+) \|$", of_pyg, re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    return ("PyG", "-") if cells[0][0] != "yes" else ("yes", _word(all(row[3] == "yes" for row in cells)))


def pyg_table() -> str:
    """A row for each drop-in of PyG's plugin."""
    columns = ["layer", "computed by", "edge weights", "edge features", "pair", "static", "lazy"]
    columns += ["autocast", "capture", "compile", "export"]
    rows = []
    for original, drop_in in fastsparse_pyg.nn.DROP_INS.items():
        name = original.__name__
        arguments = {*inspect.signature(original.forward).parameters}
        rows.append(
            [
                f"`{drop_in.__name__}`",
                f"`{drop_in._kernel}`",
                _word(bool(arguments & {"edge_weight", "hyperedge_weight"})),
                _word("edge_dim" in inspect.signature(original.__init__).parameters),
                _tried(name, lambda it: (it.x, it.x)),
                _tried(name, lambda it: torch.stack([it.x, it.x])),
                _word(bool(re.search(r"`-1`|-1 to", original.__doc__ or ""))),
                _under_autocast(name),
                "yes",  # `test_a_training_step_is_replayed`, on a GPU
                *_compiled(name),
            ]
        )
    return _table(columns, sorted(rows))


def _takes_pair(name: str) -> bool:
    """Whether a drop-in of DGL takes features of the sources and of the destinations of a bipartite graph."""
    tables = _table_of_tests("dgl_layer_cases")
    graph = tables.bipartite()
    features = tables.pair(graph, _WIDTH, _WIDTH)
    tried = itertools.product(tables.CASES, (_WIDTH, (_WIDTH, _WIDTH)))  # some layers need two widths
    for case, width in ((case, width) for case, width in tried if case.name == name):
        with contextlib.suppress(Exception):
            case.run(case.pair(width, _WIDTH)[1], graph, features, *case.rest(graph, _WIDTH))
            return True
    return False


def dgl_table() -> str:
    """A row for each drop-in of DGL's plugin."""
    rows = []
    for original, drop_in in fastsparse_dgl.nn.DROP_INS.items():
        arguments = {*inspect.signature(drop_in.forward).parameters}
        rows.append(
            [
                f"`{drop_in.__name__}`",
                _word("edge_weight" in arguments),
                _word(bool(arguments & {"edge_feat", "edge_feats", "efeat", "efeats"})),
                _word(_takes_pair(original.__name__)),
                _word(original.__name__ not in _table_of_tests("dgl_layer_cases").NOT_REPLAYED),
            ]
        )
    return _table(["layer", "edge weights", "edge features", "pair", "capture"], sorted(rows))


def _word(is_so: bool) -> str:
    return "yes" if is_so else "-"


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES = {"PyG": pyg_table, "DGL": dgl_table}


def shown(framework: str) -> str:
    """The table that the page shows."""
    (found,) = re.findall(_BLOCK.format(framework), PAGE.read_text(), re.DOTALL)
    return found


if __name__ == "__main__":
    for framework, table in TABLES.items():
        before, rest = re.split(_BLOCK.format(framework), PAGE.read_text(), flags=re.DOTALL)
        PAGE.write_text(before + table() + rest)
