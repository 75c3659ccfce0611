"""Finds the layers of a model, and what the model computes between them."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, ModuleList

from fastsparse_core.exact_inference.tiles import Placement, Stage, Tile, run
from fastsparse_core.structure.adjacency import Adjacency

_Function = Callable[[Tensor], Tensor]
#: Relative tolerance for the result of a whole model. It is smaller than the difference between relu and
#: leaky_relu with a slope of 0.01.
_OF_FORMS = 1e-5
#: Relative tolerance for a layer in 16 bits, because the frameworks' own sums vary between runs on a GPU.
_OF_16_BITS = 5e-2
_ACTIVATION_NAMES = ("act", "activation", "act_fn", "nonlinearity")
_ACTIVATIONS: tuple[_Function, ...] = (
    F.relu,
    F.elu,
    F.leaky_relu,
    F.gelu,
    F.silu,
    F.selu,
    torch.tanh,
    lambda x: x,
)


@dataclass(frozen=True)
class Framework:
    """Functions that a plugin provides for its layers.

    Attributes:
        is_layer: whether a module is a graph layer.
        stage: makes the `Stage` of a graph layer from its name and the layer.
        call: calls a graph layer or a model with the small graph and the given features.
        reshapes: pairs of functions that models apply to results of layers: of every layer except the last,
            and of the last layer; None: no function.
        preserved: context in which calls do not change the caches of layers.
    """

    is_layer: Callable[[Any], bool]
    stage: Callable[[str, Any], Stage]
    call: Callable[[Any, Tensor], Tensor]
    reshapes: Sequence[tuple[_Function | None, _Function | None]] = ((None, None),)
    preserved: Callable[[Iterable[Module]], contextlib.AbstractContextManager[None]] = field(
        default=lambda modules: contextlib.nullcontext()
    )


@dataclass(frozen=True)
class _Part:
    """A graph layer, or None, and the functions after it, which compute every row independently."""

    name: str
    layer: Any
    functions: tuple[_Function, ...] = ()

    def finish(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x)
        return x


def split(
    model: Any, framework: Framework, like: Tensor, device: torch.device, small: Adjacency
) -> list[Stage]:
    """The stages of a model, or of a list of layers and functions.

    The functions between the layers of a model are found by trying usual functions: their result on a small
    graph must equal the model's. Each stage is also compared with its layer on the small graph.

    Args:
        model: module, list or tuple.
        framework: functions of the plugin.
        like: features (N, ...); the features of the small graph get the same width and dtype.
        device: device of the model.
        small: structure of the small graph, on which ``framework.call`` computes.

    Raises:
        TypeError: an item of the list is neither a layer nor callable.
        ValueError: the model is not a chain of its layers, or a layer cannot be computed in tiles.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(small.num_dst, *like.shape[1:], generator=generator)
    # Numbers of several magnitudes, so that activations that differ only for small or large numbers give
    # different results.
    size = torch.logspace(-1, 1, small.num_dst).view(-1, *([1] * (like.dim() - 1)))
    x = (x * size).to(like.dtype).to(device)
    modules = model.modules() if isinstance(model, Module) else (m for m in model if isinstance(m, Module))
    with torch.no_grad(), framework.preserved(list(modules)):
        if not isinstance(model, Module) or isinstance(model, (torch.nn.Sequential, ModuleList)):
            parts = _of_list(model, framework)
        elif framework.is_layer(model):
            parts = [_Part("model", model)]
        else:
            parts = _of_model(model, framework, x)
        return list(_checked(parts, framework, x, small))


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Context in which a model, or the modules of a list, are in evaluation mode.

    Args:
        model: module or iterable.
    """
    roots = [model] if isinstance(model, Module) else [item for item in model if isinstance(item, Module)]
    modules = [module for root in roots for module in root.modules()]
    before = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


# ---------------------------------------------------------------- parts


def _of_list(items: Any, framework: Framework) -> list[_Part]:
    parts: list[_Part] = []
    for number, item in enumerate(items):
        if framework.is_layer(item):
            parts.append(_Part(f"layers[{number}] ({type(item).__name__})", item))
        elif not callable(item):
            raise TypeError(
                f"layers[{number}]: expected a graph layer or a function of features, got "
                f"{type(item).__name__}"
            )
        elif parts:
            parts[-1] = replace(parts[-1], functions=(*parts[-1].functions, item))
        else:
            name = getattr(item, "__name__", type(item).__name__)
            parts.append(_Part(f"layers[{number}] ({name})", None, (item,)))
    if not parts:
        raise ValueError("model: expected layers, got an empty list")
    return parts


def _of_model(model: Module, framework: Framework, x: Tensor) -> list[_Part]:
    layers = _layers_of(model, framework)
    shown = ", ".join(part.name for part in layers) or "none"
    cure = (
        f"graph layers found in {type(model).__name__}: {shown}. Pass a list of its layers and of the "
        "functions between them, such as [model.conv1, torch.relu, model.conv2]"
    )
    if not layers:
        raise ValueError(f"model: expected graph layers that follow each other; {cure}")
    try:
        expected = framework.call(model, x)
    except Exception as error:
        raise ValueError(
            f"model: expected a forward() that takes only features and graph, but it raised "
            f"{type(error).__name__} ({error}); {cure}"
        ) from error
    # Rounding to 16 bits hides the difference between similar activations.
    compared = _in_float32(model, framework, x) if x.element_size() <= 2 else None
    reference, features, expected = compared or (model, x, expected)
    forms = _forms(reference, _layers_of(reference, framework), framework)
    for parts, form in zip(_forms(model, layers, framework), forms, strict=True):
        try:
            found = features
            for part in form:
                found = part.finish(framework.call(part.layer, found))
        except Exception:  # the next candidate may fit
            continue
        if isinstance(expected, Tensor) and _is_close(found, expected, _OF_FORMS):
            return parts
    raise ValueError(
        "model: expected a forward() that calls its graph layers one after the other, with normalisation and "
        f"activation between them, but its result differs; {cure}"
    )


def _in_float32(model: Module, framework: Framework, x: Tensor) -> tuple[Module, Tensor, Any] | None:
    """A float32 copy of a model and of the features, and the copy's result.

    Returns:
        None if the model cannot be copied, or its forward() does not run in float32.
    """
    try:
        exact, features = copy.deepcopy(model).float(), x.float()
        return exact, features, framework.call(exact, features)
    except Exception:
        return None


def _layers_of(model: Module, framework: Framework) -> list[_Part]:
    """Graph layers that are attributes of a model, or in its ``ModuleList`` attributes."""
    found = []
    for name, child in model.named_children():
        items = child.named_children() if isinstance(child, ModuleList) else [("", child)]
        for number, item in items:
            if framework.is_layer(item):
                path = f"{name}.{number}" if number else name
                found.append(_Part(f"{path} ({type(item).__name__})", item))
    return found


def _forms(model: Module, layers: list[_Part], framework: Framework) -> Iterator[list[_Part]]:
    """Candidates for the functions that a model calls between its layers, the most usual ones first."""
    own = [getattr(model, name, None) for name in _ACTIVATION_NAMES]
    activations = [act for act in own if callable(act)] + list(_ACTIVATIONS)
    norms = _norms_of(model, len(layers), framework)
    heads = [child for child in model.children() if isinstance(child, torch.nn.Linear) or _is_linear(child)]
    log_softmax = (lambda x: F.log_softmax(x, dim=-1),)
    ends: list[tuple[_Function, ...]] = [(), log_softmax]
    ends += [(head, *end) for head in heads[-1:] for end in ends]
    orders: list[tuple[bool, bool]] = [(True, True), (True, False)] if norms else [(False, True)]
    if norms:
        orders.append((False, True))
    choices = itertools.product(framework.reshapes, activations, orders, (False, True), ends)
    for (reshape, last_reshape), act, (has_norms, norm_first), is_behind_last, end in choices:
        parts = []
        for number, part in enumerate(layers):
            is_last = number == len(layers) - 1
            functions = [last_reshape if is_last else reshape]
            if not is_last or is_behind_last:
                norm = norms[number] if has_norms and number < len(norms) else None
                functions += [norm, act] if norm_first else [act, norm]
            functions += end if is_last else ()
            parts.append(replace(part, functions=tuple(f for f in functions if f is not None)))
        yield parts


def _norms_of(model: Module, count: int, framework: Framework) -> list[Module]:
    """Normalisation layers, in the order of the graph layers."""
    for child in model.children():
        if (
            isinstance(child, ModuleList)
            and len(child) >= count - 1
            and not any(framework.is_layer(item) for item in child)
            and any("Norm" in type(item).__name__ for item in child)
        ):
            return list(child)
    return [child for child in model.children() if "Norm" in type(child).__name__]


def _is_linear(module: Module) -> bool:
    return type(module).__name__ == "Linear"


# ---------------------------------------------------------------- comparison


def _checked(parts: Sequence[_Part], framework: Framework, x: Tensor, small: Adjacency) -> Iterator[Stage]:
    placement = Placement(x.device, tile=max(small.num_dst // 2 - 1, 1))
    for part in parts:
        stage = _stage_of(part, framework)
        expected = _whole(part, framework, x)
        if not isinstance(expected, Tensor):
            raise ValueError(
                f"model: expected layers that return one tensor, got {type(expected).__name__} from "
                f"{part.name}"
            )
        try:
            found = run(small, x, [stage], placement)
        except Exception as error:
            raise ValueError(
                f"model: {part.name} cannot be computed from a node and its neighbours alone: {error}"
            ) from error
        loose = {torch.float64: 1e-8, torch.float32: 1e-4}.get(expected.dtype, _OF_16_BITS)
        rounding = 0.0
        if loose == _OF_16_BITS and x.is_floating_point():
            # Sums in another order are rounded differently, and the layer may enlarge the difference. So half
            # of the numbers are changed by one rounding error. The factor of 4 is for rounding inside the
            # layer.
            nearby = x.clone(memory_format=torch.contiguous_format)
            nearby.view(-1)[::2] *= 1 + torch.finfo(x.dtype).eps
            change = (_whole(part, framework, nearby) - expected).double().abs().nan_to_num(0.0, 0.0)
            rounding = 4 * change.max().item() if change.numel() else 0.0
        if not _is_close(found, expected, loose, rounding):
            raise ValueError(
                f"model: {part.name}, with the functions that follow it, gives other results when it is "
                "computed from a node and its neighbours alone. Usual causes: layers of several hops, "
                "normalisation over all nodes. Compute these outside of inference()"
            )
        yield stage
        x = expected


def _whole(part: _Part, framework: Framework, x: Tensor) -> Any:
    """Result of the framework's layer and the functions that follow it, for all nodes at once."""
    result = x if part.layer is None else framework.call(part.layer, x)
    return part.finish(result) if isinstance(result, Tensor) else result


