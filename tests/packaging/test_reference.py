"""The API reference is complete: arguments with shapes and dtypes, formulas, sources, running examples."""

from __future__ import annotations

import doctest
import functools
import importlib
import inspect
import operator
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_prose import faults

import fastsparse_core

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = ["fastsparse_core", "fastsparse_dgl", "fastsparse_pyg", "fastsparse_run"]
ENTRY = re.compile(
    r"^\.\. auto(?:class|function|exception):: ([\w.]+)$|^\.\. automodule:: ([\w.]+)\n +:members: (.+)$", re.M
)
SECTION = re.compile(r"^(\w+):$")
#: "Arguments and errors as in :meth:`FastGCNConv.forward`": what that one documents counts here, too.
ELSEWHERE = re.compile(r"\b[Aa]rguments\b[^.]*? (?:as in|of) :(?:meth|func):`[~!]?([\w.]+)`")
SHAPE = re.compile(r"\([^()]*,[^()]*\)|:math:`\(|\bas (in|for)\b|\blike ``|\bin the shape\b|\bscalar\b")
DTYPE = re.compile(
    r"\b(u?int\d*|float\d*|bfloat16|bool|integers?|floating|dtypes?|numbers?)\b|\bas (in|for)\b|\blike ``"
)
SOURCE = re.compile(r"https?://|arXiv:|et al\.|\b(19|20)\d\d\b|\b(sections?|figure) \w")
#: Operators that no paper describes.
ELEMENTARY = {"edge_softmax", "gather_csr", "scatter", "scatter_softmax", "segment_reduce", "segment_softmax"}


@functools.cache
def entries(package: str) -> dict[str, Any]:
    """What the package's page shows, by full name."""
    page = (CHECKOUT / "docs" / "api" / f"{package}.md").read_text()
    names = []
    for name, module, members in ENTRY.findall(page):
        names += [name] if name else [f"{module}.{member.strip()}" for member in members.split(",")]
    if f"<!-- layers of {package} -->" in page:  # which `docs/conf.py` replaces with an entry for each
        names += [f"{package}.{name}" for name in importlib.import_module(f"{package}.nn").__all__]
    return {
        name: getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2])
        for name in names
    }


def sections(thing: Any) -> dict[str, str]:
    """A docstring's sections by title; what is before the first one is ""."""
    found, title = {"": ""}, ""
    for line in (inspect.getdoc(thing) or "").splitlines():
        if match := SECTION.match(line):
            title = match[1]
            found[title] = ""
        else:
            found[title] += line + "\n"
    return found


def arguments(text: str) -> dict[str, str]:
    """What a section says of each argument, by name."""
    found, names = {}, []
    for line in text.splitlines():
        if match := re.match(r" {4}\*{0,2}(\w+(?:, \w+)*): (.*)", line):
            names = match[1].split(", ")
            found.update(dict.fromkeys(names, match[2]))
        else:
            found.update({name: f"{found[name]} {line.strip()}" for name in names})
    return found


def resolve(name: str, near: Any) -> Any:
    """What a docstring of ``near`` refers to: a name of its module or of its package, or a full one."""
    for module in (near.__module__, near.__module__.partition(".")[0]):
        try:
            return operator.attrgetter(name.removeprefix(f"{module}."))(sys.modules[module])
        except AttributeError:
            continue
    raise LookupError(f"{near.__qualname__} refers to {name}, which does not exist")


def missing_of_function(function: Any, cls: type | None = None) -> list[str]:
    """What the docstring of a function or method lacks."""
    parts, signature = sections(function), inspect.signature(function)
    if not parts[""].strip():
        return ["docstring"]
    known = arguments(parts.get("Args", ""))
    if elsewhere := ELSEWHERE.search(parts[""]):
        other = sections(resolve(elsewhere[1], function))
        known = arguments(other.get("Args", "")) | known
        parts = {**{title: text for title, text in other.items() if title}, **parts}
    found = []
    for name, parameter in signature.parameters.items():
        if name in ("self", "cls") or name.startswith("_"):
            continue
        if name not in known:
            found.append(f"argument {name}")
        elif re.match(r"(torch\.)?\w*Tensor\b", str(parameter.annotation)):
            text = known[name] + (sections(cls).get("Shapes", "") if cls else "")
            found += [
                f"{what} of {name}"
                for what, is_there in (("shape", SHAPE), ("dtype", DTYPE))
                if not is_there.search(text)
            ]
    returns = signature.return_annotation not in ("None", None, inspect.Signature.empty)
    if cls is None and returns and "Returns" not in parts:
        found.append("Returns")
    raised = set(
        re.findall(r"^ +raise (\w+(?:Error|Warning))\b", inspect.getsource(inspect.unwrap(function)), re.M)
    )
    found += [f"raises {error}" for error in sorted(raised) if error not in parts.get("Raises", "")]
    return found


def constructor(cls: type) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(cls).parameters)
    except ValueError:  # an exception's
        return {}


