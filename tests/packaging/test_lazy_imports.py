"""Modules that `fastsparse run` leaves out until a script uses them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENABLE = {
    "torch": "from fastsparse_core import sparse_products; sparse_products.enable()",
    "torch_geometric": "import fastsparse_pyg; fastsparse_pyg.enable()",
    "dgl": "import fastsparse_dgl; fastsparse_dgl.enable()",
}
_ALWAYS_LATE = (
    "capturing",
    "distributed",
    "exact_inference",
    "explanation",
    "export",
    "self_check",
    "tiling",
)
#: Package that the script uses -> modules of the core that are not imported at its start.
LATE = {
    "torch": (*_ALWAYS_LATE, "fused", "graph_store", "layer_swap", "message_plans", "sampling"),
    "torch_geometric": (*_ALWAYS_LATE, "fused", "message_plans"),
    "dgl": (*_ALWAYS_LATE, "message_plans"),
}
LATE_OF_PLUGINS = {
    "fastsparse_pyg": [
        "captured_batches",
        "compat",
        "exact_inference",
        "explanation",
        "layer_swap",
        "nn",
        "tiling",
        "verification",
    ],
    "fastsparse_dgl": ["captured_graphs", "exact_inference", "explanation", "layer_swap", "nn"],
}


def run(code):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", ENABLE)
def test_a_start_leaves_out_what_few_scripts_use(package):
    pytest.importorskip(package if package != "dgl" else "fastsparse_dgl")
    code = f"{ENABLE[package]}\nimport sys, json; print(json.dumps([*sys.modules]))"
    imported = set(json.loads(run(code)))
    late = [f"fastsparse_core.{name}" for name in LATE[package]]
    late += [f"{plugin}.{name}" for plugin, names in LATE_OF_PLUGINS.items() for name in names]
    assert "fastsparse_core.ops" in imported
    assert [name for name in late if name in imported] == []


@pytest.mark.parametrize("name", ["fastsparse_core", "fastsparse_pyg", "fastsparse_dgl"])
def test_every_name_is_there_at_its_first_use(name):
    pytest.importorskip(name)
    code = f"""
import importlib, threading
package = importlib.import_module({name!r})
late = sorted(package._LAZY)
assert not set(late) & set(vars(package))
assert set(late) <= set(dir(package))
found = []
def use():
    found.append([getattr(package, each) for each in late])
threads = [threading.Thread(target=use) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(found) == 8
assert all(all(map(lambda one, other: one is other, each, found[0])) for each in found)
assert set(late) <= set(vars(package))
exec("from {name} import *", space := dict())
assert set(package.__all__) <= set(space)
"""
    run(code)


@pytest.mark.parametrize("first", ["plugin", "capture"])
@pytest.mark.parametrize(
    ("plugin", "kind"),
    [("fastsparse_pyg", "torch_geometric.data:Data"), ("fastsparse_dgl", "dgl:DGLGraph")],
)
def test_capture_knows_the_graphs_of_a_plugin_in_both_orders(plugin, kind, first):
    pytest.importorskip(plugin)
    imports = [f"import {plugin}", "import fastsparse_core; fastsparse_core.capture"]
    imports = imports if first == "plugin" else imports[::-1]
    code = f"""
{imports[0]}
{imports[1]}
import pkgutil
from fastsparse_core.capturing import arguments
print(pkgutil.resolve_name({kind!r}) in [known for known, _ in arguments._makers])
"""
    assert run(code) == "True\n"


def test_late_names_work_within_torch_compile_and_in_spawned_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        """
import multiprocessing, pickle
import torch
import fastsparse_core
def traced(x):
    return x * len(fastsparse_core.NeighborSampler.__name__)
def worker(sampler):
    return fastsparse_core.NeighborSampler is sampler
if __name__ == "__main__":
    compiled = torch.compile(traced, backend="eager", fullgraph=True)
    assert compiled(torch.ones(())) == len("NeighborSampler")
    again = pickle.loads(pickle.dumps(fastsparse_core.NeighborSampler))
    assert again is fastsparse_core.NeighborSampler
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(worker, [again]))
"""
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.stdout == "[True]\n", done.stderr


@pytest.mark.parametrize("plugin", ["fastsparse_pyg", "fastsparse_dgl"])
def test_the_names_of_layers_are_those_of_the_module(plugin):
    package = pytest.importorskip(plugin)
    assert package.nn.__all__ == package._LAYERS
    assert set(package._LAYERS) < set(package.__all__)


def test_the_layers_that_dgl_s_hooks_replace_are_those_with_drop_ins():
    nn = pytest.importorskip("fastsparse_dgl").nn
    from fastsparse_dgl.compat import dgl
    from fastsparse_dgl.hooks import table

    installed = {name for name in table.ORIGINALS if hasattr(dgl.nn, name)}
    assert {original.__name__ for original in nn.DROP_INS} == installed


FIRST_CALLS = """
import threading
import torch
from torch_geometric.nn import GCNConv
import fastsparse_pyg
fastsparse_pyg.enable()
import sys
layers = [GCNConv(4, 4) for _ in range(8)]
edge_index, x = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.randn(3, 4)
assert "fastsparse_pyg.nn" not in sys.modules
results = [None] * 8
def call(number):
    results[number] = layers[number](x, edge_index)
threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert [type(layer).__name__ for layer in layers] == ["FastGCNConv"] * 8
fastsparse_pyg.disable()
assert [type(layer) for layer in layers] == [GCNConv] * 8
for layer, result in zip(layers, results):
    torch.testing.assert_close(layer(x, edge_index), result)
print("done")
"""


def test_first_calls_of_layers_in_threads():
    pytest.importorskip("torch_geometric")
    assert run(FIRST_CALLS) == "done\n"


def test_a_drop_in_that_is_called_before_any_other_layer_stays_one():
    pytest.importorskip("torch_geometric")
    code = """
import torch
import fastsparse_pyg
fastsparse_pyg.enable(report=True)
layer = fastsparse_pyg.FastGCNConv(4, 4)
layer(torch.randn(3, 4), torch.tensor([[0, 1, 2], [1, 2, 0]]))
fastsparse_pyg.disable()
print(type(layer).__name__)
"""
    assert run(code) == "FastGCNConv\n"
