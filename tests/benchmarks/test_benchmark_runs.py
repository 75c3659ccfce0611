"""Every benchmark once, tiny, through the command line."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console
from simulated_graphs import simulate

from benchmarks import record, suite, summary, tables
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


def result_of(tmp_path: Path, name: str, *arguments: str, device: str = "cpu") -> dict:
    words = " ".join(arguments).split()
    run([name, "--device", device, "--out", str(tmp_path), *words], Console(quiet=True))
    return record.load(next(tmp_path.glob(f"*/{name}*.json")))


def test_spmm_checks_then_times_every_cell(tmp_path: Path) -> None:
    arguments = "--graphs pubmed dd --widths 8 --dtypes float32 bfloat16 --budget-ms 1"
    result = result_of(tmp_path, "spmm", arguments)
    ours = [cell for cell in result["cells"] if cell["implementation"] == "fastsparse csr"]
    assert len(ours) == 2 * 2 * 2
    assert all(cell["status"] == "ok" and cell["samples"] >= 5 for cell in ours)
    assert all(cell["error"] < (1e-6 if cell["dtype"] == "float32" else 4e-3) for cell in ours)
    assert [cell for cell in result["cells"] if cell["implementation"] == "torch.sparse CSR"]
    assert result["settings"]["widths"] == [8]


def test_edges_compares_gine_and_gated_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_geometric")
    monkeypatch.setattr("benchmarks.edge_messages.MOLECULES", 4)
    result = result_of(tmp_path, "edges", "--graphs --dtypes float32 --budget-ms 1")
    cells = result["cells"]
    assert len(cells) == 2 * 4 * 2
    assert all(cell["status"] == "ok" and cell["error"] < 1e-5 for cell in cells)
    title, *_ = (table.title for table in tables.TABLES["edges"](result) if table.rows)
    assert title.startswith("GINE and gated layers")


def test_messages_compare_layers_with_named_and_compiled_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = pytest.importorskip("benchmarks.messages")
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: module)
    monkeypatch.setattr(messages, "WIDTH", 8)
    monkeypatch.setattr("benchmarks.any_layer.ROUNDS", 1)
    messages.draw_graph.cache_clear()
    arguments = "--graphs ogbn-arxiv --dtypes float32 --budget-ms 1 --limit-s 1000"
    arguments += " --implementations pyg fastsparse named compiled"
    result = result_of(tmp_path, "messages", arguments)
    assert [cell for cell in result["cells"] if cell["status"] != "ok"] == []
    count = Counter(cell["implementation"] for cell in result["cells"])
    names = [name for name, message in messages.MESSAGES.items() if not message.has_forces]
    assert count["pyg"] == count["fastsparse"] == count["compiled"] == len(names)
    assert count["named"] == 3
    (found,) = tables.TABLES["messages"](result)
    assert [row[0] for row in found.rows] == [*names, "geometric mean"]


def test_quick_messages_until_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = pytest.importorskip("benchmarks.messages")
    monkeypatch.setattr("benchmarks.edge_messages.MOLECULES", 4)
    messages.draw_graph.cache_clear()
    arguments = "--quick --messages GAT --dtypes bfloat16 --budget-ms 1"
    cells = result_of(tmp_path, "messages", arguments)["cells"]
    assert [cell["status"] for cell in cells] == ["ok"] * 6
    assert [cell["graph"] for cell in cells] == 3 * ["ogbn-arxiv"] + 3 * ["molecules"]
    assert [cell["implementation"] for cell in cells] == 2 * ["pyg", "fastsparse", "named"]
    cells = result_of(tmp_path, "messages", arguments, "--limit-s 0")["cells"]
    assert {cell["status"] for cell in cells} == {"skipped: --limit-s had passed"}


def test_compile_compares_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_geometric")
    monkeypatch.setattr("benchmarks.compile.MOLECULES", 2)
    arguments = "--graphs molecules pubmed --implementations FastSparse PyG --budget-ms 1"
    result = result_of(tmp_path, "compile", arguments)
    assert len(result["cells"]) == 2 * 2 * 7
    assert all(cell["status"] == "ok" and cell["compilations"] == 0 for cell in result["cells"])
    assert len(tables.TABLES["compile"](result)) == 2


def test_dlmc_ratios_use_the_stored_baselines_of_the_gpu() -> None:
    from benchmarks.roofline import peers

    known = peers()
    matrix = "transformer_mag_0.9_body_decoder_layer_0_ffn_conv1"
    stored = known["kernels"]["dlmc@256"]
    place = {
        "part": "matrices",
        "matrix": matrix,
        "rows": 2048,
        "columns": 512,
        "sparsity": 0.9,
        "width": 256,
    }
    cells = [
        {**place, "dtype": "float16", "implementation": f"fastsparse {name}", "status": "ok", "median_ms": ms}
        for name, ms in (("csr", 0.03), ("tca", 0.02), ("hr", 0.025))
    ]
    result = {"machine": {"gpu": known["gpu"]}, "cells": cells}
    table = tables.TABLES["dlmc"](result)[1]
    ratios = dict(zip(table.columns, table.rows[0], strict=True))
    assert ratios["best of ours"] == "tca"
    assert ratios["TCA-SpMM / tca"] == f"{stored['TCA fp16'][matrix] / 0.02:.2f}x"
    assert ratios["Sputnik / hr"] == f"{stored['Sputnik fp32'][matrix] / 0.025:.2f}x"
    assert ratios["csr / best"] == "1.50x"
    assert "dense / best" not in ratios
    assert len(tables.TABLES["dlmc"](result)) == 2
    cells[1]["warm_median_ms"] = 0.0125
    warm = tables.TABLES["dlmc"](result)[2]
    assert dict(zip(warm.columns, warm.rows[0], strict=True))["tca"] == "12.5"
    elsewhere = tables.TABLES["dlmc"]({"machine": {"gpu": "other"}, "cells": cells})[1]
    assert elsewhere.columns == ["matrix", "best of ours", "csr / best"]


def test_sddmm_checks_then_times_every_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import sddmm

    arguments = ["--graphs", "pubmed", "--widths", "8", "--budget-ms", "1"]
    result = result_of(tmp_path, "sddmm", *arguments)
    assert len(result["cells"]) == 3 * 3
    assert all(cell["status"] == "ok" and cell["samples"] >= 5 for cell in result["cells"])
    shown = tables.TABLES["sddmm"](result)
    assert [table.rows[0][0] for table in shown] == ["pubmed"] * 3
    assert shown[0].columns[1:4] == ["fastsparse csr ms", "fastsparse flashsparse ms", "fastsparse auto ms"]

    right = sddmm.sddmm
    monkeypatch.setattr(
        sddmm, "sddmm", lambda adj, *x, algorithm: right(adj, *x) * (1.1 if algorithm == "auto" else 1)
    )
    result = result_of(tmp_path / "wrong", "sddmm", *arguments)
    for cell in result["cells"]:
        assert cell["status"].startswith("wrong") == (cell["implementation"] == "fastsparse auto")


def test_ssd_checks_then_times_every_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import ssd

    arguments = "--graphs pubmed dd --kept 4 8 --backward-kept 8 --width 32 --rows 50 --budget-ms 1"
    result = result_of(tmp_path, "ssd", arguments)
    assert all(cell["status"] == "ok" for cell in result["cells"])
    count = Counter(cell["part"] for cell in result["cells"])
    assert count == {"forward": 2 * 2 * 2 * 2, "backward": 2 * 2, "groups": 2, "maxk": 2 * 3}
    shown = {table.title: table for table in tables.TABLES["ssd"](result)}
    assert [row[0] for row in shown["ssd forward, float16, F = 32, k = 8"].rows] == ["pubmed", "dd"]
    assert [row[1] for row in shown["Baseline's time over ours"].rows] == ["densify"] * 4
    assert shown["maxk, (50, 32), k = 32"].rows[0][0] == "float32"

    right = ssd.ssd
    monkeypatch.setattr(ssd, "ssd", lambda *x, algorithm="auto": right(*x) * (1 + (algorithm == "densify")))
    result = result_of(tmp_path / "wrong", "ssd", arguments + " --parts forward")
    for cell in result["cells"]:
        assert cell["status"].startswith("wrong") == (cell["implementation"] == "densify")


ATTENTION = "--graphs pubmed --cases attention@1x64 gatv2_attention@4x32 --budget-ms 1"


def test_attention_checks_then_times_every_cell(tmp_path: Path) -> None:
    arguments = "--graphs pubmed dd --dtypes float32 float16 --budget-ms 1 --algorithms fused3s unfused"
    result = result_of(tmp_path, "attention", arguments)
    assert len(result["cells"]) == 2 * 6 * 2 * 2 * 2
    for cell in result["cells"]:
        assert (cell["status"], cell["extra_bytes"]) == ("ok", None)
        assert cell["error"] < (2e-6 if cell["dtype"] == "float32" else 1e-3)
        assert cell["samples"] >= 5
    (forward,) = (
        cell["result_bytes"]
        for cell in result["cells"]
        if (cell["graph"], cell["case"]) == ("pubmed", "attention@4x32")
        and (cell["dtype"], cell["direction"]) == ("float16", "forward")
        and cell["implementation"] == "fastsparse unfused"
    )
    assert forward == 400 * 128 * 2
    assert "gatv2_attention@4x32 backward, float16" in tables.report(result)


def test_attention_on_sampled_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import attention

    graph = suite.load("pubmed", "cpu")
    degree = graph.rowptr.diff()
    part = attention.sample(graph, 300)
    assert degree.argmax() in part.dst
    assert 300 - degree.max() < part.adj.num_edges <= 300
    for place, row in enumerate(part.dst.tolist()):
        mine = part.src[part.adj.col[part.adj.rowptr[place] : part.adj.rowptr[place + 1]].long()]
        assert mine.tolist() == graph.col[graph.rowptr[row] : graph.rowptr[row + 1]].tolist()
    monkeypatch.setattr(attention, "CHECKED", 300)
    cells = result_of(tmp_path, "attention", ATTENTION, "--dtypes float32")["cells"]
    assert all(cell["status"] == "ok" and cell["error"] < 2e-6 for cell in cells)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_attention_does_not_time_a_wrong_gradient(
    tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import attention

    right = torch.autograd.grad

    def wrong(*arguments: object, **options: object) -> tuple[torch.Tensor, ...]:
        gradients = list(right(*arguments, **options))
        if options.get("retain_graph"):
            gradients[place] = gradients[place] * 1.01
        return tuple(gradients)

    monkeypatch.setattr(attention.torch.autograd, "grad", wrong)
    for cell in result_of(tmp_path, "attention", ATTENTION)["cells"]:
        assert cell["status"].startswith("wrong") == (cell["direction"] == "backward")
        assert ("median_ms" in cell) == (cell["direction"] == "forward")


def test_gradients_outside_the_sample_must_be_zero() -> None:
    from benchmarks import attention

    found = torch.zeros(5, 2)
    found[1:3] = 1
    rows, expected = torch.tensor([1, 2]), torch.ones(2, 2, dtype=torch.float64)
    assert attention._gradient_error(found, rows, expected) == 0
    found[4] = 1e-9
    assert attention._gradient_error(found, rows, expected) == float("inf")


def test_spmm_does_not_time_a_wrong_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import spmm

    monkeypatch.setattr(spmm, "spmm", lambda adj, x, algorithm: 1.01 * x)
    result = result_of(tmp_path, "spmm", "--graphs", "pubmed", "--widths", "8", "--budget-ms", "1")
    ours = [cell for cell in result["cells"] if cell["implementation"] == "fastsparse csr"]
    assert all(cell["status"].startswith("wrong") and "median_ms" not in cell for cell in ours)
    assert "wrong" in tables.report(result)


def test_tensor_cores_gather_a_row_per_vector() -> None:
    from benchmarks.spmm import rows_gathered
    from fastsparse_core import Adjacency

    row = torch.arange(16)
    adj = Adjacency.from_coo(row, torch.zeros_like(row), (16, 16))
    assert rows_gathered(adj, "fastsparse flashsparse") == 16
    assert adj.bsb.num_vectors == 2
    assert rows_gathered(adj, "fastsparse flashsparse") == 2
    assert rows_gathered(adj, "fastsparse csr") == rows_gathered(adj, "cuSPARSE") == 16


@pytest.mark.parametrize(
    ("name", "arguments", "cells", "rows"),
    [
        ("adjacency", "--graphs pubmed --budget-ms 1", 4, [4]),
        ("cpu", "--graphs pubmed --width 16 --rounds 2", 6, [6]),
        ("pna", "--width 16 --budget-ms 1", 8, [4]),
        ("large", "--scale 0.00002 --width 8 --steps 1", 4, [4]),
        ("segments", "--graphs pubmed --widths 3 --budget-ms 1", 2 * 2 * 4 * 2 * 3, [2 * 2 * 4] * 2),
        ("typed", "--scale 0.0001 --budget-ms 1", 16, [8]),
        (
            "masks",
            "--masks lengths-20 --tokens 200 --heads 2 --width 16 --dtypes float32 --budget-ms 1"
            " --implementations FastSparse dense nested",
            2 * 3,
            [1, 1],
        ),
        (
            "enabled",
            "--graphs molecules --dtypes float32 --width 3 --starts 1 --budget-ms 1",
            2 * 2 * (2 + 7) + 2,
            [9, 9, 1],
        ),
    ],
)
def test_every_cell_is_right_and_in_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, arguments: str, cells: int, rows: list[int]
) -> None:
    if name in ("cpu", "pna", "large", "typed", "enabled"):
        pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    from benchmarks import pna

    draw = pna.draw_edges
    monkeypatch.setattr(pna, "draw_edges", lambda name, device: draw(name, device, 6))
    if name == "enabled":  # its processes take half a minute, and tests of the runner start some
        monkeypatch.setattr("benchmarks.enabled.subprocess", SimpleNamespace(run=lambda *_, **__: None))
    result = result_of(tmp_path, name, arguments)
    assert [cell["status"] for cell in result["cells"]] == ["ok"] * cells
    assert [len(table.rows) for table in tables.TABLES[name](result)] == rows
    if name == "adjacency":
        kinds = ["symmetric", "symmetric, prepared", "directed", "directed, prepared"]
        assert [cell["structure"] for cell in result["cells"]] == kinds
    if name == "segments":
        ours = [cell for cell in result["cells"] if cell["implementation"] != "torch"]
        assert all(cell["repeats"] and cell["error"] < 0.1 for cell in ours)


def test_train_reports_every_implementation(tmp_path: Path) -> None:
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    arguments = "--graphs pubmed --models gcn3-128 --budget-ms 1 --dtypes float32"
    result = result_of(tmp_path, "train", arguments)
    found = {cell["implementation"]: cell["status"] for cell in result["cells"]}
    assert set(found) == {"FastGCNConv", "PyG edge_index", "PyG edge_index, cached", "PyG sparse_csr"}
    assert found["FastGCNConv"] == found["PyG edge_index"] == "ok"
    assert all(cell["infer_median_ms"] > 0 for cell in result["cells"] if cell["status"] == "ok")


def test_train_with_attention_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = pytest.importorskip("benchmarks.train", exc_type=ImportError)
    models = ["gat3-4x32", "gatv2-3-4x32", "gt3-4x32", "agnn2-32"]
    arguments = f"--graphs pubmed --budget-ms 1 --dtypes float32 --models {' '.join(models)}"
    result = result_of(tmp_path, "train", arguments)
    assert [cell["model"] for cell in result["cells"]] == [name for name in models for _ in range(2)]
    assert {cell["status"] for cell in result["cells"]} == {"ok"}
    assert [table.title for table in tables.TABLES["train"](result)] == [
        f"{name}, float32" for name in models
    ]
    assert all(len(table.rows) == 2 for table in tables.TABLES["train"](result))

    monkeypatch.setattr(train, "REFERENCE_EDGES", 1)
    monkeypatch.setitem(
        train.MODELS, "agnn2-32", (train.agnn, train._pair(train.FastAGNNConv, train.AGNNConv))
    )
    arguments = "--graphs pubmed --budget-ms 1 --dtypes float32 --models agnn2-32"
    for extra, expected in (("", ["FastAGNNConv"]), ("--reference-all", ["FastAGNNConv", "PyG edge_index"])):
        result = result_of(tmp_path, "train", arguments, extra)
        assert [cell["implementation"] for cell in result["cells"]] == expected
        assert any("--reference-all" in note for note in result["notes"]) == (not extra)


def test_train_with_maxk(tmp_path: Path) -> None:
    train = pytest.importorskip("benchmarks.train", exc_type=ImportError)
    arguments = f"--graphs pubmed --budget-ms 1 --dtypes float32 --models {' '.join(train.OWN)}"
    result = result_of(tmp_path, "train", arguments)
    names = [name for model in train.OWN for name in train.MODELS[model][1]]
    assert [cell["implementation"] for cell in result["cells"]] == names
    assert {cell["status"] for cell in result["cells"]} == {"ok"}
    build, layers = train.MODELS["maxk-gcn3-256"]
    for name, implementation in layers.items():
        model = build(implementation.layer, **implementation.options)
        assert model.rectified == ("ReLU" in name)
        if not model.rectified:
            assert [conv.recompute for conv in model.convs] == ["recompute" in name] * 3


@pytest.mark.parametrize("model", ["gcn3-128", "gat3-4x32", "gatv2-3-4x32", "gt3-4x32", "agnn2-32"])
def test_models_compute_the_same_with_either_layer(model: str) -> None:
    train = pytest.importorskip("benchmarks.train", exc_type=ImportError)
    build, layers = train.MODELS[model]
    graph = suite.load("pubmed", "cpu").edge_index()
    x = torch.randn(400, train.IN_CHANNELS)
    ours, original = (build(layers[name].layer, **layers[name].options) for name in list(layers)[:2])
    ours.load_state_dict(original.state_dict())
    torch.testing.assert_close(ours(x, graph), original(x, graph), rtol=1e-4, atol=1e-4)
    assert ours(x, graph).shape == (400, train.CLASSES)


def test_breakdown(tmp_path: Path) -> None:
    breakdown = pytest.importorskip("benchmarks.breakdown", exc_type=ImportError)
    arguments = "--graphs pubmed --models gcn3-128 --dtypes float32"
    (cell,) = (result := result_of(tmp_path, "breakdown", arguments))["cells"]
    assert cell["status"] == "ok"
    spent = cell["kinds_ms"]
    for kind in ("aggregation", "dense products", "optimiser", "loss"):
        assert spent[kind] > 0, kind
    assert cell["median_ms"] > 0
    (table,) = tables.TABLES["breakdown"](result)
    assert table.columns == ["graph", "step", *spent, "device idle"]
    assert breakdown.kind_of("void at::native::vectorized_elementwise_kernel<4>") == "elementwise and copies"
    assert breakdown.kind_of("nvjet_tst_64x8_64x16_1x4_v_bz_TNT") == "dense products"


def test_host(tmp_path: Path) -> None:
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    result = result_of(tmp_path, "host", "--calls", "3", "--rounds", "3", "--stacks", "new")
    stacks = [cell for cell in result["cells"] if "structure" in cell]
    assert len(stacks) == 13
    assert all(cell["step_us"] > 0 for cell in stacks)
    _, table = tables.TABLES["host"](result)
    assert [row[0] for row in table.rows] == [cell["layer"] for cell in stacks]
    cells = [cell for cell in result["cells"] if "features" in cell]
    features = [cell["features"] for cell in cells if cell["layer"] == "FastGCNConv"]
    assert features == ["constant", "with gradient"]
    assert all(cell["forward_us"] > 0 and cell["step_us"] > 0 for cell in cells)
    assert all(cell["step_ratio"] == 1 for cell in cells if cell["layer"] == "nn.Linear")


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_accuracy_goes_through_the_example(
    tmp_path: Path, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(f"fastsparse_{framework}", exc_type=ImportError)
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = ["--datasets", "no-such-data", "karate", "--frameworks", framework, "--jobs", "1"]
    arguments += ["--precisions", "fp32", "bf16", "--runs", "2", "--epochs", "3"]
    result = result_of(tmp_path, "accuracy", *arguments)
    failed, cells = result["cells"][:3], result["cells"][3:]
    assert all(cell["status"].startswith("failed: ") for cell in failed)
    trained = dict.fromkeys((cell["conv"], cell["precision"]) for cell in cells)
    assert list(trained) == [("reference", "fp32"), ("fast", "fp32"), ("fast", "bf16")]
    assert all(0 <= cell["mean"] <= 1 and len(cell["scores"]) == 2 for cell in cells)
    original, ours = cells[0], next(cell for cell in cells if cell["conv"] == "fast")
    assert original["scores"] == ours["scores"]
    assert all(cell["step_ms"] > 0 for cell in cells)


def test_accuracy_of_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    model = "agnn"
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = f"--models {model} --datasets karate --jobs 1 --runs 2 --epochs 3"
    run(["accuracy", "--device", "cpu", "--out", str(tmp_path), *arguments.split()], Console(quiet=True))
    result = record.load(next(tmp_path.glob(f"*/accuracy_{model}.json")))
    trained = [(cell["model"], cell["conv"], cell["precision"], cell["status"]) for cell in result["cells"]]
    assert trained == [
        (model, conv, precision, "ok")
        for conv, precision in (("reference", "fp32"), ("fast", "fp32"), ("fast", "bf16"))
    ]
    assert result["cells"][1]["implementation"] != result["cells"][0]["implementation"]
    (table,) = tables.TABLES["accuracy"](result)
    assert table.title.startswith(f"{model}: ")


def test_each_model_has_its_own_defaults() -> None:
    accuracy = pytest.importorskip("benchmarks.accuracy", exc_type=ImportError)
    from benchmarks.__main__ import make_parser

    options = make_parser("accuracy").parse_args(["accuracy", "--device", "cpu", "--models", "gat", "gt"])
    tasks = accuracy._tasks(options)
    assert {(task.model, task.dataset, task.runs) for task in tasks} == {
        ("gat", "cora", 10),
        ("gat", "minesweeper", 10),
        ("gat", "actor", 10),
        ("gt", "molhiv", 3),
    }
    assert len(tasks) == 4 * 3
    assert {task.algorithm for task in tasks} == {"auto"}
    options = make_parser("accuracy").parse_args(["accuracy", "--device", "cuda"])
    assert len(accuracy._tasks(options)) == 5 * 2 * 5


def test_accuracy_in_several_processes(tmp_path: Path) -> None:
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    arguments = "--datasets karate --frameworks pyg --precisions fp32 --runs 2 --epochs 3 --jobs 2"
    cells = result_of(tmp_path, "accuracy", arguments)["cells"]
    assert [(cell["conv"], cell["status"], cell["step_ms"]) for cell in cells] == [
        ("reference", "ok", None),
        ("fast", "ok", None),
    ]
    assert cells[0]["scores"] == cells[1]["scores"]


def test_accuracy_takes_dgls_own_layer_to_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = pytest.importorskip("benchmarks.accuracy", exc_type=ImportError)
    pytest.importorskip("fastsparse_dgl", exc_type=ImportError)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(accuracy, "_dgl_has_cuda", lambda device: False)
    task = accuracy.Task("gcn", "karate", "dgl", "reference", "fp32", "cuda", "flashsparse", 1, 2)
    cells = accuracy._train(task, timed=True)
    assert {(cell["device"], cell["algorithm"]) for cell in cells} == {("cpu", None)}


def test_regret_covers_every_kind_of_structure(tmp_path: Path) -> None:
    arguments = "--structures pubmed block:dd pruned:0.9 dlmc:none --widths 8 --dtypes float32 --budget-ms 1"
    result = result_of(tmp_path, "regret", arguments)
    *cells, failed = result["cells"]
    assert failed["structure"] == "dlmc:none"
    assert failed["status"].startswith("failed")
    assert [(cell["structure"], cell["seen"]) for cell in cells] == [
        (name, seen) for name in ("pubmed", "block:dd", "pruned:0.9") for seen in ("first", "repeated")
    ]
    for cell in cells:
        assert (cell["status"], cell["pick"], cell["best"], cell["regret"]) == ("ok", "csr", "csr", 1.0)
        assert list(cell["times_ms"]) == ["csr"]
    assert "within 10 %: 3 of 3" in tables.report(result)


def test_minibatch_compares_layers_that_agree(tmp_path: Path) -> None:
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    arguments = "--graphs pubmed --seeds 16 --fanouts 4 3 --width 8 --batches 2 --rounds 1"
    result = result_of(tmp_path, "minibatch", arguments)
    cells = {cell["implementation"]: cell for cell in result["cells"]}
    assert {"FastSAGEConv (PyG)", "PyG SAGEConv"} <= cells.keys()
    for cell in cells.values():
        assert cell["status"] == "ok"
        assert cell["error"] < 1e-6
        assert cell["samples"] == 2
        assert cell["forward_ms"] > 0
        assert cell["backward_ms"] > 0
        assert cell["launches"] is None
    assert cells["FastSAGEConv (PyG)"]["structure_ms"] > 0
    assert "structure_ms" not in cells["PyG SAGEConv"]
    assert "| PyG SAGEConv |" in tables.report(result)


def test_minibatch_in_every_precision(tmp_path: Path) -> None:
    """Two PyG layers and, where DGL is installed, two of DGL, whose own code lacks some dtypes on the CPU."""
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    from benchmarks.minibatch import PRECISIONS

    arguments = "--graphs pubmed --seeds 16 --fanouts 4 3 --width 8 --batches 2 --rounds 1"
    result = result_of(tmp_path, "minibatch", arguments, "--precisions", *PRECISIONS)
    assert any("twice that of PyG's layers" in note for note in result["notes"])
    report = tables.report(result)
    for name, precision in PRECISIONS.items():
        cells = {c["implementation"]: c for c in result["cells"] if c["precision"] == name}
        for implementation in ("FastSAGEConv (PyG)", "PyG SAGEConv"):
            cell = cells[implementation]
            assert cell["status"] == "ok"
            assert cell["error"] <= precision.tolerance
            rounds = precision.amp is not None or precision.dtype.itemsize == 2
            assert (cell["error"] > 1e-4) == rounds  # so it was computed in that dtype
        assert f"8 wide, {name}" in report


def test_minibatch_finds_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minibatch = pytest.importorskip("benchmarks.minibatch", exc_type=ImportError)

    class Wrong(minibatch.FastSAGEConv):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) * 1.1

    monkeypatch.setattr(minibatch, "FastSAGEConv", Wrong)
    arguments = "--graphs pubmed --seeds 16 --fanouts 4 3 --width 8 --batches 2 --rounds 1"
    result = result_of(tmp_path, "minibatch", arguments, "--precisions float32 bfloat16")
    for cell in result["cells"]:
        if cell["implementation"] == "FastSAGEConv (PyG)":
            assert cell["status"].startswith("wrong: relative error ")
            assert "median_ms" not in cell
        elif cell["implementation"] == "PyG SAGEConv":
            assert cell["status"] == "ok"


@pytest.mark.parametrize("captures", [False, True])
def test_sampling_draws_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captures: bool) -> None:
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    if captures:
        simulate(monkeypatch)
    arguments = "--graphs pubmed --seeds 16 --fanouts 4 3 --width 8 --features 5 --train-nodes 96 --epochs 2"
    result = result_of(tmp_path, "sampling", arguments)
    draws = [cell for cell in result["cells"] if cell["part"] == "draw"]
    assert {cell["implementation"] for cell in draws} == {
        "NeighborSampler, blocks",
        "NeighborSampler, once",
        "plain PyTorch, blocks",
    }
    for cell in draws:
        assert cell["where"] == "cpu"
        assert cell["edges_per_s"] > 0
    for cell in result["cells"]:
        assert cell["status"] == "ok"
        if cell["part"] == "epoch":
            assert cell["epoch_s"] > 0
            assert 0 < cell["loss"] < 10
    epochs = [cell["implementation"] for cell in result["cells"] if cell["part"] == "epoch"]
    captured = ["captured", "captured, the step gathers"] if captures else []
    in_16_bits = ["captured, the step gathers 16 bits"] if captures else []  # under autocast alone
    assert epochs == ["loop", *captured, "loop", *captured, *in_16_bits]
    assert "drawing a batch, cpu" in tables.report(result)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("batches", [2, None])
def test_sampling_trains_on_a_scaled_stand_in_of_papers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, batches: int | None
) -> None:
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    if device == "cpu":
        simulate(monkeypatch)
    elif not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    limit = "" if batches is None else f"--batches {batches}"
    arguments = f"--parts papers --scale 0.0002 --seeds 16 --fanouts 4 3 --width 8 {limit}"
    result = result_of(tmp_path, "sampling", arguments, device=device)
    cells = result["cells"]
    places = [("host", 0)] if device == "cpu" else [("GPU", 0), ("host", 0), ("host", 2221)]
    expected = [(*place, step) for place in places for step in ("loop", "captured")]
    assert [(cell["features_on"], cell["cached"], cell["implementation"]) for cell in cells] == expected
    for cell in cells:
        assert cell["status"] == "ok"
        assert (cell["num_nodes"], cell["nodes"]) == (22_211, 240)
        assert abs(cell["entries"] / 646_274 - 1) < 0.01
        assert cell["batches"] == (batches or 15)
        assert ("epoch_s" in cell) == (batches is None)
        assert 16 * 4 < cell["nodes_per_batch"] <= 16 * (1 + 4 + 4 * 3)
    assert "22,211 nodes" in tables.report(result)


def test_blocks_hold_different_neighbours_of_every_destination() -> None:
    from benchmarks.blocks import sample

    graph = suite.load("pubmed", "cpu")
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randperm(graph.num_nodes, generator=generator)[:20]
    blocks, nodes = sample(graph, seeds, (6, 4), generator)
    assert nodes[:20].tolist() == seeds.tolist()
    assert nodes.unique().numel() == nodes.numel() == blocks[0].num_src
    assert blocks[0].num_dst == blocks[1].num_src
    assert blocks[1].num_dst == 20
    degree = graph.rowptr.diff()
    for block, fanout in zip(blocks, (4, 6), strict=True):
        source, target = block.edge_index
        assert bool((target.diff() >= 0).all())
        assert torch.unique(block.edge_index, dim=1).size(1) == source.numel()
        expected = degree[nodes[: block.num_dst]].clamp(max=fanout)
        assert torch.bincount(target, minlength=block.num_dst).tolist() == expected.tolist()
        for src, dst in zip(nodes[source].tolist(), nodes[target].tolist(), strict=True):
            assert src in graph.col[graph.rowptr[dst] : graph.rowptr[dst + 1]]


def test_regret_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import regret

    original, right = suite.load, regret.spmm

    def load(name: str, device: torch.device) -> suite.Graph:
        if name == "dd":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return original(name, device)

    def spmm(adj: object, x: torch.Tensor, algorithm: str) -> torch.Tensor:
        out = right(adj, x, algorithm=algorithm)
        return out * 1.1 if x.size(1) == 20 and x.dtype == torch.float32 else out

    monkeypatch.setattr(suite, "load", load)
    monkeypatch.setattr(regret, "spmm", spmm)
    arguments = "--structures dd pubmed --widths 8 20 --dtypes float32 --seen repeated --budget-ms 1"
    result = result_of(tmp_path, "regret", arguments)
    statuses = [cell["status"] for cell in result["cells"]]
    assert statuses[:2] == ["out of memory", "ok"]
    assert statuses[2].startswith("wrong: csr has relative error 1.0e-01")
    assert "wrong" in tables.report(result)


@pytest.mark.gpu
def test_regret_and_accuracy_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    arguments = "--structures pubmed --widths 64 --dtypes float32 --seen repeated --budget-ms 5"
    cells = result_of(tmp_path, "regret", arguments, device="cuda")["cells"]
    assert all(cell["times_ms"]["flashsparse"] > 0 and cell["regret"] >= 1 for cell in cells)
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = (
        "--datasets karate --frameworks pyg --precisions fp32 tf32 bf16 fp16 --runs 2 --epochs 5 --jobs 1"
    )
    cells = result_of(tmp_path, "accuracy", arguments, device="cuda")["cells"]
    assert [cell["status"] for cell in cells] == ["ok"] * 5


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
    cuda = (
        "programs attention masks edges pna any_layer messages dgl_operators segments enabled typed train"
        " small compile epochs breakdown ssd accuracy maxk spmm sddmm spmm formats adjacency host minibatch"
        " sampling regret accuracy"
    )
    for device, expected in (("cpu", "cpu dgl_operators formats accuracy"), ("cuda", cuda)):
        ran.clear()
        pretend(["all", "--device", device, "--out", str(tmp_path), "--commit", "abc"], Console(quiet=True))
        assert [arguments[0] for arguments in ran] == [*expected.split(), "plots", "summary"]
        assert all(arguments[-2:] == ["--commit", "abc"] for arguments in ran[:-2])


def test_all_goes_on_after_a_failure_and_says_so_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import __main__ as command_line

    ran: list[str] = []
    original = command_line.run

    def pretend(arguments: list[str], console: Console) -> None:
        if arguments[0] == "all":
            original(arguments, console)
            return
        ran.append(arguments[0])
        if arguments[0] == "cpu":
            raise RuntimeError("the machine is on fire")
        if arguments[0] == "formats":
            raise SystemExit(2)

    monkeypatch.setattr(command_line, "run", pretend)
    with pytest.raises(SystemExit) as stopped:
        main(["all", "--device", "cpu", "--out", str(tmp_path)])
    assert stopped.value.code == 1
    assert ran == ["cpu", "dgl_operators", "formats", "accuracy", "plots", "summary"]
    printed = capsys.readouterr().out
    assert "the machine is on fire" in printed
    assert "2 of 6 failed" in printed


def test_all_writes_what_did_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import __main__ as command_line

    working = "formats --graphs pubmed --budget-ms 1", "adjacency --graphs pubmed --budget-ms 1"
    monkeypatch.setattr(command_line, "ON_CPU", ("formats --graphs no-such-graph", *working))
    with pytest.raises(SystemExit) as stopped:
        main(["all", "--device", "cpu", "--out", str(tmp_path)])
    assert stopped.value.code == 1
    written = {path.relative_to(tmp_path).as_posix().split("/")[-1] for path in tmp_path.rglob("*.*")}
    pages = {f"{topic}.md" for topic in summary.TOPICS}
    assert written == {"formats.json", "formats.png", "adjacency.json", "summary.md", *pages}
    assert re.search(r"## Building a structure\n\n### \w", (tmp_path / "summary" / "cpu.md").read_text())
    monkeypatch.setattr(command_line, "ON_CPU", working)
    main(["all", "--device", "cpu", "--out", str(tmp_path)])  # no exit: nothing failed


def test_unknown_graph_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["adjacency", "--graphs", "redit"])
    assert "'redit' is not in the suite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("framework", "kind", "others"),
    [("pyg", "cora", ["PyG", "PyG, cached"]), ("dgl", "molecules-64", ["DGL"])],
)
def test_small_steps(tmp_path: Path, framework: str, kind: str, others: list[str]) -> None:
    pytest.importorskip(f"fastsparse_{framework}", exc_type=ImportError)
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    arguments = f"--framework {framework} --kinds {kind} --layers GCN --dtypes float32 --budget-ms 1"
    result = result_of(tmp_path, "small", arguments)
    assert {cell["status"] for cell in result["cells"]} == {"ok"}
    (table,) = tables.TABLES["small"](result)
    assert table.title.startswith(f"{kind}, float32: ms per step, geometric mean")
    assert [row[0] for row in table.rows] == ["GCN"]
    assert table.columns[1:-1] == [*others, "FastSparse"]


@pytest.mark.parametrize(("kind", "layer"), [("cora", "GCN"), ("blocks", "SAGE")])
def test_small_steps_that_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, layer: str
) -> None:
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    from benchmarks import small

    simulate(monkeypatch)
    monkeypatch.setattr(small, "WHOLE", {"cora": (200, 800, 16, 3)})
    monkeypatch.setattr(small, "BLOCKS", (200, 800, 16, 3))
    monkeypatch.setattr(small, "SEEDS", 10)
    result = result_of(tmp_path, "small", f"--kinds {kind} --layers {layer} --budget-ms 1")
    assert {cell["status"] for cell in result["cells"]} == {"ok"}
    assert all(cell["loss_difference"] < 1e-3 for cell in result["cells"] if "loss_difference" in cell)
    made = tables.TABLES["small"](result)
    ours = ["FastSparse", "captured", *["captured model"] * (kind == "cora")]
    expected = [*ours, *(f"fastest other / {name}" for name in ours), "losses differ by", "by rounding"]
    assert all(table.columns[-len(expected) :] == expected for table in made)
    assert [len(table.rows) for table in made] == [1, 1]


@pytest.mark.parametrize("captures", [False, True])
def test_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captures: bool) -> None:
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    if captures:
        simulate(monkeypatch)
    arguments = "--layers GIN --batches 4 --molecules 60 --workers 0 --epochs 1"
    result = result_of(tmp_path, "epochs", arguments)
    assert {cell["status"] for cell in result["cells"]} == {"ok"}
    losses = [cell["loss"] for cell in result["cells"] if "loss" in cell]
    assert len(losses) == 4 + 2 * captures
    alone, with_layers = tables.TABLES["epochs"](result)
    assert [len(alone.rows), len(with_layers.rows)] == [2, len(losses)]


TINY = "--width 16 --train-nodes 48 --seeds 16 --molecules 32 --batch 16 --links 48 --workers 0 --epochs 1"


@pytest.fixture
def program_list(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The programs on the small stand-ins: their data is generated again."""
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    pytest.importorskip("fastsparse_dgl", exc_type=ImportError)
    from benchmarks import program_list

    monkeypatch.delenv("FASTSPARSE_DATA", raising=False)
    cached = [item for item in vars(program_list).values() if hasattr(item, "cache_clear")]
    for item in cached:
        item.cache_clear()
    yield program_list
    for item in cached:
        item.cache_clear()


