"""Table of the host's time."""

from __future__ import annotations

from typing import Any

from .cells import Table


def host(result: dict[str, Any]) -> list[Table]:
    if "mode" in result["cells"][0]:
        return [_older(result)]
    rows = [
        [
            cell["layer"],
            cell["features"],
            *(f"{cell[f'{part}_us']:.1f} ({cell[f'{part}_ratio']:.2f}x)" for part in ("forward", "step")),
        ]
        for cell in result["cells"]
        if "features" in cell
    ]
    columns = ["layer", "features", "forward us (over nn.Linear)", "forward and backward us (over nn.Linear)"]
    return [Table("Host time on a tiny cached graph", columns, rows), *_stacks(result)]


def _stacks(result: dict[str, Any]) -> list[Table]:
    """Three layers of a kind: a row, with a column for edges seen before and one for new ones."""
    cells = [cell for cell in result["cells"] if "structure" in cell]
    if not cells:
        return []
    structures = list(dict.fromkeys(cell["structure"] for cell in cells))
    found = {(cell["layer"], cell["structure"]): cell for cell in cells}
    rows = [
        [
            layer,
            *(
                f"{cell['step_us']:.0f} ({cell['step_ratio']:.2f}x)"
                if (cell := found.get((layer, structure)))
                else "-"
                for structure in structures
            ),
        ]
        for layer in dict.fromkeys(cell["layer"] for cell in cells)
    ]
    columns = ["layers", *(f"{structure} structure, us (over three nn.Linear)" for structure in structures)]
    return [Table("Three layers on a graph of pubmed's size, forward and backward", columns, rows)]


def _older(result: dict[str, Any]) -> Table:
    """Of a record of GCN's forward pass alone."""
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
    return Table("Host time on a tiny cached graph", columns, rows)
