"""What a step reads from tensors that stay: found once, and given to every later run.

PyG's own layers read sizes of the graph in every call: ``edge_index[:, row != col]`` waits for the number of
edges that are no loops. A recording must not wait. Where all that decides a size is tensors of integers that
no call changes, as ``edge_index`` is in a loop on one graph, the size is the same in every call.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fastsparse_core.capturing.refused import Refused
from fastsparse_core.log import current_line
from fastsparse_core.ops._autocast import version_of

#: Functions (names without underscores) whose results depend only on their arguments.
_PURE = frozenset(
    (
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "logical_xor"),
        *("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "invert", "and", "or", "xor", "add"),
        *("sub", "rsub", "mul", "floor_divide", "floordiv", "remainder", "mod", "neg", "abs", "pow"),
        *("getitem", "cat", "stack", "repeat", "expand", "expand_as", "view", "view_as", "reshape"),
        *("flatten", "ravel", "t", "transpose", "permute", "squeeze", "unsqueeze", "select", "narrow"),
        *("index_select", "gather", "unbind", "split", "chunk", "long", "int", "bool", "to", "clone"),
        *("contiguous", "detach", "sum", "max", "min", "amax", "amin", "any", "all", "cumsum", "sort"),
        *("argsort", "unique", "unique_consecutive", "nonzero", "masked_select", "masked_fill", "where"),
        *("flip", "roll", "isin", "arange", "bincount", "maximum", "minimum", "clamp", "repeat_interleave"),
        *("scatter_add", "scatter", "index_add", "fill", "setitem", "div", "truediv", "float", "double"),
        *("sqrt", "rsqrt", "matmul", "mean", "convert_indices_from_coo_to_csr"),
    )
)


#: Functions that fill a new tensor. Only integer tensors count, and only if no kernel of FastSparse writes to
#: them: version counters do not show such writes.
_FILLED = frozenset(("ones", "zeros", "full", "new_ones", "new_zeros", "new_full", "ones_like", "zeros_like"))


def is_ours(frame: FrameType) -> bool:
    """Whether code of FastSparse runs in a frame."""
    return str(frame.f_globals.get("__name__", "")).startswith("fastsparse_")


def is_whole(item: Any) -> bool:
    """Whether an object is a tensor of integers or truth values."""
    return isinstance(item, Tensor) and not item.is_floating_point() and not item.is_complex()


class Persistent:
    """Tensors of integers that several calls of a step use, and that are not written to in between."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._found: dict[int, tuple[Tensor, int]] = {}

    def see(self, items: Any) -> None:
        """Notes the tensors among the arguments of a function."""
        for item in items:
            if isinstance(item, (tuple, list)):
                self.see(item)
            elif is_whole(item) and id(item) not in self._seen:
                self._seen[id(item)] = (weakref.ref(item), version_of(item))

    def end_call(self) -> None:
        """Keeps those that were seen in the call before too, and are as they were."""
        for place, (reference, version) in self._seen.items():
            item, (known, before) = reference(), self._before.get(place, (None, -1))
            if item is not None and known is not None and known() is item and version_of(item) == before:
                self._found[place] = (item, version)
        self._before = {
            place: (reference, version_of(item))
            for place, (reference, _) in self._seen.items()
            if (item := reference()) is not None
        }
        self._seen = {}

    def now(self) -> list[Tensor]:
        """Those that have not been written to since."""
        return [item for item, version in self._found.values() if version_of(item) == version]


class Origins:
    """Which tensors of a run depend on persistent ones alone.

    Args:
        sources: the persistent ones.
    """

    def __init__(self, sources: list[Tensor]) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, tuple[Tensor, ...]]] = {
            id(item): (weakref.ref(item), version_of(item), (item,)) for item in sources
        }

    def of(self, items: Any, written: Any = None) -> tuple[Tensor, ...] | None:
        """The persistent tensors that decide all tensors among objects; None: something else does too.

        Args:
            items: tensors and others, in containers.
            written: one that was just written to once.
        """
        found: list[Tensor] = []
        for item in tree_leaves(items):
            if isinstance(item, Tensor):
                reference, version, sources = self._known.get(id(item), (None, -1, ()))
                version += item is written
                if reference is None or reference() is not item or version != version_of(item):
                    return None
                found += sources
        return tuple({id(item): item for item in found}.values())

    def add(self, results: Any, sources: tuple[Tensor, ...]) -> None:
        """Notes results that these tensors decide of."""
        for item in tree_leaves(results):
            if isinstance(item, Tensor) and not item.requires_grad:
                self._known[id(item)] = (weakref.ref(item), version_of(item), sources)

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Notes the result of a function."""
        name = getattr(func, "__name__", "")
        is_pure = name.strip("_") in _PURE or (
            name in _FILLED and is_whole(result) and not is_ours(sys._getframe(2))
        )
        if not is_pure or "out" in kwargs:
            return
        writes = bool(args) and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__")))
        made = args[0] if writes else result
        sources = self.of((args, kwargs), args[0] if writes else None)
        if sources is not None:
            self.add(made, sources)


class Answers:
    """What the first run of a record read from persistent tensors, in order; later runs are given it.

    Attributes:
        sources: the tensors, and their versions.
    """

    def __init__(self) -> None:
        self._answers: list[tuple[str, Any]] = []
        self.sources: dict[int, tuple[Tensor, int]] = {}
        self._next = 0
        self._is_complete = False

    def begin_run(self) -> None:
        """Starts from the first one again."""
        self._is_complete = self._is_complete or bool(self._next)
        self._next = 0

    def ask(
        self,
        what: str,
        job: Callable[[], Any],
        sources: tuple[Tensor, ...],
        otherwise: str = "is not reached in every call, or not in the same order. Decide outside of the step",
    ) -> Any:
        """The answer of the first run; tensors in it are copies.

        Raises:
            Refused: that run asked something else; the message is the line of the user and ``otherwise``.
        """
        if not self._is_complete:
            self._answers.append((what, job()))
            self.sources |= {id(item): (item, version_of(item)) for item in sources}
        if self._next >= len(self._answers) or self._answers[self._next][0] != what:
            raise Refused(f"{current_line()} {otherwise}")
        answer = self._answers[self._next][1]
        self._next += 1
        return tree_map(lambda item: item.clone() if isinstance(item, Tensor) else item, answer)

    def are_valid(self) -> bool:
        """Whether the tensors have not been written to since."""
        return all(version_of(item) == version for item, version in self.sources.values())


class Carried:
    """Tensors that one run makes and the next one uses, as a memory of earlier results: a replay would not.

    Attributes:
        line: where one is used; "" if there is none.
    """

    def __init__(self) -> None:
        self._before: dict[int, weakref.ref[Tensor]] = {}
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self.line = ""

    def begin_run(self) -> None:
        """What was made since the last time belongs to the run before."""
        self._before, self._made, self.line = self._made, {}, ""

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Looks at what a function gets and gives; attributes, such as gradients, are left out."""
        if getattr(func, "__name__", "") == "__get__":
            return
        given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        if not self.line and any(
            (reference := self._before.get(id(item))) is not None and reference() is item for item in given
        ):
            self.line = current_line()
        for item in tree_leaves(result):
            if isinstance(item, Tensor) and not any(item is other for other in given):
                self._made[id(item)] = weakref.ref(item)
