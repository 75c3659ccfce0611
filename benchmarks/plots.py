"""Plots from stored results: speed-up bars per graph, roofline, memory bars, heat maps of the choice."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from . import record, tables
from .bars import INK
from .overview import training_overview
from .roofline import LARGE_EDGES, TARGET, gather_bandwidth, peers
from .tables.cells import by, ordered, stored_baselines
from .tables.formats import graph_label
from .tables.pivots import REGRET_SEEN, csr_over_flashsparse
from .tables.programs import OURS, baseline, of_programs

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
#: Inches. Pages show plots about 800 pixels wide: at 100 pixels per inch, 7-point text is readable.
WIDTH = 8.0
#: Transparent background and text of medium brightness, as in `bars`: readable on light and dark pages.
_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
mpl.rcParams.update({"font.size": 9, "savefig.dpi": 150, "savefig.transparent": True, "legend.framealpha": 0})
mpl.rcParams.update(dict.fromkeys(_INKED, INK))


def _plot_path(record_path: Path, *parts: str) -> Path:
    """Path of a plot of a record: in the same folder, beginning with the name of the record."""
    return record_path.with_name("_".join((record_path.stem, *parts)) + ".png")


def speed_up_bars(result: dict[str, Any], record_path: Path) -> list[Path]:
    """One plot per feature type and direction: the baseline's time over ours, a colour per width."""
    cells = by(result["cells"], status="ok")
    written = []
    for dtype, direction in ordered((cell["dtype"], cell["direction"]) for cell in cells):
        group = by(cells, dtype=dtype, direction=direction)
        times: list[dict[tuple[str, int], float]] = [{}, {}]
        for cell in group:
            times[_is_ours(cell)][cell["graph"], cell["width"]] = cell["median_ms"]
        baselines = sorted({cell["implementation"] for cell in group if not _is_ours(cell)})
        bars: dict[str, dict[str, float]] = {}
        for (graph, width), theirs in times[0].items():
            if ours := times[1].get((graph, width)):
                bars.setdefault(f"F = {width}", {})[graph] = theirs / ours
        label, title = f"times faster than {' / '.join(baselines)}", f"spmm {direction}, {dtype}"
        path = _plot_path(record_path, "speedup", direction, dtype)
        written.append(_grouped_bars(bars, ordered(c["graph"] for c in group), label, title, path))
    return written


def roofline_plots(result: dict[str, Any], record_path: Path) -> list[Path]:
    """Rate of gathering against the size of the table, and the share of the bound on large graphs."""
    cells = by(result["cells"], status="ok", direction="forward")
    if result["machine"].get("gpu") != peers()["gpu"] or not cells:
        return []
    figure, (axes, bars) = pyplot.subplots(
        2, 1, figsize=(WIDTH, 10), height_ratios=(4, 5), constrained_layout=True
    )
    sizes = [2**power for power in range(20, 33)]
    bound = [gather_bandwidth(size) for size in sizes]
    megabytes = [size / 1e6 for size in sizes]
    axes.plot(megabytes, bound, color=INK, label="measured gather roofline")
    target = [TARGET * rate for rate in bound]
    axes.plot(megabytes, target, color=INK, linestyle="--", linewidth=0.8, label=f"{TARGET:.0%} of it")
    for place, name in enumerate(dict.fromkeys(cell["implementation"] for cell in cells)):
        for is_large in (True, False):
            group = [cell for cell in cells if cell["implementation"] == name and _is_large(cell) == is_large]
            across = [cell["nodes"] * cell["width"] * ITEMSIZE[cell["dtype"]] / 1e6 for cell in group]
            up = [cell["gather_bytes"] / cell["median_ms"] / 1e9 for cell in group]
            fill = f"C{place}" if is_large else "none"
            label = f"{name}, {'over' if is_large else 'up to'} {LARGE_EDGES / 1e6:.0f} M edges"
            axes.scatter(across, up, label=label, facecolors=fill, edgecolors=f"C{place}", s=28)
    axes.set_xscale("log")
    axes.set_xlabel("feature table, MB")
    axes.set_ylabel("rows gathered, TB/s")
    axes.grid(alpha=0.3)
    # Leaves space for the legend above the points.
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])
    axes.legend(fontsize=8, loc="upper center", ncols=2)
    axes.set_title(f"spmm on {result['machine']['gpu']}: gather rate and its bound")
    large = [cell for cell in cells if _is_large(cell) and _is_ours(cell)]
    names = [f"{cell['graph']} {cell['dtype']} {cell['width']}" for cell in large]
    shares = [cell["floor_ms"] / cell["median_ms"] for cell in large]
    colours = ["C0" if share >= TARGET else "C3" for share in shares]
    bars.bar_label(
        bars.barh(names, shares, color=colours), [f"{share:.0%}" for share in shares], fontsize=7, padding=2
    )
    bars.margins(x=0.08, y=0.01)
    bars.axvline(TARGET, color=INK, linestyle="--", linewidth=0.8)
    bars.invert_yaxis()
    bars.tick_params(axis="y", labelsize=7)
    bars.set_xlabel(f"share of the gather roofline; dashed: {TARGET:.0%}")
    bars.set_title(f"graphs over {LARGE_EDGES / 1e6:.0f} million edges")
    return [_saved(figure, _plot_path(record_path, "roofline"))]