def _stage_of(part: _Part, framework: Framework) -> Stage:
    if part.layer is None:
        return Stage(part.name, lambda tile, sums: part.finish(tile.own), "own")
    stage = framework.stage(part.name, part.layer)

    def compute(tile: Tile, sums: Tensor | None) -> Tensor:
        return part.finish(stage.compute(tile, sums))

    return replace(stage, compute=compute)


def _is_close(found: Tensor, expected: Tensor, loose: float, rounding: float = 0.0) -> bool:
    """True if rows are equal up to a tolerance, relative to their largest number, plus ``rounding``."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    a, b = found.double().flatten(1), expected.double().flatten(1)
    if not b.numel():
        return True
    size = b.abs().nan_to_num().amax(1, keepdim=True)
    is_same = (a - b).abs() <= loose * (size + size.max() / 50) + rounding
    return bool((is_same | (a == b) | (a.isnan() & b.isnan())).all())


def small_graph() -> tuple[Tensor, int]:
    """Edges (2, E) of the small graph, sources and destinations, and its number of nodes.

    Every node has incoming edges. There are loops, repeated edges and edges without a reverse edge.
    """
    generator = torch.Generator().manual_seed(0)
    num_nodes = 12
    ring = torch.arange(num_nodes)
    ends = torch.randint(num_nodes, (2, 30), generator=generator)
    src = torch.cat([ring, ends[0], ring[:3]])
    dst = torch.cat([(ring + 1) % num_nodes, ends[1], ring[:3]])
    return torch.stack([src, dst]), num_nodes
