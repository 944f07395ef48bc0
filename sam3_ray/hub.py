"""Whether the Hugging Face Hub answers, found out in seconds.

``huggingface_hub`` itself tries five more times with growing pauses (half a minute) and says so on the
console: right for a download that stalls, not for a machine without a network.
"""

from __future__ import annotations

import os

DEFAULT_ENDPOINT = "https://huggingface.co"

PROBE_TIMEOUT_S = 4.0


def hub_endpoint() -> str:
    """Where the Hub is: HF_ENDPOINT, else huggingface.co."""
    return (os.environ.get("HF_ENDPOINT", "").strip() or DEFAULT_ENDPOINT).rstrip("/")


def hub_problem(timeout: float = PROBE_TIMEOUT_S) -> str | None:
    """Why the Hub cannot be reached; None where it answers, whatever it answers.

    Args:
        timeout: seconds for the one request.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    import httpx

    try:
        httpx.head(hub_endpoint(), timeout=timeout)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        return f"{hub_endpoint()} does not answer ({error or type(error).__name__})"
    return None
