"""What ``sam3-ray serve`` checks in its own process before Ray starts: config, port, chips, weights.

What is wrong ends there with one message. Neither torch nor sam3 is imported.
"""

from __future__ import annotations

import copy
import difflib
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, ValidationError

from sam3_ray import chips
from sam3_ray.checkpoint_header import read_header
from sam3_ray.errors import (
    CheckpointError,
    DemoCheckpointWarning,
    VocabularyError,
    WeightsAccessError,
    WeightsNotFoundError,
)
from sam3_ray.serve.access import Access
from sam3_ray.serve.address import (
    EVERYWHERE,
    AddressError,
    base_url,
    check_certificate,
    check_port,
)
from sam3_ray.serve.config import ServeConfig, ServeConfigError, load_config
from sam3_ray.serve.plan import REPLICA_DEPLOYMENT, Cluster, Plan, resolve
from sam3_ray.serve.uploads import limits_of
from sam3_ray.settings import DEMO_REPO_ID
from sam3_ray.text import check_bpe_file, find_bpe_file

CONFIG_FILE = "serve_config.yaml"
BUILDER = "sam3_ray.serve.app:build_app"

DEFAULT_VALUES: dict[str, Any] = {
    "proxy_location": "EveryNode",
    "http_options": {"host": "127.0.0.1", "port": 8000, "request_timeout_s": 150},
    "applications": [
        {
            "name": "sam3",
            "route_prefix": "/",
            "import_path": BUILDER,
            "args": {"backend": "auto", "checkpoint": "auto", "chips": "auto"},
        }
    ],
}
"""What is served where there is no configuration file; the repository's ``serve_config.yaml`` is the same."""


class PreflightError(Exception):
    """Something is wrong, and nothing was started. The message is for a person."""


@dataclass(frozen=True)
class Overrides:
    """What the command line sets over the configuration file; None leaves the file's value.

    Attributes:
        host, port: of ``http_options``.
        args: of the application.
    """

    host: str | None = None
    port: int | None = None
    args: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Launch:
    """A configuration that was checked and can be started.

    Attributes:
        values: the whole configuration, for Ray's ``ServeDeploySchema``.
        application: name of ours among its applications.
        plan: backend, checkpoint, replicas.
        max_upload_bytes: of an image file that a request sends.
        machine_chips: chips that Ray may count.
        url: where it will answer, as this machine reaches it.
        everywhere: it listens on all interfaces.
        notes: what a person should know though it is no error.
        why_demo: why ``checkpoint: auto`` became the demo checkpoint; None where it did not.
    """

    values: dict[str, Any]
    application: str
    plan: Plan
    max_upload_bytes: int
    machine_chips: tuple[chips.Chip, ...]
    url: str
    everywhere: bool
    notes: tuple[str, ...]
    why_demo: str | None


def check(path: Path | None, overrides: Overrides, machine: chips.Machine | None = None) -> Launch:
    """Check everything that can be checked before Ray starts.

    Args:
        path: the configuration file; None takes ``serve_config.yaml`` of the current folder, else defaults.
        overrides: of the command line.
        machine: the chips; default those of this machine.

    Raises:
        PreflightError: with the first thing that is wrong.
    """
    if path is None and Path(CONFIG_FILE).is_file():
        path = Path(CONFIG_FILE)
    name = "the built-in configuration" if path is None else str(path)
    values = copy.deepcopy(DEFAULT_VALUES) if path is None else _read(path)
    application = _override(values, overrides, name)
    _check_schema(values, name)
    try:
        config = load_config(application.get("args", {}))
    except ServeConfigError as error:
        raise PreflightError(f"{name}: {error}") from error
    options = values.get("http_options", {})
    # Ray's own default host in a configuration file is all interfaces.
    host, port = str(options.get("host", "0.0.0.0")), int(options.get("port", 8000))
    _check_http(name, options, application, config)
    if config.api_keys_file is not None:
        keys = Path(config.api_keys_file).absolute()
        try:
            Access.from_file(keys)
        except (OSError, ValueError) as error:
            raise PreflightError(f"{name}: api_keys_file: {error}") from error
        application["args"] = {**application["args"], "api_keys_file": str(keys)}
    try:
        check_port(host, port)
    except AddressError as error:
        raise PreflightError(str(error)) from error
    notes: list[str] = []
    visible = _visible_chips(machine or chips.look(), notes)
    plan, why_demo = decide(config, len(visible))
    _check_deployments(name, application, plan)
    # Decided once: the builder must not ask the Hub again, nor decide otherwise.
    application["args"] = {**application.get("args", {}), "backend": plan.backend}
    if plan.checkpoint.is_demo:
        application["args"]["checkpoint"] = DEMO_REPO_ID
    elif plan.checkpoint_path is not None:
        application["args"]["checkpoint"] = plan.checkpoint_path  # absolute
    prefix = str(application.get("route_prefix", "/")).rstrip("/")
    scheme = "https" if options.get("ssl_certfile") else "http"
    return Launch(
        values=values,
        application=str(application.get("name", "default")),
        plan=plan,
        max_upload_bytes=limits_of(config).max_upload_bytes,
        machine_chips=visible,
        url=f"{base_url(host, port, scheme)}{options.get('root_path', '').rstrip('/')}{prefix}",
        everywhere=host in EVERYWHERE,
        notes=tuple(notes),
        why_demo=why_demo,
    )