def is_documented_elsewhere(cls: type, owner: type) -> bool:
    """Whether a member that a class inherits from ``owner`` stands at another entry."""
    documented = [
        thing for package in PACKAGES if package in sys.modules for thing in entries(package).values()
    ]
    return owner is not cls and any(
        thing in cls.__mro__[1:] and owner in thing.__mro__ for thing in documented if inspect.isclass(thing)
    )


def missing_of_class(cls: type) -> dict[str, list[str]]:
    """What the docstrings of a class and its public methods lack, by the method's name."""
    parts = sections(cls)
    known = arguments(parts.get("Args", "")) | arguments(parts.get("Attributes", ""))
    original = next(
        (base for base in cls.__mro__ if base.__module__.startswith(("torch_geometric.", "dgl."))), None
    )
    found = {"": [] if parts[""].strip() else ["docstring"]}
    if original is None or not re.search(rf":class:`[~!]?[\w.]+\.{original.__name__}`", parts[""]):
        names = [name for name in constructor(cls) if not name.startswith("_")]
        found[""] += [f"argument {name}" for name in names if name not in known]
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        if name.startswith("_") or not owner.__module__.startswith("fastsparse_"):
            continue
        if is_documented_elsewhere(cls, owner):
            continue
        member = inspect.getattr_static(cls, name)
        if isinstance(member, property):
            found[name] = [] if inspect.getdoc(member) else ["docstring"]
        elif inspect.isfunction(function := getattr(member, "__func__", member)):
            found[name] = missing_of_function(function, cls)
    return found


def missing(name: str, thing: Any) -> dict[str, list[str]]:
    """What the entry of a page lacks, by the member's name."""
    is_class = inspect.isclass(thing)
    found = missing_of_class(thing) if is_class else {"": missing_of_function(thing)}
    text = inspect.getdoc(thing) or ""
    if not {"Example", "Examples"} & sections(thing).keys():
        found[""].append("Example")
    short = name.rpartition(".")[2]
    is_layer = is_class and issubclass(thing, torch.nn.Module)
    is_operator = not is_class and re.match(r"fastsparse_core\.(ops|segment)\b", thing.__module__)
    if (is_layer or is_operator) and "math::" not in text and ":math:" not in text:
        found[""].append("formula")
    if (is_layer or is_operator) and short not in ELEMENTARY and not SOURCE.search(text):
        found[""].append("source")
    return {f"{name}.{member}".rstrip("."): what for member, what in found.items() if what}


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_missing(package: str) -> None:
    pytest.importorskip(package, exc_type=ImportError)
    assert {
        entry: what
        for name, thing in entries(package).items()
        for entry, what in missing(name, thing).items()
    } == {}


def prose(docstring: str) -> str:
    """A docstring as Markdown, for the rules of sentences."""
    text = re.sub(r"\.\. math::\n\n?((?: +\S.*\n)+)", "\n", docstring + "\n")
    text = re.sub(r":\w+:`[^`]*`|`[^`]*<https?[^>]*>`_", "X", text)
    text = re.sub(r"^ *(>>>|\.\.\. ).*$|^\w+:$", "\n", text, flags=re.M)
    return re.sub(r"\n(?= +\*{0,2}\w+: )", "\n\n", text)


@pytest.mark.parametrize("package", PACKAGES)
def test_sentences_are_plain(package: str) -> None:
    pytest.importorskip(package, exc_type=ImportError)
    texts = set()
    for thing in entries(package).values():
        members = vars(thing).items() if inspect.isclass(thing) else ()
        public = [member for name, member in members if not name.startswith("_")]
        texts |= {
            inspect.getdoc(one) or "" for one in (thing, *public) if callable(one) or hasattr(one, "__get__")
        }
    # "Whether ..." is how the description of a property begins.
    found = [fault for text in texts for fault in faults(prose(text)) if not fault.startswith("'Whether ")]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_run(package: str) -> None:
    """Each in a namespace of its own, so that it imports what it uses."""
    pytest.importorskip(package, exc_type=ImportError)
    finder, runner, report = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(verbose=False), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fastsparse_core.SlowPathWarning)
        for name, thing in entries(package).items():
            (example,) = finder.find(thing, name, globs={}, module=False)
            runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


@pytest.mark.parametrize("package", ["fastsparse_dgl", "fastsparse_pyg"])
def test_layers_are_entries(package: str) -> None:
    pytest.importorskip(package, exc_type=ImportError)
    layers = {f"{package}.{name}" for name in importlib.import_module(f"{package}.nn").__all__}
    assert len(layers) > 10
    assert layers - entries(package).keys() == set()


def test_gaps_are_found() -> None:
    def spmm(adj: Any, x: torch.Tensor, bias: torch.Tensor, scale: float) -> torch.Tensor:
        """Multiplies.

        Args:
            adj: structure.
            x: features (n, F).
            bias: float32.
        """
        if scale:
            raise ValueError
        return x

    assert missing("fastsparse_core.spmm", spmm) == {
        "fastsparse_core.spmm": [
            "dtype of x",
            "shape of bias",
            "argument scale",
            "Returns",
            "raises ValueError",
            "Example",
        ]
    }
