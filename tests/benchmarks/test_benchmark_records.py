"""Timer, records, roofline, tables and plots of the benchmarks."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import record, roofline, runner, tables, timing
from benchmarks.tables.cells import number, stored_baselines

CPU = torch.device("cpu")
RESULTS = tables.stored(record.RESULTS)


def sleeper(milliseconds: float) -> Any:
    def fn() -> None:
        end = time.perf_counter() + milliseconds / 1e3
        while time.perf_counter() < end:
            pass

    return fn


class Clock:
    """A clock that calls move, in place of the machine's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def takes(self, milliseconds: float) -> Callable[[], None]:
        def fn() -> None:
            self.now += milliseconds / 1e3

        return fn


def test_wall_time_measures_a_known_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    found = timing.wall_time(Clock(monkeypatch).takes(2.0), CPU, budget_ms=40)
    assert (found.p20_ms, found.median_ms, found.p80_ms) == pytest.approx((2.0, 2.0, 2.0))
    assert found.samples == 20


def test_wall_times_take_turns() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    found = timing.wall_times(calls, CPU, budget_ms=1, warm_up=1, min_calls=3, max_calls=4)
    # Each is called once more before it is timed, and one round says how many follow.
    assert order == ["a", "a", "b", "b"] * (1 + 1 + found["a"].samples)
    assert 3 <= found["a"].samples == found["b"].samples <= 4


def test_wall_times_measure_known_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    found = timing.wall_times(
        {"short": clock.takes(0.5), "long": clock.takes(2.0)}, CPU, min_calls=4, max_calls=4
    )
    assert found["short"].samples == 4
    assert (found["short"].p20_ms, found["long"].p20_ms) == pytest.approx((0.5, 2.0))


def test_summary_is_median_and_fifths() -> None:
    found = timing.summarise([5.0, 1.0, 2.0, 3.0, 4.0, 6.0], "x")
    assert (found.median_ms, found.p20_ms, found.p80_ms, found.samples) == (3.5, 2.0, 5.0, 6)
    assert timing.summarise([7.0], "x").p80_ms == 7.0
    assert found.as_cell("infer_")["infer_median_ms"] == 3.5


@pytest.mark.gpu
def test_device_time_is_not_host_time() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    x = torch.randn(64 * 2**20, device=device)
    y = torch.empty_like(x)
    copy_ms = timing.kernel_time(lambda: y.copy_(x), device).median_ms
    rate = 2 * x.numel() * 4 / copy_ms / 1e9
    assert 0.2 < rate < 20  # TB/s
    small = torch.randn(16, device=device)

    def slow_host() -> None:
        sleeper(0.2)()
        small.add_(1)

    assert timing.kernel_time(slow_host, device).median_ms < 0.1
    # Milliseconds, so that another process that holds the GPU for its slice of time does not close the gaps.
    assert timing.step_time(sleeper(5.0), device, budget_ms=50).median_ms > 4


def test_recorder_writes_a_valid_record_after_each_cell(tmp_path: Path) -> None:
    recorder = record.Recorder("spmm", CPU, {"widths": [64]}, tmp_path)
    for place in range(2):
        recorder.add(graph="reddit", median_ms=1.0 + place)
        loaded = record.load(recorder.path)
        assert len(loaded["cells"]) == place + 1
    assert recorder.path.parent.parent == tmp_path
    assert recorder.path.name == "spmm.json"
    assert loaded["cells"][0] == {"graph": "reddit", "median_ms": 1.0, "status": "ok"}
    assert loaded["settings"] == {"widths": [64]}
    assert {"cpu", "cores", "threads"} <= loaded["machine"].keys()
    assert loaded["software"]["torch"] == importlib.metadata.version("torch")
    assert len(loaded["source"]["kernels_digest"]) == 64
    assert not list(tmp_path.rglob("*.partial"))


def test_commit_can_be_given_where_there_is_no_history(tmp_path: Path) -> None:
    recorder = record.Recorder("spmm", CPU, {}, tmp_path, commit="abc")
    assert recorder.record["source"]["commit"] == "abc"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "schema is 99"),
        ({"cells": [{}]}, "cell 0 has no status"),
        ({"machine": "fast"}, "machine should be dict, is str"),
        ({"source": None}, "source should be dict"),
    ],
)
def test_damaged_records_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    recorder = record.Recorder("spmm", CPU, {}, tmp_path)
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps({**recorder.record, **change}))
    with pytest.raises(ValueError, match=message):
        record.load(path)


