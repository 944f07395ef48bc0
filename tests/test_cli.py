"""The command line: quick help, ``predict`` on the demo checkpoint, and how commands end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

import sam3_ray
from sam3_ray.cli import main

SAM3_RAY = [sys.executable, "-c", "import sys; from sam3_ray.cli import main; sys.exit(main())"]
TIMEOUT = 240


def started(arguments: Sequence[str], **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [*SAM3_RAY, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        **options,
    )


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two pictures: a red circle on white, and a blue square on white."""
    folder = tmp_path_factory.mktemp("pictures")
    circle = Image.new("RGB", (320, 240), "white")
    ImageDraw.Draw(circle).ellipse((60, 50, 160, 150), fill="red")
    square = Image.new("RGB", (200, 200), "white")
    ImageDraw.Draw(square).rectangle((50, 60, 130, 140), fill="blue")
    paths = [folder / "circle.png", folder / "square.png"]
    for picture, path in zip((circle, square), paths, strict=True):
        picture.save(path)
    return paths


# -- the command line itself -----------------------------------------------------------------------


def test_help_loads_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *SAM3_RAY[1:], "--help"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    for command in ("serve", "predict", "label", "preview", "chips", "doctor"):
        assert command in done.stdout
    loaded = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in loaded
    assert not loaded & {"numpy", "torch", "ray", "PIL", "pydantic", "httpx", "typer", "asyncio"}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"sam3-ray {sam3_ray.__version__}\n"


@pytest.mark.parametrize("command", ["serve", "predict", "label", "preview", "chips", "doctor"])
def test_every_command_has_help_with_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "examples:" in shown
    assert f"sam3-ray {command}" in shown


