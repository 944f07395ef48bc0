"""The byte-bounded cache."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam3_ray.cache import LruCache


def test_least_recently_used_leaves_first() -> None:
    gone: list[str] = []
    cache: LruCache[str, str] = LruCache(10, on_evict=gone.append)
    cache.put("a", "A", 4)
    cache.put("b", "B", 4)
    assert cache.get("a") == "A"  # now b is the older one
    cache.put("c", "C", 4)
    assert gone == ["B"]
    assert (cache.get("b"), cache.get("a"), cache.get("c")) == (None, "A", "C")


def test_what_is_larger_than_the_budget_is_not_kept_and_evicts_nothing() -> None:
    gone: list[str] = []
    cache: LruCache[str, str] = LruCache(10, on_evict=gone.append)
    cache.put("a", "A", 10)
    assert not cache.put("b", "B", 11)
    assert cache.get("a") == "A"
    assert gone == []


def test_a_replaced_value_is_let_go_once() -> None:
    gone: list[str] = []
    cache: LruCache[str, str] = LruCache(10, on_evict=gone.append)
    cache.put("a", "old", 3)
    cache.put("a", "new", 5)
    cache.clear()
    assert gone == ["old", "new"]
    assert cache.size == 0


def test_zero_budget_keeps_nothing() -> None:
    cache: LruCache[str, str] = LruCache(0)
    assert not cache.put("a", "A", 1)
    assert len(cache) == 0


def test_negative_budget_is_an_error() -> None:
    with pytest.raises(ValueError, match="-1"):
        LruCache(-1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=60))
def test_size_never_exceeds_the_budget_and_every_value_leaves_once(
    steps: list[tuple[int, int]],
) -> None:
    gone: list[int] = []
    cache: LruCache[int, int] = LruCache(12, on_evict=gone.append)
    for number, (key, size) in enumerate(steps):
        cache.put(key, number, size)
        assert cache.size <= 12
    cache.clear()
    assert sorted(gone) == list(range(len(steps)))


def test_threads_do_not_break_the_sums() -> None:
    cache: LruCache[int, int] = LruCache(50)

    def work(offset: int) -> None:
        for i in range(500):
            cache.put((i * 7 + offset) % 40, i, 1 + i % 5)
            cache.get(i % 40)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < cache.size <= 50
    stats = cache.stats()
    assert stats["hits"] + stats["misses"] == 2000