def test_digest_follows_sources_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "cuda").mkdir()
    source = tmp_path / "cuda" / "a.cu"
    source.write_text("one")
    first = record.kernels_digest(tmp_path)
    (tmp_path / "built.so").write_text("binary")
    assert record.kernels_digest(tmp_path) == first
    source.write_text("two")
    second = record.kernels_digest(tmp_path)
    source.rename(tmp_path / "cuda" / "b.cu")
    assert len({first, second, record.kernels_digest(tmp_path)}) == 3


def test_slug_is_fit_for_a_folder() -> None:
    assert record.slug("NVIDIA H200") == "nvidia-h200"
    assert record.slug("Intel(R) Xeon(R) CPU @ 2.20GHz") == "intel-xeon-cpu-2.20ghz"


def test_failures_become_a_status() -> None:
    def out_of_memory() -> dict[str, Any]:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 50 GiB")

    def unsupported() -> dict[str, Any]:
        raise RuntimeError("not implemented for 'BFloat16'\nmore")

    assert runner.attempt(out_of_memory) == {"status": "out of memory"}
    assert runner.attempt(unsupported) == {"status": "failed: not implemented for 'BFloat16'"}
    assert runner.attempt(lambda: {"a": 1}) == {"status": "ok", "a": 1}


def test_programming_errors_are_no_results() -> None:
    def broken() -> dict[str, Any]:
        raise KeyError("typo")

    with pytest.raises(KeyError):
        runner.attempt(broken)


def test_relative_error_sees_nan_and_difference() -> None:
    reference = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert runner.relative_error(torch.tensor([3.0, 4.0]), reference) == 0
    assert runner.relative_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert runner.relative_error(torch.tensor([3.0, float("nan")]), reference) == float("inf")


def test_gather_bandwidth_falls_between_the_stored_points() -> None:
    points = roofline.peers()["gather_roofline"]["table_mb_and_tb_per_s"]
    for size, rate in points:
        assert roofline.gather_bandwidth(int(size * 1e6)) == pytest.approx(rate)
    rates = [roofline.gather_bandwidth(int(10**power)) for power in (5, 7, 7.7, 8, 8.3, 9, 10)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == points[0][1]
    assert rates[-1] == points[-1][1]


def test_floor_is_bytes_over_bandwidth() -> None:
    # 1e9 edges of 256 bytes from a table of 10 GB: 256 GB at 4.4 TB/s.
    expected = 1e9 * 64 * 4 / 4.4e12 * 1e3
    assert roofline.spmm_floor_ms(10**9, 40_000_000, 64, 4) == pytest.approx(expected)


def spmm_record(gpu: str | None) -> dict[str, Any]:
    cells = []
    for graph, ours, baseline in (("reddit", 2.0, 6.0), ("yelp", 1.0, 1.5)):
        shared = {
            "graph": graph,
            "nodes": 1000,
            "edges": 10_000_000,
            "width": 64,
            "dtype": "float32",
            "direction": "forward",
            "gather_bytes": 2_560_000_000,
            "floor_ms": 0.5,
        }
        for name, milliseconds in (("fastsparse csr", ours), ("cuSPARSE", baseline)):
            spread = {"median_ms": milliseconds, "p20_ms": milliseconds, "p80_ms": milliseconds}
            cells.append({**shared, "implementation": name, "status": "ok", "error": 1e-7, **spread})
    cells[-1] = {**cells[-1], "status": "out of memory"}
    machine = {"cpu": "x", "cores": 2, "threads": 2}
    return {
        "schema": record.SCHEMA,
        "name": "spmm",
        "date": "2026-01-01T00:00:00+00:00",
        "machine": {**machine, "gpu": gpu} if gpu else machine,
        "software": {"torch": "2"},
        "source": {"commit": "0123456789abcdef", "kernels_digest": "f" * 64},
        "settings": {},
        "notes": ["a note"],
        "cells": cells,
    }


def test_spmm_table_compares_with_stored_baselines_on_the_same_gpu_only() -> None:
    table = tables.TABLES["spmm"](spmm_record("NVIDIA H200"))[0]
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows["reddit"]["speed-up"] == "3.00x"
    assert rows["reddit"]["best stored baseline ms"] == "RoDe fp32 2.75"
    assert rows["reddit"]["against it"] == "1.37x"
    assert rows["reddit"]["of roofline"] == "25%"
    assert rows["yelp"]["cuSPARSE ms"] == "out of memory"
    assert rows["yelp"]["speed-up"] == "-"
    assert rows["geometric mean"]["speed-up"] == "3.00x"
    elsewhere = tables.TABLES["spmm"](spmm_record("NVIDIA A100"))[0]
    row = dict(zip(elsewhere.columns, elsewhere.rows[0], strict=True))
    assert (row["best stored baseline ms"], row["of roofline"]) == ("-", "-")


def test_stored_baselines_of_the_same_precision() -> None:
    result = spmm_record("NVIDIA H200")
    single = stored_baselines(result, "spmm@64", "float32", "reddit")
    assert single
    assert all(name.endswith("fp32") for name in single)
    assert "FlashSparse fp16" in stored_baselines(result, "spmm@64", "float16", "reddit")
    assert stored_baselines(spmm_record(None), "spmm@64", "float16", "reddit") == {}


def test_markdown_has_a_line_per_row_and_the_origin() -> None:
    text = tables.report(spmm_record("NVIDIA H200"))
    lines = text.splitlines()
    assert "NVIDIA H200" in text
    assert "0123456789ab" in text
    body = [line for line in lines if line.startswith("|")]
    assert len(body) == 2 + 3
    assert len({line.count("|") for line in body}) == 1
    assert lines[-1] == "- a note"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01234, "0.01"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
        (1234.5, "1234"),
        (0, "0"),
        (0.00123, "1.2e-03"),
        (None, "-"),
        (float("nan"), "-"),
    ],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_plots_are_drawn_from_records(tmp_path: Path) -> None:
    plots = pytest.importorskip("benchmarks.plots", exc_type=ImportError)
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    (folder / "spmm.json").write_text(record.dumps(spmm_record("NVIDIA H200")))
    options = type("Options", (), {"results": tmp_path})
    names = {path.name for path in plots.run(options)}
    assert names == {"spmm_speedup_forward_float32.png", "spmm_roofline.png"}
    # No ground, so that dark pages can show them.
    assert all(plots.pyplot.imread(folder / name)[0, 0, 3] == 0 for name in names)


