"""Phrases to token ids, with upstream's byte-pair tokenizer."""

from __future__ import annotations

import gzip
import importlib.util
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sam3_ray.errors import VocabularyError
from sam3_ray.settings import settings
from sam3_ray.upstream import quiet_import

if TYPE_CHECKING:
    from torch import Tensor

BPE_FILE = "bpe_simple_vocab_16e6.txt.gz"
PADDING_TOKEN = 0

MERGES = 49152 - 256 - 2
"""Of CLIP's byte-pair encoding (sam3/model/tokenizer_ve.py): tokens less bytes and both marks."""


def find_bpe_file() -> Path:
    """The vocabulary: SAM3_BPE_PATH, else the one that open_clip ships (sam3's wheel has none).

    Raises:
        FileNotFoundError: neither is there.
    """
    chosen = settings().bpe_path
    if chosen is not None:
        if not chosen.is_file():
            raise FileNotFoundError(f"SAM3_BPE_PATH={chosen} is not a file")
        return chosen
    spec = importlib.util.find_spec("open_clip")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / BPE_FILE
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"no {BPE_FILE}: install open_clip_torch, which ships it, or set SAM3_BPE_PATH to a copy"
    )


def check_bpe_file(path: Path) -> None:
    """Whether the tokenizer can read a vocabulary.

    Raises:
        VocabularyError: not gzip, not text, or too few merges.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            count = sum(len(line.split()) == 2 for line in lines)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise VocabularyError(f"{path} is no BPE vocabulary: {error}") from error
    if count < MERGES:
        raise VocabularyError(f"{path} is no BPE vocabulary: {count} merges, not {MERGES}")


def load_tokenizer() -> None:
    """Read the vocabulary now, which takes about a second, and not with the first phrase.

    Raises:
        FileNotFoundError: no vocabulary file.
    """
    _tokenizer(find_bpe_file())


def tokenize(phrases: Sequence[str], context_length: int) -> Tensor:
    """Token ids of phrases, padded with 0 on the right; a longer phrase is cut.

    Returns:
        (k, context_length) int64 tensor; start and end marks are included.

    Raises:
        FileNotFoundError: no vocabulary file.
    """
    return cast("Tensor", _tokenizer(find_bpe_file())(list(phrases), context_length))


@lru_cache(maxsize=2)
def _tokenizer(bpe_path: Path) -> Any:
    with quiet_import():
        from sam3.model.tokenizer_ve import SimpleTokenizer

    return SimpleTokenizer(bpe_path=str(bpe_path))
