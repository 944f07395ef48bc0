"""What is asked: a noun phrase (Prompt), and an image with its phrases and options (Request)."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sam3_ray.images import ImageSource

DEFAULT_THRESHOLD = 0.5
DEFAULT_MAX_INSTANCES = 50
MAX_INSTANCES_LIMIT = 200

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zs", "Zl", "Zp"})
"""Unicode's control, format and surrogate characters, and all that separate."""


@dataclass(frozen=True)
class Prompt:
    """One noun phrase.

    Attributes:
        text: the phrase; surrounding white space is stripped.
        threshold: keep instances with a score above it; None means the request's.

    Raises:
        TypeError: ``text`` is not a string, or ``threshold`` not a number.
        ValueError: the phrase is empty or no Unicode text, or the threshold outside [0, 1].
    """

    text: str
    threshold: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"a prompt is a string, got {type(self.text).__name__}: {self.text!r}")
        object.__setattr__(self, "text", self.text.strip())
        if not self.text:
            raise ValueError("a prompt is empty; give a noun phrase such as 'red car'")
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"a prompt must be text that UTF-8 has, got {self.text[:80]!r} with half a surrogate"
            ) from None
        if not _is_readable(self.text):
            raise ValueError(
                f"a prompt is empty but for what cannot be seen, got {self.text[:80]!r}; give a noun phrase"
            )
        if self.threshold is not None:
            object.__setattr__(self, "threshold", checked_threshold(self.threshold))


def _is_readable(text: str) -> bool:
    """Whether upstream's tokenizer, which repairs text and unescapes HTML, leaves anything to read of it."""
    if text.isascii() and text.isprintable() and "&" not in text:
        return True
    import html

    import ftfy

    # sam3/model/tokenizer_ve.py, basic_clean
    cleaned = html.unescape(html.unescape(ftfy.fix_text(text)))
    return any(unicodedata.category(character) not in _UNSEEN for character in cleaned)


def checked_threshold(threshold: float) -> float:
    """``threshold`` as a float.

    Raises:
        TypeError: not a number.
        ValueError: outside [0, 1].
    """
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise TypeError(
            f"threshold must be a number, got {type(threshold).__name__}: {threshold!r}"
        )
    if not 0.0 <= threshold <= 1.0:  # NaN is not, and an integer of any length compares
        raise ValueError(f"threshold must be in [0, 1], got {_shown(threshold)}")
    return float(threshold)


def _shown(number: float) -> str:
    """A number for a message: an integer may be too long to read, and for Python too long to print."""
    if isinstance(number, int) and abs(number) >= 10**30:
        return f"an integer of {number.bit_length()} bits"
    return repr(number)


def as_prompts(prompts: str | Prompt | Sequence[str | Prompt]) -> tuple[Prompt, ...]:
    """One phrase or several, as Prompts.

    Raises:
        TypeError: something that is neither a phrase nor a sequence of phrases.
        ValueError: no phrase at all, or an empty one.
    """
    if isinstance(prompts, (str, Prompt)):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise TypeError(
            f"prompts must be a phrase or a list of phrases, got {type(prompts).__name__}: {prompts!r}"
        )
    if not prompts:
        raise ValueError("prompts is empty; give at least one noun phrase")
    return tuple(p if isinstance(p, Prompt) else Prompt(p) for p in prompts)


@dataclass(frozen=True)
class Request:
    """One image and what is asked of it. No prompts at all warms the image cache and asks nothing.

    Attributes:
        source: the image (``sam3_ray.images.ImageSource``), perhaps by digest only.
        prompts: the phrases; each is an independent query.
        threshold: for the phrases that bring none.
        max_instances: at most so many instances a phrase, highest scores first (1 to 200).
        return_masks: also give masks at the image's own size.
        return_mask_logits: also give the raw mask logits.

    Raises:
        TypeError, ValueError: an option of the wrong type or outside its range.
    """

    source: ImageSource
    prompts: tuple[Prompt, ...] = ()
    threshold: float = DEFAULT_THRESHOLD
    max_instances: int = DEFAULT_MAX_INSTANCES
    return_masks: bool = True
    return_mask_logits: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", checked_threshold(self.threshold))
        count = self.max_instances
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"max_instances must be an int, got {type(count).__name__}: {count!r}")
        if not 1 <= count <= MAX_INSTANCES_LIMIT:
            raise ValueError(
                f"max_instances must be 1 to {MAX_INSTANCES_LIMIT}, got {_shown(count)}"
            )

    @property
    def wants_masks(self) -> bool:
        """Whether masks are needed in any form."""
        return self.return_masks or self.return_mask_logits

    def threshold_of(self, prompt: Prompt) -> float:
        """The threshold that holds for ``prompt``."""
        return self.threshold if prompt.threshold is None else prompt.threshold
