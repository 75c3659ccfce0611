"""Tables of test scores."""

from __future__ import annotations

from typing import Any

from .cells import Cell, Table, by, first, ordered


def accuracy(result: dict[str, Any]) -> list[Table]:
    """FlashSparse's table 8: the framework's own layer in float32, and the drop-in in every precision."""
    # Records of the GCN alone may lack the model's name.
    cells = [{"model": "gcn", **cell} for cell in result["cells"]]
    return [_scores(model, by(cells, model=model)) for model in ordered(c["model"] for c in cells)]


def _scores(model: str, cells: list[Cell]) -> Table:
    precisions = ordered(c["precision"] for c in cells if c["conv"] == "fast")
    rows = []
    for dataset, framework in ordered((c["dataset"], c["framework"]) for c in cells):
        group = by(cells, dataset=dataset, framework=framework)
        for metric in ordered(c["metric"] for c in group if "metric" in c) or ["-"]:
            original, *ours = (
                first(group, conv=conv, precision=precision, metric=metric)
                or first(group, conv=conv, precision=precision)
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
