"""Packages GAT and GraphSAGE for C++, builds a C++ program that runs them, and compares it with Python.

    FASTSPARSE_CPP=1 pip install --no-build-isolation .
    python examples/serve/serve.py

The script needs cmake and a C++ compiler. It prints the median time of a request in microseconds, for a graph
of Cora's size.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fastsparse_core.export import for_cpp
from fastsparse_pyg import FastGATConv, FastSAGEConv

NODES, EDGES, FEATURES, CLASSES = 2708, 10556, 1433, 7


class TwoLayers(nn.Module):
    """Two layers with a ReLU between them."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class OnOneGraph(nn.Module):
    """The same model for one fixed graph, whose structure becomes a part of the package."""

    def __init__(self, model: nn.Module, edge_index: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("edge_index", edge_index)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, self.edge_index)


MODELS = {
    "gat": lambda: TwoLayers(FastGATConv(FEATURES, 8, heads=8), FastGATConv(64, CLASSES)),
    "sage": lambda: TwoLayers(FastSAGEConv(FEATURES, 64), FastSAGEConv(64, CLASSES)),
}


def request(device: str) -> list[Tensor]:
    """Makes random features and edges."""
    return [
        torch.randn(NODES, FEATURES, device=device),
        torch.randint(0, NODES, (2, EDGES), device=device),
    ]


def package(model: nn.Module, example: list[Tensor], path: Path) -> None:
    """Writes the package of a model. If the model takes edges, the package supports graphs of any size."""
    free = torch.export.Dim.DYNAMIC
    sizes = ({0: free}, {1: free}) if len(example) > 1 else None
    program = torch.export.export(model, tuple(example), dynamic_shapes=sizes)
    torch._inductor.aoti_compile_and_package(for_cpp(program), package_path=str(path))


def build(folder: Path) -> Path:
    """Builds the C++ program."""
    source = str(Path(__file__).parent)
    configure = ["cmake", "-S", source, "-B", str(folder), f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (configure, ["cmake", "--build", str(folder)]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "serve"


def median_us(call: Callable[[], object], repeats: int) -> float:
    """Returns the median time of a call in microseconds."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(1e6 * (time.perf_counter() - start))
    return statistics.median(taken)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/serve"), help="where files are written")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--models", nargs="+", default=["gat", "sage", "gat-one-graph", "sage-one-graph"])
    options = parser.parse_args(arguments)
    folder, repeats = options.folder, options.repeats
    folder.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    program = build(folder)
    print("model             Python     C++")
    for name in options.models:
        model = MODELS[name.split("-")[0]]().to(options.device).eval()
        given = request(options.device)
        if "-" in name:
            model = OnOneGraph(model, given.pop())
        package(model, given, folder / f"{name}.pt2")

        def answer(model: nn.Module = model, given: list[Tensor] = given) -> Tensor:
            return model(
                *(each.clone() for each in given)
            ).cpu()  # each request comes with tensors of its own

        expected = answer()
        in_python = median_us(answer, repeats)
        torch.save([each.cpu() for each in given], folder / "request.pt")
        files = [str(folder / each) for each in (f"{name}.pt2", "request.pt", "result.pt")]
        done = subprocess.run([program, *files, str(repeats)], check=True, capture_output=True, text=True)
        torch.testing.assert_close(torch.load(folder / "result.pt"), expected, rtol=1e-4, atol=1e-5)
        print(f"{name:14s} {in_python:9.0f} {float(done.stdout):7.0f}", flush=True)


if __name__ == "__main__":
    main()
