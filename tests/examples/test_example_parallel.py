"""examples/ogb_node.py under torchrun: mini-batches by several processes, and one graph divided."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import ogb_files
import ogb_node
import pytest
import torch
from common.errors import ExampleError
from common.parallel import ALONE, Parallel
from rich.console import Console

if importlib.util.find_spec("ogb") is None:  # not importorskip: importing ogb asks the network
    pytest.skip("needs ogb", allow_module_level=True)

SCRIPT = Path(ogb_node.__file__)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("ogbn-products", "ogbn-proteins"):
        ogb_files.WRITERS[name](tmp_path)
    return tmp_path


def torchrun(size: int, *arguments: object) -> str:
    """Runs the example in ``size`` processes; returns what they print."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launcher, str(SCRIPT), *map(str, arguments), "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=1800,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_divided_graph_trains_as_the_whole_one(root: Path, tmp_path: Path) -> None:
    # Proteins: no dropout, so that both compute the same.
    common = ["--dataset", "ogbn-proteins", "--root", root, "--model", "gcn", "--hidden", 16, "--epochs", 3]
    common += ["--eval-every", 1]
    log, curve, checkpoint = (tmp_path / name for name in ("log.json", "curve.csv", "model.pt"))
    files = ["--json", log, "--csv", curve, "--checkpoint", checkpoint, "--checkpoint-every", 1]
    printed = torchrun(2, *common, *files, "--parallel", "fullgraph")
    assert printed.count("2 processes (fullgraph)") == 1
    assert "rank 0 of 2" in printed
    single = [str(part) for part in common]
    expected, _ = ogb_node.main([*single, "--device", "cpu"], Console(file=io.StringIO()))
    ours = json.loads(log.read_text())["layers"][0]["runs"][0]
    theirs = expected["layers"][0]["runs"][0]
    for part in ("loss", "train", "val", "test"):
        assert ours[part] == pytest.approx(theirs[part], rel=1e-4), part
    assert len(list(csv.DictReader(curve.open()))) == 3
    kept = torch.load(checkpoint, weights_only=True)
    assert kept["settings"]["processes"] == 2
    assert kept["current"]["loss"] == ours["loss"]
    assert not list(tmp_path.glob("*.part"))


def test_mini_batches_by_two_processes(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("fastsparse_dgl", exc_type=ImportError)
    log = tmp_path / "log.json"
    arguments = ["--dataset", "ogbn-products", "--root", root, "--model", "sage", "--framework", "dgl"]
    arguments += ["--hidden", 16, "--layers", 2, "--fanouts", "5,5", "--batch-size", 10, "--epochs", 4]
    printed = torchrun(2, *arguments, "--json", log, "--parallel", "ddp")
    assert printed.count("2 processes (ddp)") == 1
    run = json.loads(log.read_text())["layers"][0]["runs"][0]
    assert len(run["loss"]) == 4
    assert run["loss"][-1] < run["loss"][0]
    assert all(0 <= score <= 1 for score in run["test"])


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_process_gets_as_many_nodes(size: int) -> None:
    seeds = torch.arange(100, 110)
    shares = [Parallel("ddp", rank, size).share(seeds) for rank in range(size)]
    assert len({share.numel() for share in shares}) == 1
    assert set(torch.cat(shares).tolist()) == set(seeds.tolist())
    assert sum(share.numel() for share in shares) < 10 + size


def test_alone_is_the_first() -> None:
    assert ALONE.is_first
    assert ALONE.mean_loss(6.0, 3) == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parallel", "ddp"], "start it with torchrun"),
        (["--parallel", "ddp", "--batching", "full"], "--parallel ddp: expected --batching neighbor"),
        (
            ["--parallel", "fullgraph", "--batching", "neighbor"],
            "--parallel fullgraph: expected --batching full",
        ),
        (["--parallel", "fullgraph", "--conv", "reference"], "expected --conv fast"),
        (["--parallel", "fullgraph", "--model", "maxk-sage"], "expected --model gcn, sage, gat or gt"),
    ],
)
def test_what_cannot_work_is_said(
    root: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    command = ["--dataset", "ogbn-products", "--root", str(root), "--device", "cpu", *arguments]
    with pytest.raises(ExampleError, match=message):
        ogb_node.main(command, Console(file=io.StringIO()))
