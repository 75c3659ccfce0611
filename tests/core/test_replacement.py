import subprocess
import sys
import warnings
from types import ModuleType

import pytest
import torch

from fastsparse_core import replacement
from fastsparse_core.replacement import ABSENT, Hook, enabled_parts, install, problems, remove


def double(x: int) -> int:
    return 2 * x


def triple(x: int) -> int:
    return 3 * x


def plus_one(original, x):
    return original(x) + 1


@pytest.fixture
def modules(monkeypatch):
    owner, holder, other = (ModuleType(f"toy_{name}") for name in ("owner", "holder", "other"))
    owner.double = holder.twice = other.double = double
    owner.Class = type("Class", (), {})
    for module in (owner, holder, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return owner, holder, other


def test_a_function_is_replaced_in_its_place_alone(modules):
    owner, holder, _ = modules
    done = install([Hook("toy_owner", "double", "x", triple)])
    assert owner.double is triple
    assert holder.twice is double
    remove(done)
    assert owner.double is double
    assert not done


def test_every_name_of_a_function_is_replaced_in_modules_that_the_hook_chooses(modules):
    owner, holder, other = modules
    done = install(
        [
            Hook(
                "toy_owner",
                "double",
                "x",
                plus_one,
                wraps=True,
                holders={"toy_owner", "toy_holder"}.__contains__,
            )
        ]
    )
    assert owner.double is holder.twice
    assert holder.twice(4) == 9
    assert other.double is double
    remove(done)
    assert (owner.double, holder.twice, other.double) == (double, double, double)


def test_a_name_that_a_class_inherited_is_gone_afterwards(modules):
    owner, *_ = modules
    done = install([Hook("toy_owner:Class", "__str__", "self", lambda self: "replaced")])
    assert str(owner.Class()) == "replaced"
    assert done == [(owner.Class, "__str__", ABSENT)]
    remove(done)
    assert "__str__" not in vars(owner.Class)


def test_none_is_put_back_as_none(modules):
    modules[0].nothing = None
    done = [replacement.replace(modules[0], "nothing", 1)]
    remove(done)
    assert vars(modules[0])["nothing"] is None


def test_what_does_not_fit_is_named(modules):
    hooks = [
        Hook("toy_owner", "double", "y", triple),
        Hook("toy_owner", "missing", "x", triple),
        Hook("toy_owner:Other", "f", None, triple),
        Hook("toy_owner", "double", "x", triple),
    ]
    assert problems(hooks) == [
        "toy_owner.double takes (x), not (y)",
        "toy_owner.missing does not exist",
        "toy_owner.Other.f does not exist",
    ]


def test_torch_jit_compiles_the_original(modules):
    done = install([Hook("toy_owner", "double", "x", plus_one, wraps=True)])
    assert torch.jit.script(modules[0].double)(4) == 8
    remove(done)


def test_a_variable_switches_parts_off(monkeypatch):
    monkeypatch.setenv("FASTSPARSE_DISABLE", "scatter, sparse_mm")
    assert enabled_parts(["layers", "scatter", "pool", "sparse_mm"]) == ["layers", "pool"]
    monkeypatch.delenv("FASTSPARSE_DISABLE")
    assert enabled_parts(["layers", "scatter"]) == ["layers", "scatter"]


def test_names_that_do_not_exist_are_told_once(monkeypatch):
    monkeypatch.setattr("fastsparse_core.log.seen", set())
    monkeypatch.setenv("FASTSPARSE_DISABLE", "scater, dgl,")
    with pytest.warns(UserWarning, match="FASTSPARSE_DISABLE: expected some of layers, .*dgl, got .scater."):
        assert enabled_parts(["scatter", "dgl"]) == ["scatter"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enabled_parts(["scatter"])


def test_importing_the_core_does_not_import_the_compiler():
    code = "import sys, fastsparse_core; sys.exit('torch._dynamo' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
