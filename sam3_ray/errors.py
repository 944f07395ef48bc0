"""The errors that are a user's to mend. Each is a subclass of the builtin that fits."""

from __future__ import annotations


class ImageError(ValueError):
    """An image that cannot be used: empty, of a wrong shape, with values out of range.

    Attributes:
        reason: what is wrong, for someone who sent the image from elsewhere: without the name that it has
            here, the words of the decoder and the knobs of this machine. The message where there are none.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = message if reason is None else reason


class ImageDecodeError(ImageError):
    """Bytes that are not an image we read, or a truncated one."""


class ImageTooLargeError(ImageError):
    """More bytes or pixels than allowed."""


class ImageNotCachedError(LookupError):
    """A request named an image by digest only, and its features are not in the cache."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: broken, of other dimensions, with missing keys."""


class VocabularyError(ValueError):
    """A file of the tokenizer's vocabulary that is none."""


class _MissingWeights(OSError):
    """Weights that are not to be had.

    Attributes:
        reason: why, in half a sentence; the message goes on with what to do.
    """

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(f"{reason}. {advice}" if advice else reason)
        self.reason = reason


class WeightsNotFoundError(_MissingWeights, FileNotFoundError):
    """No SAM3 weights where they were looked for; the message says what to do."""


class WeightsAccessError(_MissingWeights, PermissionError):
    """The Hub refused the gated weights; the message says what to do."""


class DemoCheckpointWarning(RuntimeWarning):
    """``checkpoint: auto`` had to take the demo checkpoint, for ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"serving the DEMO checkpoint, which only knows coloured shapes: {reason}")
        self.reason = reason


class ChipUnavailableError(RuntimeError):
    """A chip that does not open: none is there, another process has it, or its driver is not ready."""
