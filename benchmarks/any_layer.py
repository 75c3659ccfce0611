"""Every layer of PyG under `accelerate` against itself: forward and backward, time and peak memory.

``python -m benchmarks.any_layer`` prints the table of docs/pyg_layers.md (layer, what it becomes, what
computes it, measured speed-ups of the stored record); with ``--write`` it puts the table there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastsparse_core.layer_swap import Row
from fastsparse_pyg import accelerate, clear_cache

from . import suite
from .pyg_layers import LAYERS, Inputs, Layer
from .record import RESULTS
from .runner import (
    Benchmark,
    Cell,
    Run,
    attempt,
    check,
    geometric_mean,
    option,
    peak_bytes,
    relative_error,
    synchronise,
)
from .timing import step_time

WIDTH = 128
GRAPHS = ("ogbn-arxiv", "cora", "molecules")
#: Accepted relative error of outputs: sums of hundreds of terms have another order.
TOLERANCE = 1e-4
PAGE = Path(__file__).parents[1] / "docs" / "pyg_layers.md"
BEGIN, END = "<!-- layers: python -m benchmarks.any_layer --write -->", "<!-- layers end -->"
#: If the first step takes longer than SLOW seconds, one step is timed; above TOO_SLOW, none.
SLOW, TOO_SLOW = 0.5, 1.0
#: Shorter steps, in milliseconds, are timed in many short rounds that alternate between both implementations,
#: and the best round counts. The host limits such steps, so other work of the machine affects them.
SHORT, ROUNDS, PER_ROUND = 10.0, 10, 0.25


def draw_graph(name: str, device: torch.device) -> tuple[Tensor, int]:
    """Edges and number of nodes: a stand-in of the suite, cora's size, or a batch of 512 molecules."""
    if name not in ("cora", "molecules"):
        graph = suite.load(name, device)
        return graph.edge_index(), graph.num_nodes
    generator = torch.Generator().manual_seed(0)
    if name == "cora":
        src, dst = torch.randint(2708, (2, 5278), generator=generator)
        num_nodes = 2708
    else:  # chains of 26 atoms with 2 rings each
        atoms = torch.arange(26)
        bonds = torch.stack([torch.cat([atoms[:-1], atoms[[0, 13]]]), torch.cat([atoms[1:], atoms[[5, 18]]])])
        src, dst = (bonds[:, None] + 26 * torch.arange(512)[None, :, None]).flatten(1)
        num_nodes = 26 * 512
    return torch.stack([torch.cat([src, dst]), torch.cat([dst, src])]).to(device), num_nodes


def cells(run: Run, case: tuple[str, str]) -> Iterator[Cell]:
    """Both cells of one layer on one graph."""
    graph, name = case
    edge_index, num_nodes = draw_graph(graph, run.device)
    layer, width = LAYERS[name], min(run.options.width, LAYERS[name].widest)
    torch.manual_seed(0)
    it = Inputs.draw(edge_index, num_nodes, width, torch.float32)
    expected = state = None
    cells: dict[str, Cell] = {}
    steps: dict[str, Callable[[], Any]] = {}
    for implementation in ("pyg", "fastsparse"):
        row = Row((), name, "", "")
        cell = attempt(lambda: {"layer": layer.make(width).to(run.device)})
        module = cell.pop("layer", None)
        if module is not None:
            if state is not None:
                module.load_state_dict(state)
            state = {key: value.clone() for key, value in module.state_dict().items()}
            if implementation == "fastsparse":
                (row,) = accelerate(module, show=False).rows
            steps[implementation] = partial(_step, layer, module, it)
            cell = attempt(partial(_measure, run, layer, module, it, expected))
            result = cell.pop("result", None)
            expected = result if expected is None else expected
        cells[implementation] = {"now": row.drop_in, "by": row.kernel or row.reason, **cell}
        if cell["status"].startswith("left out"):
            break
    time_in_turn(run, cells, steps)
    what = {"graph": graph, "edges": edge_index.size(1), "layer": name, "width": width}
    for implementation, cell in cells.items():
        yield {**what, "implementation": implementation, **cell}
    clear_cache()