def test_measured_loaders_leave_no_workers(monkeypatch: pytest.MonkeyPatch, program_list: ModuleType) -> None:
    """PyTorch waits for each worker of a loader that is deleted, so they end while it is referenced."""
    from benchmarks import epochs, programs

    data, device = epochs.molecules(8), torch.device("cpu")
    loader = epochs.make_loader(data, 4, 1, device)
    assert epochs._alone(loader, 1, device)["median_ms"] > 0
    assert loader._iterator is not None
    assert multiprocessing.active_children() == []
    epoch = epochs.Epoch(epochs.Variant("PyG", "PyG", 1, False), "GIN", data, 4, device)
    epochs._in_turn({"PyG": epoch}, 1)
    assert multiprocessing.active_children() == []

    known, kept = program_list.PROGRAMS["gin_molecules"], []

    def make(kit: program_list.Kit) -> program_list.Epoch:
        kept.append(known.make(kit))
        return kept[0]

    monkeypatch.setitem(program_list.PROGRAMS, "gin_molecules", known._replace(make=make))
    sizes = program_list.Sizes(8, 4, 4, molecules=8, batch=4, links=4, workers=1)
    cell = programs._timed(
        programs.Variant("PyG", "gin_molecules", device, {}), program_list.Kit("pyg", sizes, device), 1
    )
    assert cell["timed"] == len(kept) == 1
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("milliseconds", "is_replaying", "expected"),
    [(0.0, True, (7, 25)), (4.0, False, (21, 25)), (20.0, False, (7, 5)), (5000.0, False, (7, 1))],
)
def test_slow_forms_are_called_less(milliseconds: float, is_replaying: bool, expected: tuple) -> None:
    pytest.importorskip("fastsparse_pyg", exc_type=ImportError)
    from benchmarks.programs import effort

    assert effort(milliseconds, is_replaying) == expected


