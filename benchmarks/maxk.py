"""MaxK against ReLU in training: test accuracy, stored activations and time of a step, for several k.

MaxK-GNN, section 5 (accuracy against k). The work is examples/maxk.py's; all models start from the same
weights.
"""

from __future__ import annotations

import importlib
import io
import itertools
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from .record import REPOSITORY
from .runner import Benchmark, Cell, Run, option


def cells(run: Run, case: tuple[str, str]) -> Iterator[Cell]:
    # The examples are scripts and not part of a package.
    sys.path.insert(0, str(REPOSITORY / "examples"))
    example = importlib.import_module("maxk")
    (dataset, operator), options = case, run.options
    arguments = ["--dataset", dataset, "--framework", options.framework, "--operator", operator]
    arguments += ["--device", options.device, "--k", *map(str, options.k)]
    arguments += ["--recompute"] * options.recompute
    for name in ("runs", "epochs"):
        if getattr(options, name):
            arguments += [f"--{name}", str(getattr(options, name))]
    log, results = example.main(arguments, Console(file=io.StringIO()))
    for result in results:
        (metric,) = result.runs[0].scores
        scores = result.scores(metric)
        yield {
            "dataset": Path(dataset).stem,
            "framework": options.framework,
            "operator": operator,
            "activation": "ReLU" if result.conv == "relu" else f"k = {result.conv}",
            "implementation": result.layer,
            "metric": metric,
            "runs": len(scores),
            "epochs": log["settings"]["recipe"]["epochs"],
            "mean": statistics.fmean(scores),
            "std": statistics.stdev(scores) if len(scores) > 1 else None,
            "scores": [round(score, 5) for score in scores],
            "stored_bytes": log["stored_bytes"][result.conv],
            "step_ms": result.step_ms(),
        }


BENCHMARK = Benchmark(
    "maxk",
    cells,
    lambda options: itertools.product(options.datasets, options.operators),
    options={
        "datasets": option(["cora", "citeseer", "pubmed"], "names or paths of .npz files"),
        "operators": option(["sage"], choices=("sage", "gcn")),
        "framework": option("pyg", choices=("pyg", "dgl")),
        "k": option([8, 16, 32, 64, 128], "kept entries of 256"),
        "runs": option(None, "repetitions, each with its own seed", type=int),
        "recompute": option(False, "layers aggregate once more in the backward pass"),
        "epochs": option(None, "training steps (default: the example's recipe)", type=int),
    },
    notes=lambda options: [
        "examples/maxk.py: same initial weights for all; test score at the best validation; stored: what"
        " autograd keeps for the backward pass of each graph convolution with its activation and dropout,"
        " parameters aside",
        *["layers with MaxK aggregate once more in the backward pass (recompute=True)"] * options.recompute,
    ],
    variant=lambda options: "recompute" * options.recompute,
)
