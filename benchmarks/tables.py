"""Tables from stored results: Markdown for the documentation, rich tables for the terminal."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from . import record
from .common import geometric_mean
from .roofline import peers

Cell = dict[str, Any]

#: A pick this much slower than the best is marked: less is within the spread of the timings.
REGRET_SEEN = 1.03
#: What a pick may cost against the best.
ACCEPTED_REGRET = 1.10


@dataclass(frozen=True)
class Table:
    """Rows of text under column titles; the first column is left-aligned, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [
            f"**{self.title}**",
            "",
            _line(self.columns),
            _line(["---", *["---:"] * (len(self.columns) - 1)]),
        ]
        return "\n".join(lines + [_line(row) for row in self.rows]) + "\n"

    def print(self, console: Console) -> None:
        table = RichTable(title=self.title, title_justify="left")
        for place, column in enumerate(self.columns):
            table.add_column(column, justify="right" if place else "left", no_wrap=not place)
        for row in self.rows:
            table.add_row(*row)
        console.print(table)


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits or so; "-" for nothing."""
    if value is None or not math.isfinite(value):
        return "-"
    if value and abs(value) < 10 ** (1 - digits):
        return f"{value:.1e}"
    return f"{value:.{max(digits - 1 - max(math.floor(math.log10(abs(value))), 0), 0)}f}" if value else "0"


def ratio(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.2f}x"


def time_of(cell: Cell | None, field: str = "median_ms") -> float | None:
    """The time of a cell that was measured, else None."""
    return cell[field] if cell is not None and cell["status"] == "ok" else None


def _shown(cell: Cell | None, field: str = "median_ms") -> str:
    if cell is None:
        return "-"
    return number(cell[field]) if cell["status"] == "ok" else cell["status"].split(":")[0]


def _quotient(slow: float | None, fast: float | None) -> float | None:
    return slow / fast if slow is not None and fast else None


def _ordered(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _by(cells: Iterable[Cell], **wanted: Any) -> list[Cell]:
    return [cell for cell in cells if all(cell.get(key) == value for key, value in wanted.items())]


def _first(cells: Iterable[Cell], **wanted: Any) -> Cell | None:
    return next(iter(_by(cells, **wanted)), None)


def stored_rivals(result: dict[str, Any], operator: str, dtype: str, graph: str) -> dict[str, float]:
    """Stored times of rivals on a graph, if they were taken on the same GPU model.

    For float32 only rivals that compute in float32 count; for 16-bit types those of any precision.
    """
    known = peers()
    if result["machine"].get("gpu") != known["gpu"]:
        return {}
    return {
        name: times[graph]
        for name, times in known["kernels"].get(operator, {}).items()
        if graph in times
        and not name.startswith("cuSPARSE")
        and (dtype != "float32" or name.endswith("fp32"))
    }


def spmm(result: dict[str, Any]) -> list[Table]:
    cells = result["cells"]
    tables = []
    keys = _ordered((c["dtype"], c["width"], c["direction"]) for c in cells)
    for dtype, width, direction in keys:
        group = _by(cells, dtype=dtype, width=width, direction=direction)
        ours_name, rival_name = (
            next(
                name
                for name in _ordered(c["implementation"] for c in group)
                if name.startswith("fast") == ours
            )
            for ours in (True, False)
        )
        rows, ratios, stored_ratios, fractions = [], [], [], []
        for graph in _ordered(c["graph"] for c in group):
            ours = _first(group, graph=graph, implementation=ours_name)
            rival = _first(group, graph=graph, implementation=rival_name)
            stored = stored_rivals(result, f"spmm@{width}", dtype, graph) if direction == "forward" else {}
            best = min(stored, key=stored.__getitem__, default=None)
            mine = time_of(ours)
            speed = _quotient(time_of(rival), mine)
            against = _quotient(stored.get(best) if best else None, mine)
            fraction = _quotient(ours["floor_ms"] if ours else None, mine) if _has_roofline(result) else None
            rate = ours["gather_bytes"] / mine / 1e6 if ours and mine else None
            ratios.append(speed)
            stored_ratios.append(against)
            fractions.append(fraction)
            spread = f" ({number(ours['p20_ms'])}-{number(ours['p80_ms'])})" if ours and mine else ""
            rows.append(
                [
                    graph,
                    _shown(ours) + spread,
                    _shown(rival),
                    ratio(speed),
                    number(ours.get("error") if ours else None, 2),
                    number(rate),
                    "-" if fraction is None else f"{fraction:.0%}",
                    f"{best} {number(stored[best])}" if best else "-",
                    ratio(against),
                ]
            )
        rows.append(
            [
                "geometric mean",
                "",
                "",
                ratio(geometric_mean(r for r in ratios if r)),
                "",
                "",
                _percent(geometric_mean(f for f in fractions if f)),
                "",
                ratio(geometric_mean(r for r in stored_ratios if r)),
            ]
        )
        columns = [
            "graph",
            f"{ours_name} ms (20-80 %)",
            f"{rival_name} ms",
            "speed-up",
            "error",
            "gather GB/s",
            "of roofline",
            "best stored rival ms",
            "against it",
        ]
        tables.append(Table(f"spmm {direction}, {dtype}, F = {width}", columns, rows))
    return tables


def sddmm(result: dict[str, Any]) -> list[Table]:
    cells = result["cells"]
    tables = []
    for dtype, width in _ordered((c["dtype"], c["width"]) for c in cells):
        group = _by(cells, dtype=dtype, width=width)
        names = _ordered(c["implementation"] for c in group)
        rows, ratios = [], []
        for graph in _ordered(c["graph"] for c in group):
            times = {name: time_of(_first(group, graph=graph, implementation=name)) for name in names}
            picked = times.get("fastsparse auto")
            stored = stored_rivals(result, f"sddmm@{width}", dtype, graph)
            best = min(stored, key=stored.__getitem__, default=None)
            ratios.append(_quotient(stored.get(best) if best else None, picked))
            rows.append(
                [
                    graph,
                    *(_shown(_first(group, graph=graph, implementation=name)) for name in names),
                    f"{best} {number(stored[best])}" if best else "-",
                    ratio(ratios[-1]),
                ]
            )
        mean = ratio(geometric_mean(r for r in ratios if r))
        rows.append(["geometric mean", *("" for _ in names), "", mean])
        columns = ["graph", *(f"{name} ms" for name in names), "best stored rival ms", "auto against it"]
        tables.append(Table(f"sddmm, {dtype}, F = {width}", columns, rows))
    return tables


def ssd(result: dict[str, Any]) -> list[Table]:
    """The products against stored rivals, in short and by graph; the papers' tables and figures; maxk."""
    cells = result["cells"]
    summary, details = [], []
    for part, operator in (("forward", "ssd"), ("backward", "ssd_bwd")):
        group = _by(cells, part=part)
        for dtype, k in _ordered((c["dtype"], c["k"]) for c in group):
            shown, marks = _ssd_products(result, _by(group, dtype=dtype, k=k), operator)
            details.append(shown)
            summary += [[f"{part}, {dtype}, k = {k}", *mark] for mark in marks]
    columns = ["", "rival", "geometric mean", "least", "graphs"]
    tables = [Table("Rival's time over ours", columns, summary)]
    return [
        table
        for table in (*tables, *details, *_ssd_papers(cells), _maxk(_by(cells, part="maxk")))
        if table.rows
    ]


