"""``sam3-ray serve``: what it refuses before Ray starts, real starts, and what it leaves behind: nothing."""

from __future__ import annotations

import datetime
import gzip
import ipaddress
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
import yaml
from PIL import Image, ImageDraw

from sam3_ray.chips import Chip, Holder, Machine
from sam3_ray.local_ray import LOOPBACK_VARIABLE
from sam3_ray.ray_messages import cause_of
from sam3_ray.serve.preflight import DEFAULT_VALUES, Launch, Overrides, PreflightError, check

ROOT = Path(__file__).parents[1]
SAM3_RAY = [sys.executable, "-c", "import sys; from sam3_ray.cli import main; sys.exit(main())"]
START_S = 270.0
"""A start on a machine that is busy and has to compile every Python file."""

NO_CHIPS = Machine()
ONE_CHIP = Machine(chips=(Chip(index=0, device=0, card="p150a"),), driver="2.6.0")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until[T](found: Callable[[], T], what: str, seconds: float = START_S) -> T:
    """The first true value of ``found``."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, f"no {what} after {seconds:g} s"
        time.sleep(0.05)
    return value


# -- before Ray starts -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user without weights, chips and network, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("SAM3_WEIGHTS_DIR", raising=False)
    monkeypatch.delenv("TT_VISIBLE_DEVICES", raising=False)


def checked(
    values: Mapping[str, Any] | str | None = None, machine: Machine = NO_CHIPS, **overrides: Any
) -> Launch:
    """``check`` of a configuration, on a free port."""
    path = None
    if values is not None:
        path = Path("some_config.yaml")
        path.write_text(values if isinstance(values, str) else yaml.safe_dump(dict(values)))
    overrides.setdefault("port", free_port())
    return check(path, Overrides(**overrides), machine)


def config(args: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The default configuration, changed."""
    application = {**DEFAULT_VALUES["applications"][0], "args": dict(args or {})}
    return {**DEFAULT_VALUES, "applications": [application], **changes}


def routed(prefix: str | None) -> dict[str, Any]:
    application = {**DEFAULT_VALUES["applications"][0], "route_prefix": prefix}
    return {**DEFAULT_VALUES, "applications": [application]}


def test_the_repositorys_configuration_is_the_default() -> None:
    assert yaml.safe_load((ROOT / "serve_config.yaml").read_text()) == DEFAULT_VALUES


def test_defaults_become_the_demo_checkpoint_on_the_cpu() -> None:
    port = free_port()
    launch = checked(port=port)
    assert launch.plan.backend == "cpu"
    assert launch.plan.checkpoint.is_demo
    assert "HF_HUB_OFFLINE" in str(launch.why_demo)
    assert launch.url == f"http://127.0.0.1:{port}"
    # The builder inside Ray has nothing left to decide.
    args = launch.values["applications"][0]["args"]
    assert (args["backend"], args["checkpoint"]) == ("cpu", "demo")


def test_the_folders_own_configuration_is_taken() -> None:
    Path("serve_config.yaml").write_text(yaml.safe_dump(config({"checkpoint": "demo"})))
    launch = check(None, Overrides(port=free_port(), args={"max_prompts": 7}), NO_CHIPS)
    assert launch.why_demo is None
    assert launch.values["applications"][0]["args"]["max_prompts"] == 7


