"""Forms of steps as people write them, as they are and under `capture`, on a graph of pubmed's size.

``python -m benchmarks.programs --out programs.json`` prints for every form of `step_forms` what capture did
with it, the time of a plain and of a captured call, and by how much their results differ. Calls of both
alternate, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastsparse_core import capture
from fastsparse_core.capturing.captured import CALLS

from . import suite
from .step_forms import FORMS, Problem, Step

#: Calls that are timed, in rounds that alternate; three times as many rounds where a few per cent matter.
_ROUNDS, _CALLS = 7, 25


def compare(name: str, problem: Problem) -> dict[str, Any]:
    """Status, times and the difference of one form."""
    plain, step = FORMS[name](problem), capture(FORMS[name](problem))
    warm_up = CALLS + 6
    difference = 0.0
    results = []
    for run in (plain, step):
        torch.manual_seed(1)
        results.append([_numbers(run()) for _ in range(warm_up)])
    for one, other in zip(*results, strict=True):
        pairs = zip(one, other, strict=True)
        difference = max([difference, *(abs(x - y) / max(abs(x), 1e-3) for x, y in pairs)])
    times: tuple[list[float], list[float]] = ([], [])
    status: str = step.captured.status  # type: ignore[attr-defined]
    for _ in range(_ROUNDS if status == "replaying" else 3 * _ROUNDS):
        for run, found in zip((plain, step), times, strict=True):
            found.append(_time(run))
    one, other = (statistics.median(found) for found in times)
    gain = statistics.median(x / y for x, y in zip(*times, strict=True))
    return {
        "form": name,
        "status": status,
        "plain_ms": one,
        "captured_ms": other,
        "gain": gain,
        "difference": difference,
    }


def _numbers(result: Any) -> list[float]:
    return [
        float(item.detach().sum()) if isinstance(item, Tensor) else float(item)
        for item in tree_leaves(result)
    ]


def _time(run: Step) -> float:
    """Milliseconds a call, calls back to back."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_CALLS):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1000 / _CALLS


def main() -> None:
    """Prints a line for every form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", default="real:pubmed", help="a graph as `benchmarks spmm` takes it")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--out", type=Path, help="a file for the numbers")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    graph = suite.load(args.graph, "cuda")
    row = torch.repeat_interleave(torch.arange(graph.rowptr.numel() - 1, device="cuda"), graph.rowptr.diff())
    edge_index = torch.stack([graph.col.long(), row])
    found = []
    for name in args.forms:
        problem = Problem("cuda", graph.rowptr.numel() - 1, 0, 500, args.width, edge_index)
        item = compare(name, problem)
        found.append(item)
        print(
            f"{name:22s} {item['plain_ms']:7.3f} {item['captured_ms']:7.3f} ms {item['gain']:6.2f}x "
            f"{item['difference']:.1e}  {item['status']}",
            flush=True,
        )
    replaying = [item["gain"] for item in found if item["status"] == "replaying"]
    print(f"{len(replaying)} of {len(found)} replay; gain {min(replaying):.2f} to {max(replaying):.2f}")
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
