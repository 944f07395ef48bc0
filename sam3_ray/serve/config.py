"""The ``args`` of ``serve_config.yaml``, typed. An unknown key is an error."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sam3_ray.prompt import DEFAULT_THRESHOLD
from sam3_ray.settings import MAX_PROMPTS_LIMIT

BATCHES_IN_HAND = 2
"""Batches that a replica has room for: one on the device, and the next one, which is decoded meanwhile."""

CHIP_NAMES = ("{device}", "{pci_address}")
"""What of a reset command stands for the chip."""

PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ServeConfigError(ValueError):
    """A configuration that cannot be served; the message is one line, for a person."""


def check_reset_command(command: str) -> None:
    """Raise ValueError where a reset command names no chip: it would reset every chip of the machine."""
    if not any(name in command for name in CHIP_NAMES):
        raise ValueError(
            f"reset_command {command!r} names no chip, so it would reset all of them; put "
            f"{' or '.join(CHIP_NAMES)} where the chip belongs, as in 'tt-smi -r {{device}}'"
        )


class ServeConfig(BaseModel):
    """How the application is served. Every key has a default.

    Raises:
        ServeConfigError (inside pydantic's ValidationError): an unknown key, with the one it looks like.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["auto", "cpu", "blackhole"] = Field(
        default="auto",
        description="auto: one Blackhole replica a chip where the Ray cluster has TTNPU resources, else CPU.",
    )
    checkpoint: str = Field(
        default="auto",
        min_length=1,
        description="auto: SAM3's weights; on a CPU where they cannot be had, the demo checkpoint. "
        "demo: the small checkpoint in the package. facebook/sam3 (or another Hub repository): required. "
        "A path: a local sam3.pt, or a folder that holds it.",
    )
    revision: str | None = Field(default=None, description="Revision of the Hub repository.")
    chips: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="Chips to serve on, a replica on each. auto: all that the Ray cluster has (TTNPU); where "
        "it has none, the CPU.",
    )
    replicas: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", description="auto: one a chip; on a CPU one."
    )
    cpus_per_replica: Literal["auto"] | Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default="auto",
        description="CPUs that Ray reserves for a replica; torch gets as many threads. auto: on a CPU the "
        "node's cores less one, on chips one.",
    )
    threshold: float = Field(
        default=DEFAULT_THRESHOLD,
        ge=0,
        le=1,
        description="Of a request that names none.",
    )
    max_prompts: int | None = Field(
        default=None,
        ge=1,
        le=MAX_PROMPTS_LIMIT,
        description="Phrases of one request; default SAM3_MAX_PROMPTS, else 4.",
    )
    max_upload_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Largest image file; default SAM3_MAX_UPLOAD_BYTES, else 32 MiB.",
    )
    max_image_pixels: int | None = Field(
        default=None,
        ge=1,
        description="Largest image, refused before it is decoded; default SAM3_MAX_IMAGE_PIXELS, else "
        "178,956,970.",
    )
    max_mask_pixels: int | None = Field(
        default=None,
        ge=1,
        description="Pixels of all masks of one answer, at the image's size, whatever their format; more are "
        "refused. Default SAM3_MAX_MASK_PIXELS, else 5,000,000,000.",
    )
    image_cache_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Budget of a replica's image cache; default SAM3_IMAGE_CACHE_BYTES, else the backend's. "
        "0: no cache.",
    )
    max_batch_size: int = Field(default=8, ge=1, le=256, description="Requests of one device call.")
    batch_wait_s: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="How long a batch waits for more requests while the device idles. 0: what came while the "
        "device was busy is the next batch, and nothing waits for nothing.",
    )
    max_ongoing_requests: int = Field(
        default=24,
        ge=1,
        description="Requests that a replica has at a time, those that it decodes included.",
    )
    max_queued_requests: int = Field(
        default=64,
        ge=0,
        description="Requests that may wait for a replica; more get 503 with Retry-After.",
    )
    retry_after_s: PositiveSeconds = Field(default=1.0, description="What Retry-After says.")
    deadline_s: PositiveSeconds = Field(
        default=120.0,
        description="A request without an answer gets 504 after this time. Keep "
        "http_options.request_timeout_s above it, else Serve's own plain-text 408 comes first.",
    )
    device_call_limit_s: PositiveSeconds = Field(
        default=120.0,
        description="A device call may always take this long for each of its requests before the replica "
        "counts as unhealthy.",
    )
    chip_timeout_s: PositiveSeconds | None = Field(
        default=None,
        description="A device call that takes longer has hung: the replica ends itself, the chip is reset "
        "where reset_command is set, and opened once more. Default: ten times the 99th percentile of calls "
        "so far, at least device_call_limit_s; the first call is exempt unless this key is set.",
    )
    reset_command: str | None = Field(
        default=None,
        description="Resets one chip that has hung, such as 'tt-smi -r {device}'; must name that chip: "
        "{device} is its number in /dev/tenstorrent, {pci_address} its address. Default: no chip is reset.",
    )
    canary_every_s: PositiveSeconds = Field(
        default=60.0,
        description="An idle device answers a picture with a known answer this often; where the answer is "
        "wrong, the replica counts as unhealthy.",
    )
    park_retry_s: PositiveSeconds = Field(
        default=300.0,
        description="A chip that does not open is parked; this often it is tried again. One that was parked "
        "by hand stays so (`sam3-ray chips unpark`).",
    )
    api_keys_file: str | None = Field(
        default=None,
        min_length=1,
        description="A file of bearer keys, `name: key` a line; requests without one get 401. Default: "
        "everyone who reaches the service may use it.",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="Origins such as https://example.org whose pages may call the service from a browser; "
        "'*' is every one. Default: none but its own page.",
    )
    num_fallbacks: int = Field(
        default=2,
        ge=0,
        description="Replicas after the first that a digest-only request may go to.",
    )
    load_factor: float = Field(
        default=1.25,
        ge=1,
        description="A replica's images overflow to others from this many times the mean load.",
    )

    @model_validator(mode="before")
    @classmethod
    def _names_are_known(cls, values: Any) -> Any:
        for name in values if isinstance(values, Mapping) else ():
            if name not in cls.model_fields:
                close = difflib.get_close_matches(str(name), cls.model_fields, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"unknown key {name!r}{hint} (known: {', '.join(cls.model_fields)})"
                )
        return values

    @model_validator(mode="after")
    def _one_chip_is_reset(self) -> Self:
        if self.reset_command is not None:
            check_reset_command(self.reset_command)
        return self

    @model_validator(mode="after")
    def _batches_fit(self) -> Self:
        needed = self.max_batch_size * BATCHES_IN_HAND
        if self.max_ongoing_requests < needed:
            raise ValueError(
                f"max_ongoing_requests is {self.max_ongoing_requests}, but max_batch_size "
                f"{self.max_batch_size} needs at least {needed}: one batch on the device, one to come"
            )
        return self


