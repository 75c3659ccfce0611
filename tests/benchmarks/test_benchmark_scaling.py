"""The benchmark of several GPUs, tiny, with processes on the CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import record, suite, tables
from benchmarks.__main__ import main, run

pytest.importorskip("fastsparse_core", exc_type=ImportError)
pytest.importorskip("fastsparse_pyg", exc_type=ImportError)


def test_scaling_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        name: dataclasses.replace(suite.SUITE[name], nodes=400, edges=3_000, max_degree=60)
        for name in ("ogbn-products", "pubmed")
    }
    monkeypatch.setattr(suite, "SUITE", small)
    arguments = [
        "--gpus",
        "2",
        "--graphs",
        "pubmed",
        "--steps",
        "2",
        "--dtypes",
        "float32",
        "--batches",
        "50",
    ]
    run(["scaling", "--device", "cpu", "--out", str(tmp_path), *arguments], Console(quiet=True))
    result = record.load(next(tmp_path.glob("*/scaling.json")))
    full = [cell for cell in result["cells"] if cell["kind"] == "full"]
    assert [(cell["gpus"], cell["variant"]) for cell in full] == [
        (1, "one GPU"),
        (2, "overlap"),
        (2, "in turn"),
        (2, "16-bit halo"),
        (2, "cached inputs"),
        (2, "16-bit halo, cached inputs"),
    ]
    error = {cell["variant"]: cell["error"] for cell in full}
    assert max(error[name] for name in ("overlap", "in turn", "cached inputs")) < 1e-5
    assert all(1e-5 < error[name] < 2e-2 for name in error if name.startswith("16-bit"))
    assert all(0 < cell["edge_cut"] < 1 and 0 < cell["halo_share"] <= 1 for cell in full[1:])
    batches = [cell for cell in result["cells"] if cell["kind"] == "ddp"]
    assert [cell["gpus"] for cell in batches] == [1, 2]
    assert all(cell["seeds_per_s"] > 0 for cell in batches)
    titles = [table.title for table in tables.TABLES["scaling"](result)]
    assert titles == [
        "full graph, gcn3-256, pubmed, float32",
        "mini-batches of 50, sage3-256, ogbn-products, float32",
    ]
    options = ["--scale", "0.00003", "--parts", "papers", "large"]
    run(["scaling", "--device", "cpu", "--out", str(tmp_path), *arguments, *options], Console(quiet=True))
    result = record.load(next(tmp_path.glob("*/scaling_large.json")))
    assert [(cell["kind"], cell["gpus"]) for cell in result["cells"]] == (
        [("papers", gpus) for gpus in (1, 2, 2)] + [("large", 2)] * 2
    )
    titles = [(table.title, len(table.rows)) for table in tables.TABLES["scaling"](result)]
    assert titles == [
        ("an epoch of ogbn-papers100M, mini-batches of 50, sage3-256", 3),
        ("all nodes of ogbn-papers100M, 3 x 128", 2),
    ]
    main(["plots", "--results", str(tmp_path)])
    assert "scaling_speedup.png" in capsys.readouterr().out
    assert next(tmp_path.glob("*/scaling_speedup.png")).stat().st_size > 0


def test_sampled_structures() -> None:
    scaling = pytest.importorskip("benchmarks.scaling")
    graph = suite.load("pubmed", "cpu", nodes=400, edges=3_000, max_degree=60)
    sampler = scaling.Sampler(graph, torch.arange(graph.num_nodes))
    seeds = torch.tensor([7, 3, 250])
    batch = sampler.draw(seeds)
    assert torch.equal(batch.y, seeds)
    assert torch.equal(batch.nodes[:3], seeds)
    assert batch.nodes.unique().numel() == batch.nodes.numel()
    assert batch.layers[-1].num_dst == 3
    assert batch.layers[0].num_src == batch.nodes.numel()
    edges = set(zip(graph.row().tolist(), graph.col.tolist(), strict=True))
    for adj, fanouts in zip(batch.layers, ((15, 10, 5), (15, 10), (15,)), strict=True):
        ends = zip(batch.nodes[adj.row().long()].tolist(), batch.nodes[adj.col.long()].tolist(), strict=True)
        assert set(ends) <= edges
        degree = adj.in_degree()
        has_neighbours = graph.rowptr.diff()[batch.nodes[: adj.num_dst]] > 0
        assert torch.equal(degree > 0, has_neighbours)
        assert set(degree.tolist()) <= {0, *fanouts}
    assert (sampler.place == -1).all()


def test_more_gpus_than_there_are(tmp_path: Path) -> None:
    scaling = pytest.importorskip("benchmarks.scaling")
    import argparse

    with pytest.raises(ValueError, match=f"this machine has {torch.cuda.device_count()}"):
        scaling.run(argparse.Namespace(device="cuda", gpus=[1000], out=tmp_path))


def test_next_batch_is_drawn_after_training_was_launched() -> None:
    scaling = pytest.importorskip("benchmarks.scaling")
    numbers, events = iter(range(10)), []

    def draw() -> int:
        number = next(numbers)
        events.append(("draw", number))
        return number

    ahead = scaling.Prefetch(draw, lambda batch: events.append(("train", batch)), torch.device("cpu"))
    for _ in range(2):
        ahead.step()
    assert events == [("draw", 0), ("train", 0), ("draw", 1), ("train", 1), ("draw", 2)]


@pytest.mark.gpu
def test_a_batch_keeps_its_memory_until_it_was_trained_on() -> None:
    scaling = pytest.importorskip("benchmarks.scaling")
    device, numbers, found = torch.device("cuda"), iter(range(40)), []

    def train(batch: torch.Tensor) -> None:
        torch.cuda._sleep(2_000_000)  # so that drawing would overtake it
        found.append(batch.sum(dtype=torch.float64))

    ahead = scaling.Prefetch(lambda: torch.full((1 << 20,), next(numbers), device=device), train, device)
    for _ in range(20):
        ahead.step()
    assert [int(total) >> 20 for total in found] == list(range(20))