def _ssd_products(result: dict[str, Any], cells: list[Cell], operator: str) -> tuple[Table, list[list[str]]]:
    """One direction, type and k: a row per graph, and the means over the graphs by rival."""
    part, dtype, k, width = (cells[0][key] for key in ("part", "dtype", "k", "width"))
    name = f"{operator}@{k}" if width == 256 else ""
    rows = []
    ratios: dict[str, dict[str, float]] = {}
    known = {c["graph"]: stored_rivals(result, name, dtype, c["graph"]) for c in cells}
    rivals = _ordered(rival for times in known.values() for rival in times)
    for graph in _ordered(c["graph"] for c in cells):
        ours, *others = _by(cells, graph=graph)
        dense = others[0] if others else None
        times = {"densify": time_of(dense), **known[graph]} if part == "forward" else known[graph]
        for rival, time in times.items():
            if speed := _quotient(time, time_of(ours)):
                ratios.setdefault(rival, {})[graph] = speed
        row = [graph, _shown(ours) + _spread(ours), number(ours.get("error"), 2)]
        for rival in (["densify"] if part == "forward" else []) + rivals:
            row += [number(times.get(rival)), ratio(ratios.get(rival, {}).get(graph))]
        rows.append(row)
    columns = ["graph", "ms (20-80 %)", "error"]
    for rival in (["densify"] if part == "forward" else []) + rivals:
        columns += [f"{rival} ms", "against it"]
    marks = [
        [
            rival,
            ratio(geometric_mean(speeds.values())),
            f"{ratio(min(speeds.values()))} {min(speeds, key=speeds.__getitem__)}",
            str(len(speeds)),
        ]
        for rival, speeds in ratios.items()
    ]
    return Table(f"ssd {part}, {dtype}, F = {width}, k = {k}", columns, rows), marks