# -- the configuration file ------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PreflightError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PreflightError(f"{path} is not a text file") from error
    try:
        values = yaml.safe_load(text)
    except (ValueError, AttributeError, RecursionError) as error:
        # PyYAML's own constructors: of a date that is none, of `!!int abc`, of a thousand brackets.
        raise PreflightError(f"{path}: not YAML: {type(error).__name__}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise PreflightError(
            f"{where}: not YAML: {getattr(error, 'problem', None) or error}"
        ) from error
    if not isinstance(values, dict):
        raise PreflightError(f"{path} holds no keys and values, but a {type(values).__name__}")
    return values


def _override(values: dict[str, Any], overrides: Overrides, name: str) -> dict[str, Any]:
    """Set what the command line says; our application's part of the configuration."""
    applications = values.get("applications")
    if not isinstance(applications, list) or not all(isinstance(one, dict) for one in applications):
        raise PreflightError(
            f"{name}: `applications` must be a list, with an `import_path` in each entry"
        )
    ours = [one for one in applications if one.get("import_path") == BUILDER]
    if len(ours) != 1:
        raise PreflightError(
            f"{name}: {len(ours)} applications have import_path {BUILDER}; `sam3-ray serve` starts "
            "exactly one (`serve run` starts any configuration)"
        )
    for key, holder in (("http_options", values), ("args", ours[0])):
        if holder.get(key) is None:
            holder[key] = {}
        if not isinstance(holder[key], dict):
            raise PreflightError(f"{name}: `{key}` must be keys and values, got {holder[key]!r}")
    if overrides.host is not None:
        values["http_options"]["host"] = overrides.host
    if overrides.port is not None:
        values["http_options"]["port"] = overrides.port
    ours[0]["args"].update(overrides.args or {})
    application: dict[str, Any] = ours[0]
    return application


