"""Chart of training: time and memory of an epoch against PyG's layers, a row for each graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes

#: The model of the chart, which PyG's layers can train on all three graphs.
MODEL = "sage3-128"
GRAPHS = ("ogbn-arxiv", "reddit", "ogbn-products")
#: (implementation, dtype) -> label and colour
BARS = {
    ("PyG edge_index", "float32"): ("PyG", "#9aa0a6"),
    ("PyG sparse_csr", "float32"): ("PyG, torch.sparse", "#c5c8cb"),
    ("FastSAGEConv", "float32"): ("FastSparse", "#1f77b4"),
    ("FastSAGEConv", "bf16-amp"): ("FastSparse, bf16", "#6aaed6"),
}
COLUMNS = (("median_ms", "ms", "time of an epoch"), ("peak_gb", "GB", "peak memory"))
#: Inches. The chart is narrow, so that text is readable on pages about 360 pixels wide.
SIZE = (5.6, 3.9)


def training_overview(result: dict[str, Any], record_path: Path) -> list[Path]:
    """Time of an epoch (a full-batch step) and peak memory of GraphSAGE; nothing if a cell is missing."""
    found = {
        (cell["graph"], cell["implementation"], cell["dtype"]): cell
        for cell in result["cells"]
        if cell["model"] == MODEL and cell["status"] == "ok"
    }
    if not all((graph, name, dtype) in found for graph in GRAPHS for name, dtype in BARS):
        return []
    figure, panels = pyplot.subplots(len(GRAPHS), len(COLUMNS), figsize=SIZE, constrained_layout=True)
    for row, graph in zip(panels, GRAPHS, strict=True):
        cells = [found[graph, name, dtype] for name, dtype in BARS]
        for axes, (field, unit, title) in zip(row, COLUMNS, strict=True):
            is_first = field == COLUMNS[0][0]
            axes.set_title(
                f"{graph}, {_count(cells[0]['edges'])} edges: {title}" if is_first else title,
                fontsize=8.5,
                loc="left",
                x=-0.5 if is_first else 0,
            )
            _panel(axes, [cell[field] for cell in cells], unit, show_names=is_first)
    gpu = result["machine"].get("gpu") or result["machine"]["cpu"]
    figure.suptitle(f"GraphSAGE, 3 layers, 128 wide, full batch, {gpu}", fontsize=9.5)
    path = record_path.with_name(f"{record_path.stem}_overview.png")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return [path]


def _panel(axes: Axes, values: list[float], unit: str, *, show_names: bool) -> None:
    """Bars of one graph, the first on top; each with its value, ours with the quotient to PyG's."""
    names, colours = zip(*BARS.values(), strict=True)
    bars = axes.barh(range(len(values)), values, color=colours)
    texts = [
        f"{value:.3g} {unit}" + (f"  ({values[0] / value:.3g}x)" if name.startswith("Fast") else "")
        for name, value in zip(names, values, strict=True)
    ]
    axes.bar_label(bars, texts, fontsize=8, padding=3)
    axes.set_yticks(range(len(values)), names if show_names else [""] * len(names), fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(values))
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def _count(edges: int) -> str:
    return f"{edges / 1e6:.3g} million"
