"""Tables of epochs with the loader inside the clock."""

from __future__ import annotations

from typing import Any

from .cells import Table, by, first, ordered, quotient, ratio, shown, time_of


def epochs(result: dict[str, Any]) -> list[Table]:
    """Milliseconds per batch, of epochs by layer and of the loaders alone."""
    cells = result["cells"]
    tables = []
    for size in ordered(cell["batch"] for cell in cells):
        of_size = by(cells, batch=size)
        for layer in ordered(cell["layer"] for cell in of_size):
            of_layer = by(of_size, layer=layer)
            names = ordered(cell["implementation"] for cell in of_layer)
            known = {name: first(of_layer, implementation=name) for name in names}
            of_pyg = [name for name in names if name.startswith("PyG") and "our loader" not in name]
            pyg = [time for name in of_pyg if (time := time_of(known[name]))]
            rows = [
                [name, shown(cell), ratio(quotient(min(pyg), time_of(cell)) if pyg else None), _more(cell)]
                for name, cell in known.items()
            ]
            what = "the loader alone" if layer == "none" else f"epochs with {layer}"
            columns = [
                "",
                "ms per batch",
                "PyG's fastest / this",
                "of the host" if layer == "none" else "loss",
            ]
            tables.append(Table(f"Batches of {size}, {what}", columns, rows))
    return tables


def _more(cell: dict[str, Any] | None) -> str:
    number = (cell or {}).get("host_ms", (cell or {}).get("loss"))
    return "-" if number is None else f"{number:.3g}"