def _is_ours(cell: dict[str, Any]) -> bool:
    return cell["implementation"].startswith("fast")


def _is_large(cell: dict[str, Any]) -> bool:
    return cell["edges"] > LARGE_EDGES


def choice_heat_maps(result: dict[str, Any], record_path: Path) -> list[Path]:
    """Time of csr divided by time of flashsparse, by graph and width; a map per feature type."""
    cells = [cell for cell in result["cells"] if cell["status"] == "ok" and csr_over_flashsparse(cell)]
    dtypes = ordered(cell["dtype"] for cell in cells)
    if not dtypes:
        return []
    graphs = ordered(cell["graph"] for cell in cells)
    of_dtype = {dtype: [cell for cell in cells if cell["dtype"] == dtype] for dtype in dtypes}
    figure, row = pyplot.subplots(
        1,
        len(dtypes),
        figsize=(WIDTH, 1.8 + 0.28 * len(graphs)),
        sharey=True,
        squeeze=False,
        constrained_layout=True,
    )
    for axes, (dtype, group) in zip(row[0], of_dtype.items(), strict=True):
        widths = sorted({cell["width"] for cell in group})
        image = [[math.nan] * len(widths) for _ in graphs]
        for cell in group:
            y, x = graphs.index(cell["graph"]), widths.index(cell["width"])
            speed = csr_over_flashsparse(cell) or math.nan
            image[y][x] = math.log2(speed)
            axes.text(x, y, f"{speed:.2f}", ha="center", va="center", fontsize=7, color="black")
            if cell["regret"] > REGRET_SEEN:
                axes.add_patch(Rectangle((x - 0.46, y - 0.44), 0.92, 0.88, fill=False, linewidth=1.2))
        shown = axes.imshow(image, cmap="RdYlGn", vmin=-2, vmax=2, aspect="auto")
        axes.set_xticks(range(len(widths)), [str(width) for width in widths])
        axes.set_yticks(range(len(graphs)), graphs)
        axes.set_xlabel("F")
        axes.set_title(dtype)
    figure.colorbar(shown, ax=row[0], label="log2 of csr time over flashsparse time")
    figure.suptitle("where the tensor cores win (green); framed: auto takes the slower one")
    return [_saved(figure, _plot_path(record_path))]


def format_bars(result: dict[str, Any], record_path: Path) -> list[Path]:
    """FlashSparse's figure 14 and table 2: instructions and zeros of 16x1 and of 8x1 vectors."""
    cells = [cell for cell in by(result["cells"], status="ok", grouping="none") if cell["mma_8x1"]]
    if not cells:
        return []
    places = range(len(cells))
    figure, row = pyplot.subplots(
        1, 2, figsize=(WIDTH, 1.5 + 0.3 * len(cells)), sharey=True, constrained_layout=True
    )
    drawn = (("mma", "matrix instructions per 1000 edges, 16 features", 1e3), ("zeros", "zeros per edge", 1))
    for axes, (field, label, factor) in zip(row, drawn, strict=True):
        for shift, shape in ((-0.2, "16x1"), (0.2, "8x1")):
            counts = [factor * cell[f"{field}_{shape}"] / cell["edges"] for cell in cells]
            bars = axes.barh([place + shift for place in places], counts, 0.4, label=f"{shape} vectors")
            axes.bar_label(bars, [f"{count:.3g}" for count in counts], fontsize=7, padding=1)
        axes.margins(x=0.12, y=0.01)
        axes.set_xlabel(label)
        axes.grid(axis="x", alpha=0.3)
        axes.legend(fontsize=8)
    row[0].set_yticks(places, [graph_label(cell) for cell in cells], fontsize=7)
    row[0].invert_yaxis()
    return [_saved(figure, _plot_path(record_path))]