class _Live(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class IngressSettings(_Live):
    """What of the ingress changes while it runs: ``user_config`` of the deployment ``Ingress``."""

    threshold: float = Field(ge=0, le=1)


class ReplicaSettings(_Live):
    """What of the replicas changes while they run: ``user_config`` of the deployment ``Sam3Replica``."""

    max_batch_size: int = Field(ge=1, le=256)
    batch_wait_s: float = Field(ge=0, le=10)
    image_cache_bytes: int | None = Field(ge=0)


def live_settings[Settings: _Live](
    kind: type[Settings], config: ServeConfig, given: Mapping[str, Any]
) -> Settings:
    """Settings from a ``user_config``; what that leaves out is the configuration's.

    Raises:
        ServeConfigError: with every fault in one line.
    """
    own = {name: getattr(config, name) for name in kind.model_fields}
    try:
        return kind.model_validate(own | dict(given))
    except ValidationError as error:
        raise ServeConfigError(f"user_config: {_in_one_line(error)}") from error


def load_config(values: Mapping[str, Any]) -> ServeConfig:
    """The configuration of an application's ``args``.

    Raises:
        ServeConfigError: with every fault in one line.
    """
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        raise ServeConfigError(_in_one_line(error)) from error


def _in_one_line(error: ValidationError) -> str:
    faults = []
    for fault in error.errors(include_url=False):
        where = str(fault["loc"][0]) if fault["loc"] else ""
        message = fault["msg"].removeprefix("Value error, ")
        faults.append(f"{where}: {message}, got {fault['input']!r}" if where else message)
    return "; ".join(dict.fromkeys(faults))