def record_of(name: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    return {**spmm_record("NVIDIA H200"), "name": name, "cells": cells}


def accuracy_cells(means: dict[str, float], std: float) -> list[dict[str, Any]]:
    """One dataset: the original layer at 80 %, the drop-in as given per precision."""
    shared = {"dataset": "cora", "framework": "pyg", "metric": "accuracy", "status": "ok", "std": std}
    original = {**shared, "conv": "reference", "precision": "fp32", "mean": 0.80}
    return [original, *({**shared, "conv": "fast", "precision": p, "mean": m} for p, m in means.items())]


@pytest.mark.parametrize(
    ("means", "loss", "verdict"),
    [
        ({"fp32": 0.801, "bf16": 0.796}, "+0.40", "yes"),
        ({"fp32": 0.801, "bf16": 0.794}, "+0.60", "no"),
        ({"fp32": 0.820}, "-2.00", "yes"),
    ],
)
def test_accuracy_verdict_is_one_standard_deviation_of_the_original(
    means: dict[str, float], loss: str, verdict: str
) -> None:
    (table,) = tables.TABLES["accuracy"](record_of("accuracy", accuracy_cells(means, 0.005)))
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["largest loss"], row["all within one std"]) == (loss, verdict)
    assert row["original fp32"] == "80.00 ± 0.50"


def test_accuracy_table_shows_what_failed() -> None:
    cells = accuracy_cells({"fp32": 0.80}, 0.005)
    name = {"dataset": "cora", "framework": "pyg", "conv": "fast", "precision": "fp16"}
    cells += [{**name, "status": "failed: the loss became inf"}]
    cells += [{**cells[0], "framework": "dgl", "status": "failed: no dgl"}]
    for key in ("metric", "mean", "std"):
        del cells[-1][key]
    first, second = tables.TABLES["accuracy"](record_of("accuracy", cells))[0].rows
    assert first[3:] == ["80.00 ± 0.50", "80.00 ± 0.50", "failed", "+0.00", "no"]
    assert second[2:] == ["-", "failed", "-", "-", "-", "-"]


def choice_cells() -> list[dict[str, Any]]:
    shared = {
        "graph": "reddit",
        "nodes": 100,
        "edges": 1000,
        "vectors": 800,
        "dtype": "float16",
        "status": "ok",
    }
    both = {**shared, "csr_median_ms": 2.0, "flashsparse_median_ms": 1.0}
    return [
        {**both, "width": 64, "pick": "flashsparse", "regret": 1.0},
        {**both, "width": 128, "pick": "csr", "regret": 2.0},
        {**shared, "width": 100, "csr_median_ms": 2.0, "pick": "csr", "regret": 1.0},
        {**shared, "width": 256, "status": "out of memory"},
        {"graph": "yelp", "status": "failed: no file"},
    ]