def test_every_program_runs(tmp_path: Path, program_list: ModuleType) -> None:
    result = result_of(tmp_path, "programs", TINY, "--no-compile", "--parts programs forms")
    cells = [cell for cell in result["cells"] if cell["part"] == "programs"]
    for name in program_list.PROGRAMS:
        of_program = {cell["implementation"]: cell for cell in cells if cell["program"] == name}
        assert of_program.pop("captured")["status"] == "skipped: capture needs a CUDA device"
        assert "fastsparse run" in of_program
        if "PyG's layers, our loader" in of_program:  # without pyg-lib
            assert "requires either 'pyg-lib'" in of_program.pop("PyG")["status"]
            assert "requires either 'pyg-lib'" in of_program.pop("layers swapped")["status"]
        assert len(of_program) >= 2
        assert {cell["status"] for cell in of_program.values()} == {"ok"}, name
        assert all(math.isfinite(cell["loss"]) for cell in of_program.values())
        if name not in ("gat", "dgl_sage_sampled"):  # those two draw other dropped weights and neighbours
            first, *others = of_program.values()
            for cell in others:
                assert cell["loss"] == pytest.approx(first["loss"], rel=0.02), (name, cell["implementation"])
    table, *_, forms = tables.TABLES["programs"](result)
    assert [row[0] for row in table.rows] == list(program_list.PROGRAMS)
    assert forms.rows == [["all", "-", "-", "-", "skipped: capture needs a CUDA device"]]
    run(["plots", "--results", str(tmp_path)], Console(quiet=True))
    assert list(tmp_path.glob("*/programs_epochs.png"))


