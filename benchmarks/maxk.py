"""MaxK against ReLU in training: test accuracy, stored activations and time of a step, for several k.

MaxK-GNN, section 5 (accuracy against k). The work is examples/maxk.py's; all models start from the same
weights.
"""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import statistics
import sys
from pathlib import Path

from rich.console import Console

from .common import add_common, progress, recorder
from .record import REPOSITORY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument(
        "--datasets", nargs="+", default=["cora", "citeseer", "pubmed"], help="names or paths of .npz files"
    )
    parser.add_argument("--operators", nargs="+", choices=("sage", "gcn"), default=["sage"])
    parser.add_argument("--framework", choices=("pyg", "dgl"), default="pyg")
    parser.add_argument("--k", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="kept entries of 256")
    parser.add_argument("--runs", type=int, help="repetitions, each with its own seed")
    parser.add_argument(
        "--recompute", action="store_true", help="layers aggregate once more in the backward pass"
    )
    parser.add_argument("--epochs", type=int, help="training steps (default: the example's recipe)")


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    out = recorder("maxk", options, variant="recompute" if options.recompute else "")
    out.note(
        "examples/maxk.py: same initial weights for all; test score at the best validation; stored: what"
        " autograd keeps for the backward pass of each graph convolution with its activation and dropout,"
        " parameters aside"
    )
    if options.recompute:
        out.note("layers with MaxK aggregate once more in the backward pass (recompute=True)")
    # The examples are scripts beside the package, not part of it.
    sys.path.insert(0, str(REPOSITORY / "examples"))
    example = importlib.import_module("maxk")
    for dataset, operator in progress([*itertools.product(options.datasets, options.operators)], "maxk"):
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
            out.add(
                dataset=Path(dataset).stem,
                framework=options.framework,
                operator=operator,
                activation="ReLU" if result.conv == "relu" else f"k = {result.conv}",
                implementation=result.layer,
                metric=metric,
                runs=len(scores),
                epochs=log["settings"]["recipe"]["epochs"],
                mean=statistics.fmean(scores),
                std=statistics.stdev(scores) if len(scores) > 1 else None,
                scores=[round(score, 5) for score in scores],
                stored_bytes=log["stored_bytes"][result.conv],
                step_ms=result.step_ms(),
            )
    return out.path