def test_help_says_which_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "predict", "label"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert "where they cannot be had, the small demo checkpoint" in shown


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pedict"], "pedict"),
        (["predict", "a.png"], "--prompt"),
        (["predict", "--prompt", "car"], "IMAGE"),
        (["predict", "a.png", "-p", " "], "a prompt is empty"),
        (["predict", "a.png", "-p", "car", "--threshold", "2"], "[0, 1]"),
        (["predict", "a.png", "-p", "car", "--threshold", "nan"], "[0, 1]"),
        (["predict", "a.png", "-p", "car", "--max-instances", "201"], "1 to 200"),
        (["predict", "a.png", "-p", "car", "--max-instances", "many"], "many"),
        (["predict", "a.png", "-p", "car", "--backend", "gpu"], "gpu"),
    ],
)
def test_a_wrong_command_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.png", "b.png", "-o", "one.png"], "give a folder"),
        (["a.png", "-o", "one.xyz"], ".xyz"),
        (["a.png", "-o", "a.png"], "overwrite"),
        (["a.png", "-o", "not/there/one.png"], "not/there"),
        (["a.png", "-o", "y.blp"], ".blp cannot hold"),
        (["a.png", "-o", f"{'n' * 300}.png"], "too long"),
        (["a.png", "--masks"], "--json"),
        (["a.png", "--checkpoint", "nowhere/sam3.pt"], "nowhere/sam3.pt"),
        (["a.png", "--checkpoint", "broken.pt"], "broken.pt cannot be read"),
        (["a.png", "--checkpoint", "demo", "--backend", "blackhole"], "no chip"),
    ],
)
def test_what_fails_before_the_model_is_loaded(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TT_VISIBLE_DEVICES", "none")
    Path("broken.pt").write_bytes(b"not a checkpoint")
    monkeypatch.setattr("sam3_ray.api.Sam3.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    assert main(["predict", *arguments, "-p", "car"]) != 0
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("command", [["predict", "a.png", "-p", "car"], ["serve"], ["chips"]])
@pytest.mark.parametrize(
    ("name", "value"),
    [("SAM3_MAX_PROMPTS", "abc"), ("SAM3_EXIF", "maybe"), ("SAM3_NUM_THREADS", "0")],
)
def test_a_variable_with_an_impossible_value_is_named_first(
    command: list[str],
    name: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    assert main(command) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert f"sam3-ray: {name}=" in shown.err


@pytest.mark.parametrize("name", ["SAM3_BPE_PATH", "SAM3_WEIGHTS_DIR"])
def test_a_file_that_a_variable_names_must_be_there(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "not/there.gz")
    monkeypatch.setattr("sam3_ray.api.Sam3.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    assert main(["predict", "a.png", "-p", "car"]) == 1
    assert "not/there.gz" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written(pictures: list[Path], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*SAM3_RAY, "predict", str(pictures[0]), "-p", "car", "--checkpoint", "demo"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 1
    assert done.stderr == "sam3-ray: the output cannot be written: No space left on device\n"


def test_no_output_at_all(pictures: list[Path], tmp_path: Path) -> None:
    """As after ``>&- 2>&-`` in a shell: the next files that are opened must not be written to instead."""
    target = tmp_path / "overlay.png"
    arguments = [str(pictures[0]), "-p", "red circle", "--checkpoint", "demo", "-o", str(target)]
    shell = 'exec "$@" >&- 2>&-'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *SAM3_RAY, "predict", *arguments], timeout=TIMEOUT
    )
    assert done.returncode == 0
    with Image.open(target) as drawn:
        drawn.load()
        assert drawn.format == "PNG"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--version"], ["doctor"]])
def test_a_reader_that_goes_away(arguments: list[str], unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*SAM3_RAY, *arguments],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered, "HF_HUB_OFFLINE": "1"},
    )
    os.close(writing)
    assert done.stderr == ""
    # argparse itself says nothing of a version that nobody reads.
    assert done.returncode == 141 or (arguments == ["--version"] and unbuffered)


# -- predict ---------------------------------------------------------------------------------------


def test_predict_prints_a_table(pictures: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["predict", str(pictures[0]), "-p", "red circle", "-p", "car", "--checkpoint", "demo"]
    )
    shown = capsys.readouterr().out
    assert code == 0
    assert "circle.png  320 x 240" in shown
    assert '"red circle": 1 found' in shown
    assert '"car": nothing' in shown


def test_predict_json_is_one_document_that_agrees_with_python(
    pictures: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    from pycocotools import mask as coco

    asked = ["-p", "red circle", "-p", "blue square"]
    options = ["--json", "--masks", "--checkpoint", "demo"]
    code = main(["predict", *map(str, pictures), *asked, *options])
    document = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (document["checkpoint"], document["backend"]) == ("demo", "cpu")
    assert [image["image"] for image in document["images"]] == [str(path) for path in pictures]
    with sam3_ray.Sam3.from_pretrained("demo", backend="cpu") as model:
        for path, image in zip(pictures, document["images"], strict=True):
            for told, result in zip(image["results"], model(path, asked[1::2]), strict=True):
                assert told["prompt"] == result.prompt
                assert [one["score"] for one in told["instances"]] == result.scores.tolist()
                assert result.masks is not None
                for one, mask in zip(told["instances"], result.masks, strict=True):
                    assert np.array_equal(coco.decode(one["mask"]).astype(bool), mask)
    assert document["images"][0]["results"][0]["num_instances"] == 1
    assert document["images"][1]["results"][1]["num_instances"] == 1


def test_a_bad_image_does_not_cost_the_others_their_answers(
    pictures: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junk = tmp_path / "junk.png"
    junk.write_bytes(b"no picture at all")
    absent = tmp_path / "absent.png"
    images = [junk, pictures[0], absent, tmp_path, pictures[1]]
    code = main(
        ["predict", *map(str, images), "-p", "red circle", "--json", "--checkpoint", "demo"]
    )
    shown = capsys.readouterr()
    assert code == 1
    answered = json.loads(shown.out)["images"]
    assert ["results" in image for image in answered] == [False, True, False, False, True]
    assert [image["image"] for image in answered] == [str(path) for path in images]
    assert str(junk) in answered[0]["error"]
    assert f"{absent}: no such file" in shown.err
    assert f"{tmp_path} is a folder" in shown.err
    assert "3 of 5 images failed" in shown.err


def test_names_of_files_need_be_neither_text_nor_short(
    pictures: list[Path], tmp_path: Path
) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9.png")
    odd.write_bytes(pictures[0].read_bytes())
    long = tmp_path / f"{'n' * 300}.png"
    images = [str(odd), str(long), str(pictures[1])]
    for options in ([], ["--json"]):
        done = subprocess.run(
            [*SAM3_RAY, "predict", *images, "-p", "red circle", "--checkpoint", "demo", *options],
            capture_output=True,
            timeout=TIMEOUT,
            env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        )
        assert done.returncode == 1, done.stderr
        assert b"File name too long" in done.stderr
        assert b"1 of 3 images failed" in done.stderr
        if options:
            answered = json.loads(done.stdout)["images"]
            assert [image["image"] for image in answered] == images
            assert ["results" in image for image in answered] == [True, False, True]
        else:
            assert done.stdout.count(b'"red circle": ') == 2


def test_a_picture_that_its_format_cannot_hold_costs_that_picture_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = tmp_path / "wide.png"
    Image.new("RGB", (16_400, 8), "white").save(wide)  # WebP ends at 16383
    target = tmp_path / "wide.webp"
    code = main(["predict", str(wide), "-p", "car", "--checkpoint", "demo", "-o", str(target)])
    assert code == 1
    assert f"{wide}: the picture {target} cannot be written" in capsys.readouterr().err


def test_overlays(pictures: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twin = tmp_path / "circle.png"
    twin.write_bytes(pictures[0].read_bytes())
    folder = tmp_path / "overlays"
    arguments = ["-p", "red circle", "--checkpoint", "demo", "-o"]
    assert main(["predict", str(pictures[0]), str(twin), *arguments, str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "circle-2.overlay.png",
        "circle.overlay.png",
    ]
    with Image.open(folder / "circle.overlay.png") as drawn, Image.open(pictures[0]) as plain:
        assert drawn.size == plain.size
        changed = (np.asarray(drawn.convert("RGB")) != np.asarray(plain)).any(axis=-1)
    assert changed[60:140, 70:150].mean() > 0.5  # the circle is tinted
    assert not changed[200:, 250:].any()  # the far corner is not
    target = tmp_path / "one.jpg"
    assert main(["predict", str(pictures[0]), *arguments, str(target)]) == 0
    with Image.open(target) as drawn:
        assert drawn.format == "JPEG"
    assert str(target) in capsys.readouterr().out


def test_auto_takes_the_demo_checkpoint_and_says_so(
    pictures: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TT_VISIBLE_DEVICES", "none")
    monkeypatch.delenv("SAM3_WEIGHTS_DIR", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["predict", str(pictures[0]), "-p", "red circle", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["checkpoint"] == "demo"
    assert shown.err.count("demo checkpoint") == 1
    assert "HF_HUB_OFFLINE" in shown.err
    # Asked for by name, the weights are required.
    assert main(["predict", str(pictures[0]), "-p", "x", "--checkpoint", "facebook/sam3"]) == 1
    assert "SAM3_WEIGHTS_DIR" in capsys.readouterr().err


def test_ctrl_c_while_predicting(pictures: list[Path]) -> None:
    process = started(
        ["predict", *[str(pictures[0])] * 5000, "-p", "red circle", "--checkpoint", "demo"]
    )
    assert process.stdout is not None
    assert "circle.png" in process.stdout.readline()  # it works by now
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert errors == ""
