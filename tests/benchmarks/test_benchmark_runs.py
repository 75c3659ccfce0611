"""Every benchmark once, tiny, through the command line."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import record, suite, tables
from benchmarks.__main__ import COMMANDS, main, run

pytest.importorskip("fastsparse_core", exc_type=ImportError)


@pytest.fixture(autouse=True)
def small_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins of a few hundred nodes."""
    small = {
        name: dataclasses.replace(spec, nodes=400, edges=3_000, max_degree=60)
        for name, spec in suite.SUITE.items()
    }
    monkeypatch.setattr(suite, "SUITE", small)


def result_of(tmp_path: Path, name: str, *arguments: str) -> dict:
    run([name, "--device", "cpu", "--out", str(tmp_path), *arguments], Console(quiet=True))
    return record.load(next(tmp_path.glob(f"*/{name}.json")))


def test_spmm_checks_then_times_every_cell(tmp_path: Path) -> None:
    arguments = [
        "--graphs",
        "pubmed",
        "dd",
        "--widths",
        "8",
        "--dtypes",
        "float32",
        "bfloat16",
        "--budget-ms",
        "1",
    ]
    result = result_of(tmp_path, "spmm", *arguments)
    ours = [cell for cell in result["cells"] if cell["implementation"] == "fastsparse csr"]
    assert len(ours) == 2 * 2 * 2
    assert all(cell["status"] == "ok" and cell["samples"] >= 5 for cell in ours)
    assert all(cell["error"] < (1e-6 if cell["dtype"] == "float32" else 4e-3) for cell in ours)
    assert [cell for cell in result["cells"] if cell["implementation"] == "torch.sparse CSR"]
    assert result["settings"]["widths"] == [8]


def test_spmm_does_not_time_a_wrong_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import spmm

    monkeypatch.setattr(spmm, "spmm", lambda adj, x, algorithm: 1.01 * x)
    result = result_of(tmp_path, "spmm", "--graphs", "pubmed", "--widths", "8", "--budget-ms", "1")
    ours = [cell for cell in result["cells"] if cell["implementation"] == "fastsparse csr"]
    assert all(cell["status"].startswith("wrong") and "median_ms" not in cell for cell in ours)
    assert "wrong" in tables.report(result)


def test_adjacency(tmp_path: Path) -> None:
    result = result_of(tmp_path, "adjacency", "--graphs", "pubmed", "--budget-ms", "1")
    kinds = ["symmetric", "symmetric, prepared", "directed", "directed, prepared"]
    assert [cell["structure"] for cell in result["cells"]] == kinds
    assert all(cell["status"] == "ok" for cell in result["cells"])


def test_train_reports_every_implementation(tmp_path: Path) -> None:
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    result = result_of(tmp_path, "train", "--graphs", "pubmed", "--budget-ms", "1", "--dtypes", "float32")
    found = {cell["implementation"]: cell["status"] for cell in result["cells"]}
    assert set(found) == {"FastGCNConv", "PyG edge_index", "PyG edge_index, cached", "PyG sparse_csr"}
    assert found["FastGCNConv"] == found["PyG edge_index"] == "ok"
    assert all(cell["infer_median_ms"] > 0 for cell in result["cells"] if cell["status"] == "ok")


def test_host(tmp_path: Path) -> None:
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    result = result_of(tmp_path, "host", "--calls", "3", "--rounds", "3")
    ours = [cell for cell in result["cells"] if cell["implementation"] == "FastGCNConv"]
    assert [cell["mode"] for cell in ours] == ["inference", "training forward"]
    assert all(cell["p20_us"] <= cell["median_us"] <= cell["p80_us"] for cell in ours)


def test_cpu_implementations_agree(tmp_path: Path) -> None:
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    result = result_of(tmp_path, "cpu", "--graphs", "pubmed", "--width", "16", "--rounds", "2")
    assert len(result["cells"]) == 6
    assert {cell["status"] for cell in result["cells"]} == {"ok"}


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_accuracy_goes_through_the_example(
    tmp_path: Path, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(f"fastsparse_{framework}", exc_type=ImportError)
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = ["--datasets", "karate", "--frameworks", framework, "--runs", "2", "--epochs", "3"]
    result = result_of(tmp_path, "accuracy", *arguments)
    assert {cell["conv"] for cell in result["cells"]} == {"reference", "fast"}
    assert all(0 <= cell["mean"] <= 1 and len(cell["scores"]) == 2 for cell in result["cells"])


def test_tables_and_plots_of_what_was_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    result_of(tmp_path, "spmm", "--graphs", "pubmed", "--widths", "8", "--budget-ms", "1")
    result_of(tmp_path, "adjacency", "--graphs", "pubmed", "--budget-ms", "1")
    capsys.readouterr()
    main(["tables", "--results", str(tmp_path)])
    assert "| pubmed |" in capsys.readouterr().out
    main(["tables", "--results", str(tmp_path), "--out", str(tmp_path / "tables.md")])
    assert "### adjacency" in (tmp_path / "tables.md").read_text()
    main(["plots", "--results", str(tmp_path)])
    assert list(tmp_path.rglob("*.png"))


def test_all_runs_what_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import __main__ as command_line

    ran: list[list[str]] = []
    original = command_line.run

    def pretend(arguments: list[str], console: Console) -> None:
        if arguments[0] == "all":
            original(arguments, console)
        else:
            ran.append(arguments)

    monkeypatch.setattr(command_line, "run", pretend)
    for device, expected in (
        ("cpu", ["cpu", "formats", "accuracy"]),
        ("cuda", ["spmm", "spmm", "adjacency", "formats", "host", "train"]),
    ):
        ran.clear()
        pretend(["all", "--device", device, "--out", str(tmp_path), "--commit", "abc"], Console(quiet=True))
        assert [arguments[0] for arguments in ran] == [*expected, "plots"]
        assert all(arguments[-2:] == ["--commit", "abc"] for arguments in ran[:-1])


def test_unknown_graph_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["adjacency", "--graphs", "redit"])
    assert "'redit' is not in the suite" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in ("train", "host", "cpu"):
        pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    assert COMMANDS[name] in " ".join(capsys.readouterr().out.split())


@pytest.mark.gpu
def test_benchmarks_on_the_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for name, arguments in (
        ("spmm", "--graphs pubmed --widths 64 --dtypes float32 float16"),
        ("adjacency", "--graphs pubmed"),
        ("train", "--graphs pubmed --budget-ms 20"),
    ):
        run([name, "--device", "cuda", "--out", str(tmp_path), *arguments.split()], Console(quiet=True))
        result = record.load(next(tmp_path.glob(f"*/{name}.json")))
        assert all(cell["status"] == "ok" for cell in result["cells"] if "ast" in cell["implementation"])