def test_choice_table_marks_the_wrong_picks() -> None:
    (table,) = tables.TABLES["choice"](record_of("choice", choice_cells()))
    row, mean = (dict(zip(table.columns, cells, strict=True)) for cells in table.rows)
    assert (row["vectors/edge"], row["edges/row"]) == ("0.8", "10.0")
    found = [row[f"F = {width}"] for width in (64, 128, 100, 256)]
    assert found == ["2.00x f", "2.00x c!", "c", "out of memory"]
    assert row["worst regret"] == "2.00x"
    assert mean["worst regret"] == "mean 1.26x"
    assert mean["F = 64"] == "2.00x"


def test_published_page_puts_plots_under_their_own_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "results" / "nvidia-h200"
    folder.mkdir(parents=True)
    for name in ("spmm", "spmm_flashsparse"):
        (folder / f"{name}.json").write_text(record.dumps(spmm_record("NVIDIA H200")))
        (folder / f"{name}_roofline.png").touch()
    (folder / "other.png").touch()
    options = type(
        "Options", (), {"results": tmp_path / "results", "out": tmp_path / "results" / "README.md"}
    )
    tables.run(options)
    lines = options.out.read_text().splitlines()
    kept = [line for line in lines if line.startswith(("#", "!"))]
    assert kept == [
        "# Benchmark results",
        "## nvidia-h200",
        "### spmm",
        "![spmm_roofline](nvidia-h200/spmm_roofline.png)",
        "### spmm_flashsparse",
        "![spmm_flashsparse_roofline](nvidia-h200/spmm_flashsparse_roofline.png)",
    ]


def test_choice_is_drawn_as_a_heat_map(tmp_path: Path) -> None:
    plots = pytest.importorskip("benchmarks.plots", exc_type=ImportError)
    (path,) = plots.choice_heat_maps(record_of("choice", choice_cells()), tmp_path / "choice.json")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert plots.choice_heat_maps(record_of("choice", choice_cells()[2:]), tmp_path / "choice.json") == []


def test_formats_are_drawn_per_graph(tmp_path: Path) -> None:
    plots = pytest.importorskip("benchmarks.plots", exc_type=ImportError)
    counts = {"mma_16x1": 4, "mma_8x1": 2, "zeros_16x1": 90, "zeros_8x1": 30}
    cell = {"graph": "cora", "real": True, "edges": 50, "grouping": "none", "status": "ok", **counts}
    (path,) = plots.format_bars(record_of("formats", [cell]), tmp_path / "formats.json")
    assert path.name == "formats.png"
    assert (
        plots.format_bars(record_of("formats", [{**cell, "status": "failed"}]), tmp_path / "formats.json")
        == []
    )


def test_roofline_tells_large_graphs_apart(tmp_path: Path) -> None:
    plots = pytest.importorskip("benchmarks.plots", exc_type=ImportError)
    result = spmm_record("NVIDIA H200")
    assert not any(plots._is_large(cell) for cell in result["cells"])
    result["cells"] = [{**cell, "edges": 10_000_001} for cell in result["cells"]]
    assert all(plots._is_large(cell) for cell in result["cells"])
    (path,) = plots.roofline_plots(result, tmp_path / "spmm.json")
    assert path.name == "spmm_roofline.png"
    result["machine"] = {**result["machine"], "gpu": "NVIDIA A100"}
    assert plots.roofline_plots(result, tmp_path / "spmm.json") == []


def test_committed_results_can_be_read() -> None:
    if not RESULTS:
        pytest.skip("no results are stored yet")
    for path in RESULTS:
        assert tables.report(record.load(path))


def attention_cells() -> list[dict[str, Any]]:
    """Two cases on two graphs; ours takes 1 ms forward and 2 ms backward, four heads twice that."""
    shared = {"nodes": 1000, "edges": 10_000, "dtype": "float16", "implementation": "fastsparse fused3s"}
    shared |= {"status": "ok", "error": 1e-4, "result_bytes": 1_000_000, "extra_bytes": 1_500_000}
    cells = []
    for case, factor, *names in (
        ("attention@1x128", 1.0, "attn@128", "attn_bwd@128"),
        ("attention@4x32", 2.0, "attn_fwd@4x32", "attn_bwd@4x32"),
    ):
        for graph in ("reddit", "yeast"):
            for direction, time_ms, stored in zip(("forward", "backward"), (1.0, 2.0), names, strict=True):
                times = {f"{key}_ms": factor * time_ms for key in ("median", "p20", "p80")}
                what = {"graph": graph, "case": case, "direction": direction, "stored": stored}
                cells.append({**shared, **what, **times})
    return cells