def test_all_interfaces_are_said() -> None:
    launch = checked(host="0.0.0.0")
    assert launch.everywhere
    assert launch.url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("a: [1, 2\nb: 3", r"some_config.yaml:2:\d+: not YAML"),
        ("just words", "holds no keys and values"),
        ("a: 2021-99-99", "some_config.yaml: not YAML: .*month"),
        ("a: !!int abc", "some_config.yaml: not YAML"),
        ("a: !!timestamp x", "some_config.yaml: not YAML"),
        ("a: " + "[" * 2000, "some_config.yaml.*: not YAML"),
        ({}, "`applications` must be a list"),
        ({"applications": ["sam3"]}, "`applications` must be a list"),
        ({"applications": []}, "0 applications have import_path"),
        (config(aplications=[]), "'aplications'; did you mean 'applications'"),
        (config(http_options={"prot": 1}), r"'http_options\.prot'; did you mean 'port'"),
        (config(http_options={"port": "many"}), r"http_options\.port"),
        (config(http_options={"ssl_certfile": "a.pem"}), "ssl_keyfile.*must be provided together"),
        (
            config(http_options={"ssl_keyfile": "half.yaml"}),
            r"http_options\.ssl_keyfile: no such file",
        ),
        (
            config({"deadline_s": 500}),
            "request_timeout_s is 150, but must be above deadline_s.*500",
        ),
        (routed("x"), "route_prefix 'x' must start with '/'"),
        (routed("/a/"), "route_prefix '/a/'.*not end with '/'"),
        (routed("/{a}"), r"route_prefix '/\{a\}'.*braces"),
        (routed(None), "route_prefix None"),
        (config(http_options=[1]), "`http_options` must be keys and values"),
        (config({"chekpoint": "demo"}), "'chekpoint'; did you mean 'checkpoint'"),
        (config({"api_keys_file": "no.keys"}), "api_keys_file: .*no.keys"),
        (
            config({"api_keys_file": "some_config.yaml"}),
            "api_keys_file: .*some_config.yaml:1: want",
        ),
        (config({"backend": "gpu"}), "backend: .*'gpu'"),
        (config({"replicas": 0}), "replicas"),
        (config({"checkpoint": "nowhere/else/sam3.pt"}), "nowhere/else/sam3.pt"),
        (config({"checkpoint": "facebook/sam3"}), "HF_HUB_OFFLINE is set.*SAM3_WEIGHTS_DIR"),
        (config({"backend": "blackhole", "checkpoint": "demo"}), "no chip"),
        (config({"checkpoint": "demo", "replicas": 500}), "500 replicas"),
        (
            {"applications": [{**DEFAULT_VALUES["applications"][0], "route_prefx": "/"}]},
            r"'applications\[0\]\.route_prefx'; did you mean 'route_prefix'",
        ),
    ],
)
def test_a_wrong_configuration(values: Mapping[str, Any] | str, said: str) -> None:
    with pytest.raises(PreflightError) as raised:
        checked(values, port=None if "http_options" in said else free_port())
    assert re.search(said, str(raised.value)), raised.value
    assert "\n" not in str(raised.value)


def test_a_configuration_that_is_not_there() -> None:
    with pytest.raises(PreflightError, match=r"absent\.yaml: No such file"):
        check(Path("absent.yaml"), Overrides(), NO_CHIPS)


@pytest.mark.parametrize("content", ["empty", "junk", "cut short", "another model"])
def test_a_broken_checkpoint(content: str) -> None:
    import torch

    from sam3_ray.checkpoint import DEMO_CHECKPOINT

    path = Path("broken.pt")
    if content == "another model":
        torch.save({"backbone.weight": torch.zeros(3)}, path)
    else:
        data = DEMO_CHECKPOINT.read_bytes()
        path.write_bytes({"empty": b"", "junk": b"junk" * 99, "cut short": data[:-5000]}[content])
    with pytest.raises(PreflightError, match=r"broken\.pt"):
        checked(config({"checkpoint": "broken.pt"}))


def test_a_port_in_use_names_who_uses_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PreflightError) as raised:
            checked(config({"checkpoint": "demo"}), port=port)
    assert f"port {port} on 127.0.0.1 is in use by" in str(raised.value)
    assert str(os.getpid()) in str(raised.value)
    assert f"--port {port + 1}" in str(raised.value)


