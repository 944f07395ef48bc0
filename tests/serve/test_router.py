"""Which replica an image goes to."""

import random
from collections import Counter, defaultdict
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam3_ray.serve.placement import Candidate, Placement, preference

DIGESTS = [f"{i:032x}" for i in range(4000)]


def replicas(count: int, generation: str = "a", **loads: int) -> list[Candidate]:
    return [
        Candidate(f"{generation}{i}", f"host/chip{i}", loads.get(f"load{i}", 0))
        for i in range(count)
    ]


def choose(
    digest: str, candidates: list[Candidate], *, digest_only: bool, avoid=frozenset(), **kwargs
):
    """What a placement without a history chooses."""
    return Placement(**kwargs).choose(digest, candidates, digest_only=digest_only, avoid=avoid)


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
    busy = {"load" + order[0].removeprefix("host/chip"): 20}
    assert first(digest, replicas(4, **busy)) == order[1]
    little = {"load" + order[0].removeprefix("host/chip"): 15}
    assert first(digest, replicas(4, **little)) == order[0], "a few batches' worth is no overload"
    everyone = {f"load{i}": 20 for i in range(4)}
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


@settings(deadline=None, max_examples=12)
@given(count=st.integers(1, 16), hosts=st.integers(1, 3), data=st.data())
def test_adding_or_losing_one_of_n_moves_about_one_in_n(count, hosts, data):
    def place(i: int) -> Candidate:
        return Candidate(f"id{i}", f"host{i % hosts}/chip{i // hosts}")

    some, digests = [place(i) for i in range(count)], DIGESTS[:400]
    more = [*some, place(count)]
    shuffled = data.draw(st.permutations(more))
    moved = [d for d in digests if preference(d, some)[0] != preference(d, shuffled)[0]]
    # All of what moves goes to the new one; losing it again is the same the other way round.
    assert {preference(d, more)[0] for d in moved} <= {place(count)}
    share = 1 / (count + 1)
    # Five standard deviations of a binomial share.
    assert abs(len(moved) / len(digests) - share) < 5 * (share * (1 - share) / len(digests)) ** 0.5


def test_a_hot_image_is_spread_and_a_cold_one_stays():
    placement = Placement()
    hot, cold = DIGESTS[0], DIGESTS[1]
    order = preference(hot, replicas(8))
    busy = order[0].place.removeprefix("host/chip")
    loaded = replicas(8, **{f"load{busy}": 8})
    went = {placement.choose(hot, loaded, digest_only=False)[0].place for _ in range(50)}
    assert went > {order[0].place}, "its first requests went to its own replica"
    assert placement.choose(hot, loaded, digest_only=False)[0].place != order[0].place
    own = preference(cold, loaded)[0]
    assert placement.choose(cold, loaded, digest_only=False)[0] == own


def test_a_digest_alone_goes_to_a_replica_that_was_sent_the_hot_image():
    placement, digest = Placement(), DIGESTS[0]
    order = [c.place for c in preference(digest, replicas(8))]
    loaded = replicas(8, **{f"load{p.removeprefix('host/chip')}": 9 for p in order[:5]})
    for _ in range(50):
        placement.choose(digest, loaded, digest_only=False)
    chosen = [c.place for c in placement.choose(digest, loaded, digest_only=True)]
    # The three without load were sent it; of the loaded ones, only the first and its fallbacks are tried.
    assert set(chosen[:3]) == set(order[5:])
    assert set(chosen[3:]) == set(order[:3])


def test_a_request_that_comes_again_is_no_new_demand():
    placement = Placement()
    for _ in range(50):
        placement.choose(DIGESTS[0], replicas(8, load0=9), digest_only=False, counts=False)
    assert placement.hot.width(DIGESTS[0], 8) == 1


def aged(places_work: dict[str, int], now: list[float]) -> Placement:
    """A placement whose places were sent so many requests, for images of their own."""
    placement = Placement(clock=lambda: now[0])
    for place, work in places_work.items():
        for number in range(work):
            placement.choose(f"{place}-{number}", [Candidate(place, place)], digest_only=False)
    return placement


def test_a_new_image_leaves_a_replica_that_has_had_more_work_and_then_stays():
    now, some = [0.0], replicas(8)
    busy = preference(DIGESTS[0], some)[0]
    placement = aged({c.place: 40 if c == busy else 10 for c in some}, now)
    home = placement.choose(DIGESTS[0], some, digest_only=False)[0]
    assert home != busy
    assert home in preference(DIGESTS[0], some)[:3], "a digest alone would not find it elsewhere"
    for place in preference(DIGESTS[0], some):  # whoever has had most work since
        for _ in range(30):
            placement.hot.sent("other", place.place)
        assert placement.choose(DIGESTS[0], some, digest_only=False)[0] == home
        assert placement.choose(DIGESTS[0], some, digest_only=True)[0] == home
    without = [c for c in some if c != home]
    assert placement.choose(DIGESTS[0], without, digest_only=False)[0] in without


def test_an_image_that_was_forgotten_goes_back_to_the_first():
    now, some = [0.0], replicas(8)
    busy = preference(DIGESTS[0], some)[0]
    placement = aged({c.place: 40 if c == busy else 10 for c in some}, now)
    assert placement.choose(DIGESTS[0], some, digest_only=False)[0] != busy
    now[0] += 3600
    for candidate in some:
        placement.hot.sent("other", candidate.place)
    assert placement.choose(DIGESTS[0], some, digest_only=False)[0] == busy


def test_why_an_image_went_where_it_went():
    placement, digest, some = Placement(), DIGESTS[0], replicas(4)
    order = preference(digest, some)
    placement.choose(digest, some, digest_only=False)
    assert placement.why(digest, order[0], some) == "first"
    assert placement.why(digest, order[3], some) == "overflow"
    for _ in range(60):
        placement.choose(digest, replicas(4, load0=9, load1=9), digest_only=False)
    assert placement.hot.width(digest, 4) > 1
    home = next(c for c in some if c.place == placement.hot.home(digest))
    other = next(c for c in order if c != home)
    assert placement.why(digest, home, some) == "first"
    assert placement.why(digest, other, some) == "hot"


def test_cold_images_do_not_wait_behind_a_hot_one():
    """On simulated chips: those that share the hot image's chip wait no longer than those that do not."""
    from perf import routing

    rng = random.Random(5)
    hot, cold = 0, range(1, 500)
    images = [hot if rng.random() < 0.4 else rng.choice(cold) for _ in range(6000)]

    def waits(router):
        outcome = routing.simulate(router, images, rate=55.0, seed=5)
        by_chip = defaultdict(list)
        for image, latency in zip(images, outcome.latencies, strict=True):
            if image != hot:
                by_chip[preference(routing.digest_of(image), CHIPS)[0]].append(latency)
        home = preference(routing.digest_of(hot), CHIPS)[0]
        others = [mean(by_chip[c]) for c in CHIPS if c != home]
        return mean(by_chip[home]), mean(others)

    beside, elsewhere = waits(routing.ours())
    assert beside < 1.5 * elsewhere
    beside, elsewhere = waits(routing.strict_affinity())
    assert beside > 10 * elsewhere, "or the test shows nothing"


CHIPS = [Candidate(f"host/chip{i}", f"host/chip{i}") for i in range(8)]


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