def _ssd_papers(cells: list[Cell]) -> list[Table]:
    """Table I and figures 11 to 14 and 16 of the decoupled SSD paper."""
    shares = [
        [c["graph"], f"{c['edges']:,}", *(_percent(c[key]) for key in c if key.startswith("share_"))]
        for c in _by(cells, part="groups")
    ]
    lengths = [key.removeprefix("share_") for c in _by(cells, part="groups")[:1] for key in c if "_" in key]
    tables = [
        Table(
            "Edge groups that share their row (table I), by the length of groups",
            ["graph", "edges", *lengths],
            shares,
        )
    ]
    for part, key, base, title in (
        (
            "ablation",
            "implementation",
            "maxk",
            "Time over that of MaxK's dataflow (figures 11 to 13), k = 16",
        ),
        ("slots", "slots", 1, "Time with one buffer per warp over that with several (figure 16), k = 8"),
    ):
        group = _by(cells, part=part)
        names = _ordered(c[key] for c in group)
        rows = []
        for graph, width in _ordered((c["graph"], c["width"]) for c in group):
            own = {name: time_of(_first(group, graph=graph, width=width, **{key: name})) for name in names}
            speeds = (f"{number(own[name])} {ratio(_quotient(own.get(base), own[name]))}" for name in names)
            rows.append([f"{graph}, F = {width}", *speeds])
        tables.append(Table(title, ["graph", *map(str, names)], rows))
    group = _by(cells, part="scaling")
    names = [name for name in _ordered(c["implementation"] for c in group) if "dense" not in name]
    rows = []
    for graph, k in _ordered((c["graph"], c["k"]) for c in group):
        dense = time_of(_first(group, graph=graph, implementation="cuSPARSE, dense rows"))
        cell = [_first(group, graph=graph, k=k, implementation=name) for name in names]
        if not any(cell):
            continue
        speeds = (f"{_shown(c)} {ratio(_quotient(dense, time_of(c)))}" for c in cell)
        rows.append([f"{graph}, k = {k}", *speeds])
    title = "Time, and speed-up over cuSPARSE on dense rows, by kept entries (figure 14)"
    return [*tables, Table(title, ["graph", *names], rows)]


def _maxk(cells: list[Cell]) -> Table:
    """The selection against torch.topk, and its share of the rate of a copy."""
    rows = []
    for dtype in _ordered(c["dtype"] for c in cells):
        ours, topk, copy = (time_of(cell) for cell in _by(cells, dtype=dtype))
        rows.append(
            [
                dtype,
                number(ours),
                number(topk),
                ratio(_quotient(topk, ours)),
                number(copy),
                _percent(_quotient(copy, ours) or math.nan),
            ]
        )
    shape = f"({cells[0]['rows']:,}, {cells[0]['width']}), k = {cells[0]['k']}" if cells else ""
    columns = ["", "maxk ms", "torch.topk ms", "speed-up", "copy ms", "of its bandwidth"]
    return Table(f"maxk, {shape}", columns, rows)


def attention(result: dict[str, Any]) -> list[Table]:
    """The rivals' times over ours in short, our times among each other, then every graph."""
    cells = result["cells"]
    summary, details = [], []
    for name, dtype, case, direction in _ordered(
        (c["implementation"], c["dtype"], c["case"], c["direction"]) for c in cells
    ):
        group = _by(cells, implementation=name, dtype=dtype, case=case, direction=direction)
        known = {c["graph"]: stored_rivals(result, c["stored"] or "", dtype, c["graph"]) for c in group}
        rivals = _ordered(rival for times in known.values() for rival in times)
        ratios = {
            rival: {
                cell["graph"]: speed
                for cell in group
                if (speed := _quotient(known[cell["graph"]].get(rival), time_of(cell)))
            }
            for rival in rivals
        }
        for rival, speeds in ratios.items():
            least = min(speeds, key=speeds.__getitem__, default=None)
            summary.append(
                [
                    f"{case} {direction}, {dtype}, {name}",
                    rival,
                    ratio(geometric_mean(speeds.values())),
                    f"{ratio(speeds[least])} {least}" if least else "-",
                    str(len(speeds)),
                ]
            )
        rows = [
            [
                cell["graph"],
                _shown(cell) + _spread(cell),
                number(cell.get("error"), 2),
                number(cell["extra_bytes"] / 1e6 if cell.get("extra_bytes") is not None else None),
                ratio(_quotient(cell.get("extra_bytes"), cell.get("result_bytes"))),
                *(
                    text
                    for rival in rivals
                    for text in (
                        number(known[cell["graph"]].get(rival)),
                        ratio(ratios[rival].get(cell["graph"])),
                    )
                ),
            ]
            for cell in group
        ]
        means = (text for speeds in ratios.values() for text in ("", ratio(geometric_mean(speeds.values()))))
        rows.append(["geometric mean", "", "", "", "", *means])
        columns = ["graph", "ms (20-80 %)", "error", "extra MB", "of the results"]
        columns += [text for rival in rivals for text in (f"{rival} ms", "against it")]
        details.append(Table(f"{case} {direction}, {dtype}, {name}", columns, rows))
    columns = ["", "rival", "geometric mean", "least", "graphs"]
    return [Table("Rival's time over ours", columns, summary), *_own_ratios(cells), *details]


