"""Tables of training with MaxK."""

from __future__ import annotations

from typing import Any

from .cells import Table, by, first, number, ordered, ratio


def maxk(result: dict[str, Any]) -> list[Table]:
    """By dataset: test scores, stored activations and time of every k, beside those of ReLU."""
    tables = []
    for dataset, operator in ordered((c["dataset"], c["operator"]) for c in result["cells"]):
        group = by(result["cells"], dataset=dataset, operator=operator)
        relu = first(group, activation="ReLU")
        rows = []
        for cell in group:
            loss = within = share = "-"
            if relu is not None and cell is not relu:
                loss = f"{100 * (relu['mean'] - cell['mean']):+.2f}"
                if relu["std"] is not None:
                    within = "yes" if relu["mean"] - cell["mean"] <= relu["std"] else "no"
                share = ratio(sum(cell["stored_bytes"]) / sum(relu["stored_bytes"]))
            std = "" if cell["std"] is None else f" ± {100 * cell['std']:.2f}"
            score = f"{100 * cell['mean']:.2f}{std}"
            megabytes = number(sum(cell["stored_bytes"]) / 1e6)
            rows.append([cell["activation"], score, loss, within, megabytes, share, number(cell["step_ms"])])
        columns = [
            "activation",
            group[0]["metric"] + ", %",
            "loss",
            "within one std",
            "activations MB",
            "of ReLU's",
        ]
        columns.append("step ms")
        tables.append(Table(f"{group[0]['implementation'].split(',')[0]}, {dataset}", columns, rows))
    return tables
