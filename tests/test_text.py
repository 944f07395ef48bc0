"""Token ids against the vocabulary's other reader, open_clip."""

from __future__ import annotations

import open_clip
import pytest

from sam3_ray.text import find_bpe_file, tokenize

PHRASES = ["red circle", "A Dog's bowl!", "naïve café", "x" * 400, "车 🚗"]


def test_tokens_equal_open_clips() -> None:
    theirs = open_clip.get_tokenizer("ViT-B-32", context_length=32)(PHRASES)
    assert tokenize(PHRASES, 32).tolist() == theirs.tolist()


def test_a_missing_vocabulary_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAM3_BPE_PATH", "/nowhere/bpe.gz")
    with pytest.raises(FileNotFoundError, match=r"/nowhere/bpe\.gz"):
        find_bpe_file()