def _own_ratios(cells: list[Cell]) -> list[Table]:
    """Backward over forward, and four heads of 32 over one of 128, a table per feature type."""
    tables = []
    for name, dtype in _ordered((c["implementation"], c["dtype"]) for c in cells):
        group = _by(cells, implementation=name, dtype=dtype)
        cases = _ordered(c["case"] for c in group)
        rows = []
        for graph in _ordered(c["graph"] for c in group):
            shared = _by(group, graph=graph)
            times = {(c["case"], c["direction"]): time_of(c) for c in shared}
            rows.append(
                [
                    graph,
                    f"{shared[0]['edges']:,}",
                    *(
                        ratio(_quotient(times.get((case, "backward")), times.get((case, "forward"))))
                        for case in cases
                    ),
                    *(
                        ratio(
                            _quotient(
                                times.get(("attention@4x32", direction)),
                                times.get(("attention@1x128", direction)),
                            )
                        )
                        for direction in ("forward", "backward")
                    ),
                ]
            )
        columns = ["graph", "edges", *cases, "attention 4x32 over 1x128, forward", "backward"]
        title = f"Backward time over forward time, and what four heads cost, {dtype}, {name}"
        tables.append(Table(title, columns, rows))
    return tables


def _percent(value: float) -> str:
    return f"{value:.0%}" if math.isfinite(value) else "-"


def _has_roofline(result: dict[str, Any]) -> bool:
    return result["machine"].get("gpu") == peers()["gpu"]


def train(result: dict[str, Any]) -> list[Table]:
    cells = result["cells"]
    tables = []
    columns = ["graph", "implementation", "step ms", "time against ours", "inference ms", "peak GB", "memory"]
    for model, dtype in _ordered((c["model"], c["dtype"]) for c in cells):
        rows = []
        group = _by(cells, model=model, dtype=dtype)
        for graph in _ordered(c["graph"] for c in group):
            measured = _by(group, graph=graph)
            ours = next((c for c in measured if c["implementation"].startswith("Fast")), None)
            for cell in measured:
                peak = cell.get("peak_gb")
                rows.append(
                    [
                        graph,
                        cell["implementation"],
                        _shown(cell),
                        ratio(_quotient(time_of(cell), time_of(ours))),
                        _shown(cell, "infer_median_ms") if cell["status"] == "ok" else "",
                        number(peak),
                        ratio(_quotient(peak, ours.get("peak_gb") if ours else None)),
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
            ratio(_quotient(rival["train_ms"], time_of(ours))),
            number(rival["infer_ms"]),
            number(rival["peak_gb"]),
            ratio(_quotient(rival["peak_gb"], ours.get("peak_gb") if ours else None)),
        ]
        for rival in _by(peers()["training"], graph=graph, model=model, dtype=dtype)
        if rival["implementation"] not in here and "train_ms" in rival
    ]


def breakdown(result: dict[str, Any]) -> list[Table]:
    """Per model and precision: milliseconds of every kind of work in a step."""
    cells = result["cells"]
    tables = []
    for model, dtype in _ordered((c["model"], c["dtype"]) for c in cells):
        group = _by(cells, model=model, dtype=dtype)
        kinds = list(next((c["kinds_ms"] for c in group if c["status"] == "ok"), {}))
        rows = [
            [
                cell["graph"],
                _shown(cell),
                *(number(cell.get("kinds_ms", {}).get(kind)) for kind in kinds),
                number(cell.get("idle_ms")),
            ]
            for cell in group
        ]
        tables.append(Table(f"{model}, {dtype}, ms", ["graph", "step", *kinds, "device idle"], rows))
    return tables


def adjacency(result: dict[str, Any]) -> list[Table]:
    rows = [
        [
            cell["graph"],
            f"{cell['edges']:,}",
            cell["structure"],
            _shown(cell),
            number(cell.get("kept_gb")),
            number(cell.get("scratch_gb")),
        ]
        for cell in result["cells"]
    ]
    columns = ["graph", "edges", "structure", "build ms", "kept GB", "scratch GB"]
    return [Table("Adjacency and its transpose from unsorted edges", columns, rows)]


