"""Least-recently-used caches, bounded in bytes or in entries."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable


class LruCache[Key: Hashable, Value]:
    """Keeps what was used last, as long as the sizes add up to at most ``budget``.

    Safe to use from several threads. An entry larger than the whole budget is not kept.

    Args:
        budget: the sum of sizes to stay under; 0 keeps nothing.
        on_evict: called with each value that leaves (evicted, replaced or cleared), outside the lock.
    """

    def __init__(self, budget: int, on_evict: Callable[[Value], None] | None = None) -> None:
        if budget < 0:
            raise ValueError(f"a cache's budget must be at least 0, got {budget}")
        self.budget = budget
        self._on_evict = on_evict
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._size = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    @property
    def size(self) -> int:
        """The sum of the sizes of what is kept."""
        return self._size

    def get(self, key: Key) -> Value | None:
        """The value, now the most recently used; None where it is not kept."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self.misses += 1
                return None
            self.hits += 1
            self._entries.move_to_end(key)
            return entry[0]

    def peek(self, key: Key) -> Value | None:
        """The value, without counting or refreshing it."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def put(self, key: Key, value: Value, size: int = 1) -> bool:
        """Keep ``value``, and let go of the least recently used until all fit.

        Returns:
            Whether it is kept; if not, it is the caller's to release.
        """
        if size > self.budget:
            return False
        gone: list[Value] = []
        with self._lock:
            old = self._entries.pop(key, None)
            if old is not None:
                self._size -= old[1]
                if old[0] is not value:
                    gone.append(old[0])
            self._entries[key] = (value, size)
            self._size += size
            gone += self._over_budget()
        self._let_go(gone)
        return True

    def resize(self, budget: int) -> None:
        """Take another budget, and let go of the least recently used until the rest fits."""
        if budget < 0:
            raise ValueError(f"a cache's budget must be at least 0, got {budget}")
        with self._lock:
            self.budget = budget
            gone = self._over_budget()
        self._let_go(gone)

    def _over_budget(self) -> list[Value]:
        """What has to go, taken out. Under the lock."""
        gone = []
        while self._size > self.budget:
            _, (evicted, evicted_size) = self._entries.popitem(last=False)
            self._size -= evicted_size
            self.evictions += 1
            gone.append(evicted)
        return gone

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            gone = [value for value, _ in self._entries.values()]
            self._entries.clear()
            self._size = 0
        self._let_go(gone)

    def stats(self) -> dict[str, int]:
        """Counters since the start and what is kept now."""
        return {
            "entries": len(self._entries),
            "size": self._size,
            "budget": self.budget,
            "hits": self.hits,
            "misses": self.misses,
            "evictions": self.evictions,
        }

    def _let_go(self, values: list[Value]) -> None:
        if self._on_evict is not None:
            for value in values:
                self._on_evict(value)
