"""Which replica an image goes to."""

from collections import Counter

import pytest

from sam3_ray.serve.router import Candidate, choose, preference

DIGESTS = [f"{i:032x}" for i in range(4000)]


def replicas(count: int, generation: str = "a", **loads: int) -> list[Candidate]:
    return [
        Candidate(f"{generation}{i}", f"host/chip{i}", loads.get(f"load{i}", 0))
        for i in range(count)
    ]


def first(digest: str, candidates: list[Candidate], **options) -> str:
    return choose(digest, candidates, digest_only=False, **options)[0].place


def test_the_order_does_not_depend_on_how_the_replicas_are_listed():
    some = replicas(8)
    for digest in DIGESTS[:50]:
        assert preference(digest, some) == preference(digest, some[::-1])


def test_images_spread_evenly():
    counts = Counter(first(digest, replicas(8)) for digest in DIGESTS)
    assert len(counts) == 8
    assert max(counts.values()) < 1.25 * len(DIGESTS) / 8


def test_a_restarted_replica_gets_its_images_back():
    before = replicas(8)
    after = before[:3] + replicas(8, "b")[3:4] + before[4:]
    for digest in DIGESTS[:500]:
        assert first(digest, before) == first(digest, after)


def test_a_replica_that_goes_moves_only_its_own_images():
    before, without = replicas(8), replicas(8)[:-1]
    moved = [d for d in DIGESTS if first(d, before) != first(d, without)]
    assert {first(d, before) for d in moved} == {"host/chip7"}
    assert len({first(d, without) for d in moved}) == 7


def test_two_replicas_of_one_place_have_a_fixed_order():
    twins = [Candidate("a", "host/cpu0"), Candidate("b", "host/cpu0")]
    orders = {tuple(c.replica_id for c in preference(d, twins)) for d in DIGESTS[:100]}
    assert orders == {("b", "a")}


def test_a_popular_image_overflows_before_its_replica_drowns():
    digest = DIGESTS[0]
    order = [c.place for c in preference(digest, replicas(4))]
    busy = {"load" + order[0].removeprefix("host/chip"): 12}
    assert first(digest, replicas(4, **busy)) == order[1]
    little = {"load" + order[0].removeprefix("host/chip"): 3}
    assert first(digest, replicas(4, **little)) == order[0], "a batch's worth is no overload"
    everyone = {f"load{i}": 12 for i in range(4)}
    assert first(digest, replicas(4, **everyone)) == order[0], "no use where all are busy"


def test_no_replica_is_ever_left_out_for_an_image():
    chosen = choose(DIGESTS[0], replicas(4, load0=99, load1=99), digest_only=False)
    assert len(chosen) == 4


def test_a_digest_alone_goes_to_the_first_and_its_fallbacks_only():
    for digest in DIGESTS[:100]:
        order = preference(digest, replicas(6))
        loaded = [Candidate(c.replica_id, c.place, 50) for c in order]
        chosen = choose(digest, loaded, digest_only=True, num_fallbacks=2)
        assert [c.place for c in chosen] == [c.place for c in order[:3]]


def test_a_parked_replica_is_left_out_while_there_is_another():
    some = [Candidate("a", "host/chip0", parked=True), Candidate("b", "host/chip1")]
    assert {first(d, some) for d in DIGESTS[:50]} == {"host/chip1"}
    parked = [Candidate("a", "host/chip0", parked=True)]
    assert choose(DIGESTS[0], parked, digest_only=False) == parked


def test_a_replica_that_failed_is_avoided_while_there_is_another():
    order = [c.replica_id for c in preference(DIGESTS[0], replicas(3))]
    chosen = choose(DIGESTS[0], replicas(3), digest_only=False, avoid=frozenset(order[:1]))
    assert [c.replica_id for c in chosen] == order[1:]
    chosen = choose(DIGESTS[0], replicas(3), digest_only=False, avoid=frozenset(order))
    assert [c.replica_id for c in chosen] == order


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_fallbacks": -1}, "num_fallbacks must be at least 0, got -1"),
        ({"load_factor": 0.5}, "load_factor must be at least 1, got 0.5"),
        ({"free_load": 0}, "free_load must be at least 1, got 0"),
    ],
)
def test_options_out_of_range(kwargs, message):
    from sam3_ray.serve.router import DigestRouter

    router = DigestRouter.__new__(DigestRouter)
    with pytest.raises(ValueError, match=message):
        router.initialize_state(**kwargs)