def formats(result: dict[str, Any]) -> list[Table]:
    """FlashSparse's tables 2 and 7, the counts behind figure 14, and row grouping."""
    cells = [cell for cell in result["cells"] if cell["status"] == "ok"]
    natural = _by(cells, grouping="none")
    counts = [
        [
            cell["graph"],
            f"{cell['edges']:,}",
            *(f"{cell[name] / 1e3:,.1f}" for name in ("zeros_16x1", "zeros_8x1", "mma_16x1", "mma_8x1")),
            ratio(_quotient(cell["mma_16x1"], cell["mma_8x1"])),
        ]
        for cell in natural
    ]
    sizes = [
        [
            cell["graph"],
            cell["grouping"],
            *(number(cell[f"{name}_bytes"] / 1e6) for name in ("bsb", "me_bcrs", "sr_bcrs", "csr")),
            _percent(1 - cell["me_bcrs_bytes"] / cell["sr_bcrs_bytes"]),
            *(number(cell[f"{name}_bytes"] / max(cell["edges"], 1)) for name in ("bsb", "csr")),
            _percent(cell["bsb_bytes"] / cell["csr_bytes"]),
        ]
        for cell in cells
        if cell["grouping"] != "auto"
    ]
    grouped, products = [], []
    for cell in natural:
        other, auto = (
            _first(cells, graph=cell["graph"], real=cell["real"], grouping=grouping)
            for grouping in ("minhash", "auto")
        )
        if other is None or auto is None:
            continue
        times = [[it.get(f"spmm_{dtype}_ms") for it in (cell, other)] for dtype in ("float16", "float32")]
        products.append(
            [
                cell["graph"],
                "yes" if cell["kept"] else "no",
                *(text for pair in times for text in (*map(number, pair), ratio(_quotient(*pair)))),
            ]
        )
        grouped.append(
            [
                cell["graph"],
                *(
                    number(it[f"vectors_{height}x1"] / max(it["edges"], 1), 4)
                    for height in (8, 16)
                    for it in (cell, other)
                ),
                "yes" if cell["kept"] else "no",
                number(cell.get("median_ms")),
                *(
                    text
                    for it in (other, auto)
                    for text in (
                        number(it.get("median_ms")),
                        ratio(_quotient(it.get("median_ms"), cell.get("median_ms"))),
                    )
                ),
                number(cell.get("scratch_gb")),
                number(auto.get("scratch_gb")),
            ]
        )
    mean = geometric_mean(cell["mma_16x1"] / cell["mma_8x1"] for cell in natural if cell["mma_8x1"])
    counts.append(["geometric mean", "", "", "", "", "", ratio(mean)])
    return [
        Table(
            "Zeros in vectors and instructions for 16 features, thousands, natural order",
            ["graph", "edges", "zeros 16x1", "zeros 8x1", "mma 16x1", "mma 8x1", "16x1 / 8x1"],
            counts,
        ),
        Table(
            "Footprint, MB",
            [
                "graph",
                "grouping",
                "BSB",
                "ME-BCRS",
                "SR-BCRS",
                "CSR",
                "ME saves of SR",
                "BSB bytes/edge",
                "CSR bytes/edge",
                "BSB of CSR",
            ],
            sizes,
        ),
        Table(
            "Vectors per edge, natural order and grouped, and conversion from CSR",
            [
                "graph",
                "8x1",
                "8x1 grouped",
                "16x1",
                "16x1 grouped",
                "kept",
                "convert ms",
                "grouped ms",
                "ratio",
                "auto ms",
                "ratio",
                "scratch GB",
                "auto scratch GB",
            ],
            grouped,
        ),
        Table(
            "Product in natural order and grouped",
            [
                "graph",
                "kept",
                "float16 ms",
                "grouped ms",
                "speed-up",
                "float32 ms",
                "grouped ms",
                "speed-up",
            ],
            products,
        ),
    ]


def host(result: dict[str, Any]) -> list[Table]:
    rows = [
        [
            cell["implementation"],
            cell["mode"],
            f"{cell['median_us']:.1f} ({cell['p20_us']:.1f}-{cell['p80_us']:.1f})",
            f"{cell['above_gemm_us']:.1f}",
        ]
        for cell in result["cells"]
    ]
    columns = ["call", "mode", "host us per call (20-80 %)", "above GEMM us"]
    return [Table("Host time on a tiny cached graph", columns, rows)]


def cpu(result: dict[str, Any]) -> list[Table]:
    rows = []
    for graph in _ordered(c["graph"] for c in result["cells"]):
        group = _by(result["cells"], graph=graph)
        ours = time_of(_first(group, implementation="FastGCNConv"))
        rows += [
            [
                graph,
                cell["implementation"],
                _shown(cell) + _spread(cell),
                ratio(_quotient(time_of(cell), ours)),
                number(cell.get("error"), 2),
            ]
            for cell in group
        ]
    columns = ["graph", "implementation", "ms (20-80 %)", "time against ours", "difference from PyG"]
    return [Table("One GCN layer on the CPU, forward and backward, float32", columns, rows)]