def training_bars(result: dict[str, Any], record_path: Path) -> list[Path]:
    """Time of a training step and peak memory: a panel per model, bars per graph, a colour per layer."""
    written = []
    for dtype in ordered(cell["dtype"] for cell in result["cells"]):
        of_dtype = by(result["cells"], dtype=dtype)
        models, graphs = (ordered(cell[key] for cell in of_dtype) for key in ("model", "graph"))
        for field, name, label in (
            ("median_ms", "time", "training step, ms"),
            ("peak_gb", "memory", "peak memory, GB"),
        ):
            if not any(cell.get(field) for cell in of_dtype):
                continue
            figure, panels = _panels(len(models), 3.3)
            for axes, model in zip(panels, models, strict=True):
                group = by(of_dtype, model=model)
                _bars(axes, _heights([cell for cell in group if cell.get(field)], field), graphs, "")
                axes.set_yscale("log")
                axes.margins(y=0.25)  # space for the rotated numbers above the bars
                axes.set_ylabel(label)
                axes.set_title(f"{model}, {dtype} (no bar: {_missing(group)})")
            written.append(_saved(figure, _plot_path(record_path, name, dtype)))
    return written


def _heights(cells: list[dict[str, Any]], field: str = "median_ms") -> dict[str, dict[str, float]]:
    """Implementation -> graph -> number."""
    names = ordered(cell["implementation"] for cell in cells)
    return {name: {c["graph"]: c[field] for c in by(cells, implementation=name)} for name in names}


def attention_bars(result: dict[str, Any], record_path: Path) -> list[Path]:
    """One plot per implementation, dtype and direction: the fastest stored baseline's time over ours."""
    cells = by(result["cells"], status="ok")
    written = []
    keys = ("implementation", "dtype", "direction")
    for name, dtype, direction in ordered(tuple(cell[key] for key in keys) for cell in cells):
        speed: dict[str, dict[str, float]] = {}
        for cell in by(cells, implementation=name, dtype=dtype, direction=direction):
            stored = stored_baselines(result, cell["stored"] or "", dtype, cell["graph"])
            if stored:
                speed.setdefault(cell["case"], {})[cell["graph"]] = min(stored.values()) / cell["median_ms"]
        if speed:
            path = _plot_path(record_path, name.split()[-1], "speedup", direction, dtype)
            title = f"{name} {direction}, {dtype} (no bar: no baseline has a time)"
            graphs = ordered(graph for found in speed.values() for graph in found)
            label = "times faster than the fastest stored baseline"
            written.append(_grouped_bars(speed, graphs, label, title, path))
    return written


def _missing(cells: list[dict[str, Any]]) -> str:
    reasons = dict.fromkeys(cell["status"].split(":")[0] for cell in cells if cell["status"] != "ok")
    return " or ".join(reasons) or "not measured"


def sparse_activation_plots(result: dict[str, Any], record_path: Path) -> list[Path]:
    """The decoupled SSD paper's ablation, and its figures 14 (kept entries) and 16 (slots)."""
    cells = by(result["cells"], status="ok")
    parts = {name: by(cells, part=name) for name in ("ablation", "scaling", "slots")}
    written = []
    if group := parts["ablation"]:
        graphs, path = ordered(cell["graph"] for cell in group), _plot_path(record_path, "ablation")
        title = "ssd, 16 of 256 features kept, float32"
        written.append(_grouped_bars(_heights(group), graphs, "ms", title, path, is_speed=False))
    for name, x, label in (("scaling", "k", "kept entries of 256"), ("slots", "slots", "slots per warp")):
        if parts[name]:
            written.append(_lines(parts[name], x, label, _plot_path(record_path, name)))
    return written


def scaling_curves(result: dict[str, Any], record_path: Path) -> list[Path]:
    """Speed-up against the number of GPUs, and what would be ideal."""
    cells = [cell for cell in result["cells"] if cell["status"] == "ok" and cell["kind"] != "large"]
    most = max((cell["gpus"] for cell in cells), default=1)
    if most == 1:
        return []
    figure, axes = pyplot.subplots(figsize=(WIDTH, 5.0), constrained_layout=True)
    axes.plot([1, most], [1, most], color=INK, linewidth=0.8, linestyle="--", label="ideal")
    keys = [(c["kind"], c["graph"], c["dtype"], c.get("batch")) for c in cells]
    for kind, graph, dtype, batch in dict.fromkeys(keys):
        group = [c for c, key in zip(cells, keys, strict=True) if key == (kind, graph, dtype, batch)]
        (one,) = [c for c in group if c["gpus"] == 1]
        for variant in dict.fromkeys(c["variant"] for c in group if c["gpus"] > 1):
            points = [(1, 1.0)]
            for cell in group:
                if cell["variant"] == variant and cell["gpus"] > 1:
                    # With mini-batches, the number of nodes per step is proportional to the number of GPUs.
                    work = cell["gpus"] if kind == "ddp" else 1
                    points.append((cell["gpus"], work * one["median_ms"] / cell["median_ms"]))
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"{graph}, {dtype}, {variant}")
    axes.set_xticks(range(1, most + 1))
    axes.set_xlabel("GPUs")
    axes.set_ylabel("times faster than one")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return [_saved(figure, _plot_path(record_path, "speedup"))]


