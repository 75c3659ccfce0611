"""Tables of training steps."""

from __future__ import annotations

from typing import Any

from ..goals import STEPS_MS, verdict
from ..roofline import peers
from ..runner import geometric_mean
from .cells import (
    Cell,
    Column,
    Row,
    Table,
    by,
    by_graph,
    compared,
    first,
    has_roofline,
    number,
    ordered,
    pivot,
    quotient,
    ratio,
    shown,
    time_of,
    value,
)

#: The layers that replace one of PyG's.
LAYERS = {f"Fast{name}Conv" for name in ("GCN", "SAGE", "GAT", "GATv2", "Transformer", "AGNN")}


def _is_ours(cell: Cell) -> bool:
    return cell["implementation"].startswith("Fast")


def train(result: dict[str, Any]) -> list[Table]:
    """The measured cells, then stored ones from the same GPU model that were not measured."""

    def beside(row: Row, field: str) -> str:
        ours = next(filter(_is_ours, by(row.table, graph=row.cell["graph"])), {})
        found = time_of if field == "median_ms" else lambda cell: cell.get(field)
        return ratio(quotient(found(row.cell), found(ours) if ours else None))

    def inference(cell: Cell) -> str:
        return shown(cell, "infer_median_ms") if cell["status"] == "ok" else ""

    columns = [
        value("graph"),
        value("implementation"),
        Column("step ms", lambda row: shown(row.cell)),
        Column("time against ours", lambda row: beside(row, "median_ms")),
        Column("inference ms", lambda row: inference(row.cell)),
        value("peak GB", "peak_gb", number),
        Column("memory", lambda row: beside(row, "peak_gb")),
    ]
    cells = []
    for model, dtype, graph in ordered((c["model"], c["dtype"], c["graph"]) for c in result["cells"]):
        group = by(result["cells"], model=model, dtype=dtype, graph=graph)
        cells += group + by(_stored_cells(result, group), status="ok")
    return pivot(cells, "{model}, {dtype}", (), columns, split=("model", "dtype"))


def train_in_short(result: dict[str, Any]) -> list[Table]:
    """The layers' times over ours, then every model: time, and memory behind the comma."""
    summary, details = [], []
    for model, dtype in ordered((c["model"], c["dtype"]) for c in result["cells"]):
        group = by(result["cells"], model=model, dtype=dtype)
        cells = group + _stored_cells(result, group)
        names = ordered(c["implementation"] for c in cells)
        ours = next((name for name in names if name.startswith("Fast")), names[0])
        others = [name for name in names if name != ours]
        graphs = ordered(c["graph"] for c in group)
        goals = STEPS_MS.get((model, dtype), {})

        def asked(row: Row, ours: str = ours, goals: dict[str, float] = goals) -> str:
            time, goal = time_of(row[ours]), goals.get(row.key["graph"])
            reached = goal is not None and time is not None and time <= goal
            return "" if goal is None else verdict(reached, f"{number(goal)} ms")

        columns = [value("graph"), Column(f"{ours}, ms, peak GB", lambda row, it=ours: _step(row[it], None))]
        columns += [Column("asked", asked)] if goals else []
        if any("captured_median_ms" in c for c in group):
            columns.append(value("as a CUDA graph, ms", "captured_median_ms", number))
        columns += [
            Column(name, lambda row, name=name, it=ours: _step(row[name], time_of(row[it])))
            for name in others
        ]
        cells = [it for it in cells if it["implementation"] == ours] + cells
        details += pivot(cells, f"{model}, {dtype}", ("graph",), columns)
        for name in others:
            theirs = {graph: first(cells, graph=graph, implementation=name) for graph in graphs}
            speeds = by_graph(
                filter(None, (first(cells, graph=graph, implementation=ours) for graph in graphs)),
                lambda cell, theirs=theirs: time_of(theirs[cell["graph"]]),
            )
            cannot: dict[str, list[str]] = {}
            for graph, baseline in theirs.items():
                if baseline is not None and baseline["status"] != "ok":
                    cannot.setdefault(_short(baseline["status"]), []).append(graph)
            row = compared(f"{model}, {dtype}", name, speeds)[:-1] if speeds else ["", name, "-", "-", "0"]
            reasons = [
                f"{'any' if len(where) == len(graphs) > 1 else ', '.join(where)} ({why})"
                for why, where in cannot.items()
            ]
            summary.append([f"{model}, {dtype}", *row[1:], ", ".join(reasons)])
    columns = ["", "baseline", "geometric mean", "least", "graphs", "does not run on"]
    return [Table("Baseline's step over ours", columns, summary), *details]


