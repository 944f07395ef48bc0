"""Emulated chips behind the real ingress: a replica each, what each sees, parking, two hosts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sam3_ray import Sam3, chips
from sam3_ray.masks import rle_to_mask
from sam3_ray.serve.hosts import ChipPinningError, fault_of, pinned_chip
from sam3_ray.serve.ingress import place_of
from tests.emulation.processes import REPOSITORY, clean_environment
from tests.serve.conftest import Picture
from tests.serve.fakes import wait_until
from tests.serve.test_service import drawn

START_S = 400
"""Four emulated replicas at once on two cores take about a minute; other tests may run."""

RAW = {"content-type": "image/png"}

COMMAND = "from sam3_ray.cli import main; raise SystemExit(main())"


@dataclass
class Host:
    """A running emulated host."""

    client: httpx.Client
    address: str
    folder: Path

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.get("/info").json()["replicas"]
        return found

    def ask(self, data: bytes, prompt: str) -> dict[str, Any]:
        response = self.client.post(
            "/predict", content=data, headers=RAW, params={"prompts": prompt, "mask_format": "rle"}
        )
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def command(self, *words: str) -> Any:
        """``sam3-ray`` with these words on this host's Ray; its JSON."""
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *words, "--json", "--address", self.address],
            env=clean_environment(),
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@contextmanager
def emulated_host(nodes: int, chips_each: int) -> Iterator[Host]:
    folder = Path(tempfile.mkdtemp(prefix="s3e", dir="/tmp"))  # short: socket paths have a limit
    words = [str(folder), "--nodes", str(nodes), "--chips", str(chips_each)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.emulated_host", *words],
            env=clean_environment(SAM3_CACHE_DIR=str(folder / "cache")),
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()  # ends where the process does
            assert line, (folder / "log").read_text()[-6000:]
            ready = json.loads(line)
            with httpx.Client(base_url=ready["url"], timeout=START_S) as client:
                yield Host(client, ready["address"], folder)
        finally:
            process.communicate(timeout=60)  # closes stdin
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def four_chips() -> Iterator[Host]:
    with emulated_host(1, 4) as host:
        yield host


def test_each_replica_has_a_chip_of_its_own(four_chips: Host) -> None:
    replicas = four_chips.replicas()
    assert [replica["chip"] for replica in replicas] == [0, 1, 2, 3]
    assert [replica["place"] for replica in replicas] == [f"host0/chip{n}" for n in range(4)]
    assert [replica["variable"] for replica in replicas] == ["0", "1", "2", "3"]
    assert {replica["chips_seen"] for replica in replicas} == {1}
    assert len({replica["pid"] for replica in replicas}) == 4
    assert {replica["backend"] for replica in replicas} == {"blackhole"}
    folders = {Path(replica["kernels"]) for replica in replicas}
    assert folders == {four_chips.folder / "cache" / "kernels" / str(n) for n in range(4)}


def test_four_that_started_at_once_from_cold_converted_each_weight_once(four_chips: Host) -> None:
    times = Counter((four_chips.folder / "written").read_text().split())
    files = {path.name for path in (four_chips.folder / "cache/weights").rglob("*.tensorbin")}
    assert set(times) == files
    assert len(files) > 100
    assert set(times.values()) == {1}


def test_answers_equal_the_cpu_s(four_chips: Host, pictures: list[Picture]) -> None:
    """As near as the emulated chip's own tests ask: scores, boxes, masks of what is surely there."""
    served = {
        number: four_chips.ask(picture.data, picture.phrase)
        for number, picture in enumerate(pictures)
    }
    assert len({answer["chip"] for answer in served.values()}) > 1
    with Sam3.from_pretrained("demo", backend="cpu", warmup=0) as model:
        for number, picture in enumerate(pictures):
            (expected,) = model(picture.data, [picture.phrase])
            (result,) = served[number]["results"]
            assert abs(result["presence"] - expected.presence) < 0.03
            assert result["num_instances"] == len(expected)
            for found, score, box, mask in zip(
                result["instances"], expected.scores, expected.boxes, expected.masks, strict=True
            ):
                assert abs(found["score"] - score) < 0.05
                np.testing.assert_allclose(found["box_xyxy"], box, atol=4)
                ours, theirs = rle_to_mask(found["mask"]), np.asarray(mask)
                assert (ours & theirs).sum() / (ours | theirs).sum() > 0.9


def test_an_image_comes_back_to_the_chip_that_has_it(
    four_chips: Host, pictures: list[Picture]
) -> None:
    for picture in pictures[:4]:
        first = four_chips.ask(picture.data, picture.phrase)
        again = four_chips.ask(picture.data, "another phrase")
        assert again["cached"] is True
        assert again["chip"] == first["chip"]


def test_a_chip_is_parked_and_unparked_by_hand(four_chips: Host, pictures: list[Picture]) -> None:
    picture = pictures[0]
    chip = four_chips.ask(picture.data, picture.phrase)["chip"]
    place, pid = f"host0/chip{chip}", four_chips.replicas()[chip]["pid"]
    assert four_chips.command("chips", "park", str(chip)) == {
        "place": place, "closed": True, "unfinished": 0,
    }  # fmt: skip
    assert four_chips.ask(picture.data, picture.phrase)["chip"] != chip
    listed = {row["place"]: row for row in four_chips.command("chips")["replicas"]}
    assert listed[place]["parked"] == "parked by hand"
    assert sum(row["parked"] is None for row in listed.values()) == 3
    assert four_chips.client.get("/health").status_code == 200

    assert four_chips.command("chips", "unpark", place)["was"] == "parked by hand"

    def back() -> bool:
        at = {replica["place"]: replica for replica in four_chips.replicas()}.get(place)
        return at is not None and at["parked"] is None and at["pid"] != pid

    wait_until(back, START_S)
    # Its old images are at home elsewhere now; of new ones it gets its share.
    seeds = iter(range(20_000, 30_000))
    wait_until(lambda: four_chips.ask(drawn(next(seeds)), picture.phrase)["chip"] == chip, 90)


def test_caches_are_listed_and_cleared(four_chips: Host, pictures: list[Picture]) -> None:
    four_chips.ask(pictures[0].data, pictures[0].phrase)
    replicas = four_chips.command("cache", "ls")["replicas"]
    assert [replica["place"] for replica in replicas] == [f"host0/chip{n}" for n in range(4)]
    assert sum(replica["image_cache"]["entries"] for replica in replicas) > 0
    assert four_chips.command("cache", "clear") == {"cleared": 4}
    assert all(r["image_cache"]["entries"] == 0 for r in four_chips.replicas())
    assert four_chips.ask(pictures[0].data, pictures[0].phrase)["cached"] is False


def test_two_hosts_of_two_chips(pictures: list[Picture]) -> None:
    with emulated_host(2, 2) as host:
        replicas = host.replicas()
        places = [f"host{node}/chip{chip}" for node in range(2) for chip in range(2)]
        assert [replica["place"] for replica in replicas] == places
        assert {replica["chips_seen"] for replica in replicas} == {1}
        served = Counter(host.ask(picture.data, picture.phrase)["replica"] for picture in pictures)
        assert len(served) > 1
        for picture in pictures[:3]:
            assert host.ask(picture.data, picture.phrase)["cached"] is True
        # Both hosts have a chip 1: its number alone does not say which.
        done = host.command("chips", "park", "host1/chip1")
        assert done == {"place": "host1/chip1", "closed": True, "unfinished": 0}
        assert {r["place"] for r in host.replicas() if r["parked"]} == {"host1/chip1"}


# -- what is refused before anything starts ---------------------------------------------------------

FOUR = chips.Machine(
    tuple(chips.Chip(n, n, pci_address=f"0000:0{n + 1}:00.0") for n in range(4)), driver="2.5.0"
)


@pytest.mark.parametrize(
    ("counted", "machine", "environment", "message"),
    [
        (4, FOUR, {}, None),
        (3, FOUR, {}, None),  # someone told Ray to use fewer
        (5, FOUR, {}, r"counts 5 chips .* on here, which has 4 .*TT_VISIBLE_DEVICES=0,1,2,3"),
        (2, FOUR, {"TT_VISIBLE_DEVICES": "1,2"}, None),
        (3, FOUR, {"TT_VISIBLE_DEVICES": "1,2"}, "which has 2 .*TT_VISIBLE_DEVICES=1,2"),
        (2, FOUR, {"TT_VISIBLE_DEVICES": "0,0"}, "names chip '0' twice"),
        (2, FOUR, {"TT_VISIBLE_DEVICES": "0,7"}, "names chip '7', which is not here"),
        (1, chips.Machine(), {}, "counts 1 chips .* which has 0 .*sam3-ray doctor"),
        (4, chips.Machine(), {"TT_METAL_MOCK_CLUSTER_DESC_PATH": "/x"}, None),
    ],
)
def test_what_ray_counts_is_compared_with_the_machine(
    counted: int, machine: chips.Machine, environment: dict[str, str], message: str | None
) -> None:
    fault = fault_of(counted, machine, environment, "here")
    if message is None:
        assert fault is None
    else:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(fault)


@pytest.mark.parametrize(("value", "chip"), [("0", 0), ("3", 3), ("0000:02:00.0", 1), (" 2 ", 2)])
def test_the_chip_that_ray_gave(value: str, chip: int) -> None:
    assert pinned_chip(value, FOUR) == chip


@pytest.mark.parametrize("value", [None, "", "0,1", "NoDevFiles", "0000:09:00.0"])
def test_a_replica_that_does_not_see_one_chip_says_so(value: str | None) -> None:
    with pytest.raises(ChipPinningError, match="TT_VISIBLE_DEVICES"):
        pinned_chip(value, FOUR)


@pytest.mark.parametrize(
    ("name", "places", "expected"),
    [
        ("1", ["a/chip0", "a/chip1", "a/chip11"], "a/chip1"),
        ("a/chip0", ["a/chip0", "b/chip0"], "a/chip0"),
        ("0", ["a/chip0", "b/chip0"], "means more than one of the places .*a/chip0, b/chip0"),
        ("7", ["a/chip0"], "'7' is none of the places"),
        ("", ["a/cpu0"], "is none of"),
    ],
)
def test_which_place_is_meant(name: str, places: list[str], expected: str) -> None:
    if expected in places:
        assert place_of(name, places) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            place_of(name, places)
