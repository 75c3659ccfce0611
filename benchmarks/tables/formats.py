"""Tables of the tensor-core formats."""

from __future__ import annotations

from typing import Any

from ..common import geometric_mean
from .cells import Cell, Table, by, first, number, percent, quotient, ratio


def formats(result: dict[str, Any]) -> list[Table]:
    """FlashSparse's tables 2 and 7, the counts behind figure 14, and row grouping."""
    cells = [cell for cell in result["cells"] if cell["status"] == "ok"]
    natural = by(cells, grouping="none")
    counts = [
        [
            cell["graph"],
            f"{cell['edges']:,}",
            *(f"{cell[name] / 1e3:,.1f}" for name in ("zeros_16x1", "zeros_8x1", "mma_16x1", "mma_8x1")),
            ratio(quotient(cell["mma_16x1"], cell["mma_8x1"])),
        ]
        for cell in natural
    ]
    sizes = [
        [
            cell["graph"],
            cell["grouping"],
            *(number(cell[f"{name}_bytes"] / 1e6) for name in ("bsb", "me_bcrs", "sr_bcrs", "csr")),
            percent(1 - cell["me_bcrs_bytes"] / cell["sr_bcrs_bytes"]),
            *(number(cell[f"{name}_bytes"] / max(cell["edges"], 1)) for name in ("bsb", "csr")),
            percent(cell["bsb_bytes"] / cell["csr_bytes"]),
        ]
        for cell in cells
        if cell["grouping"] != "auto"
    ]
    grouped, products = [], []
    for cell in natural:
        other, auto = (
            first(cells, graph=cell["graph"], real=cell["real"], grouping=grouping)
            for grouping in ("minhash", "auto")
        )
        if other is None or auto is None:
            continue
        times = [[it.get(f"spmm_{dtype}_ms") for it in (cell, other)] for dtype in ("float16", "float32")]
        products.append(
            [
                cell["graph"],
                "yes" if cell["kept"] else "no",
                *(text for pair in times for text in (*map(number, pair), ratio(quotient(*pair)))),
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
                        ratio(quotient(it.get("median_ms"), cell.get("median_ms"))),
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


def formats_in_short(result: dict[str, Any]) -> list[Table]:
    """What vectors of 8 save over 16, what similar rows in a window save, and the bytes."""
    cells = [c for c in result["cells"] if c["status"] == "ok" and c["mma_8x1"]]
    natural = by(cells, grouping="none")
    grouped = [
        (c, other)
        for c in natural
        if (other := first(cells, graph=c["graph"], real=c["real"], grouping="minhash")) and c["kept"]
    ]
    values = {
        "matrix instructions, 16x1 over 8x1": {_named(c): c["mma_16x1"] / c["mma_8x1"] for c in natural},
        "bytes of BSB over CSR, natural order": {_named(c): c["bsb_bytes"] / c["csr_bytes"] for c in natural},
        "vectors grouped over natural, where kept": {
            _named(c): other["vectors_8x1"] / c["vectors_8x1"] for c, other in grouped
        },
    }
    rows = [_extremes(what, found) for what, found in values.items() if found]
    columns = ["", "geometric mean", "least", "most", "graphs"]
    return [Table("Tensor-core formats", columns, rows)]


def _named(cell: Cell) -> str:
    return cell["graph"] + ("" if cell["real"] else " (stand-in)")


def _extremes(what: str, values: dict[str, float]) -> list[str]:
    least, most = (end(values, key=values.__getitem__) for end in (min, max))
    ends = (f"{ratio(values[graph])} {graph}" for graph in (least, most))
    return [what, ratio(geometric_mean(values.values())), *ends, str(len(values))]