def minibatch(result: dict[str, Any]) -> list[Table]:
    """Steps on new structures and their parts, compared with our layer of the same framework."""
    tables = []
    for graph in _ordered(c["graph"] for c in result["cells"]):
        group = _by(result["cells"], graph=graph)
        rows = []
        for cell in group:
            framework = "DGL" if "DGL" in cell["implementation"] else "PyG"
            ours = time_of(_first(group, implementation=f"FastSAGEConv ({framework})"))
            rows.append(
                [
                    cell["implementation"],
                    _shown(cell) + _spread(cell),
                    ratio(_quotient(time_of(cell), ours)),
                    *(number(cell.get(f"{part}_ms")) for part in ("structure", "forward", "backward")),
                    "-" if cell.get("launches") is None else str(cell["launches"]),
                ]
            )
        columns = [
            "implementation",
            "ms per step (20-80 %)",
            "time against ours",
            "structure ms",
            "forward ms",
            "backward ms",
            "launches",
        ]
        edges, width = group[0]["edges"], group[0]["width"]
        title = f"{graph}: GraphSAGE on blocks of {edges:,} edges seen once, {width} wide, float32"
        tables.append(Table(title, columns, rows))
    return tables


def _spread(cell: Cell) -> str:
    return f" ({number(cell['p20_ms'])}-{number(cell['p80_ms'])})" if cell["status"] == "ok" else ""


def accuracy(result: dict[str, Any]) -> list[Table]:
    """FlashSparse's table 8: the framework's own layer in float32, and the drop-in in every precision."""
    # Records of the GCN alone may lack the model's name.
    cells = [{"model": "gcn", **cell} for cell in result["cells"]]
    return [_scores(model, _by(cells, model=model)) for model in _ordered(c["model"] for c in cells)]


def _scores(model: str, cells: list[Cell]) -> Table:
    precisions = _ordered(c["precision"] for c in cells if c["conv"] == "fast")
    rows = []
    for dataset, framework in _ordered((c["dataset"], c["framework"]) for c in cells):
        group = _by(cells, dataset=dataset, framework=framework)
        for metric in _ordered(c["metric"] for c in group if "metric" in c) or ["-"]:
            original, *ours = (
                _first(group, conv=conv, precision=precision, metric=metric)
                or _first(group, conv=conv, precision=precision)
                for conv, precision in [("reference", "fp32"), *(("fast", name) for name in precisions)]
            )
            losses = [
                original["mean"] - cell["mean"]
                for cell in ours
                if original and cell and "mean" in original and "mean" in cell
            ]
            spread = original.get("std") if original else None
            verdict = "-"
            if losses and spread is not None:
                verdict = "yes" if max(losses) <= spread and len(losses) == len(ours) else "no"
            rows.append(
                [
                    dataset,
                    framework,
                    metric,
                    *(_score(cell) for cell in (original, *ours)),
                    f"{100 * max(losses):+.2f}" if losses else "-",
                    verdict,
                ]
            )
    columns = ["dataset", "framework", "metric", "original fp32", *(f"drop-in {name}" for name in precisions)]
    columns += ["largest loss", "all within one std"]
    return Table(f"{model}: test scores, %, mean ± standard deviation", columns, rows)


