"""Tables of the tensor-core formats."""

from __future__ import annotations

from typing import Any

from ..runner import geometric_mean
from .cells import (
    Cell,
    Column,
    Row,
    Table,
    by,
    first,
    mean_of,
    number,
    percent,
    pivot,
    quotient,
    ratio,
    value,
)


def _quotient(title: str, top: tuple[str, str], bottom: tuple[str, str]) -> Column:
    """A field of one grouping's cell over that of another's."""

    def text(row: Row) -> str:
        return ratio(quotient(*(row[grouping].get(field) for grouping, field in (top, bottom))))

    return Column(title, text)


def _field(title: str, grouping: str, field: str) -> Column:
    return Column(title, lambda row: number(row[grouping].get(field)))


def _vectors(title: str, grouping: str, height: int) -> Column:
    def text(row: Row) -> str:
        cell = row[grouping]
        return number(cell[f"vectors_{height}x1"] / max(cell["edges"], 1), 4)

    return Column(title, text)


def formats(result: dict[str, Any]) -> list[Table]:
    """FlashSparse's tables 2 and 7, the counts behind figure 14, and row grouping."""
    cells = by(result["cells"], status="ok")

    def thousands(count: int) -> str:
        return f"{count / 1e3:,.1f}"

    def over(field: str, other: str) -> Any:
        return lambda row: row.cell[field] / row.cell[other]

    names = {f"{kind} {shape}": f"{kind}_{shape}" for kind in ("zeros", "mma") for shape in ("16x1", "8x1")}
    counts = pivot(
        by(cells, grouping="none"),
        "Zeros in vectors and instructions for 16 features, thousands, natural order",
        (),
        [
            value("graph"),
            value("edges", form="{:,}".format),
            *(value(title, field, thousands) for title, field in names.items()),
            mean_of("16x1 / 8x1", lambda row: quotient(row.cell["mma_16x1"], row.cell["mma_8x1"])),
        ],
        last="geometric mean",
    )
    names = {"BSB": "bsb", "ME-BCRS": "me_bcrs", "SR-BCRS": "sr_bcrs", "CSR": "csr"}
    sizes = pivot(
        [cell for cell in cells if cell["grouping"] != "auto"],
        "Footprint, MB",
        (),
        [
            value("graph"),
            value("grouping"),
            *(value(title, f"{it}_bytes", lambda size: number(size / 1e6)) for title, it in names.items()),
            Column("ME saves of SR", lambda row: percent(1 - over("me_bcrs_bytes", "sr_bcrs_bytes")(row))),
            *(
                Column(
                    f"{it.upper()} bytes/edge",
                    lambda row, it=it: number(row.cell[f"{it}_bytes"] / max(row.cell["edges"], 1)),
                )
                for it in ("bsb", "csr")
            ),
            Column("BSB of CSR", lambda row: percent(over("bsb_bytes", "csr_bytes")(row))),
        ],
    )
    kept = Column("kept", lambda row: "yes" if row["none"]["kept"] else "no")
    complete = [
        cell
        for cell in cells
        if len(by(cells, graph=cell["graph"], real=cell["real"])) == 3  # natural, grouped, and what is chosen
    ]
    grouped = pivot(
        complete,
        "Vectors per edge, natural order and grouped, and conversion from CSR",
        ("graph", "real"),
        [
            value("graph"),
            _vectors("8x1", "none", 8),
            _vectors("8x1 grouped", "minhash", 8),
            _vectors("16x1", "none", 16),
            _vectors("16x1 grouped", "minhash", 16),
            kept,
            _field("convert ms", "none", "median_ms"),
            _field("grouped ms", "minhash", "median_ms"),
            _quotient("ratio", ("minhash", "median_ms"), ("none", "median_ms")),
            _field("auto ms", "auto", "median_ms"),
            _quotient("ratio", ("auto", "median_ms"), ("none", "median_ms")),
            _field("scratch GB", "none", "scratch_gb"),
            _field("auto scratch GB", "auto", "scratch_gb"),
        ],
        by="grouping",
    )
    products = [value("graph"), kept]
    for dtype in ("float16", "float32"):
        field = f"spmm_{dtype}_ms"
        products += [_field(f"{dtype} ms", "none", field), _field("grouped ms", "minhash", field)]
        products.append(_quotient("speed-up", ("none", field), ("minhash", field)))
    title = "Product in natural order and grouped"
    return counts + sizes + grouped + pivot(complete, title, ("graph", "real"), products, by="grouping")


def formats_in_short(result: dict[str, Any]) -> list[Table]:
    """What vectors of 8 save over 16, what similar rows in a window save, and the bytes."""
    cells = [cell for cell in by(result["cells"], status="ok") if cell["mma_8x1"]]
    natural = {graph_label(cell): cell for cell in by(cells, grouping="none")}
    grouped = {
        name: first(cells, graph=it["graph"], real=it["real"], grouping="minhash")
        for name, it in natural.items()
    }
    values = {
        "matrix instructions, 16x1 over 8x1": {n: c["mma_16x1"] / c["mma_8x1"] for n, c in natural.items()},
        "bytes of BSB over CSR, natural order": {
            n: c["bsb_bytes"] / c["csr_bytes"] for n, c in natural.items()
        },
        "vectors grouped over natural, where kept": {
            name: other["vectors_8x1"] / natural[name]["vectors_8x1"]
            for name, other in grouped.items()
            if other and natural[name]["kept"]
        },
    }
    rows = []
    for what, found in values.items():
        if found:
            ends = (end(found, key=found.__getitem__) for end in (min, max))
            ends = (f"{ratio(found[graph])} {graph}" for graph in ends)
            rows.append([what, ratio(geometric_mean(found.values())), *ends, str(len(found))])
    return [Table("Tensor-core formats", ["", "geometric mean", "least", "most", "graphs"], rows)]


def graph_label(cell: Cell) -> str:
    """The graph, and whether it is a stand-in."""
    return cell["graph"] + ("" if cell["real"] else " (stand-in)")
