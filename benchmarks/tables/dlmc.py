"""Tables of pruned weight matrices, and of what kernels build before a product."""

from __future__ import annotations

from typing import Any

from ..common import geometric_mean
from .cells import Cell, Table, by, first, number, ordered, quotient, ratio, stored_rivals, time_of

#: Columns of preprocessing that divide one step by another.
_RATIOS = {
    "list / spmm hr, device": ("hr work list, device", "spmm hr"),
    "list / spmm hr, wall clock": ("hr work list", "spmm hr, wall clock"),
    "list / conversion": ("hr work list", "flashsparse conversion"),
}


def dlmc(result: dict[str, Any]) -> list[Table]:
    """Pruned matrices by dtype, and preprocessing by graph."""
    # Records of before 0.2 also timed a layer that is no more (docs/dev/decisions/no_sparse_linear.md).
    cells = [c for c in by(result["cells"], part="matrices") if c["implementation"] != "SparseLinear"]
    tables = []
    for dtype, width in ordered((c["dtype"], c["width"]) for c in cells):
        tables += _dlmc_times(result, by(cells, dtype=dtype, width=width), dtype, width)
    return tables + _preprocessing(by(result["cells"], part="preprocessing"))


def _dlmc_times(result: dict[str, Any], cells: list[Cell], dtype: str, width: int) -> list[Table]:
    """Times of everything, then ratios to stored rivals: those of the best of ours, of tca and of hr."""
    names = ordered(c["implementation"] for c in cells)
    ours = [name for name in names if name.startswith("fast")]
    times, warm, ratios = [], [], []
    means: dict[str, list[float]] = {}
    for matrix in ordered(c["matrix"] for c in cells):
        row = {name: first(cells, matrix=matrix, implementation=name) for name in names}
        shared = first(cells, matrix=matrix)
        assert shared is not None
        facts = [matrix, f"{shared['rows']}x{shared['columns']}", f"{shared['sparsity']:.3f}"]
        times.append([*facts, *(_in_microseconds(row[name], "median_ms") for name in names)])
        if any(cell and "warm_median_ms" in cell for cell in row.values()):
            warm.append([*facts, *(_in_microseconds(row[name], "warm_median_ms") for name in names)])
        measured = {name: time for name in ours if (time := time_of(row[name])) is not None}
        best = min(measured, key=measured.__getitem__, default=None)
        fastest = measured[best] if best else None
        stored = stored_rivals(result, f"dlmc@{width}", dtype, matrix)
        rival = min(stored, key=stored.__getitem__, default=None)
        quotients = {
            "best stored rival / best": quotient(stored[rival] if rival else None, fastest),
            "TCA-SpMM / tca": quotient(stored.get("TCA fp16"), measured.get("fastsparse tca")),
            "Sputnik / hr": quotient(stored.get("Sputnik fp32"), measured.get("fastsparse hr")),
            "csr / best": quotient(measured.get("fastsparse csr"), fastest),
            "dense / best": quotient(time_of(row.get("dense")), fastest),
        }
        for name, speed in quotients.items():
            means.setdefault(name, []).extend([speed] if speed else [])
        ratios.append(
            [
                matrix,
                best.removeprefix("fastsparse ") if best else "-",
                f"{rival} {number(1e3 * stored[rival])}" if rival else "-",
                *map(ratio, quotients.values()),
            ]
        )
    ratios.append(["geometric mean", "", "", *(ratio(geometric_mean(it)) for it in means.values())])
    title = f"DLMC, {dtype}, N = {width}"
    columns = ["matrix", "shape", "sparsity", *(name.removeprefix("fastsparse ") for name in names)]
    names_of_ratios = ["matrix", "best of ours", "best stored rival us", *means]
    # Without rivals of this GPU model there is nothing to compare with.
    filled = [i for i in range(len(names_of_ratios)) if any(row[i] not in ("", "-") for row in ratios)]
    tables = [
        Table(f"{title}, microseconds", columns, times),
        Table(
            f"{title}, ratios",
            [names_of_ratios[i] for i in filled],
            [[row[i] for i in filled] for row in ratios],
        ),
    ]
    return [*tables, Table(f"{title}, microseconds back to back, warm", columns, warm)] if warm else tables


def _in_microseconds(cell: Cell | None, field: str) -> str:
    """A time of a cell that has it, else what became of the cell."""
    if cell is not None and field in cell:
        return number(1e3 * cell[field])
    return "-" if cell is None or cell["status"] == "ok" else cell["status"].split(":")[0]


def _preprocessing(cells: list[Cell]) -> list[Table]:
    """What hr and flashsparse build from CSR, against one product."""
    if not cells:
        return []
    steps = ordered(c["step"] for c in cells)
    where = f"Before a product, float16, F = {cells[0]['width']}"
    rows = []
    for graph in ordered(c["graph"] for c in cells):
        row = {step: first(cells, graph=graph, step=step) for step in steps}
        times = [_in_microseconds(cell, "median_ms") for cell in row.values()]
        speeds = [quotient(time_of(row.get(a)), time_of(row.get(b))) for a, b in _RATIOS.values()]
        rows.append([graph, *times, *map(ratio, speeds)])
    return [Table(f"{where}, microseconds", ["graph", *steps, *_RATIOS], rows)]
