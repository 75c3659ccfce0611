"""Steps on sampled batches as CUDA graphs: batches are padded to the sizes of the record."""

from __future__ import annotations

import logging
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastsparse_core.capturing.padded_adjacency import PaddedAdjacency, write
from fastsparse_core.capturing.step import CapturedStep
from fastsparse_core.formats.inspection import Facts
from fastsparse_core.log import info_once
from fastsparse_core.streams import on_stream
from fastsparse_core.structure.adjacency import Adjacency

_logger = logging.getLogger("fastsparse_core")
_T = TypeVar("_T")

#: Destinations, sources, and the numbers of both: what `Adjacency.from_coo` takes.
Edges = tuple[Tensor, Tensor, tuple[int, int]]

#: Sizes of one batch: edges, destinations and sources of every level, then the rows of every tensor.
Sizes = tuple[int, ...]

#: Room beyond the greatest size seen, as a share of it; where sizes vary by more, as much as they vary.
_ROOM = 1 / 64
#: Steps on padded batches before the one that is recorded, so that libraries have what they allocate once.
_WARM_UP = 2


class _TensorRoom:
    """Memory for one tensor of every batch, and what its rows behind those of a batch hold.

    Args:
        name: of the tensor.
        like: one of the batches' tensors.
        rows: number of rows there is room for.
        fill: value of the rows behind those of a batch.

    Attributes:
        held: what the step reads.
    """

    def __init__(self, name: str, like: Tensor, rows: int, fill: float) -> None:
        self._name, self._fill = name, fill
        self._row_shape = like.shape[1:]
        self.held = like.new_full((rows, *self._row_shape), fill)

    def takes(self, tensor: Tensor, rows: int) -> bool:
        """Whether so many rows like those of a tensor belong here."""
        held = self.held
        return (
            rows <= held.size(0)
            and tensor.dtype == held.dtype
            and tensor.device == held.device
            and tensor.shape[1:] == self._row_shape
        )

    def check(self, tensor: Tensor) -> None:
        """Refuses rows of another kind.

        Raises:
            ValueError: they are not like those of the batches before.
        """
        if tensor.dtype != self.held.dtype or tensor.shape[1:] != self._row_shape:
            raise ValueError(
                f"{self._name}: expected {self.held.dtype} of shape (rows, "
                f"{', '.join(map(str, self._row_shape))}) as in the batches before, got {tensor.dtype} of "
                f"shape {tuple(tensor.shape)}"
            )

    def write(self, tensor: Tensor) -> None:
        """Copies the rows of a tensor, unless they are here, and fills those behind them."""
        rows, held = tensor.size(0), self.held
        if tensor.data_ptr() != held.data_ptr():
            (held if rows == held.size(0) else held[:rows]).copy_(tensor)
        if rows < held.size(0):
            held[rows:].fill_(self._fill)  # anew for every batch: the step may have written there


class _Record(NamedTuple, Generic[_T]):
    """What a step was, or is about to be, recorded with.

    Attributes:
        room: how much of everything there is room for.
        exact: the places of those sizes that a batch must have exactly to fit.
        structures: of every level.
        facts: about them.
        tensors: what the step takes besides, by name.
        step: reads these.
    """

    room: Sizes
    exact: tuple[int, ...]
    structures: list[PaddedAdjacency]
    facts: Facts
    tensors: dict[str, _TensorRoom]
    step: CapturedStep[_T]