def train_at_a_glance(result: dict[str, Any]) -> Table:
    """A row for each of our layers: PyG's time and memory over ours, on the graphs that PyG trains."""
    rows = []
    for model in ordered(c["model"] for c in result["cells"]):
        step, step_bf16, memory = (
            _pyg_over_ours(result, model, dtype, field)
            for dtype, field in (("float32", "median_ms"), ("bf16-amp", "median_ms"), ("float32", "peak_gb"))
        )
        csr = _pyg_over_ours(result, model, "float32", "median_ms", "PyG sparse_csr")
        if step and step_bf16 and memory:
            (name,) = {c["implementation"] for c in by(result["cells"], model=model)} & LAYERS
            means = [ratio(geometric_mean(found.values())) for found in (step, step_bf16, memory)]
            least, most = (choose(step, key=step.__getitem__) for choose in (min, max))
            ends = [f"{ratio(step[least])} {least}", f"{ratio(step[most])} {most}"]
            means.append(ratio(geometric_mean(csr.values())))
            rows.append([f"`{name}`", means[0], *ends, *means[1:], str(len(step))])
    columns = ["layer", "time, float32", "least", "most", "time, bf16", "memory, float32"]
    columns += ["time, PyG on torch.sparse", "graphs"]
    return Table("PyG's value divided by ours: time of a training step, and peak memory", columns, rows)


def _pyg_over_ours(
    result: dict[str, Any], model: str, dtype: str, field: str, baseline: str = "PyG edge_index"
) -> dict[str, float]:
    """PyG's number over ours by graph, where both were measured."""
    group = by(result["cells"], model=model, dtype=dtype, status="ok")
    ours = {c["graph"]: c[field] for c in group if c["implementation"] in LAYERS}
    baselines = by(group, implementation=baseline)
    return {c["graph"]: c[field] / ours[c["graph"]] for c in baselines if c["graph"] in ours}


def _step(cell: Cell | None, ours: float | None) -> str:
    """Time, its quotient to ours, and memory; or why the cell was not measured; or "not run"."""
    if cell is None:
        return "not run"
    if cell["status"] != "ok":
        return _short(cell["status"])
    over = f", {ratio(quotient(cell['median_ms'], ours))}" if ours else ""
    return f"{number(cell['median_ms'])}{over}, {number(cell.get('peak_gb'))} GB"


def _short(status: str) -> str:
    return "not supported" if "not supported" in status else status.split(":")[0]


def _stored_cells(result: dict[str, Any], group: list[Cell]) -> list[Cell]:
    """Stored measurements of layers that were not run, on the graphs that were, from the same GPU model."""
    if not has_roofline(result):
        return []
    here = {(c["graph"], c["implementation"]) for c in group}
    graphs = {c["graph"] for c in group}
    return [
        {
            **baseline,
            "implementation": f"{baseline['implementation']} (stored)",
            "status": baseline.get("status", "ok"),
            "median_ms": baseline.get("train_ms"),
            "infer_median_ms": baseline.get("infer_ms"),
        }
        for baseline in by(peers()["training"], model=group[0]["model"], dtype=group[0]["dtype"])
        if baseline["graph"] in graphs and (baseline["graph"], baseline["implementation"]) not in here
    ]
