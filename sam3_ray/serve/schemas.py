"""What goes over the wire: the body of ``POST /predict``, its answer, and what ingress and replicas send."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from sam3_ray.prompt import DEFAULT_MAX_INSTANCES, DEFAULT_THRESHOLD, MAX_INSTANCES_LIMIT, Prompt
from sam3_ray.serve.errors import Problem
from sam3_ray.settings import MAX_PROMPTS_LIMIT

MaskFormat = Literal["png", "rle", "polygon", "none"]

Threshold = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]


class PromptBody(BaseModel):
    """A noun phrase with a threshold of its own."""

    model_config = ConfigDict(extra="forbid")

    text: str = Field(description="The noun phrase.", examples=["red circle"])
    threshold: Threshold | None = Field(
        default=None, description="Keep instances with a score above it; default: the request's."
    )


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, dict)) else value


class Options(BaseModel):
    """What every way of sending an image has in common."""

    model_config = ConfigDict(extra="forbid")

    prompts: Annotated[list[str | PromptBody], BeforeValidator(_as_list)] = Field(
        default_factory=list,
        max_length=MAX_PROMPTS_LIMIT,
        description="Noun phrases, each an independent query. None at all only fills the image cache.",
        examples=[["red circle", {"text": "blue square", "threshold": 0.3}]],
    )
    threshold: Threshold = Field(
        default=DEFAULT_THRESHOLD,
        description="Keep instances with a score above it. The service's configuration can set another "
        "default.",
    )
    max_instances: int = Field(
        default=DEFAULT_MAX_INSTANCES,
        ge=1,
        le=MAX_INSTANCES_LIMIT,
        description="At most so many instances a phrase, highest scores first.",
    )
    mask_format: MaskFormat = Field(
        default="png",
        description="png: base64 of a 1-bit PNG. rle: COCO, compressed. polygon: flat rings, even-odd. "
        "none: no masks.",
    )
    image_digest: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{32}$",
        description="`image_digest` of an earlier answer, instead of the image. 404 `image-not-cached` "
        "where the image is not in the cache any more.",
    )


class PredictBody(Options):
    """Body of ``POST /predict`` as ``application/json``."""

    image: str | None = Field(default=None, description="The image file, base64.")


class RleMask(BaseModel):
    """A mask as COCO's compressed RLE."""

    size: tuple[int, int] = Field(description="Height and width in pixels.")
    counts: str


class Instance(BaseModel):
    """One object found."""

    score: float = Field(description="Rounded to 4 decimals.")
    box_xyxy: tuple[float, float, float, float] = Field(
        description="x0, y0, x1, y1 in pixels of the image as sent, rounded to 2 decimals."
    )
    mask_area: int = Field(description="Pixels of the mask.")
    mask: str | RleMask | list[list[float]] | None = Field(description="As `mask_format` says.")


class PromptResult(BaseModel):
    """What was found for one phrase, highest score first."""

    prompt: str
    presence: float = Field(description="Probability that the concept is in the image at all.")
    num_instances: int
    truncated: bool = Field(description="`max_instances` cut some off.")
    instances: list[Instance]


class Timing(BaseModel):
    """Milliseconds. Stages that a batch shares are counted whole."""

    queue: float
    decode: float
    image: float
    text: float
    prompts: float
    masks: float
    encode: float
    total: float


class PredictAnswer(BaseModel):
    """Answer of ``POST /predict``."""

    width: int
    height: int
    input_size: int = Field(description="Side of the square that the model sees, in pixels.")
    threshold: float
    mask_format: MaskFormat
    results: list[PromptResult] = Field(description="One for each phrase, in order.")
    image_digest: str = Field(description="Names the image in later requests.")
    cached: bool = Field(description="The image part came from the cache.")
    checkpoint: str = Field(description="`demo`, or the weights' repository and revision.")
    replica: str
    chip: int | None = Field(description="The Tenstorrent chip that answered; null on a CPU.")
    timing_ms: Timing


class FieldError(BaseModel):
    """One fault of a request."""

    field: str
    message: str


class ProblemBody(BaseModel):
    """An error, as RFC 9457 has it."""

    type: str = Field(description="Which problem, a fixed name.", examples=["image-not-cached"])
    title: str
    status: int
    detail: str
    errors: list[FieldError] | None = None


@dataclass(frozen=True)
class PredictJob:
    """One request on its way to a replica.

    Attributes:
        digest: xxh3_128 of the file's bytes, hex.
        image: the file, or None where the client sent only the digest.
        prompts: the phrases; none only fills the cache.
        threshold: as in ``Options``; None until the ingress puts its own in.
        max_instances, mask_format: as in ``Options``.
        gzip: the client takes a compressed answer.
        sent_at: ``time.time()`` when the body had been read, for ``timing_ms.queue``.
        avoid: replicas that failed on it already.
        namespace: of the key that sent it; under it the image is cached, and found by no other key.
    """

    digest: str
    image: bytes | None
    prompts: tuple[Prompt, ...] = ()
    threshold: float | None = None
    max_instances: int = DEFAULT_MAX_INSTANCES
    mask_format: MaskFormat = "png"
    gzip: bool = False
    sent_at: float = 0.0
    avoid: frozenset[str] = field(default_factory=frozenset)
    namespace: str = ""


@dataclass(frozen=True)
class Reply:
    """What a replica gives the ingress to forward.

    Attributes:
        body: JSON; gzip where ``content_encoding`` says so.
        content_encoding: ``gzip`` or None.
        log: what the request's line in the log says of it: replica, chip, cached, stages in ms.
    """

    body: bytes
    content_encoding: str | None = None
    log: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A job that got no answer. Sent as data: exceptions lose their type on the way through Ray.

    Attributes:
        problem: for the client.
        replica: who failed.
        parked: it never tried: its chip is parked.
    """

    problem: Problem
    replica: str
    parked: bool = False