@pytest.mark.parametrize("taken", ["by another", "by the service itself"])
def test_a_metrics_port_in_use(taken: str, capsys: pytest.CaptureFixture[str]) -> None:
    from sam3_ray.cli import main

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1] if taken == "by another" else free_port())
        own = port if taken != "by another" else str(free_port())
        assert main(["serve", "--port", own, "--metrics-port", port]) == 1
    said = capsys.readouterr().err
    assert f"--metrics-port {port}" in said or f"--metrics-port {int(port) + 1}" in said


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("127.0.0.1", 65536, "65536"),
        ("127.0.0.1", -1, "-1"),
        ("192.0.2.7", None, "192.0.2.7 is not an address of this machine"),
        ("no such host", None, "no such host"),
        ("a..b", None, r"'a\.\.b': not the name of a host"),
        ("h" * 70, None, "not the name of a host"),
    ],
)
def test_an_address_that_cannot_be(host: str, port: int | None, said: str) -> None:
    with pytest.raises(PreflightError, match=said):
        checked(host=host, port=free_port() if port is None else port)


def test_a_route_below_the_root_is_part_of_the_url() -> None:
    port = free_port()
    for prefix in ("/sam3", "/a/b"):
        assert checked(routed(prefix), port=port).url == f"http://127.0.0.1:{port}{prefix}"


def test_limits_are_those_of_our_application_wherever_it_stands() -> None:
    ours = config({"checkpoint": "demo", "max_upload_bytes": 12345})["applications"]
    other = {
        "name": "o",
        "route_prefix": "/o",
        "import_path": "other:app",
        "args": {"max_upload_bytes": 1},
    }
    for applications in ([other, *ours], [*ours, other]):
        assert checked(config(applications=applications)).max_upload_bytes == 12345


def test_a_file_of_keys_is_found_from_any_folder(tmp_path: Path) -> None:
    Path("keys").write_text("me: 0123456789abcdef\n")
    launch = checked(config({"checkpoint": "demo", "api_keys_file": "keys"}))
    assert launch.values["applications"][0]["args"]["api_keys_file"] == str(tmp_path / "keys")


def test_without_a_timeout_of_serves_any_deadline_will_do() -> None:
    http = {"host": "127.0.0.1"}
    values = config({"deadline_s": 500, "checkpoint": "demo"}, http_options=http)
    assert checked(values).url


