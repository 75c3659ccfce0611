import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import pyproject

import fastsparse_run
from fastsparse_run import watch

ROOT = Path(__file__).parents[2]
REAL = pyproject()["project"]["entry-points"][fastsparse_run.GROUP]
PLUGIN = """
import os, sys
def enable():
    import toy
    toy.enabled = os.getpid()
def fail():
    raise ValueError("too old")
"""
SCRIPT = """
import sys, toy, os
print(sys.argv[1:], __name__, os.path.basename(__file__), os.path.basename(sys.path[0]))
print(toy.enabled == os.getpid())
def f():
    raise KeyError("boom")
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
f()
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a package `toy`, a plugin that enables it, a script, and records of an installation."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/toy.py").write_text("enabled = 0\n")
    (tmp_path / "site/plugin.py").write_text(PLUGIN)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/script.py").write_text(SCRIPT)
    register(tmp_path, {"toy": "plugin:enable"})
    return tmp_path


def register(folder, entries):
    records = folder / "site/toys-1.0.dist-info"
    records.mkdir(exist_ok=True)
    (records / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    lines = [f"{name} = {place}" for name, place in entries.items()]
    (records / "entry_points.txt").write_text("\n".join([f"[{fastsparse_run.GROUP}]", *lines, ""]))


def python(folder, *arguments, **environment):
    paths = [folder / "site", ROOT, ROOT / "kernels"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=folder / "work", capture_output=True, text=True)


def run(folder, *arguments, **environment):
    code = "import sys, fastsparse_run; sys.exit(fastsparse_run.main())"
    return python(folder, "-c", code, "run", *arguments, **environment)


def without_first_line(text):
    return text.partition("\n")[2]


def test_a_script_runs_as_it_does_without_and_is_enabled(folder):
    plain = python(folder, "script.py", "3", "-x", "--report")
    ours = run(folder, "script.py", "3", "-x", "--report")
    assert plain.returncode == ours.returncode == 3
    assert ours.stdout == plain.stdout.replace("False", "True")
    assert (
        ours.stderr == "fastsparse: runs script.py with FastSparse (FASTSPARSE_DISABLE switches parts off)\n"
    )


def test_tracebacks_are_the_scripts(folder):
    plain, ours = python(folder, "script.py"), run(folder, "script.py")
    assert plain.returncode == ours.returncode == 1
    assert "KeyError: 'boom'" in plain.stderr
    assert without_first_line(ours.stderr) == plain.stderr


def test_interrupted_scripts_exit_as_by_python(folder):
    (folder / "work/interrupted.py").write_text("import torch, toy\nraise KeyboardInterrupt\n")
    plugin = "from fastsparse_core import call_report\ndef enable(): call_report.record('scatter', 'PyG')\n"
    (folder / "site/plugin.py").write_text(plugin)
    plain, ours = python(folder, "interrupted.py"), run(folder, "--report", "interrupted.py")
    assert "scatter" in ours.stderr
    assert plain.returncode == ours.returncode == -signal.SIGINT


def test_modules_run_as_by_python(folder):
    plain, ours = python(folder, "-m", "script", "0"), run(folder, "-m", "script", "0")
    assert ours.returncode == 0
    assert ours.stdout == plain.stdout.replace("False", "True")


CHILDREN = """
import multiprocessing, os, subprocess, sys
def child(_):
    import toy
    return toy.enabled == os.getpid()
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(child, [0]))
    code = "import os, sys, toy; print(toy.enabled == os.getpid(), 'startup' in str(sys.path))"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
