"""Prompts and requests refuse what does not fit, and say what was wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam3_ray.images import ImageSource
from sam3_ray.prompt import Prompt, Request, as_prompts
from sam3_ray.text import PADDING_TOKEN, tokenize

SOURCE = ImageSource.from_digest("0" * 32)


def test_a_prompt_is_stripped() -> None:
    assert Prompt("  red car\n").text == "red car"


@pytest.mark.parametrize("text", ["", "   ", "\n\t"])
def test_an_empty_prompt(text: str) -> None:
    with pytest.raises(ValueError, match="empty"):
        Prompt(text)


@pytest.mark.parametrize(
    "text",
    [
        "\0",
        "\ufeff",
        "&nbsp;",
        "&amp;nbsp;",
        "\u200b",
        "\x1b[36m",
        "ï»¿",
        "\u00a0 \u2003",
        "\u00ad",
    ],
)
def test_a_prompt_of_which_nothing_is_left_to_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be seen|empty"):
        Prompt(text)


@settings(deadline=None)  # the first text loads the tokenizer
@given(
    st.text(st.sampled_from("a\0\ufeff\x1b[m;0&nbsp#x \u200bï»¿Â\u00a0é猫"), min_size=1, max_size=9)
)
def test_the_tokenizer_finds_something_in_every_prompt(text: str) -> None:
    """Start, end and nothing between is what upstream's tokenizer makes of a text without content."""
    try:
        prompt = Prompt(text)
    except ValueError:
        return
    assert int((tokenize([prompt.text], 32) != PADDING_TOKEN).sum()) > 2


@pytest.mark.parametrize("text", ["AT&T logo", "café", "猫", "!", "🦜", "größe &amp; form", "a\tb"])
def test_a_prompt_in_any_script(text: str) -> None:
    assert Prompt(text).text == text


@pytest.mark.parametrize("text", ["\ud800", "red \udcff car"])
def test_a_prompt_that_is_no_unicode_text(text: str) -> None:
    with pytest.raises(ValueError, match="half a surrogate"):
        Prompt(text)


@pytest.mark.parametrize("text", [None, 3, b"car", ["car"]])
def test_a_prompt_that_is_not_a_string(text: Any) -> None:
    with pytest.raises(TypeError, match="string"):
        Prompt(text)


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_threshold_out_of_range(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        Prompt("car", threshold=threshold)
    with pytest.raises(ValueError, match="threshold"):
        Request(SOURCE, threshold=threshold)


@pytest.mark.parametrize("threshold", ["0.5", True, [0.5]])
def test_a_threshold_that_is_no_number(threshold: Any) -> None:
    with pytest.raises(TypeError, match="threshold"):
        Request(SOURCE, threshold=threshold)


@pytest.mark.parametrize("count", [0, 201, -1])
def test_max_instances_out_of_range(count: int) -> None:
    with pytest.raises(ValueError, match=str(count)):
        Request(SOURCE, max_instances=count)


@pytest.mark.parametrize("count", [1.5, "3", True])
def test_max_instances_that_is_no_int(count: Any) -> None:
    with pytest.raises(TypeError, match="max_instances"):
        Request(SOURCE, max_instances=count)


def test_one_or_several() -> None:
    assert as_prompts("car") == (Prompt("car"),)
    assert as_prompts(["car", Prompt("dog", 0.3)]) == (Prompt("car"), Prompt("dog", 0.3))


@pytest.mark.parametrize(
    ("prompts", "error"),
    [([], ValueError), (b"car", TypeError), (None, TypeError), (["car", None], TypeError)],
)
def test_prompts_of_the_wrong_kind(prompts: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        as_prompts(prompts)


def test_a_prompts_own_threshold_wins() -> None:
    request = Request(SOURCE, (Prompt("a"), Prompt("b", 0.0)), threshold=0.4)
    assert [request.threshold_of(p) for p in request.prompts] == [0.4, 0.0]