class CapturedBatches(Generic[_T]):
    """A step on sampled batches that becomes one CUDA graph, though every batch has other sizes.

    A step on a batch is dozens of short kernels, which the host launches more slowly than the GPU runs them.
    The first batches run as they are. Then memory is set aside for batches of slightly more than the greatest
    size seen, the step is recorded on it, and every later batch is copied there and the record replayed. A
    batch that does not fit runs as it is; if it was too large, the step is recorded anew with more room.

    The step therefore sees padded batches: behind the nodes of the batch there may be more, which have no
    edges, and ``fill`` says what their rows of every tensor hold. They come last, on every level, so that
    seeds stay the first nodes; the step must look at nothing but its seeds when it computes the loss
    (``out[:num_seeds]``), and mix no rows elsewhere, as `BatchNorm` would. What never varied is not padded,
    nor are tensors that ``fill`` does not name, such as the labels of the seeds, and levels of as many nodes;
    batches that have another number of seeds, as the last one of an epoch, run as they are. Structures are
    :class:`fastsparse_core.Adjacency` objects that serve sums and means of neighbours and the layers made of
    them (GraphSAGE, GIN, graph convolutions without self loops); attention needs more than a padded structure
    has. Otherwise the rules of :class:`CapturedStep` hold: the optimizer belongs into the step.

    Without a GPU, and under deterministic algorithms, all batches run as they are.

    Args:
        step: called as ``step(structures, **tensors)``; its result, tensors in general, is overwritten by the
            next call.
        fill: for tensors whose number of rows varies, the value of rows behind those of the batch: 0 for
            features and for indices into a table, -100 for labels that ``cross_entropy`` ignores.
        observe: batches that run as they are, to learn how sizes vary.

    Raises:
        ValueError: ``observe`` is not positive; in calls: a tensor's rows vary from batch to batch and
            ``fill`` does not name it, a tensor requires a gradient, or is a number.
        RuntimeError: the step cannot be recorded.

    Examples:
        >>> weight = torch.ones(3, 2)
        >>> def step(structures, x):
        ...     (adjacency,) = structures
        ...     return (fastsparse_core.spmm(adjacency, x) @ weight)[:1]
        >>> batches = CapturedBatches(step, fill={"x": 0.0})
        >>> row, col = torch.tensor([0, 0]), torch.tensor([1, 2])
        >>> batches([(row, col, (1, 3))], x=torch.ones(3, 3))
        tensor([[6., 6.]])
    """

    def __init__(
        self, step: Callable[..., _T], *, fill: Mapping[str, float] | None = None, observe: int = 8
    ) -> None:
        if observe < 1:
            raise ValueError(f"observe: expected at least 1, got {observe}")
        self._step = step
        self._fill = dict(fill or {})
        self._observe = observe
        self._stream: torch.cuda.Stream | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets sizes and record: as if no batch had been seen."""
        self._seen: list[Sizes] = []
        self._record: _Record[_T] | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether memory is set aside, so that batches that fit are replayed or about to be."""
        return self._record is not None

    def __call__(self, edges: Sequence[Edges], **tensors: Tensor) -> _T:
        """Runs the step on one batch.

        Args:
            edges: of every level, in the order of the layers, what :meth:`Adjacency.from_coo` takes:
                destinations, sources, ``(num_dst, num_src)``. Edges should come sorted by destination, as
                samplers give them: other batches run as they are.
            tensors: what the step takes besides, by name.
        """
        if not _can_record(edges):
            info_once(
                _logger,
                "CapturedBatches: batches run as they are on the CPU and under deterministic algorithms",
            )
            return self._as_it_is(edges, tensors)
        tensors = dict(sorted(tensors.items()))  # calls may name them in any order
        sizes = _sizes(edges, tensors)
        if self._seen and len(sizes) != len(self._seen[0]):
            raise ValueError(
                f"expected batches of the same levels and tensors, {len(self._seen[0])} sizes, got "
                f"{len(sizes)}; call reset() before batches of another kind"
            )
        record = self._record
        if record is None:
            self._seen.append(sizes)
            if len(self._seen) <= self._observe:
                return self._as_it_is(edges, tensors)
            record = self._record = self._set_aside(edges, tensors)
        if not self._fits(record, sizes):
            return self._as_it_is(edges, tensors)
        if not _write(record, edges, tensors):
            info_once(
                _logger,
                "CapturedBatches: a batch runs as it is: its edges are not sorted by destination, or a "
                "destination has very many",
            )
            return self._as_it_is(edges, tensors)
        return record.step()

    def gather(self, name: str, table: Tensor, index: Tensor) -> Tensor:
        """``table[index]`` as the tensor of that name of the next batch, written where the step reads it.

        Passing the result to the call spares a copy of it. Gather for a batch after the call for the one
        before: both may be written to the same place.

        Args:
            name: of the tensor.
            table: (N, ...) without gradient.
            index: integer (rows,), on the same device.
        """
        room = None if self._record is None else self._record.tensors.get(name)
        if room is None or not room.takes(table, index.numel()):
            return table[index]
        return torch.index_select(table, 0, index, out=room.held[: index.numel()])

    def _as_it_is(self, edges: Sequence[Edges], tensors: Mapping[str, Tensor]) -> _T:
        def run() -> _T:
            return self._step([Adjacency.from_coo(row, col, shape) for row, col, shape in edges], **tensors)

        on_gpu = len(edges) > 0 and edges[0][0].is_cuda
        return on_stream(self._side_stream(), run) if on_gpu else run()

    def _side_stream(self) -> torch.cuda.Stream:
        """Where all batches run that are not replayed."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream

    def _set_aside(self, edges: Sequence[Edges], tensors: Mapping[str, Tensor]) -> _Record[_T]:
        """Memory for batches like those seen so far, and a step that reads it."""
        room, exact = self._plan(list(tensors))
        structures = []
        for level, (row, _, _) in enumerate(edges):
            num_edges, num_dst, num_src = room[3 * level : 3 * level + 3]
            structures.append(PaddedAdjacency((num_dst, num_src), num_edges, row.device))
        rows = dict(zip(tensors, room[3 * len(edges) :], strict=True))
        rooms = {
            name: _TensorRoom(name, tensor, rows[name], self._fill.get(name, 0.0))
            for name, tensor in tensors.items()
        }
        held = {name: room.held for name, room in rooms.items()}
        stream = self._side_stream() if edges[0][0].is_cuda else None
        step = CapturedStep(lambda: self._step(structures, **held), warm_up=_WARM_UP, stream=stream)
        facts = Facts(len(edges), edges[0][0].device)
        return _Record(room, exact, structures, facts, rooms, step)

    def _plan(self, names: list[str]) -> tuple[Sizes, tuple[int, ...]]:
        """How much room there should be of everything, and what has to be as much exactly.

        Equal sizes stay equal, as levels that follow each other ask for.
        """
        columns = list(zip(*self._seen, strict=True))
        fixed = set()
        for name, column in zip(names, columns[len(columns) - len(names) :], strict=True):
            if name not in self._fill:
                fixed.add(column)
                if 2 * column.count(statistics.mode(column)) < len(column):
                    raise ValueError(
                        f"{name}: its number of rows varies from batch to batch ({min(column)} to "
                        f"{max(column)}): fill must say what the rows behind those of a batch hold, for "
                        f"example fill={{{name!r}: 0}} for features, or -100 for labels of cross_entropy"
                    )
        num_seeds = columns[len(columns) - len(names) - 2]  # destinations of the last level
        if len(set(num_seeds)) == 1:
            fixed.add(num_seeds)
        room = []
        for column in columns:
            least, most = min(column), max(column)
            more = max(most - least, int(most * _ROOM)) if least < most else 0
            room.append(statistics.mode(column) if column in fixed else most + more)
        return tuple(room), tuple(place for place, column in enumerate(columns) if column in fixed)

    def _fits(self, record: _Record[_T], sizes: Sizes) -> bool:
        """Whether a batch fits; forgets the record where it should have had more room."""
        if any(sizes[place] != record.room[place] for place in record.exact):
            info_once(
                _logger, "CapturedBatches: a batch with another number of seeds than usual runs as it is"
            )
            return False
        fits = all(map(operator.le, sizes, record.room))
        if not fits:
            self._seen.append(sizes)
            self._record = None
            _logger.info("CapturedBatches: a batch is larger than all before it; the step is recorded anew")
        return fits


def _can_record(edges: Sequence[Edges]) -> bool:
    on_gpu = len(edges) > 0 and all(row.is_cuda for row, _, _ in edges)
    return on_gpu and not torch.are_deterministic_algorithms_enabled()


def _sizes(edges: Sequence[Edges], tensors: Mapping[str, Tensor]) -> Sizes:
    sizes = [size for row, _, shape in edges for size in (row.numel(), *shape)]
    for name, tensor in tensors.items():
        if tensor.dim() == 0 or tensor.requires_grad:
            raise ValueError(
                f"{name}: expected a tensor of one or more dimensions without gradient, got shape "
                f"{tuple(tensor.shape)}, requires_grad={tensor.requires_grad}"
            )
        sizes.append(tensor.size(0))
    return tuple(sizes)


def _write(record: _Record[_T], edges: Sequence[Edges], tensors: Mapping[str, Tensor]) -> bool:
    """Copies a batch to where the step reads it; returns whether the step may read it."""
    pairs = [(row.contiguous(), col.contiguous()) for row, col, _ in edges]
    if not all(_can_compress(row, col, record.facts.written.device) for row, col in pairs):
        return False
    for name, tensor in tensors.items():
        record.tensors[name].check(tensor)
    write(record.structures, pairs, record.facts)
    for name, tensor in tensors.items():
        record.tensors[name].write(tensor)
    return all(
        structure.holds(words, shape)
        for structure, words, (_, _, shape) in zip(record.structures, record.facts.wait(), edges, strict=True)
    )


def _can_compress(row: Tensor, col: Tensor, device: torch.device) -> bool:
    return (
        row.numel() == col.numel() > 0
        and row.dtype == col.dtype
        and row.dtype in (torch.int64, torch.int32)
        and row.device == col.device == device
    )