"""


def test_processes_that_the_script_starts_are_enabled_too(folder):
    (folder / "work/children.py").write_text(CHILDREN)
    done = run(folder, "children.py")
    assert done.stdout == "fork [True]\nspawn [True]\nTrue False\n", done.stderr


def test_a_script_without_calls_says_so(folder, monkeypatch, capsys):
    monkeypatch.setenv("FASTSPARSE_REPORT", "tme")
    assert fastsparse_run.main(["run", str(folder / "work/script.py")]) == 2
    assert "FASTSPARSE_REPORT: expected '1' or 'time', got 'tme'" in capsys.readouterr().err
    (folder / "work/early.py").write_text("import fastsparse_core\nraise SystemExit(3)")
    done = run(folder, "--report", "early.py")
    assert done.returncode == 3
    assert without_first_line(done.stderr) == (
        "No call of a function that FastSparse replaces finished. If a module gathers and scatters by hand, "
        "call fastsparse_pyg.accelerate(model).\n"
    )


def test_the_users_own_sitecustomize_runs(folder):
    (folder / "site/sitecustomize.py").write_text("print('mine')")
    assert run(folder, "script.py", "0").stdout.count("mine") == 2  # that of the command, and the script's


def test_a_package_that_cannot_be_enabled_runs_as_it_is(folder):
    register(folder, {"toy": "plugin:fail"})
    done = run(folder, "script.py", "0")
    assert done.returncode == 0
    assert without_first_line(done.stderr) == "fastsparse: toy runs unchanged: ValueError: too old\n"
    assert done.stdout.endswith("False\n")


def test_a_script_may_import_the_plugin_first(folder):
    (folder / "site/plugin.py").write_text("import toy\n" + PLUGIN)
    (folder / "work/first.py").write_text("import plugin, toy, os\nprint(toy.enabled == os.getpid())")
    done = run(folder, "first.py")
    assert (done.stdout, without_first_line(done.stderr)) == ("True\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected a script, or -m and a module"),
        (("-m",), "expected a script, or -m and a module"),
        (("missing.py",), "there is no file 'missing.py'"),
        (("--reprt", "script.py"), "unknown option --reprt; options of the script come after its name"),
        (("--report-json",), "--report-json: expected a file"),
        (("--report=fast", "x.py"), "--report: expected nothing or 'time', got 'fast'"),
        (("-c", "print()"), "-c is not supported; write the code to a file and run the file"),
        (("-i", "x.py"), "unknown option -i; options of the script come after its name"),
    ],
)
def test_wrong_commands_are_refused(capsys, arguments, message):
    assert fastsparse_run.main(["run", *arguments]) == 2
    assert capsys.readouterr().err == f"fastsparse: {message}. See fastsparse --help\n"


def test_other_commands(capsys):
    assert fastsparse_run.main(["help"]) == 2
    assert "expected one of run, doctor, tune, got 'help'" in capsys.readouterr().err
    assert fastsparse_run.main([]) == 2
    assert capsys.readouterr().err.startswith("usage: fastsparse run")
    assert fastsparse_run.main(["--help"]) == fastsparse_run.main(["run", "--help"]) == 0


def test_an_installation_without_records_says_so(folder, monkeypatch, capsys):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    assert fastsparse_run.main(["run", str(folder / "work/script.py")]) == 2
    assert "no package registers 'fastsparse.enable'" in capsys.readouterr().err


def test_the_command_does_not_import_pytorch(folder):
    done = python(folder, "-c", "import sys, fastsparse_run; print('torch' in sys.modules)")
    assert done.stdout == "False\n"


def test_the_doctor_runs_by_the_command(folder, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments) or sys.exit(0))
    with pytest.raises(SystemExit):
        fastsparse_run.main(["doctor"])
    with pytest.raises(SystemExit):
        fastsparse_run.main(["tune", "--out", "x.json"])
    assert [command[-2:] for _, command, _ in started] == [
        ["-m", "fastsparse_core.doctor"],
        ["--out", "x.json"],
    ]


REAL_SCRIPT = """
import importlib.util
if importlib.util.find_spec("torch_scatter") is None:
    raise SystemExit("torch_scatter is not there")
import torch_scatter
import torch
from torch_geometric.nn import GCNConv
matrix, x = torch.rand(100, 100).to_sparse(), torch.rand(100, 4)
for _ in range(5):
    matrix @ x
