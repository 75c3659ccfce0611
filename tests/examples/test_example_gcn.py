"""examples/gcn.py end to end on tiny inputs, and its training and report modules."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import example_runs
import gcn
import pytest
import torch
from common import cli, frameworks, report, training
from common.data import Split, planted_partition
from common.errors import ExampleError
from common.training import Recipe
from example_runs import need
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]


run = partial(example_runs.run, gcn)


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_both_layers_train_alike(framework: str) -> None:
    log, results, out = run("--epochs", "8", "--runs", "2", framework=framework)
    assert [result.conv for result in results] == ["reference", "fast"]
    names = {"pyg": ["GCNConv", "FastGCNConv"], "dgl": ["GraphConv", "FastGraphConv"]}[framework]
    assert [result.layer for result in results] == names
    for reference, fast in zip(results[0].runs, results[1].runs, strict=True):
        # Same weights, same dropout: the curves are those of one computation.
        torch.testing.assert_close(
            torch.tensor(fast.loss), torch.tensor(reference.loss), rtol=1e-4, atol=1e-5
        )
        assert fast.scores["accuracy"] == pytest.approx(reference.scores["accuracy"], abs=1e-6)
    assert results[0].runs[0].loss != results[0].runs[1].loss
    for text in ("speed-up", "peak memory", "test accuracy", *names):
        assert text in out
    assert log["layers"][0]["speed_up"] == 1.0


@pytest.mark.parametrize("conv", ["fast", "reference"])
@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_one_layer_alone(framework: str, conv: str) -> None:
    log, results, _ = run("--epochs", "2", "--runs", "1", "--conv", conv, framework=framework)
    assert [layer["conv"] for layer in log["layers"]] == [conv]
    assert len(results[0].runs) == 1
    assert log["layers"][0]["scores"]["accuracy"]["std"] is None


def test_depth_and_width_are_taken_from_the_command_line() -> None:
    need("pyg")
    options = cli.parser("").parse_args(["--layers", "4", "--hidden", "5", "--epochs", "3", "--runs", "2"])
    recipe = cli.override(Recipe(), options)
    assert (recipe.layers, recipe.hidden, recipe.epochs, recipe.runs) == (4, 5, 3, 2)
    model, _ = gcn.make_model("pyg", "fast", 7, 3, recipe)
    shapes = [tuple(conv.lin.weight.shape) for conv in model.convs]
    assert shapes == [(5, 7), (5, 5), (5, 5), (3, 5)]
    single, _ = gcn.make_model("pyg", "fast", 7, 3, Recipe(layers=1))
    assert [tuple(conv.lin.weight.shape) for conv in single.convs] == [(3, 7)]


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_residual_model_trains(framework: str) -> None:
    need(framework)
    recipe = Recipe(layers=3, hidden=8, epochs=3, runs=1, residual=True, select_by="roc_auc")
    graph = planted_partition(num_nodes=200, num_edges=2000, num_classes=2, num_features=6)
    results = training.compare(
        graph,
        graph.x,
        ["reference", "fast"],
        lambda conv: gcn.make_model(framework, conv, 6, 2, recipe),
        lambda conv: frameworks.make_graph(framework, graph, conv, torch.device("cpu")),
        recipe,
        device=torch.device("cpu"),
        precision="fp32",
        seed=0,
    )
    assert set(results[0].runs[0].scores) == {"accuracy", "roc_auc"}
    first, second = (torch.tensor(result.runs[0].loss) for result in results)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_every_precision_runs_and_leaves_pytorch_as_it_was(framework: str, precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    _, results, out = run(
        "--epochs", "2", "--runs", "1", "--conv", "fast", "--precision", precision, framework=framework
    )
    assert torch.get_float32_matmul_precision() == before
    assert precision in out
    assert all(map(torch.isfinite, map(torch.tensor, results[0].runs[0].loss)))


@pytest.mark.parametrize("features", ["degree", "learned"])
def test_made_features_are_said(features: str) -> None:
    log, results, out = run("--epochs", "2", "--runs", "1", "--features", features)
    assert features in log["data"]["features"]
    assert features in out
    reference, fast = (result.runs[0].loss for result in results)
    assert fast == pytest.approx(reference, rel=1e-4)


def test_seed_decides_everything() -> None:
    once, again, other = (
        run("--epochs", "3", "--runs", "1", "--conv", "fast", "--seed", seed)[1][0].runs[0].loss
        for seed in ("5", "5", "6")
    )
    assert once == again
    assert once != other


def test_json_and_plot_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "log.json", tmp_path / "curves.png"
    log, results, _ = run("--epochs", "4", "--runs", "2", "--json", str(path), "--plot", str(picture))
    stored = json.loads(path.read_text())
    assert stored == json.loads(json.dumps(log))
    assert stored["settings"]["recipe"]["epochs"] == 4
    assert stored["settings"]["framework"] == "pyg"
    assert "random split" in stored["data"]["split"]
    for layer, result in zip(stored["layers"], results, strict=True):
        assert layer["step_ms"] == pytest.approx(result.step_ms())
        assert all(len(r["loss"]) == len(r["test"]) == len(r["step_ms"]) == 4 for r in layer["runs"])
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_real_graph_through_the_command_line(data_folder: Path) -> None:
    need("pyg")
    out = io.StringIO()
    arguments = ["--dataset", "cora", "--root", str(data_folder), "--epochs", "2", "--runs", "1"]
    log, _ = gcn.main([*arguments, "--device", "cpu"], Console(file=out, width=160))
    assert "public split, 140/500/1000 nodes" in out.getvalue()
    assert log["settings"]["recipe"]["hidden"] == 16
    assert "rows scaled" in log["data"]["features"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda:97"], "PyTorch .* sees [0-9]+ CUDA devices"),
        (["--device", "tpu"], "expected cpu, cuda or cuda:N"),
        (["--device", "meta"], "expected cpu, cuda or cuda:N"),
        (["--json", "/no/such/folder/log.json"], "--json .* does not exist"),
        (["--plot", "/no/such/folder/plot.png"], "--plot .* does not exist"),
        (["--json", "/"], "--json / *: expected the path of a file"),
        (["--json", "/proc/log.json"], r"--json /proc/log\.json: expected .* cannot be written"),
        (["--plot", "/proc/plot.png"], r"--plot /proc/plot\.png: expected .* cannot be written"),
        (["--dataset", "nothing"], "Known names"),
    ],
)
def test_what_the_user_can_mend_is_said_before_training(arguments: list[str], message: str) -> None:
    with pytest.raises(ExampleError, match=message):
        gcn.main(["--dataset", "planted", "--root", "/nowhere", *arguments], Console(file=io.StringIO()))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--epochs", "0"],
        ["--runs", "-1"],
        ["--hidden", "wide"],
        ["--framework", "jax"],
        ["--precision", "int8"],
    ],
)
def test_bad_options_are_refused_by_the_parser(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        gcn.main(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_missing_plugin_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastsparse_pyg", None)
    with pytest.raises(ExampleError, match=r"pip install 'fastsparse-gnn\[pyg\]'"):
        frameworks.layer("pyg", "gcn", "fast")


def test_loss_that_is_no_number_stops_the_run() -> None:
    need("pyg")
    graph = planted_partition(num_nodes=60, num_edges=200, num_classes=2, num_features=4)
    recipe = Recipe(epochs=3, runs=1)
    with pytest.raises(ExampleError, match="the loss became nan in epoch 1"):
        training.compare(
            graph,
            torch.full_like(graph.x, float("nan")),
            ["fast"],
            lambda conv: gcn.make_model("pyg", conv, 4, 2, recipe),
            lambda conv: frameworks.make_graph("pyg", graph, conv, torch.device("cpu")),
            recipe,
            device=torch.device("cpu"),
            precision="fp32",
            seed=0,
        )


class Scripted(torch.nn.Module):
    """Answers rightly, epoch by epoch, for the nodes that a script names."""

    def __init__(self, right: list[list[bool]]) -> None:
        super().__init__()
        self.right = iter(torch.tensor(right))
        self.bias = torch.nn.Parameter(torch.zeros(2))

    def forward(self, graph: None, x: None) -> torch.Tensor:
        right = torch.ones(3, dtype=torch.bool) if self.training else next(self.right)
        return torch.stack([right, ~right], dim=1).float() + self.bias


def test_the_first_epoch_with_the_best_validation_score_counts() -> None:
    #       train  val    test
    right = [[True, False, True], [False, True, False], [True, True, True], [True, False, True]]
    result = training.train_run(
        Scripted(right),
        None,
        None,
        torch.zeros(3, dtype=torch.int64),
        Split(*torch.eye(3, dtype=torch.bool)),
        Recipe(epochs=4),
        precision="fp32",
        metrics=["accuracy"],
        progress=training.tqdm(disable=True),
    )
    assert result.best_epoch == 1
    assert result.scores == {"accuracy": 0.0}


def test_first_layer_alone_is_decayed_where_the_recipe_says_so() -> None:
    need("pyg")
    recipe = Recipe(weight_decay=0.1, decay_first_layer_only=True)
    model, _ = gcn.make_model("pyg", "fast", 4, 2, recipe)
    for wrapped in (model, training.LearnedFeatures(model, 3, 4)):
        groups = training._optimiser(wrapped, recipe).param_groups
        decayed = {id(p) for p in groups[0]["params"]}
        assert decayed == {id(p) for p in model.convs[0].parameters()}
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        assert sum(len(group["params"]) for group in groups) == len(list(wrapped.parameters()))


def test_roc_auc_equals_the_count_over_all_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        score = torch.randint(0, 6, (30,), generator=generator).float()
        positive = torch.rand(30, generator=generator) < 0.4
        high, low = score[positive], score[~positive]
        pairs = (high[:, None] > low).double() + 0.5 * (high[:, None] == low).double()
        assert training.roc_auc(score, positive) == pytest.approx(pairs.mean().item())
    assert training.roc_auc(torch.tensor([1.0, 2.0]), torch.tensor([True, True])) != 0
    assert torch.tensor(training.roc_auc(torch.rand(3), torch.zeros(3, dtype=torch.bool))).isnan()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_peak_memory_sees_a_temporary_allocation() -> None:
    memory = training.PeakMemory(torch.device("cpu"))
    if memory.start is None:
        pytest.skip("this process may not reset its high-water mark")
    torch.ones(16_000_000)
    peak = memory.read()
    assert 50e6 < peak < 200e6


def test_median_leaves_the_first_step_out() -> None:
    result = training.LayerResult("fast", "X", [training.RunResult(step_ms=[100.0, 2.0, 4.0, 3.0])])
    assert result.step_ms() == 3.0
    assert result.first_step_ms() == 100.0
    assert training.LayerResult("fast", "X", [training.RunResult(step_ms=[7.0])]).step_ms() == 7.0


def test_log_holds_no_number_that_json_cannot(tmp_path: Path) -> None:
    report.write_json(tmp_path / "log.json", {"a": [1.0, float("nan")], "b": (float("inf"),)})
    assert json.loads((tmp_path / "log.json").read_text()) == {"a": [1.0, None], "b": [None]}


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT / "kernels"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "gcn.py"), "--device", "cpu", *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


def test_script_runs_from_anywhere() -> None:
    need("pyg")
    done = script("--dataset", "karate", "--epochs", "2", "--runs", "1")
    assert done.returncode == 0, done.stderr
    assert "FastGCNConv" in done.stdout


def test_script_ends_with_a_message_and_no_traceback(tmp_path: Path) -> None:
    done = script("--dataset", "cora", "--root", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("error: --dataset cora")
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_training_on_the_gpu(framework: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    conv = "both" if framework == "pyg" else "fast"
    arguments = ["--epochs", "3", "--runs", "1", "--conv", conv, "--device", "cuda"]
    log, results, _ = run(*arguments, framework=framework)
    assert all(result.runs[0].peak_bytes > 0 for result in results)
    if framework == "pyg":
        first, second = (torch.tensor(result.runs[0].loss) for result in results)
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)
    assert log["versions"]["gpu"]


def test_the_help_names_datasets_and_no_default_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gcn.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: None)" not in text
    assert "(default: False)" not in text
    for name in ("planted", "karate", ".npz", "cora", "ogbn-arxiv"):
        assert name in text
    assert "(default: 0)" in text


def test_a_short_comparison_is_called_noise() -> None:
    for epochs, is_noise in (("3", True), ("25", False)):
        out = io.StringIO()
        gcn.main(
            ["--dataset", "karate", "--device", "cpu", "--runs", "1", "--epochs", epochs],
            Console(file=out, width=200),
        )
        assert ("may be noise" in out.getvalue()) == is_noise


def test_control_c_during_imports_ends_quietly(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")  # as if it came while torch is imported
    script = Path(gcn.__file__)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{script.parents[1]}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == "interrupted\n"
    assert done.returncode