def time_in_turn(run: Run, cells: dict[str, Cell], steps: dict[str, Callable[[], Any]]) -> None:
    """Times short steps again, alternating; the best round of each is kept in its cell."""
    if not all(cell["status"] == "ok" and cell["median_ms"] < SHORT for cell in cells.values()):
        return
    for _ in range(ROUNDS):
        for implementation, cell in cells.items():
            budget = PER_ROUND * run.options.budget_ms
            timing = step_time(steps[implementation], run.device, budget_ms=budget)
            if timing.median_ms < cell["median_ms"]:
                cell |= timing.as_cell()


def _step(layer: Layer, module: nn.Module, it: Inputs) -> Tensor:
    """Forward and backward."""
    out = layer.call(module, it)
    out.sum().backward()
    for leaf in it.leaves():
        leaf.grad = None
    module.zero_grad()
    return out.detach()


def _measure(run: Run, layer: Layer, module: nn.Module, it: Inputs, expected: Tensor | None) -> Cell:
    """Time and peak memory of a step whose output is that of PyG's layer."""
    module.eval()
    with torch.no_grad():
        result = layer.call(module, it).detach()
    error = None if expected is None else relative_error(result, expected)
    if error is not None:
        check(error, TOLERANCE)
    module.train()
    step = partial(_step, layer, module, it)
    begin = time.perf_counter()
    step()
    synchronise(run.device)
    seconds = time.perf_counter() - begin
    if seconds > TOO_SLOW:
        return {"status": f"left out: a step takes {seconds:.1f} s"}
    is_slow = seconds > SLOW
    for _ in range(0 if is_slow else 3):  # so that the cache also handles edges that are new in every call
        step()
    peak = peak_bytes(step, run.device, above=True)
    samples = {"warm_up": 1, "min_calls": 1} if is_slow else {"warm_up": 2, "min_calls": 3}
    return {"result": result, "error": error, "peak_bytes": peak, **run.time(step, step_time, **samples)}


BENCHMARK = Benchmark(
    "any_layer",
    cells,
    lambda options: [(graph, name) for graph in options.drawn for name in options.layers],
    budget_ms=80.0,
    options={
        "graphs": option(choices=GRAPHS, dest="drawn"),
        "layers": option(choices=tuple(LAYERS)),
        "width": option(WIDTH),
    },
    notes=("float32; a step is forward and backward with the gradients of all inputs and parameters",),
)


# ---------------------------------------------------------------- the table of the documentation


def rows() -> list[tuple[str, str, str]]:
    """(layer, what it becomes, what computes it) of every layer of PyG."""
    found = []
    for name, layer in LAYERS.items():
        for row in accelerate(layer.make(16), show=False).rows:
            found.append((name, row.drop_in or "unchanged", row.kernel or row.reason))
            break
    return found


def speed_ups(record: dict[str, Any]) -> dict[tuple[str, str], float]:
    """(layer, graph) -> time of PyG's layer divided by ours."""
    times = {
        (cell["layer"], cell["graph"], cell["implementation"]): cell["median_ms"]
        for cell in record["cells"]
        if cell["status"] == "ok"
    }
    return {
        (layer, graph): time / times[layer, graph, "fastsparse"]
        for (layer, graph, implementation), time in times.items()
        if implementation == "pyg" and (layer, graph, "fastsparse") in times
    }


def table(results: Path = RESULTS) -> str:
    """The table in Markdown, with speed-ups that were measured."""
    stored = sorted(results.rglob("any_layer.json"))
    measured = speed_ups(json.loads(stored[-1].read_text())) if stored else {}
    titles = ["layer", "becomes", "computed by", *(f"x PyG, {graph}" for graph in GRAPHS if measured)]
    lines = [titles, ["---"] * 3 + ["---:"] * (len(titles) - 3)]
    for name, now, by in rows():
        numbers = [f"{measured[name, graph]:.1f}" if (name, graph) in measured else "-" for graph in GRAPHS]
        lines.append([name, now, by, *(numbers if measured else ())])
    if measured:
        means = [
            geometric_mean(value for (_, each), value in measured.items() if each == graph)
            for graph in GRAPHS
        ]
        lines.append(["geometric mean", "", "", *(f"{mean:.1f}" for mean in means)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Prints the table, or writes it into the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true", help=f"put it into docs/{PAGE.name}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results")
    options = parser.parse_args()
    text = table(options.results)
    if not options.write:
        print(text)
        return
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