def _score(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    if cell["status"] != "ok":
        return cell["status"].split(":")[0]
    spread = "" if cell["std"] is None else f" ± {100 * cell['std']:.2f}"
    return f"{100 * cell['mean']:.2f}{spread}"


def choice(result: dict[str, Any]) -> list[Table]:
    """The time of csr over that of flashsparse, and what auto's picks cost."""
    tables = []
    for dtype in _ordered(c["dtype"] for c in result["cells"] if "dtype" in c):
        group = _by(result["cells"], dtype=dtype)
        widths = _ordered(c["width"] for c in group)
        rows = []
        for graph in _ordered(c["graph"] for c in group):
            cells = [_first(group, graph=graph, width=width) for width in widths]
            regrets = [cell["regret"] for cell in cells if cell and cell["status"] == "ok"]
            shared = next(cell for cell in cells if cell)
            vectors = shared["vectors"]
            rows.append(
                [
                    graph,
                    number(None if vectors is None else vectors / max(shared["edges"], 1), 2),
                    number(shared["edges"] / max(shared["nodes"], 1)),
                    *map(_crossover, cells),
                    ratio(max(regrets, default=None)),
                ]
            )
        regrets = [cell["regret"] for cell in group if cell["status"] == "ok"]
        by_width = (
            geometric_mean(speed for c in _by(group, width=width) if (speed := csr_over_flashsparse(c)))
            for width in widths
        )
        mean = f"mean {ratio(geometric_mean(regrets))}"
        rows.append(["geometric mean", "", "", *map(ratio, by_width), mean])
        columns = [
            "graph",
            "vectors/edge",
            "edges/row",
            *(f"F = {width}" for width in widths),
            "worst regret",
        ]
        title = f"csr time over flashsparse time, {dtype}; picked: c csr, f flashsparse, ! the slower one"
        tables.append(Table(title, columns, rows))
    return tables


def regret(result: dict[str, Any]) -> list[Table]:
    """What auto picks and what that costs, by number of uses and dtype."""
    tables = []
    cells = [cell for cell in result["cells"] if "seen" in cell]
    for seen, dtype in _ordered((cell["seen"], cell["dtype"]) for cell in cells):
        group = _by(cells, seen=seen, dtype=dtype)
        widths = _ordered(cell["width"] for cell in group)
        rows = []
        for structure in _ordered(cell["structure"] for cell in group):
            shown = [_picked(_first(group, structure=structure, width=width)) for width in widths]
            edges = next(cell["edges"] for cell in _by(group, structure=structure))
            rows.append([structure, f"{edges:,}", *shown])
        regrets = [cell["regret"] for cell in group if cell["status"] == "ok"]
        within = sum(value <= ACCEPTED_REGRET for value in regrets)
        worst = f"worst {ratio(max(regrets, default=None))}"
        rows.append([f"within 10 %: {within} of {len(regrets)}", *[""] * len(widths), worst])
        title = f"spmm, {dtype}, {'first use' if seen == 'first' else 'prepared'}: pick and its regret"
        tables.append(Table(title, ["structure", "edges", *(f"F = {width}" for width in widths)], rows))
    return tables


def _picked(cell: Cell | None) -> str:
    if cell is None or cell["status"] != "ok":
        return "-" if cell is None else cell["status"].split(":")[0]
    better = f" ({cell['best']})" if cell["regret"] > REGRET_SEEN else ""
    return f"{cell['pick']} {ratio(cell['regret'])}{better}"


def sparse_linear(result: dict[str, Any]) -> list[Table]:
    """The time of the dense product over that of the sparse one."""
    tables = []
    for dtype, mode in _ordered((cell["dtype"], cell["mode"]) for cell in result["cells"]):
        group = _by(result["cells"], dtype=dtype, mode=mode)
        densities = _ordered(cell["density"] for cell in group)
        rows = []
        for shape, batch in _ordered((cell["shape"], cell["batch"]) for cell in group):
            cells = [_first(group, shape=shape, batch=batch, density=density) for density in densities]
            rows.append([f"{shape}, batch {batch}", *map(_dense_over_sparse, cells)])
        title = f"{mode}, {dtype}: dense time over sparse time; picked: s sparse, d dense, ! the slower one"
        tables.append(Table(title, ["layer", *(f"{density:.1%} kept" for density in densities)], rows))
    return tables


def _dense_over_sparse(cell: Cell | None) -> str:
    if cell is None or cell["status"] != "ok":
        return "-" if cell is None else cell["status"].split(":")[0]
    mark = cell["pick"][0] + ("!" if cell["regret"] > REGRET_SEEN else "")
    return f"{ratio(_quotient(cell['dense_ms'], cell['sparse_ms']))} {mark}"


def csr_over_flashsparse(cell: Cell) -> float | None:
    """Above 1 where the tensor cores win; None where one of the two has no time."""
    return _quotient(cell.get("csr_median_ms"), cell.get("flashsparse_median_ms"))


def _crossover(cell: Cell | None) -> str:
    if cell is None or cell["status"] != "ok":
        return "-" if cell is None else cell["status"].split(":")[0]
    # Two timings of one call differ by a few per cent.
    mark = cell["pick"][0] + ("!" if cell["regret"] > REGRET_SEEN else "")
    speed = csr_over_flashsparse(cell)
    return f"{ratio(speed)} {mark}" if speed else mark


#: benchmark -> the tables of its record
TABLES: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
    "spmm": spmm,
    "sddmm": sddmm,
    "ssd": ssd,
    "attention": attention,
    "train": train,
    "breakdown": breakdown,
    "adjacency": adjacency,
    "formats": formats,
    "host": host,
    "cpu": cpu,
    "minibatch": minibatch,
    "accuracy": accuracy,
    "choice": choice,
    "regret": regret,
    "sparse_linear": sparse_linear,
}


