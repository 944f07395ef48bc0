"""Who may ask: bearer keys from a file. Keys are kept as hashes only, and are never logged.

The file has one key a line, ``name: key`` with an optional list of what it may do after it::

    # name: key [info-only]
    labelling: 4f0c...
    monitor: 91ab... info-only

A name stands in logs; a key is at least 16 characters. ``info-only`` keys may not ask for predictions (403).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sam3_ray.serve.errors import Problem, ProblemError, ProblemType

LEAST_KEY_CHARACTERS = 16

_LINE = re.compile(r"(?P<name>[\w.-]{1,64})\s*:\s*(?P<key>[!-~]+)(?:\s+(?P<role>\S+))?")
_INFO_ONLY = "info-only"

OPEN_PATHS = frozenset({"/health", "/healthz"})
"""A load balancer has no key."""


class AccessFileError(ValueError):
    """A file of keys that cannot be used; the message names the line, never a key."""


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        name: of the key.
        namespace: under which its images are cached: no other key finds them, not even by their digest.
        may_predict: False for a key that only watches.
    """

    name: str
    namespace: str = ""
    may_predict: bool = True


ANYONE = Caller("")
"""Where no keys are asked for."""


class Access:
    """The keys of a file.

    Args:
        keys: (name, key, may predict) of each.
    """

    def __init__(self, keys: Iterable[tuple[str, str, bool]]) -> None:
        self._callers = [
            (
                _hash(key),
                Caller(name, hashlib.blake2b(key.encode(), digest_size=8).hexdigest(), may),
            )
            for name, key, may in keys
        ]

    @classmethod
    def from_file(cls, path: Path) -> Access:
        """The keys of a file.

        Raises:
            FileNotFoundError: there is no such file.
            AccessFileError: a line that is none, a short key, a name or key given twice, no key at all.
        """
        keys: list[tuple[str, str, bool]] = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            found = _LINE.fullmatch(line)
            if found is None or found["role"] not in (None, _INFO_ONLY):
                raise AccessFileError(
                    f"{path}:{number}: want `name: key` or `name: key {_INFO_ONLY}`"
                )
            if len(found["key"]) < LEAST_KEY_CHARACTERS:
                raise AccessFileError(
                    f"{path}:{number}: the key has {len(found['key'])} characters, at least "
                    f"{LEAST_KEY_CHARACTERS} are wanted (`openssl rand -hex 24` makes one)"
                )
            if any(found["name"] == name or found["key"] == key for name, key, _ in keys):
                raise AccessFileError(f"{path}:{number}: a name or a key is given twice")
            keys.append((found["name"], found["key"], found["role"] is None))
        if not keys:
            raise AccessFileError(f"{path} has no key; leave api_keys_file out to ask for none")
        return cls(keys)

    def caller(self, authorization: str | None) -> Caller:
        """Who sends this ``Authorization`` header. Takes as long whichever key it is, or none.

        Raises:
            ProblemError: 401.
        """
        scheme, _, token = (authorization or "").partition(" ")
        given = _hash(token.strip())
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, given):
                found = caller
        if found is None or scheme.lower() != "bearer":
            what = "no key" if not authorization else "not a key of this service"
            raise ProblemError(
                Problem(ProblemType.UNAUTHORIZED, f"{what}; send `Authorization: Bearer <key>`")
            )
        return found


def check_may_predict(caller: Caller) -> None:
    """Raise ProblemError (403) where a key may only watch."""
    if not caller.may_predict:
        raise ProblemError(
            Problem(ProblemType.FORBIDDEN, f"the key {caller.name!r} may not ask for predictions")
        )


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