layer = GCNConv(4, 4)
layer(x, torch.randint(100, (2, 5000)))
print(type(layer).__name__, layer(x, torch.randint(100, (2, 50))).shape)
"""


@pytest.mark.slow
def test_the_real_thing_with_a_report(folder):
    register(folder, REAL)
    (folder / "work/real.py").write_text(REAL_SCRIPT)
    done = run(folder, "--report=time", "--report-json", "report.json", "real.py")
    assert done.stdout == "FastGCNConv torch.Size([100, 4])\n", done.stderr
    assert "FastSparse computed" in done.stderr
    assert '"call": "torch.sparse product"' in (folder / "work/report.json").read_text()
    assert '"host_ms": ' in (folder / "work/report.json").read_text()
    off = run(folder, "real.py", FASTSPARSE_DISABLE="layers,sparse_mm")
    assert off.stdout == "GCNConv torch.Size([100, 4])\n", off.stderr


RANKS = """
import os, torch, torch.distributed
from torch_geometric.nn import GCNConv
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
layer = GCNConv(4, 4)
model = DistributedDataParallel(layer)
model(torch.rand(100, 4), torch.randint(100, (2, 5000))).sum().backward()
total = layer.lin.weight.grad.clone()
torch.distributed.all_reduce(total)
same = torch.allclose(total, 2 * layer.lin.weight.grad)
with open(f"rank{os.environ['RANK']}", "w") as file:
    file.write(f"{type(layer).__name__} {same}")
del model  # it has a reference to the process group, whose threads must end before Python does
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_with_two_ranks(folder):
    register(folder, REAL)
    (folder / "work/ranks.py").write_text(RANKS)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "ranks.py")
    done = run(folder, "--report", *launcher, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert [(folder / f"work/rank{rank}").read_text() for rank in (0, 1)] == ["FastGCNConv True"] * 2
    assert done.stderr.count("FastSparse computed 1 of 1 calls") == 1


def test_registering_operators_looks_through_no_modules(folder):
    """`inspect` would resolve the file of every loaded module when PyTorch asks who registers: 0.1 s."""
    code = """
import inspect, torch, torch_geometric
original, seen = inspect.getabsfile, []
inspect.getabsfile = lambda *arguments: seen.append(1) or original(*arguments)
import fastsparse_pyg
print(len(seen) < 200)
"""
    pytest.importorskip("torch_geometric")
    assert python(folder, "-c", code).stdout == "True\n"


# ---------------------------------------------------------------- imports that are watched


@pytest.fixture
def watched(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder / "site")
    yield watch
    for name in ("toy", "absent"):
        watch._watcher.after.pop(name, None)
        watch.forget(name)
        sys.modules.pop(name, None)


def test_a_function_is_called_once_after_the_import(watched):
    seen = []
    watched.after_import("toy", lambda: seen.append("toy" in sys.modules))
    assert seen == []
    import toy

    assert seen == [True]
    assert toy.__loader__ is toy.__spec__.loader
    assert type(toy.__loader__).__name__ == "SourceFileLoader"
    watched.after_import("toy", lambda: seen.append("at once"))
    assert seen == [True, "at once"]


def test_a_missing_package_is_replaced(watched):
    import types

    stand_in = types.ModuleType("absent")
    watched.in_place_of("absent", lambda: sys.modules.__setitem__("absent", stand_in))
    import absent

    assert absent is stand_in
    del sys.modules["absent"]
    watched.forget("absent")
    with pytest.raises(ModuleNotFoundError):
        import absent


def test_a_package_that_is_there_is_not_replaced(watched):
    watched.in_place_of("toy", lambda: pytest.fail("called"))
    import toy

    assert toy.enabled == 0


def test_a_package_that_looks_for_a_missing_one_does_not_find_it(watched, folder):
    (folder / "site/toy.py").write_text(
        "try:\n    import absent\nexcept ImportError:\n    enabled = 'none'\n"
    )
    watched.after_import("toy", lambda: None)
    watched.in_place_of("absent", lambda: pytest.fail("called"))
    import toy

    assert toy.enabled == "none"
