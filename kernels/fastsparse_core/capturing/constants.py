"""Values that a step reads from tensors that never change. They are read once and reused in later runs.

PyG's own layers read sizes of the graph in every call: ``edge_index[:, row != col]`` waits for the number of
edges that are not loops. While a CUDA graph is recorded, the host must not wait for the GPU. If a size
depends only on integer tensors that no call changes, such as ``edge_index`` in a loop on one graph, the size
is the same in every call.

Below, such integer tensors are called persistent.
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
    """Returns whether code of FastSparse runs in a frame."""
    return str(frame.f_globals.get("__name__", "")).startswith("fastsparse_")


def is_whole(item: Any) -> bool:
    """Returns whether an object is a tensor of integers or bools."""
    return isinstance(item, Tensor) and not item.is_floating_point() and not item.is_complex()


class Persistent:
    """Integer and bool tensors that several calls of a step use without a write between the calls."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._found: dict[int, tuple[Tensor, int]] = {}

    def see(self, items: Any) -> None:
        """Records the integer tensors among the arguments of a function."""
        for item in items:
            if isinstance(item, (tuple, list)):
                self.see(item)
            elif is_whole(item) and id(item) not in self._seen:
                self._seen[id(item)] = (weakref.ref(item), version_of(item))

    def end_call(self) -> None:
        """Adds the tensors that the previous call used too, if they were not written to since."""
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
        """The persistent tensors that have not been written to since."""
        return [item for item, version in self._found.values() if version_of(item) == version]


class Origins:
    """Tracks which tensors of a run depend only on persistent tensors.

    Args:
        sources: the persistent tensors.
    """

    def __init__(self, sources: list[Tensor]) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, tuple[Tensor, ...]]] = {
            id(item): (weakref.ref(item), version_of(item), (item,)) for item in sources
        }

    def of(self, items: Any, written: Any = None) -> tuple[Tensor, ...] | None:
        """The persistent tensors that all tensors among ``items`` depend on; None: they depend on others too.

        Args:
            items: tensors and other objects, in containers.
            written: a tensor among them that the last function wrote to.
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
        """Records that results depend only on these persistent tensors."""
        for item in tree_leaves(results):
            if isinstance(item, Tensor) and not item.requires_grad:
                self._known[id(item)] = (weakref.ref(item), version_of(item), sources)

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Records the result of a function if it depends only on persistent tensors."""
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
    """Values that the first run of a record read from persistent tensors, in order, for later runs.

    Attributes:
        sources: the persistent tensors with their versions, by id.
    """

    def __init__(self) -> None:
        self._answers: list[tuple[str, Any]] = []
        self.sources: dict[int, tuple[Tensor, int]] = {}
        self._next = 0
        self._is_complete = False

    def begin_run(self) -> None:
        """Starts a run: the next call of `ask` returns the first value again."""
        self._is_complete = self._is_complete or bool(self._next)
        self._next = 0

    def ask(
        self,
        what: str,
        job: Callable[[], Any],
        sources: tuple[Tensor, ...],
        otherwise: str = (
            "is not reached in every call, or not in the same order. Move the Python branch or loop that "
            "decides this out of the step"
        ),
    ) -> Any:
        """The value that the first run read at this point; tensors in it are copied.

        Args:
            what: name of the read, which must be the same in every run.
            job: reads the value in the first run.
            sources: the persistent tensors that the value depends on.
            otherwise: end of the error message.

        Raises:
            Refused: the first run read something else at this point. The message begins with the user's line.
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
        """Returns whether the persistent tensors have not been written to since."""
        return all(version_of(item) == version for item, version in self.sources.values())


class Carried:
    """Finds tensors that one run creates and the next run uses. A replay would read the old tensor.

    Attributes:
        line: the user's line that uses such a tensor; "" if there is none.
    """

    def __init__(self) -> None:
        self._before: dict[int, weakref.ref[Tensor]] = {}
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self.line = ""

    def begin_run(self) -> None:
        """Starts a run: tensors that were created since the last start belong to the previous run."""
        self._before, self._made, self.line = self._made, {}, ""

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Inspects arguments and result of a function. Attribute reads, such as of gradients, are ignored."""
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