def test_programs_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program_list: ModuleType
) -> None:
    """Programs whose operators read no number from the device, because a recording cannot."""
    simulate(monkeypatch)
    names = "gae gin_molecules gat_sampled dgl_gin_molecules lightgcn"
    result = result_of(tmp_path, "programs", TINY, "--seeds 4 --batch 2 --no-compile --programs", names)
    cells = [cell for cell in result["cells"] if cell["implementation"] == "captured"]
    found = {cell["program"]: cell.get("capture", cell["status"]) for cell in cells}
    assert found == dict.fromkeys(names.split(), "replaying")
    # As many updates as the plain program, with the same negatives.
    losses = [cell["loss"] for cell in result["cells"] if cell["program"] == "lightgcn"]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3)


def test_a_program_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program_list: ModuleType
) -> None:
    def fails(kit: program_list.Kit) -> program_list.Epoch:
        raise KeyError("no such column")

    broken = program_list.PROGRAMS["gcn"]._replace(make=fails)
    monkeypatch.setitem(program_list.PROGRAMS, "gcn", broken)
    result = result_of(tmp_path, "programs", TINY, "--no-compile --programs gcn lightgcn")
    statuses = {(cell["program"], cell["implementation"]): cell["status"] for cell in result["cells"]}
    assert statuses["gcn", "PyG"] == "failed: KeyError: 'no such column'"
    assert statuses["lightgcn", "PyG"] == statuses["lightgcn", "layers swapped"] == "ok"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in ("train", "small", "epochs", "programs", "host", "cpu"):
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
        ("sddmm", "--graphs pubmed --widths 32 --budget-ms 20"),
        ("adjacency", "--graphs pubmed"),
        ("attention", "--graphs pubmed --dtypes float16 bfloat16 float32 --budget-ms 20"),
        ("train", "--graphs pubmed --budget-ms 20"),
    ):
        run([name, "--device", "cuda", "--out", str(tmp_path), *arguments.split()], Console(quiet=True))
        result = record.load(next(tmp_path.glob(f"*/{name}.json")))
        assert all(cell["status"] == "ok" for cell in result["cells"] if "ast" in cell["implementation"])
        if name == "attention":
            assert all(cell["extra_bytes"] >= cell["result_bytes"] for cell in result["cells"])
