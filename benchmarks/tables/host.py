"""Table of the host's time."""

from __future__ import annotations

from typing import Any

from .cells import Table


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
