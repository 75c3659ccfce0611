"""The table of PyG's drop-ins under `torch.compile` and `torch.export`, with edges as a plain tensor.

`tests/pyg/test_pyg_compile.py` checks its rows. ``python tests/compiled_layers.py`` checks them too, with
CUDA graphs where there is a GPU, and writes the table of docs/compile_layers.md.
"""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [
        str(Path(__file__).parents[1]),
        *(str(Path(__file__).parent / each) for each in ("", "pyg")),
    ]

import torch
from pyg_cases import gradients
from pyg_layer_cases import CASES, Case
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch_geometric import nn as pyg
from torch_geometric.nn.models import LabelPropagation

from fastsparse_core import SlowPathWarning
from fastsparse_core.export import for_cpp
from fastsparse_core.log import seen
from fastsparse_pyg import nn as fast

PAGE = Path(__file__).parents[1] / "docs" / "compile_layers.md"
COLUMNS = ("compile", "other sizes", "reduce-overhead", "export", "AOTInductor")
#: Layers, or calls of them, for which PyG's code is traced, and the message that says so.
_TYPED = "typed edges"
FALLBACKS: dict[str, str] = {
    "HGTConv": _TYPED,
    "RGATConv": _TYPED,
    "RGCNConv": _TYPED,
    "FastRGCNConv": _TYPED,
    "MFConv": "sizes that depend on the edges",
}


class Row(NamedTuple):
    """A layer and a call of it.

    Attributes:
        name: of the original, or of our class where there is none.
        make: the layer.
        draw: arguments of a call, from the number of nodes.
        run: the result of a call.
    """

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[int], tuple[Any, ...]]
    run: Callable[..., Any] = lambda layer, *arguments: layer(*arguments)

    @property
    def is_fallback(self) -> bool:
        return self.name in FALLBACKS


def draw_edges(nodes: int) -> Tensor:
    """Edges with self loops."""
    return torch.randint(0, nodes, (2, 6 * nodes), generator=torch.Generator().manual_seed(nodes))


def _of_case(case: Case, name: str) -> Row:
    def draw(nodes: int) -> tuple[Any, ...]:
        edges = draw_edges(nodes)
        return case.features(nodes), edges, *case.rest(edges)

    return Row(name, lambda: case.make(case.fast), draw, case.run)


def _rows() -> Iterator[Row]:
    known = {LabelPropagation, pyg.HypergraphConv, pyg.ChebConv, pyg.HGTConv}
    for case in CASES:
        kind = (
            "with edge features" if isinstance(case.edges, int) else "with edge weights" if case.edges else ""
        )
        key = (case.original, kind)
        if case.original not in known and key not in known and case.edges != "constant":
            known.add(key)
            yield _of_case(case, f"{case.name} {kind}".strip())
    chebyshev = next(case for case in CASES if case.name == "ChebConv" and len(case.arguments(1, 1)) == 3)
    yield _of_case(chebyshev, "ChebConv")
    x_and_edges = lambda nodes: (torch.randn(nodes, 6, requires_grad=True), draw_edges(nodes))  # noqa: E731
    yield Row(
        "HypergraphConv",
        lambda: fast.FastHypergraphConv(6, 4),
        x_and_edges,
        lambda layer, x, edges: layer(x, edges, num_edges=x.size(0)),
    )
    yield Row(
        "LabelPropagation",
        lambda: fast.FastLabelPropagation(2, 0.9),
        lambda nodes: (torch.rand(nodes, 3), draw_edges(nodes)),
    )
    yield Row(
        "LightGCN",
        lambda: fast.FastLightGCN(150, 5, 2),
        lambda nodes: (draw_edges(nodes),),
        lambda layer, edges: layer.get_embedding(edges),
    )
    hgt = next(case for case in CASES if case.name == "HGTConv")
    yield _of_case(hgt, "HGTConv")
    for name in ("FastMaxKGCNConv", "FastMaxKSAGEConv"):
        yield Row(name, lambda name=name: getattr(fast, name)(6, 8, k=3), x_and_edges)
    yield Row("GraphTransformerLayer", lambda: fast.GraphTransformerLayer(6, 6, 2), x_and_edges)


ROWS = sorted(_rows(), key=lambda row: row.name.lower())


def moved(arguments: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    return tuple(each.detach().to(device).requires_grad_(each.requires_grad) for each in arguments)


def check_compiled(row: Row, device: str, mode: str | None = None) -> list[list[str]]:
    """Compares a compiled layer with itself on two graphs; returns the operators of every trace.

    Args:
        row: the layer.
        device: where.
        mode: of `torch.compile`; None: AOTAutograd alone.
    """
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch.manual_seed(0)
    layer, traced = row.make().to(device), []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        targets = [str(node.target) for node in module.graph.nodes]
        assert "autograd_function_apply" not in targets  # a trace would differentiate it once only, silently
        traced.append(targets)
        return aot_eager(module, inputs)

    options: dict[str, Any] = {"backend": backend} if mode is None else {"mode": mode}
    compiled = torch.compile(row.run, fullgraph=True, dynamic=True, **options)
    for nodes in (40, 150):
        arguments = moved(row.draw(nodes), device)
        for _step in range(1 if mode is None else 3):
            compare(
                compiled(layer, *arguments), row.run(layer, *arguments), [*arguments, *layer.parameters()]
            )
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
    with torch.no_grad():
        inference = torch.compile(row.run, backend="eager", fullgraph=True)(layer, *arguments)
        compare(inference, row.run(layer, *arguments), [])
    return traced


def compare(got: Tensor, expected: Tensor, inputs: list[Any]) -> None:
    """Results and gradients agree, to 1e-5 of the largest number."""
    wanted = [each for each in inputs if each.requires_grad]
    pairs = [(got, expected)]
    if got.requires_grad:
        pairs += zip(gradients(got, wanted), gradients(expected, wanted), strict=True)
    for one, other in pairs:
        if one is not None or other is not None:
            one, other = (torch.zeros(()) if each is None else each.detach() for each in (one, other))
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * max(1.0, float(other.abs().max())))


