"""Test accuracy of the GCN example with the original layers and with the drop-ins, in both frameworks."""

from __future__ import annotations

import argparse
import importlib
import io
import statistics
import sys
from pathlib import Path

from rich.console import Console

from .common import add_common, recorder
from .record import REPOSITORY

DATASETS = ("cora", "citeseer", "minesweeper")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), help="names or paths of .npz files")
    parser.add_argument("--frameworks", nargs="+", choices=("pyg", "dgl"), default=["pyg", "dgl"])
    parser.add_argument("--precision", default="fp32", help="as the example's option")
    parser.add_argument("--runs", type=int, help="repetitions (default: the example's recipe)")
    parser.add_argument("--epochs", type=int, help="training steps (default: the example's recipe)")


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    # The examples are scripts beside the package, not part of it.
    sys.path.insert(0, str(REPOSITORY / "examples"))
    example = importlib.import_module("gcn")
    out = recorder("accuracy", options)
    out.note(
        "examples/gcn.py: same initial weights, dropout seeds and splits; test score at the best validation"
    )
    for dataset in options.datasets:
        for framework in options.frameworks:
            arguments = ["--dataset", dataset, "--framework", framework, "--conv", "both"]
            arguments += ["--device", options.device, "--precision", options.precision]
            for name in ("runs", "epochs"):
                if getattr(options, name) is not None:
                    arguments += [f"--{name}", str(getattr(options, name))]
            log, results = example.main(arguments, Console(file=io.StringIO()))
            for result in results:
                for metric in result.runs[0].scores:
                    scores = result.scores(metric)
                    out.add(
                        dataset=log["data"]["name"],
                        framework=framework,
                        implementation=result.layer,
                        conv=result.conv,
                        precision=options.precision,
                        metric=metric,
                        split=log["data"]["split"],
                        runs=len(scores),
                        epochs=log["settings"]["recipe"]["epochs"],
                        mean=statistics.fmean(scores),
                        std=statistics.stdev(scores) if len(scores) > 1 else None,
                        scores=[round(score, 5) for score in scores],
                        step_ms=result.step_ms(),
                    )
    return out.path