def certificate(folder: Path) -> dict[str, str]:
    """A certificate of nobody for a host that is not ours, as options of Serve."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "elsewhere.example")])
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(signed.public_bytes(pem))
    plain = serialization.NoEncryption(), serialization.BestAvailableEncryption(b"secret")
    for path, encryption in zip(("key.pem", "locked.pem"), plain, strict=True):
        (folder / path).write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption)
        )
    return {"ssl_certfile": str(folder / "cert.pem"), "ssl_keyfile": str(folder / "key.pem")}


def test_a_certificate_is_tried(tmp_path: Path) -> None:
    good = certificate(tmp_path)
    (tmp_path / "junk.pem").write_text("junk")
    junk, locked = str(tmp_path / "junk.pem"), str(tmp_path / "locked.pem")

    def with_options(**options: str) -> Launch:
        http = {"host": "127.0.0.1", **good, **options}
        return checked(config({"checkpoint": "demo"}, http_options=http))

    assert with_options().url.startswith("https://127.0.0.1:")
    assert with_options(ssl_keyfile=locked, ssl_keyfile_password="secret").url
    for wrong, said in (
        ({"ssl_certfile": "absent.pem"}, r"ssl_certfile: no such file: absent\.pem"),
        ({"ssl_certfile": junk}, r"junk\.pem cannot be used"),
        ({"ssl_keyfile": junk}, "cannot be used"),
        ({"ssl_keyfile": locked}, "cannot be used"),
        ({"ssl_keyfile": locked, "ssl_keyfile_password": "wrong"}, "cannot be used"),
        ({"ssl_ca_certs": junk}, "cannot be used"),
    ):
        with pytest.raises(PreflightError, match=said):
            with_options(**wrong)


@pytest.mark.parametrize("content", [None, b"", b"junk", "cut short", "few merges"])
def test_a_vocabulary_that_is_none(
    content: bytes | str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sam3_ray.text import find_bpe_file

    path = tmp_path / "bpe.txt.gz"
    real = find_bpe_file().read_bytes()
    if content == "cut short":
        path.write_bytes(real[:-1000])
    elif content == "few merges":
        path.write_bytes(gzip.compress(gzip.decompress(real)[:10_000]))
    elif isinstance(content, bytes):
        path.write_bytes(content)
    monkeypatch.setenv("SAM3_BPE_PATH", str(path))
    with pytest.raises(PreflightError, match=str(path)):
        checked(config({"checkpoint": "demo"}))
    path.write_bytes(real)
    assert checked(config({"checkpoint": "demo"})).url


def test_a_machine_with_chips_never_takes_the_demo_by_itself() -> None:
    with pytest.raises(PreflightError, match="SAM3_WEIGHTS_DIR"):
        checked(machine=ONE_CHIP)
    assert checked(config({"checkpoint": "demo"}), ONE_CHIP).plan.backend == "blackhole"


def test_chips_that_are_busy_or_locked() -> None:
    busy = Machine(chips=(Chip(0, 0, holders=(Holder(4242, "tt-smi"),)), Chip(1, 1)))
    launch = checked(config({"checkpoint": "demo"}), busy)
    assert len(launch.notes) == 1
    assert "chip 0 is open in tt-smi (pid 4242)" in launch.notes[0]
    with pytest.raises(PreflightError, match="/dev/tenstorrent/3"):
        checked(config({"checkpoint": "demo"}), Machine(chips=(Chip(0, 3, readable=False),)))


def test_visible_devices_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(chips=tuple(Chip(i, i) for i in range(4)))
    monkeypatch.setenv("TT_VISIBLE_DEVICES", "1,3")
    launch = checked(config({"checkpoint": "demo"}), machine)
    assert [chip.index for chip in launch.machine_chips] == [1, 3]
    assert launch.plan.replicas == 2
    monkeypatch.setenv("TT_VISIBLE_DEVICES", "4")
    with pytest.raises(PreflightError, match="'4'"):
        checked(config({"checkpoint": "demo"}), machine)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_replicas": 2}, None),
        ({"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}}, None),
        ({"ray_actor_options": {"num_cpus": 0.5, "resources": {"TTNPU": 1}}}, None),
        ({"num_replicas": 3}, "Sam3Replica: num_replicas is 3, but there are 2 chips"),
        (
            {"autoscaling_config": {"min_replicas": 1, "max_replicas": 8}},
            "autoscaling_config.max_replicas is 8, but there are 2 chips",
        ),
        ({"ray_actor_options": {"num_cpus": 2}}, "must have resources: {TTNPU: 1}"),
    ],
)
def test_serves_own_options_of_the_replicas_win_where_they_fit(
    options: dict[str, Any], said: str | None
) -> None:
    machine = Machine(chips=tuple(Chip(i, i) for i in range(2)))
    values = config({"checkpoint": "demo"})
    values["applications"][0]["deployments"] = [{"name": "Sam3Replica", **options}]
    if said is None:
        launched = checked(values, machine).values["applications"][0]["deployments"]
        assert launched == [{"name": "Sam3Replica", **options}]
    else:
        with pytest.raises(PreflightError, match=re.escape(said)):
            checked(values, machine)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("", ""),
        ("it was evicted", "it was evicted"),
        (
            "The deployment failed to start. Error:\n\x1b[36mray::Replica.init()\x1b[39m (pid=3)\n"
            '  File "a.py", line 3, in f\n    raise ValueError(\nValueError: too small\n\n'
            "The above exception was the direct cause of the following exception:\n\n"
            "Traceback (most recent call last):\n  ...\n"
            "sam3_ray.errors.CheckpointError: sam3.pt does not fit",
            "sam3_ray.errors.CheckpointError: sam3.pt does not fit",
        ),
        (
            "Traceback:\nMemoryError\nray.exceptions.RayTaskError: see above",
            "MemoryError",
        ),
    ],
)
def test_the_cause_in_a_wall_of_tracebacks(message: str, cause: str) -> None:
    assert cause_of(message) == cause


# -- the command, for real -------------------------------------------------------------------------


class Serving:
    """``sam3-ray serve`` in a process of its own."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        # What the tests' own Ray sets, or a developer has set, is not what a user's machine has.
        plain = {
            k: v for k, v in os.environ.items() if k not in (LOOPBACK_VARIABLE, "RAY_AUTH_MODE")
        }
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*SAM3_RAY, "serve", *arguments],
                stdout=out,
                stderr=err,
                cwd=folder,
                env={**plain, **environment},
            )
        self.family: dict[int, psutil.Process] = {}

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def watch(self) -> bool:
        """Note all its descendants so far; whether it has ended."""
        try:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.family.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            return True
        return self.process.poll() is not None

    def reachable(self) -> dict[int, str]:
        """Ports of its processes that listen on more than the loopback, each with its process's name."""
        self.watch()
        found = {}
        for process in [psutil.Process(self.process.pid), *self.family.values()]:
            try:
                connections, name = process.net_connections("inet"), process.name()
            except psutil.NoSuchProcess:
                continue  # Ray starts short-lived ones, too
            for connection in connections:
                address = ipaddress.ip_address(connection.laddr.ip)
                address = getattr(address, "ipv4_mapped", None) or address
                if connection.status == psutil.CONN_LISTEN and not address.is_loopback:
                    found[connection.laddr.port] = name
        return found

    def until(self, found: Callable[[], object], what: str) -> None:
        def step() -> bool:
            ended = self.watch()
            assert not ended or found(), f"it ended before: {what}\n{self.out}\n{self.err}"
            return bool(found())

        until(step, what)

    def stop(self, number: int) -> int:
        """Send a signal; the exit code."""
        self.watch()
        self.process.send_signal(number)
        until(self.watch, "end", 90)
        return self.process.wait(5)

    def left_behind(self) -> list[str]:
        """Its processes that still run, though it has ended."""
        return [
            f"{process.pid} {process.name()}"
            for process in self.family.values()
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]

    def end_for_good(self) -> None:
        self.watch()
        for process in [*self.family.values(), psutil.Process(self.process.pid)]:
            if process.is_running():
                process.kill()
        self.process.wait(10)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(*arguments: str, **environment: str) -> Serving:
        started.append(Serving(tmp_path, *arguments, **environment))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.end_for_good()


