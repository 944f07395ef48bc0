"""What the emulated chip refuses. On silicon each of these would be a wrong answer or a hang."""

from __future__ import annotations


class EmulationError(RuntimeError):
    """The emulation cannot go on: set up in the wrong order, or asked for what it cannot know."""


class UnknownOperationError(EmulationError):
    """A ttnn operation whose value nobody wrote down; the message names it."""


class DeviceMemoryError(EmulationError):
    """Device memory was read that holds no data, or another tensor's."""


class TraceError(EmulationError):
    """A trace was captured or replayed in a way that a chip would answer wrongly."""
