"""The results pages: every statement is in the records, and nothing important is missing."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record, summary, tables
from benchmarks.bars import Chart
from benchmarks.tables.cells import Table, stored_baselines
from benchmarks.tables.train import train_at_a_glance

H200 = record.RESULTS / "nvidia-h200"
MACHINES = {"ours": {"gpu": "NVIDIA H200"}, "other": {"gpu": "NVIDIA A100"}}


def rows_of(name: str, cells: list[dict[str, Any]], machine: str = "ours") -> list[list[str]]:
    """The rows of all tables of a chapter."""
    result = {"name": name, "machine": MACHINES[machine], "cells": cells, "notes": []}
    return [list(row) for table in tables.CHAPTERS[name].tables(result) for row in table.rows]


def text_of(results: Path) -> str:
    return "".join(summary.pages(results, results / "results.md").values())


def test_the_committed_pages_are_what_the_records_say() -> None:
    if not summary.PAGE.exists():
        pytest.skip("no documents beside the sources")
    for path, text in summary.pages(record.RESULTS, summary.PAGE).items():
        assert path.read_text() == text, (
            f"{path} is not current: run python -m benchmarks summary --out docs/results.md"
        )


def test_every_benchmark_has_a_chapter_and_a_page() -> None:
    assert tables.CHAPTERS.keys() == tables.TABLES.keys()
    shown = {name for topic in summary.TOPICS.values() if topic.on_gpu for name in topic.benchmarks}
    assert tables.CHAPTERS.keys() - {"cpu"} == shown - {"train_maxk"}


def test_every_record_is_on_a_page() -> None:
    pages = summary.pages(record.RESULTS, summary.PAGE)
    for path in tables.stored(record.RESULTS):
        heading = f"{tables.provenance(record.load(path))}\n"
        assert any(heading in text for text in pages.values()), path


def test_benchmarks_without_a_record_are_named(tmp_path: Path) -> None:
    count = sum(len(topic.benchmarks) for topic in summary.TOPICS.values() if topic.on_gpu)
    assert text_of(tmp_path).count("Not measured: no record of") == count


def test_every_cell_has_one_number() -> None:
    """On the pages: numbers of several units are tables of their own."""
    table = Table(
        "gcn3-128, float32",
        ["graph", "FastGCNConv, ms, peak GB", "PyG", "asked"],
        [
            ["yelp", "12.9, 1.98 GB", "138, 10.67x, 17.1 GB", "9.00 ms: missed"],
            ["reddit", "24.8, 4.51 GB", "out of memory", ""],
        ],
    )
    time, ratio, memory = summary.readable(table)
    assert time.columns == ["graph", "FastGCNConv", "PyG", "target"]
    assert time.rows == [["yelp", "12.9", "138", "9.00 ms: missed"], ["reddit", "24.8", "out of memory", ""]]
    assert (ratio.columns, ratio.rows) == (["graph", "PyG"], [["yelp", "10.67x"], ["reddit", "-"]])
    assert memory.rows == [["yelp", "1.98", "17.1"], ["reddit", "4.51", "-"]]
    assert [one.title.partition(": ")[2] for one in (time, ratio, memory)] == [
        "time, ms",
        "baseline / ours",
        "peak memory, GB",
    ]
    (names,) = summary.readable(
        Table("", ["", "rival", "least"], [["gcn", "PyG", "1.76x pubmed"], ["gat", "PyG", "-"]])
    )
    assert names.columns == ["", "baseline", "worst case", "on"]
    assert names.rows == [["gcn", "PyG", "1.76x", "pubmed"], ["gat", "PyG", "-", ""]]
    (both,) = summary.readable(Table("", ["", "loss", "metric"], [["gae", "1.14 / 1.15", "- / 0.78 AUC"]]))
    assert both.columns == ["", "loss, baseline", "loss, ours", "metric", "metric, baseline", "metric, ours"]
    assert both.rows == [["gae", "1.14", "1.15", "AUC", "-", "0.78"]]


@pytest.mark.parametrize("path", sorted(H200.glob("*.json")), ids=lambda path: path.stem)
def test_stored_times_count_on_their_own_gpu_model_only(path: Path) -> None:
    result = record.load(path)

    def text() -> str:
        chapter = tables.CHAPTERS[result["name"]]
        return "".join(table.markdown() for table in chapter.tables(result))

    names = ("stored", "RoDe", "Fused3S", "turbo-gnn", "DF-GNN", "MaxK fp32")
    own = all(cell.get("model", "").startswith("maxk-") for cell in result["cells"])  # against our own layers
    if result["name"] in ("spmm", "sddmm", "attention", "ssd", "train") and not own:
        assert any(name in text() for name in names)
    result["machine"]["gpu"] = "NVIDIA A100"
    assert not any(name in text() for name in names)


def step(graph: str, implementation: str, **facts: Any) -> dict[str, Any]:
    shared = {"graph": graph, "edges": 10, "model": "gcn3-128", "dtype": "bf16-amp", "status": "ok"}
    return {**shared, "implementation": implementation, "peak_gb": 1.0, **facts}


def test_training_names_what_does_not_run_and_what_misses_its_goal() -> None:
    cells = [
        step("yelp", "FastGCNConv", median_ms=8.0),
        step("yelp", "PyG edge_index", median_ms=32.0),
        step("reddit", "FastGCNConv", median_ms=40.0),
        step("reddit", "PyG edge_index", status="out of memory"),
        step("ogbn-arxiv", "FastGCNConv", status="out of memory"),
    ]
    mean, *_, yelp, reddit, arxiv = rows_of("train", cells, "other")
    assert mean == [
        "gcn3-128, bf16-amp",
        "PyG edge_index",
        "4.00x",
        "4.00x yelp",
        "1",
        "reddit (out of memory)",
    ]
    assert yelp == ["yelp", "8.00, 1.00 GB", "9.00 ms", "32.0, 4.00x, 1.00 GB"]
    assert reddit == ["reddit", "40.0, 1.00 GB", "35.0 ms: missed", "out of memory"]
    assert arxiv == ["ogbn-arxiv", "out of memory", "2.50 ms: missed", "not run"]


def test_training_shows_what_a_cuda_graph_takes() -> None:
    cells = [
        step("yelp", "FastGCNConv", median_ms=8.0, captured_median_ms=7.0),
        step("reddit", "FastGCNConv", median_ms=40.0),
    ]
    *_, yelp, reddit = rows_of("train", cells, "other")
    assert yelp == ["yelp", "8.00, 1.00 GB", "9.00 ms", "7.00"]
    assert reddit == ["reddit", "40.0, 1.00 GB", "35.0 ms: missed", "-"]


def test_speed_ups_are_held_against_their_goals() -> None:
    stored = {
        graph: stored_baselines({"machine": MACHINES["ours"]}, "sddmm@32", "float16", graph)
        for graph in ("reddit", "yelp")
    }
    for speed, asked in ((2.0, "1.80x"), (1.5, "1.80x: missed")):
        cells = [
            {
                "graph": graph,
                "width": 32,
                "dtype": "float16",
                "implementation": "fastsparse auto",
                "status": "ok",
                "median_ms": min(times.values()) / speed,
            }
            for graph, times in stored.items()
        ]
        (row,) = rows_of("sddmm", cells)
        assert row[:3] == ["auto, float16, F = 32", "the fastest stored", f"{speed:.2f}x"]
        assert row[4:] == ["2", asked]


def test_goals_are_counted(tmp_path: Path) -> None:
    cells = [
        step("yelp", "FastGCNConv", median_ms=8.0),
        step("reddit", "FastGCNConv", median_ms=40.0),
        step("ogbn-arxiv", "FastGCNConv", median_ms=3.0),
        step("pubmed", "FastGCNConv", median_ms=1.0),  # nothing was asked here
    ]
    result = record.load(H200 / "train.json") | {"cells": cells}
    path = tmp_path / "nvidia-h200" / "train_small.json"
    path.parent.mkdir()
    path.write_text(record.dumps(result))
    assert "| Training steps, NVIDIA H200: small | 1 | 2 |" in text_of(tmp_path)


def test_the_page_opens_with_training_against_pyg() -> None:
    cells = [
        step(graph, implementation, model="sage3-128", dtype=dtype, median_ms=ms, peak_gb=gb)
        for dtype in ("float32", "bf16-amp")
        for graph, implementation, ms, gb in (
            ("pubmed", "FastSAGEConv", 2.0, 1.0),
            ("pubmed", "PyG edge_index", 1.0, 1.0),
            ("yelp", "FastSAGEConv", 1.0, 1.0),
            ("yelp", "PyG edge_index", 8.0, 4.0),
            ("yelp", "PyG sparse_csr", 3.0, 4.0),
            ("reddit", "FastSAGEConv", 1.0, 1.0),
        )
    ]
    cells.append(step("reddit", "PyG edge_index", model="sage3-128", dtype="float32", status="out of memory"))
    (row,) = train_at_a_glance({"cells": cells}).rows
    assert list(row) == [
        "`FastSAGEConv`",
        "2.00x",
        "0.50x pubmed",
        "8.00x yelp",
        "2.00x",
        "2.00x",
        "3.00x",
        "2",
    ]
    top = summary.PAGE.read_text()[:2500]
    assert top.index("| `FastGCNConv` |") < top.index("train_overview.png") < top.index("## Pages")


def test_spmm_compares_with_cusparse_of_the_same_run() -> None:
    shared = {"dtype": "float32", "width": 64, "direction": "backward", "status": "ok"}
    cells = [
        {**shared, "graph": graph, "implementation": name, "median_ms": time}
        for graph, times in (("reddit", (1.0, 4.0)), ("yelp", (2.0, 2.0)))
        for name, time in zip(("fastsparse csr", "torch.sparse.mm (cuSPARSE)"), times, strict=True)
    ]
    expected = ["csr, backward, float32, F = 64", "cuSPARSE", "2.00x", "1.00x yelp", "2", ""]
    assert rows_of("spmm", cells) == [expected]


def test_float32_takes_the_faster_of_two_records() -> None:
    """RoDe's stored times are known; cuSPARSE's are of the same run."""
    rode = {
        graph: stored_baselines({"machine": MACHINES["ours"]}, "spmm@64", "float32", graph)["RoDe fp32"]
        for graph in ("reddit", "yelp")
    }
    shared = {"dtype": "float32", "width": 64, "direction": "forward", "status": "ok"}

    def result(name: str, speeds: dict[str, float]) -> dict[str, Any]:
        cells = [
            {**shared, "graph": graph, "implementation": name, "median_ms": rode[graph] / speed}
            for graph, speed in speeds.items()
        ]
        return {"name": "spmm", "machine": MACHINES["ours"], "cells": cells}

    ours = [
        result("fastsparse csr", {"reddit": 2.0, "yelp": 1.0}),
        result("fastsparse flashsparse", {"reddit": 1.0, "yelp": 2.0}),
    ]
    what = "the faster of csr and flashsparse, forward, float32, F = 64"
    together = tables.CHAPTERS["spmm"].together
    assert together is not None
    (table,) = together([*ours, result("torch.sparse.mm (cuSPARSE)", {"yelp": 1.6})])
    assert [list(row) for row in table.rows] == [
        [what, "RoDe fp32", "2.00x", "2.00x reddit", "2", "1.15x"],
        [what, "the faster of RoDe fp32 and cuSPARSE", "1.58x", "1.25x yelp", "2", ""],
    ]
    assert together(ours[:1]) == []


def test_regret_is_the_mean_and_the_worst() -> None:
    cells = [
        {"graph": "ppi", "width": 16, "dtype": "float32", "status": "ok", "regret": 1.0},
        {"graph": "dd", "width": 64, "dtype": "float32", "status": "ok", "regret": 1.21},
        {"graph": "dd", "width": 16, "dtype": "float32", "status": "out of memory"},
    ]
    assert rows_of("choice", cells) == [["float32", "1.10x", "1.21x dd, F = 64", "1 of 2"]]


def test_charts_show_the_numbers_of_their_table() -> None:
    table = Table(
        "steps, ms",
        ["layer", "PyG", "ours (20-80 %)"],
        [["GCN & co", "4.0", "1.0 (0.9-1.1)"], ["GIN", "-", "-"]],
    )
    drawn = Chart("", "steps", ("layer",), ("PyG", "ours (20-80 %)"), "ms", longest=2.0).draw([table])
    texts = re.findall(r">([^<>\n]+)</text>", drawn)
    assert texts == ["ms", "PyG", "ours (20-80 %)", "GCN &amp; co", "4 (cut)", "1"]  # no bars of GIN
    *_, first, second = (float(wide) for wide in re.findall(r'width="([\d.]+)" height', drawn))
    assert first == pytest.approx(2 * second, abs=0.2)