OTHER_RAY = """
import sys
import ray

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
         namespace="other", _temp_dir=sys.argv[1], object_store_memory=100_000_000)

@ray.remote
def double(x):
    return 2 * x

print(ray.get_runtime_context().gcs_address, flush=True)
for line in sys.stdin:
    print(ray.get(double.remote(int(line))), flush=True)
ray.shutdown()
"""


class OtherRay:
    """Somebody else's Ray on this machine."""

    def __init__(self) -> None:
        self._folder = f"/tmp/or{os.getpid()}"  # short: socket paths have a limit
        self._process = subprocess.Popen(
            [sys.executable, "-c", OTHER_RAY, self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address, "the other Ray did not start"

    def double(self, x: int) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{x}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture
def other_ray() -> Iterator[OtherRay]:
    other = OtherRay()
    yield other
    other.close()


@pytest.fixture
def circle(tmp_path: Path) -> Path:
    path = tmp_path / "circle.png"
    picture = Image.new("RGB", (320, 240), "white")
    ImageDraw.Draw(picture).ellipse((60, 50, 160, 150), fill="red")
    picture.save(path)
    return path


def documented_series() -> set[str]:
    """The names in docs/serving.md as Prometheus sees them; of a histogram its count."""
    section = (
        (ROOT / "docs" / "serving.md").read_text().split("\n## Metrics\n")[1].split("\n## ")[0]
    )
    return set(re.findall(r"^\| `(ray_sam3_\w+)` \|", section, re.MULTILINE))


def test_the_documented_metrics_are_those_of_the_source() -> None:
    source = (ROOT / "sam3_ray" / "serve" / "metrics.py").read_text()
    totals = set(re.findall(r'_Total\(\s*"(\w+)"', source))
    gauges = set(re.findall(r'Gauge\(\s*"(\w+)"', source))
    histograms = set(re.findall(r'Histogram\(\s*"(\w+)"', source))
    assert documented_series() == (
        {f"ray_{name}_total" for name in totals}
        | {f"ray_{name}" for name in gauges}
        | {f"ray_{name}_count" for name in histograms}
    )


@pytest.mark.timeout(900)
def test_a_whole_life_beside_another_ray(
    serving: Callable[..., Serving], other_ray: OtherRay, circle: Path
) -> None:
    """Starts though RAY_ADDRESS names another Ray, answers as Python does, ends, leaves nothing behind."""
    from sam3_ray import Sam3
    from sam3_ray.client import Client, RequestRefusedError

    port = free_port()
    service = serving("--port", str(port), RAY_ADDRESS=other_ray.address, HF_HUB_OFFLINE="1")
    service.until(lambda: "Ctrl-C" in service.out, "greeting")
    url = f"http://127.0.0.1:{port}"
    assert f"is ready: {url}\n" in service.out
    assert (service.out + service.err).lower().count("demo checkpoint") == 1
    # It answers at once, and as the Python API does.
    with Client(url) as client, Sam3.from_pretrained("demo", backend="cpu") as model:
        assert client.info()["checkpoint"] == "demo"
        expected = model(circle, ["red circle", "car"])
        answer = client.ask(circle, ["red circle", "car"])
        assert not answer.cached
        assert [len(result) for result in answer.results] == [1, 0]
        for got, want in zip(answer.results, expected, strict=True):
            assert np.array_equal(got.masks, want.masks)
            np.testing.assert_allclose(got.scores, want.scores, atol=1e-4)
            np.testing.assert_allclose(got.boxes, want.boxes, atol=1e-2)
        # By digest alone now; other pixels are another image.
        again = client.ask(circle, "red circle", mask_format="polygon")
        assert again.cached
        assert again.image_digest == answer.image_digest
        pixels = np.asarray(Image.open(circle).convert("RGB")).copy()
        pixels[:20, :20] = 0
        assert client.warm(pixels) != answer.image_digest
        assert client.ask(pixels, "red circle").cached
        with pytest.raises(RequestRefusedError, match="not an image"):
            client.predict(b"no picture", "car")
    # Nobody else reaches it, nor its Ray; a replica's port for its like, Ray's own, wants Ray's token.
    for port_of_replica, name in service.reachable().items():
        assert name.startswith("ray::ServeReplica"), (name, port_of_replica)
        with grpc.insecure_channel(f"127.0.0.1:{port_of_replica}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=20)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    # The metrics that are documented are where the greeting says.
    metrics_url = re.findall(
        r"^Metrics for Prometheus: (http://127\.0\.0\.1:\d+/metrics)$", service.out, re.M
    )

    def exported() -> set[str]:
        lines = httpx.get(metrics_url[0], timeout=20).text.splitlines()
        return {
            re.split(r"[ {]", line, maxsplit=1)[0]
            for line in lines
            if "sam3_" in line and line[0] != "#"
        }

    service.until(
        lambda: documented_series() <= exported(), f"series {sorted(documented_series())}"
    )
    # Nothing of Ray's or Serve's talk is on the console.
    assert [line for line in service.err.splitlines() if not line.startswith("sam3-ray: ")] == []
    assert "INFO" not in service.out + service.err
    assert len(service.family) >= 6  # its Ray is its own: gcs, raylet, agents, controller, replicas
    started = time.monotonic()
    assert service.stop(signal.SIGINT) == 0
    assert time.monotonic() - started < 60  # measured: 5 s on an idle machine
    assert service.left_behind() == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert other_ray.double(21) == 42


@pytest.mark.timeout(600)
def test_it_is_ready_when_it_answers_over_https(
    serving: Callable[..., Serving], tmp_path: Path
) -> None:
    http = {"host": "127.0.0.1", **certificate(tmp_path)}
    Path("secure.yaml").write_text(
        yaml.safe_dump(config({"checkpoint": "demo"}, http_options=http))
    )
    port = free_port()
    service = serving("secure.yaml", "--port", str(port))
    service.until(lambda: "Ctrl-C" in service.out, "greeting")
    assert f"is ready: https://127.0.0.1:{port}\n" in service.out
    with httpx.Client(verify=False) as client:
        assert client.get(f"https://127.0.0.1:{port}/health").json() == {"status": "ok"}
    assert service.stop(signal.SIGTERM) == 0
    assert service.left_behind() == []


@pytest.mark.timeout(600)
def test_a_replica_that_cannot_start_ends_it_with_its_cause(
    serving: Callable[..., Serving], tmp_path: Path
) -> None:
    """What only the loading of the model can find: a checkpoint without most of its tensors."""
    import torch

    from sam3_ray.config import DEMO

    path = tmp_path / "half.pt"
    weights = {"detector.backbone.x": torch.zeros(2)}
    torch.save({"model": weights, "sam3_ray_config": DEMO.to_dict()}, path)
    service = serving("--port", str(free_port()), "--checkpoint", str(path))
    until(service.watch, "end")
    assert service.process.wait(5) == 1
    assert service.out == ""
    *talk, last = service.err.splitlines()
    assert "does not fit" in last
    assert str(path) in last
    assert "Traceback" not in service.err
    assert all(line.startswith("sam3-ray: ") for line in talk)
    assert service.left_behind() == []


@pytest.mark.timeout(600)
def test_a_stop_while_ray_starts(serving: Callable[..., Serving]) -> None:
    service = serving("--port", str(free_port()), "--checkpoint", "demo")
    service.until(lambda: service.family, "first process of Ray")
    assert service.stop(signal.SIGTERM) == 143
    assert "Traceback" not in service.err
    assert service.out == ""
    assert service.left_behind() == []


@pytest.mark.timeout(300)
def test_what_is_wrong_is_one_message_and_no_ray(
    serving: Callable[..., Serving], tmp_path: Path
) -> None:
    Path("typo.yaml").write_text(yaml.safe_dump(config({"chekpoint": "demo"})))
    service = serving("typo.yaml")
    until(service.watch, "end")
    assert service.process.wait(5) == 1
    assert service.out == ""
    assert service.err.splitlines()[-1].startswith(
        "sam3-ray: typo.yaml: unknown key 'chekpoint'; did you mean 'checkpoint'?"
    )
    assert len(service.err.splitlines()) == 2
    assert service.family == {}


@pytest.mark.timeout(600)
def test_serve_run_runs_the_same_application(tmp_path: Path, circle: Path) -> None:
    """``serve run serve_config.yaml``, Ray's own command, with another port and the demo checkpoint."""
    port = free_port()
    values = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    values["http_options"]["port"] = port
    values["applications"][0]["args"]["checkpoint"] = "demo"
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    log = tmp_path / "serve_run.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("serve")), "run", str(path)],
            stdout=output,
            stderr=output,
            cwd=tmp_path,
            env={**os.environ, "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"},
        )
    family: dict[int, psutil.Process] = {}
    try:

        def answer() -> httpx.Response | None:
            assert process.poll() is None, log.read_text()
            for child in psutil.Process(process.pid).children(recursive=True):
                family.setdefault(child.pid, child)
            try:
                response = httpx.post(
                    f"http://127.0.0.1:{port}/predict",
                    files={"image": circle.read_bytes()},
                    data={"prompts": "red circle", "mask_format": "none"},
                    timeout=60,
                )
            except httpx.TransportError:
                return None
            return response if response.status_code == 200 else None

        body = until(answer, "answer").json()
        assert (body["checkpoint"], body["results"][0]["num_instances"]) == ("demo", 1)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(90)
        finally:
            for child in [*family.values()]:
                if child.is_running():
                    child.kill()