def test_attention_tables_hold_every_baseline_apart() -> None:
    summary, own, first, *_ = tables.TABLES["attention"](record_of("attention", attention_cells()))
    known = roofline.peers()["kernels"]
    rows = {(row[0].split(",")[0], row[1]): row[2:] for row in summary.rows}
    fused3s, turbo = (known["attn@128"][name] for name in ("Fused3S fp16", "turbo-gnn fp16"))
    mean = (fused3s["reddit"] * fused3s["yeast"]) ** 0.5
    least = [f"{fused3s['yeast']:.2f}x yeast", "2"]
    assert rows["attention@1x128 forward", "Fused3S fp16"] == [f"{mean:.2f}x", *least]
    # turbo-gnn has no time on yeast.
    speed = f"{turbo['reddit']:.2f}x"
    assert rows["attention@1x128 forward", "turbo-gnn fp16"] == [speed, f"{speed} reddit", "1"]
    backward = known["attn_bwd@4x32"]["turbo-gnn fp16"]["reddit"] / 4
    assert rows["attention@4x32 backward", "turbo-gnn fp16"][0] == f"{backward:.2f}x"
    assert own.rows[0] == ["reddit", "10,000", "2.00x", "2.00x", "2.00x", "2.00x"]
    row = dict(zip(first.columns, first.rows[0], strict=True))
    assert (row["extra MB"], row["of the results"]) == ("1.50", "1.50x")
    elsewhere = {**record_of("attention", attention_cells()), "machine": {"cpu": "x", "gpu": "NVIDIA A100"}}
    assert tables.TABLES["attention"](elsewhere)[0].rows == []


def test_attention_is_drawn_where_baselines_are_known(tmp_path: Path) -> None:
    plots = pytest.importorskip("benchmarks.plots", exc_type=ImportError)
    result = record_of("attention", attention_cells())
    assert [path.name for path in plots.attention_bars(result, tmp_path / "attention.json")] == [
        "attention_fused3s_speedup_forward_float16.png",
        "attention_fused3s_speedup_backward_float16.png",
    ]
    result["machine"] = {"cpu": "x"}
    assert plots.attention_bars(result, tmp_path / "attention.json") == []


def training_cell(implementation: str, **fields: Any) -> dict[str, Any]:
    shared = {"graph": "reddit", "model": "agnn2-32", "dtype": "bf16-amp", "status": "ok", "peak_gb": 2.0}
    return {**shared, "implementation": implementation, "median_ms": 10.0, "infer_median_ms": 3.0, **fields}


def test_training_table_fills_in_what_was_stored(tmp_path: Path) -> None:
    result = record_of("train", [training_cell("FastAGNNConv")])
    (table,) = tables.TABLES["train"](result)
    assert [row[1:4] for row in table.rows] == [
        ["FastAGNNConv", "10.0", "1.00x"],
        ["PyG edge_index (stored)", "1110", "111.01x"],
    ]
    result["cells"].append(training_cell("PyG edge_index", median_ms=1000.0))
    (table,) = tables.TABLES["train"](result)
    assert [row[1:4] for row in table.rows][1:] == [["PyG edge_index", "1000", "100.00x"]]
    # What is stored as out of memory is no row.
    lone = [training_cell("FastAGNNConv", dtype="float32")]
    assert len(tables.TABLES["train"](record_of("train", lone))[0].rows) == 1
    plots = pytest.importorskip("benchmarks.plots", exc_type=ImportError)
    names = [path.name for path in plots.training_bars(result, tmp_path / "train.json")]
    assert names == ["train_time_bf16-amp.png", "train_memory_bf16-amp.png"]


def test_plots_of_sparse_activations(tmp_path: Path) -> None:
    plots = pytest.importorskip("benchmarks.plots", exc_type=ImportError)
    shared = {"graph": "yelp", "status": "ok", "edges": 10, "width": 256, "median_ms": 1.0}
    cells = [
        {**shared, "part": "ablation", "implementation": "maxk", "k": 16},
        *({**shared, "part": "scaling", "implementation": "decoupled", "k": k} for k in (2, 4)),
        {**shared, "part": "scaling", "implementation": "spmm, dense rows", "k": 256},
        *({**shared, "part": "slots", "slots": slots} for slots in (1, 2)),
    ]
    result = record_of("ssd", cells)
    names = [path.name for path in plots.sparse_activation_plots(result, tmp_path / "ssd.json")]
    assert names == ["ssd_ablation.png", "ssd_scaling.png", "ssd_slots.png"]
    assert all((tmp_path / name).stat().st_size > 1000 for name in names)
    failed = record_of("ssd", [{**cells[0], "status": "failed"}])
    assert plots.sparse_activation_plots(failed, tmp_path / "ssd.json") == []