def _check_schema(values: dict[str, Any], name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    # Ray ignores keys that it does not know.
    for where, known in _unknown_keys(ServeDeploySchema, values, ""):
        key = where.rpartition(".")[2]
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f" (known: {', '.join(known)})"
        raise PreflightError(f"{name}: unknown key {where!r}{hint}")
    try:
        ServeDeploySchema.model_validate(values)
    except ValidationError as error:
        faults = [
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg'].removeprefix('Value error, ')}"
            for fault in error.errors(include_url=False)
        ]
        raise PreflightError(f"{name}: " + "; ".join(faults)) from error


def _check_http(
    name: str, options: Mapping[str, Any], application: Mapping[str, Any], config: ServeConfig
) -> None:
    """What Ray would find out only after it has started, or never."""
    prefix = application.get("route_prefix", "/")
    if prefix is None or not re.fullmatch(r"/|(/[^{}]*[^{}/])", prefix):
        raise PreflightError(
            f"{name}: route_prefix {prefix!r} must start with '/', not end with '/', and hold no braces"
        )
    timeout_s = options.get("request_timeout_s")
    if timeout_s is not None and 0 <= timeout_s <= config.deadline_s:
        raise PreflightError(
            f"{name}: http_options.request_timeout_s is {timeout_s:g}, but must be above deadline_s, which "
            f"is {config.deadline_s:g}: Serve's own timeout answers in plain text"
        )
    try:
        check_certificate(options)
    except AddressError as error:
        raise PreflightError(f"{name}: {error}") from error


def _check_deployments(name: str, application: Mapping[str, Any], plan: Plan) -> None:
    """What the file says of our deployment by Serve's own keys, which win over ``args``, has to fit the
    chips.

    With more replicas than chips Serve would wait for ever for one more chip.
    """
    for options in application.get("deployments") or ():
        if options.get("name") != REPLICA_DEPLOYMENT or not plan.chips_per_replica:
            continue
        scaling = options.get("autoscaling_config") or {}
        asked = {
            "num_replicas": options.get("num_replicas"),
            "autoscaling_config.max_replicas": scaling.get("max_replicas"),
        }
        for key, count in asked.items():
            if isinstance(count, int) and count > plan.chips:
                raise PreflightError(
                    f"{name}: deployment {REPLICA_DEPLOYMENT}: {key} is {count}, but there are "
                    f"{plan.chips} chips; one replica is one chip"
                )
        resources = (options.get("ray_actor_options") or {}).get("resources")
        if "ray_actor_options" in options and (resources or {}).get(chips.RAY_RESOURCE) != 1:
            raise PreflightError(
                f"{name}: deployment {REPLICA_DEPLOYMENT}: ray_actor_options replace ours, so they must have "
                f"resources: {{{chips.RAY_RESOURCE}: 1}}; without it Ray gives a replica no chip"
            )


def _unknown_keys(
    model: type[BaseModel], values: Mapping[Any, Any], where: str
) -> Iterator[tuple[str, list[str]]]:
    """(dotted key, known keys beside it) of each key that a model or the models inside it do not have."""
    known = dict(model.model_fields)
    known |= {field.alias: field for field in model.model_fields.values() if field.alias}
    for key, value in values.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in known:
            yield path, sorted(known)
            continue
        inner = next(_models(known[key].annotation), None)
        if inner is None:
            continue
        for i, one in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(one, Mapping):
                yield from _unknown_keys(
                    inner, one, f"{path}[{i}]" if isinstance(value, list) else path
                )


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


# -- the machine -----------------------------------------------------------------------------------


def _visible_chips(machine: chips.Machine, notes: list[str]) -> tuple[chips.Chip, ...]:
    try:
        visible = machine.visible()
    except ValueError as error:
        raise PreflightError(str(error)) from error
    for chip in visible:
        if not chip.readable:
            raise PreflightError(
                f"/dev/tenstorrent/{chip.device} is not yours to open: add your user to its group"
            )
        if chip.busy:
            # Perhaps only a monitor: a chip that really does not open is parked by its replica.
            notes.append(
                f"chip {chip.index} is open in {', '.join(map(str, chip.holders))}; if that uses it, stop it "
                f"or leave the chip out: {chips.VISIBLE_DEVICES}=..."
            )
    return visible


def decide(config: ServeConfig, chip_count: int) -> tuple[Plan, str | None]:
    """Which backend and checkpoint a configuration means on this machine.

    Quick without a network, and the checkpoint's file has been looked into.

    Returns:
        The plan, and why ``checkpoint: auto`` became the demo checkpoint (None where it did not).

    Raises:
        PreflightError: weights are missing or broken, or the configuration does not fit the machine.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DemoCheckpointWarning)
        try:
            plan = resolve(config, Cluster.of_this_machine(chip_count))
            read_header(plan.checkpoint.path)
            check_bpe_file(find_bpe_file())
        except (
            FileNotFoundError,
            VocabularyError,
            ServeConfigError,
            WeightsNotFoundError,
            WeightsAccessError,
            CheckpointError,
        ) as error:
            raise PreflightError(str(error)) from error
    taken = [w.message for w in caught if isinstance(w.message, DemoCheckpointWarning)]
    return plan, taken[-1].reason if taken else None
