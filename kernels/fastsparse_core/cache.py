"""A cache of converted structures per graph object, for both plugins.

A stale structure would silently give wrong results. Therefore an entry is used only for the same graph
object, and only if the object's stamp has not changed. A stamp consists of properties that change with the
object's content, such as version counters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from fastsparse_core import recorded
from fastsparse_core.locks import ForkSafeLock
from fastsparse_core.structure.adjacency import Adjacency

#: Largest number of structures per graph object, one per set of options (self loops, direction, device and
#: others). The oldest structure is dropped first.
MAX_OPTIONS = 8


#: Number of objects that :class:`Sightings` counts before it forgets all of them.
_MOST_COUNTED = 1024


class Sightings:
    """Counts how often objects are used: building a structure is worthwhile only for repeated use.

    Attributes:
        latest: count of the object that was counted last.
        previous: count of the object that was used before the newest object.
    """

    def __init__(self) -> None:
        self.latest = self.previous = 0
        # By id of the object. Python reuses ids of freed objects; the weak reference detects this.
        self._counts: dict[int, tuple[weakref.ref[Any], int]] = {}

    def of(self, key: object) -> int:
        """Number of counted uses of an object."""
        reference, count = self._counts.get(id(key), (None, 0))
        return count if reference is not None and reference() is key else 0

    def count(self, key: object) -> int:
        """Counts a use of an object, which must be weakly referenceable; returns the new count."""
        reference, count = self._counts.get(id(key), (None, 0))  # `of` would be one more call
        count = count + 1 if reference is not None and reference() is key else 1
        if len(self._counts) >= _MOST_COUNTED and id(key) not in self._counts:
            self.clear()
        self._counts[id(key)] = weakref.ref(key), count
        if count == 1:
            self.previous = self.latest
        self.latest = count
        return count

    def clear(self) -> None:
        """Sets all counts to 0."""
        self._counts.clear()
        self.latest = self.previous = 0


@dataclass(frozen=True)
class CacheInfo:
    """Counters of a cache.

    Attributes:
        hits: number of look-ups that found a valid entry.
        misses: number of look-ups that built an entry, including look-ups that found a stale entry.
        stale: number of entries that were dropped because their graph had changed.
        entries: number of structures that are cached now.
        bytes: memory of these structures, in bytes.

    Example:
        >>> from fastsparse_core.cache import CacheInfo
        >>> CacheInfo(hits=9, misses=1, stale=0, entries=1, bytes=4096).hits
        9
    """

    hits: int
    misses: int
    stale: int
    entries: int
    bytes: int


class AdjacencyCache:
    """Maps (graph object, options) to an Adjacency; entries are freed with their graph object.

    Args:
        name: name of the cache, which ``repr`` shows.

    Attributes:
        latest: options -> (weak reference to the graph object, stamp, structure) of the last look-ups.
        hits: number of look-ups that found a valid entry.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = ForkSafeLock()
        # By id of the graph object. Python reuses ids of freed objects; the weak reference detects this.
        self._graphs: dict[int, tuple[weakref.ref[Any], dict[Hashable, tuple[Hashable, Adjacency]]]] = {}
        self.hits = self._misses = self._stale = 0
        self.latest: dict[Hashable, tuple[Any, Hashable, Adjacency]] = {}

    def lookup(
        self, key: object, stamp: Hashable, options: Hashable, build: Callable[[], Adjacency]
    ) -> Adjacency:
        """Returns the cached structure for ``key`` and ``options``; builds it on a miss.

        Args:
            key: the graph object. The cache stores a weak reference, and compares objects by identity.
            stamp: properties that change with the object's content; an entry with another stamp is dropped.
            options: options of the structure. A graph may have several structures with different options.
            build: function that makes the Adjacency, which must not keep ``key`` alive. It is called at most
                once per miss, under the lock.
        """
        latest = self.latest.get(
            options
        )  # most look-ups repeat the last one: full-batch training has one graph
        if latest is not None and latest[0]() is key and latest[1] == stamp:
            self.hits += 1
            return latest[2]
        with self._lock:
            reference, entries = self._graphs.get(id(key), (None, {}))
            if reference is not None and reference() is key:
                entry = entries.get(options)
                if entry is not None:
                    if entry[0] == stamp:
                        self.hits += 1
                        self._remember(reference, stamp, options, entry[1])
                        return entry[1]
                    del entries[options]
                    self._stale += 1
            run = recorded.current()
            if run is not None:  # not cached here: the structure is valid only in this run of a captured step
                return run.structure(key, options, build)
            self._misses += 1
            adjacency = build()
            self.keep(key, stamp, options, adjacency)
            return adjacency

    def keep(self, key: object, stamp: Hashable, options: Hashable, adjacency: Adjacency) -> None:
        """Stores a structure that was built elsewhere; the arguments are those of :meth:`lookup`."""
        with self._lock:
            reference, entries = self._graphs.get(id(key), (None, {}))
            if reference is None or reference() is not key:
                reference, entries = self._reference(key), {}
                self._graphs[id(key)] = (reference, entries)
            while len(entries) >= MAX_OPTIONS:
                del entries[next(iter(entries))]
            entries[options] = (stamp, adjacency)
            self._remember(reference, stamp, options, adjacency)

    def count_miss(self, build: Callable[[], Adjacency]) -> Adjacency:
        """Builds a structure that cannot be cached, and counts a miss."""
        self._misses += 1
        return build()

    def kept(self, key: object, options: Hashable) -> tuple[Any, Hashable, Adjacency] | None:
        """Finds an entry, even if the graph object has changed since.

        Returns:
            Weak reference to the graph object, stamp and structure; None if there is no entry.
        """
        reference, entries = self._graphs.get(id(key), (None, {}))
        if reference is None or reference() is not key:
            return None
        entry = entries.get(options)
        return None if entry is None else (reference, *entry)

    def holds(self, key: object) -> bool:
        """Returns True if a graph object has an entry, even if the object has changed since."""
        kept = self._graphs.get(id(key))
        return kept is not None and kept[0]() is key

    def _reference(self, key: object) -> weakref.ref[Any]:
        """A weak reference that removes the object's entries when the object is freed."""
        number = id(key)

        def forget(dead: weakref.ref[Any]) -> None:
            kept = self._graphs.get(number)
            if kept is not None and kept[0] is dead:
                self._graphs.pop(number, None)
            for options, latest in list(self.latest.items()):
                if latest[0] is dead:
                    self.latest.pop(options, None)

        return weakref.ref(key, forget)

    def _remember(
        self, reference: weakref.ref[Any], stamp: Hashable, options: Hashable, adjacency: Adjacency
    ) -> None:
        while len(self.latest) >= MAX_OPTIONS and options not in self.latest:
            self.latest.pop(next(iter(self.latest), None), None)
        self.latest[options] = (reference, stamp, adjacency)

    def info(self) -> CacheInfo:
        """Returns the counters, and the number and memory of the entries."""
        with self._lock:
            held = [entry[1] for _, entries in list(self._graphs.values()) for entry in entries.values()]
            size = sum(sum(adjacency.memory_usage().values()) for adjacency in held)
            return CacheInfo(self.hits, self._misses, self._stale, len(held), size)

    def clear(self) -> None:
        """Drops every entry and sets the counters to zero."""
        with self._lock:
            self._graphs = {}
            self.latest = {}
            self.hits = self._misses = self._stale = 0

    def __repr__(self) -> str:
        return f"AdjacencyCache({self.name!r}, {self.info()})"