class Exported(NamedTuple):
    """A layer's program, made from one graph, and another graph with what the layer gives for it."""

    program: torch.export.ExportedProgram
    arguments: tuple[Any, ...]
    expected: Tensor

    def compare(self, call: Callable[..., Any]) -> None:
        """Checks a form of the program on the other graph."""
        with torch.no_grad():
            compare(call(*self.arguments), self.expected, [])


def export(row: Row, device: str) -> Exported:
    """Exports a layer for graphs of any size."""
    torch.manual_seed(0)
    layer = row.make().to(device).eval()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *arguments: Any) -> Any:
            return row.run(self.layer, *arguments)

    first, second = (tuple(each.detach() for each in moved(row.draw(nodes), device)) for nodes in (40, 60))
    sizes = [
        {
            place: torch.export.Dim.AUTO
            for place, size in enumerate(each.shape)
            if size != second[nth].size(place)
        }
        for nth, each in enumerate(first)
    ]
    program = torch.export.export(Model(), first, dynamic_shapes=(tuple(sizes),))
    with torch.no_grad():
        return Exported(program, second, row.run(layer, *second))


def operators(program: torch.export.ExportedProgram) -> list[str]:
    """The names of a program's operators."""
    parts = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    return [str(node.target) for part in parts for node in part.graph.nodes]


def check_exported(row: Row, device: str) -> Exported:
    """Compares an exported layer with itself on a graph of another size, and returns it."""
    exported = export(row, device)
    exported.compare(exported.program.module())
    assert is_ours(operators(exported.program)), row.name
    return exported


def check_for_cpp(exported: Exported, folder: Path | None = None) -> str:
    """Compares what C++ programs load with the layer; says as the page whose operators it calls.

    Args:
        exported: the layer.
        folder: where AOTInductor's package is written, which takes half a minute; None: there is none.
    """
    program = for_cpp(exported.program)
    exported.compare(program.module())
    if folder is not None:
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
        exported.compare(torch._inductor.aoti_load_package(path))
    names = {each.split(".")[1] for each in operators(program) if each.startswith("fastsparse_cpp.")}
    return "yes" if names - {"compress"} else "in PyTorch's operators"


def is_ours(operators: list[str]) -> bool:
    """Whether our operators are among them."""
    return any(each.startswith("fastsparse.") and "structure" not in each for each in operators)


# ---------------------------------------------------------------- the page


def table(cells: dict[str, tuple[str, ...]]) -> str:
    """The page's table."""
    lines = [f"| layer | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    return "\n".join(
        [
            *lines,
            *(
                f"| `{name.replace(' ', '` ', 1)}" + ("" if " " in name else "`") + f" | {' | '.join(row)} |"
                for name, row in cells.items()
            ),
        ]
    )


def written() -> dict[str, tuple[str, ...]]:
    """The page's table as it stands, by layer."""
    page = PAGE.read_text().split("<!-- end of the table -->")[0]
    rows = re.findall(r"^\| `([^`]+)`( [^|]*)? \| (.*) \|$", page, re.MULTILINE)
    return {(name + kind).strip(): tuple(row.split(" | ")) for name, kind, row in rows}


def main() -> None:
    device, known = "cuda" if torch.cuda.is_available() else "cpu", written()
    warnings.simplefilter("ignore", SlowPathWarning)
    cells = {}
    for row in ROWS:
        seen.clear()
        if row.is_fallback:
            cells[row.name] = (f"PyG's code: {FALLBACKS[row.name]}",) + ("no",) * 4
            continue
        assert all(map(is_ours, check_compiled(row, device))), row.name
        exported = check_exported(row, device)
        with tempfile.TemporaryDirectory() as folder:
            packaged = check_for_cpp(exported, Path(folder))
        recorded = known.get(row.name, ("", "", "not checked"))[2]
        if device == "cuda":
            check_compiled(row, device, "reduce-overhead")
            recorded = "yes"
        cells[row.name] = ("yes", "yes", recorded, "yes", packaged)
        print(row.name, cells[row.name], flush=True)
    page = PAGE.read_text()
    before, after = page.split("<!-- table -->\n")[0], page.split("<!-- end of the table -->")[1]
    PAGE.write_text(f"{before}<!-- table -->\n{table(cells)}\n<!-- end of the table -->{after}")


if __name__ == "__main__":
    main()