#: benchmark -> what a reader of its tables should know first
ABOUT = {
    "spmm": "Sparse-dense product against cuSPARSE, and the best stored rival where there is one;"
    " 'of roofline' is the time of gathering the same rows at the measured bandwidth, over our time.",
    "sddmm": "A dot product per edge, and the best stored rival where there is one.",
    "ssd": "Kept entries of sparse rows aggregated into dense ones, against the stored kernels of MaxK and a"
    " re-implementation of decoupled SSD, and the papers' own dataflows.",
    "attention": "Softmax attention over neighbours: dot products, GAT (additive) and GATv2, named by heads x"
    " width, against stored rivals. 'Of the results' is the extra memory over that of the results: it stays"
    " small, whatever the number of edges, if nothing has their size.",
    "train": "Training step, inference and peak memory of small models (`benchmarks/train.py` defines them).",
    "breakdown": "Where a training step's time goes: device time by kind of work, and what the device waits"
    " for the host.",
    "adjacency": "Building the structure from edges in arbitrary order.",
    "formats": "FlashSparse's table 2 (zeros in vectors of 16 and of 8 rows), figure 14 (matrix instructions"
    " at 16x1 and at 8x1) and table 7 (ME-BCRS against SR-BCRS), and what grouping similar rows adds.",
    "host": "What the host spends on a call whose device work is next to nothing.",
    "cpu": "The same layers without a GPU.",
    "minibatch": "Structure, forward and backward of batches whose structures are new each time.",
    "accuracy": "As FlashSparse's table 8: no precision may lose more than one standard deviation.",
    "regret": "What the picks of `auto` cost; the better algorithm in brackets where it is another.",
    "sparse_linear": "Pruned linear layers: spmm against a dense product with the zeros written out.",
    "choice": "Which algorithm wins where, and what `auto` picks; see docs/choosing.md.",
}

INTRODUCTION = """# Benchmark results

Written by `python -m benchmarks tables --out benchmarks/results/README.md` from the records (`.json`) beside
this file; run it again after a benchmark instead of editing. Times are medians; a record holds the spread,
the machine, the software and a digest of the kernels' sources. Graphs are seeded stand-ins for published
graphs of that name (`benchmarks/suite.py`) or, in `formats`, `choice` and `accuracy`, also the real ones.
"""


def provenance(result: dict[str, Any]) -> str:
    """One sentence: which machine, when, from which commit."""
    facts, versions = result["machine"], result["software"]
    place = (
        facts.get("gpu")
        or f"{facts['cpu']}, {facts['threads']} threads, load {facts.get('load_average', '-')}"
    )
    if facts.get("gpu"):
        place += f" (driver {facts.get('driver')}, CUDA {facts.get('cuda')})"
    commit = result["source"].get("commit") or "unknown"
    commit = commit[:12] + "+" * commit.endswith("+")  # "+": files differed from the commit
    digest = result["source"]["kernels_digest"][:12]
    parts = [place, f"torch {versions.get('torch', '-')}", result["date"][:10], f"commit {commit}"]
    return ", ".join([*parts, f"kernels {digest}"]) + "."


def report(result: dict[str, Any], heading: str | None = None) -> str:
    """A record as Markdown: what it is, provenance, tables, notes.

    Args:
        result: The record.
        heading: Instead of its name.
    """
    parts = [f"### {heading or result['name']}", "", ABOUT[result["name"]], "", provenance(result), ""]
    for table in TABLES[result["name"]](result):
        parts += [table.markdown()]
    parts += [f"- {note}" for note in result["notes"]]
    return "\n".join(parts) + "\n"


def show(path: Path, console: Console) -> None:
    """Prints a record's tables on the terminal."""
    result = record.load(path)
    for table in TABLES[result["name"]](result):
        table.print(console)
    console.print(f"[dim]{provenance(result)} {path}[/dim]")


def stored(root: Path) -> list[Path]:
    """Records below a folder of results that there are tables for, in the order of `TABLES`."""
    return [
        path
        for name in TABLES
        for pattern in (f"*/{name}.json", f"*/{name}_*.json")
        for path in sorted(root.glob(pattern))
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of results")
    parser.add_argument("--out", type=Path, help="file to write; by default the terminal")


def run(options: argparse.Namespace) -> None:
    """Writes the tables of all stored results as Markdown, with the plots that lie beside them."""
    target = Path.cwd() if options.out is None else options.out.resolve().parent
    paths = stored(options.results)
    parts = [INTRODUCTION]
    for folder in _ordered(sorted(path.parent for path in paths)):
        parts.append(f"## {folder.name}\n")
        for path in paths:
            if path.parent == folder:
                parts.append(report(record.load(path), path.stem))
                parts += [f"![{plot.stem}]({_relative(plot, target)})\n" for plot in _plots_of(path)]
    text = "\n".join(parts)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder)).as_posix()


def _plots_of(path: Path) -> list[Path]:
    """The plots drawn from a record: those whose name begins with its own, and with no longer one's."""

    def owner(plot: Path) -> str:
        stems = (other.stem for other in path.parent.glob("*.json"))
        return max((s for s in stems if f"{plot.stem}_".startswith(f"{s}_")), key=len, default="")

    return [plot for plot in sorted(path.parent.glob("*.png")) if owner(plot) == path.stem]
