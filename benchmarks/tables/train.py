"""Tables of training steps."""

from __future__ import annotations

from typing import Any

from ..goals import STEPS_MS, verdict
from ..roofline import peers
from ..runner import geometric_mean
from .cells import (
    Cell,
    Table,
    by,
    compared,
    first,
    has_roofline,
    number,
    ordered,
    quotient,
    ratio,
    shown,
    time_of,
)

#: The layers that replace one of PyG's.
LAYERS = (
    "FastGCNConv",
    "FastSAGEConv",
    "FastGATConv",
    "FastGATv2Conv",
    "FastTransformerConv",
    "FastAGNNConv",
)


def train(result: dict[str, Any]) -> list[Table]:
    cells = result["cells"]
    tables = []
    columns = ["graph", "implementation", "step ms", "time against ours", "inference ms", "peak GB", "memory"]
    for model, dtype in ordered((c["model"], c["dtype"]) for c in cells):
        rows = []
        group = by(cells, model=model, dtype=dtype)
        for graph in ordered(c["graph"] for c in group):
            measured = by(group, graph=graph)
            ours = next((c for c in measured if c["implementation"].startswith("Fast")), None)
            for cell in measured:
                peak = cell.get("peak_gb")
                rows.append(
                    [
                        graph,
                        cell["implementation"],
                        shown(cell),
                        ratio(quotient(time_of(cell), time_of(ours))),
                        shown(cell, "infer_median_ms") if cell["status"] == "ok" else "",
                        number(peak),
                        ratio(quotient(peak, ours.get("peak_gb") if ours else None)),
                    ]
                )
            rows += _stored_training(result, measured, ours)
        tables.append(Table(f"{model}, {dtype}", columns, rows))
    return tables


def _stored_training(result: dict[str, Any], measured: list[Cell], ours: Cell | None) -> list[list[str]]:
    """Rows of what was not run beside the measured cells but is stored from the same GPU model."""
    if result["machine"].get("gpu") != peers()["gpu"]:
        return []
    graph, model, dtype = (measured[0][key] for key in ("graph", "model", "dtype"))
    here = {cell["implementation"] for cell in measured}
    return [
        [
            graph,
            f"{rival['implementation']} (stored)",
            number(rival["train_ms"]),
            ratio(quotient(rival["train_ms"], time_of(ours))),
            number(rival["infer_ms"]),
            number(rival["peak_gb"]),
            ratio(quotient(rival["peak_gb"], ours.get("peak_gb") if ours else None)),
        ]
        for rival in by(peers()["training"], graph=graph, model=model, dtype=dtype)
        if rival["implementation"] not in here and "train_ms" in rival
    ]


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
        captured = any("captured_median_ms" in c for c in group)
        goals = STEPS_MS.get((model, dtype), {})
        rows = []
        for graph in graphs:
            mine = first(cells, graph=graph, implementation=ours)
            time = time_of(mine)
            goal = goals.get(graph)
            asked = "" if goal is None else verdict(time is not None and time <= goal, f"{number(goal)} ms")
            rivals = (first(cells, graph=graph, implementation=name) for name in others)
            replayed = [number(mine.get("captured_median_ms") if mine else None)] if captured else []
            rows.append(
                [
                    graph,
                    _step(mine, None),
                    *([asked] if goals else []),
                    *replayed,
                    *(_step(rival, time) for rival in rivals),
                ]
            )
        as_graph = ["as a CUDA graph, ms"] if captured else []
        columns = ["graph", f"{ours}, ms, peak GB", *(["asked"] if goals else []), *as_graph, *others]
        details.append(Table(f"{model}, {dtype}", columns, rows))
        for name in others:
            speeds: dict[str, float] = {}
            cannot: dict[str, list[str]] = {}
            for graph in graphs:
                rival = first(cells, graph=graph, implementation=name)
                own = time_of(first(cells, graph=graph, implementation=ours))
                if rival is not None and rival["status"] != "ok":
                    cannot.setdefault(_short(rival["status"]), []).append(graph)
                elif speed := quotient(time_of(rival), own):
                    speeds[graph] = speed
            row = compared(f"{model}, {dtype}", name, speeds)[:-1] if speeds else ["", name, "-", "-", "0"]
            reasons = [
                f"{'any' if len(where) == len(graphs) > 1 else ', '.join(where)} ({why})"
                for why, where in cannot.items()
            ]
            summary.append([f"{model}, {dtype}", *row[1:], ", ".join(reasons)])
    columns = ["", "rival", "geometric mean", "least", "graphs", "does not run on"]
    return [Table("Rival's step over ours", columns, summary), *details]


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
            (name,) = {c["implementation"] for c in by(result["cells"], model=model)} & set(LAYERS)
            means = [ratio(geometric_mean(found.values())) for found in (step, step_bf16, memory)]
            least, most = (choose(step, key=step.__getitem__) for choose in (min, max))
            ends = [f"{ratio(step[least])} {least}", f"{ratio(step[most])} {most}"]
            means.append(ratio(geometric_mean(csr.values())))
            rows.append([f"`{name}`", means[0], *ends, *means[1:], str(len(step))])
    columns = ["layer", "time, float32", "least", "most", "time, bf16", "memory, float32"]
    columns += ["time, PyG on torch.sparse", "graphs"]
    return Table("PyG's layer over ours: time of a training step, and peak memory", columns, rows)


def _pyg_over_ours(
    result: dict[str, Any], model: str, dtype: str, field: str, rival: str = "PyG edge_index"
) -> dict[str, float]:
    """PyG's number over ours by graph, where both were measured."""
    group = by(result["cells"], model=model, dtype=dtype, status="ok")
    ours = {c["graph"]: c[field] for c in group if c["implementation"] in LAYERS}
    rivals = by(group, implementation=rival)
    return {c["graph"]: c[field] / ours[c["graph"]] for c in rivals if c["graph"] in ours}


def _step(cell: Cell | None, ours: float | None) -> str:
    """Time, that over ours, and memory; what kept a cell from being measured; "not run"."""
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
            **rival,
            "implementation": f"{rival['implementation']} (stored)",
            "status": rival.get("status", "ok"),
            "median_ms": rival.get("train_ms"),
        }
        for rival in by(peers()["training"], model=group[0]["model"], dtype=group[0]["dtype"])
        if rival["graph"] in graphs and (rival["graph"], rival["implementation"]) not in here
    ]