def program_bars(result: dict[str, Any], record_path: Path) -> list[Path]:
    """Time of an epoch of every program, relative to the framework's."""
    times = {
        name: {
            cell["implementation"]: cell["median_ms"] / own["median_ms"] for cell in cells if "loss" in cell
        }
        for name, cells in of_programs(result).items()
        if (own := baseline(cells))
    }
    if not times:
        return []
    figure, axes = pyplot.subplots(figsize=(WIDTH, 1.5 + 0.6 * len(times)), constrained_layout=True)
    thick = 0.8 / len(OURS)
    for place, variant in enumerate(OURS):
        shares = [found.get(variant, 0.0) for found in times.values()]
        heights = [nth + thick * (place - (len(OURS) - 1) / 2) for nth in range(len(times))]
        bars = axes.barh(heights, shares, thick, label=variant)
        axes.bar_label(
            bars, [f"{1 / share:.1f}x" if share else "" for share in shares], fontsize=7, padding=2
        )
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(times)), list(times), fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.01)
    axes.set_xlabel("time of an epoch, relative to PyG or DGL; labels: times faster")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    return [_saved(figure, _plot_path(record_path, "epochs"))]


def _lines(cells: list[dict[str, Any]], x: str, label: str, path: Path) -> Path:
    """Time against `x`, a panel per graph, a line per implementation or width."""
    graphs = ordered(cell["graph"] for cell in cells)
    figure, panels = _panels(len(graphs), 3.6)
    for axes, graph in zip(panels, graphs, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for cell in cells:
            if cell["graph"] == graph:
                line = cell.get("implementation", f"F = {cell['width']}")
                lines.setdefault(line, []).append((cell[x], cell["median_ms"]))
        for line, points in lines.items():
            if len(points) == 1:  # does not depend on x
                axes.axhline(points[0][1], linestyle="--", color="gray", linewidth=0.8)
                axes.annotate(
                    line, (0.02, points[0][1]), xycoords=("axes fraction", "data"), fontsize=7, va="bottom"
                )
            else:
                axes.plot(*zip(*sorted(points), strict=True), marker="o", label=line)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("ms")
        axes.set_title(graph)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return _saved(figure, path)


def _saved(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """One below the other."""
    size = (WIDTH, height * count)
    figure, panels = pyplot.subplots(count, 1, figsize=size, squeeze=False, constrained_layout=True)
    return figure, list(panels[:, 0])


def _grouped_bars(
    bars: dict[str, dict[str, float]],
    graphs: list[str],
    label: str,
    title: str,
    path: Path,
    *,
    is_speed: bool = True,
) -> Path:
    """A plot of grouped bars for every graph; speeds have a line at 1, times a logarithmic axis."""
    figure, (axes,) = _panels(1, 4.5)
    _bars(axes, bars, graphs, "x" if is_speed else "")
    if is_speed:
        axes.axhline(1, color=INK, linewidth=0.8)
    else:
        axes.set_yscale("log")
    axes.set_ylabel(label)
    axes.set_title(title)
    return _saved(figure, path)


def _bars(axes: Axes, bars: dict[str, dict[str, float]], graphs: list[str], unit: str) -> None:
    """Label -> graph -> height, a colour for each label."""
    width, many = 0.8 / max(len(bars), 1), len(graphs) * len(bars)
    for place, (label, found) in enumerate(bars.items()):
        heights = [found.get(graph, 0.0) for graph in graphs]
        if not any(heights):
            continue
        positions = [i - 0.4 + (place + 0.5) * width for i in range(len(graphs))]
        drawn = axes.bar(positions, heights, width, label=label, color=f"C{place}")
        if many <= 40:  # with more bars the numbers would overlap; the tables have them
            texts = [f"{h:.0f}{unit}" if h >= 100 else f"{h:.3g}{unit}" if h else "" for h in heights]
            axes.bar_label(drawn, texts, fontsize=7, padding=2, rotation=90 if many > 16 else 0)
        axes.margins(x=0.01, y=0.15)
    axes.set_xticks(range(len(graphs)), graphs, rotation=30, ha="right")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)


#: benchmark -> what is drawn from its record
PLOTS = {
    "spmm": (speed_up_bars, roofline_plots),
    "attention": (attention_bars,),
    "train": (training_overview, training_bars),
    "programs": (program_bars,),
    "scaling": (scaling_curves,),
    "formats": (format_bars,),
    "ssd": (sparse_activation_plots,),
    "choice": (choice_heat_maps,),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of results")


def run(options: argparse.Namespace) -> list[Path]:
    """Draws all stored results; the plots are written next to their records."""
    written = []
    for path in tables.stored(options.results):
        result = record.load(path)
        for draw in PLOTS.get(result["name"], ()):
            written += draw(result, path)
    for path in written:
        print(path)
    return written
