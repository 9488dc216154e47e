"""What a DSpark sidecar says about the target that it was made for (spec/dspark.md 1.6, 1.7).

A sidecar drafts what one target would say: for another checkpoint of the same shape it loads as
well and is merely wrong most of the time. These keys of its metadata tie it to its target:

    dspark.target.name       string, `general.name` of the target
    dspark.target.release    string, such as "0731"
    dspark.target.sha256     string, `content_of` the target: what a drafter is trained against

Sidecars without them exist; of those only the shapes can be compared, and the identity is unknown.
Whether the tensors are sound is the drafter's reader to check.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Literal

from ds4d.errors import ModelFileError
from ds4d.model.gguf.container import HEADER_LIMIT, Header, read_header
from ds4d.model.gguf.schema import MERGES, TOKENS

if TYPE_CHECKING:
    from pathlib import Path

    from ds4d.model.gguf import ModelFile

TARGET_NAME = "dspark.target.name"
TARGET_RELEASE = "dspark.target.release"
TARGET_CONTENT = "dspark.target.sha256"

_BLOCK = re.compile(r"dspark\.([0-9]{1,4})\.")


def compare(path: Path, model: ModelFile, release: str | None) -> Literal["matches", "unknown"]:
    """Whether the sidecar was made for this model, of that release if it is known.

    Raises ModelFileError for what is no sidecar, or is one for another target.
    """
    header = _read(path)
    try:
        _compare_shapes(path, header, model)
        said = {key: _text(path, header, key) for key in (TARGET_NAME, TARGET_RELEASE)}
        content = _text(path, header, TARGET_CONTENT)
    finally:
        header.metadata.release()
    for key, ours in ((TARGET_NAME, model.geometry.name), (TARGET_RELEASE, release)):
        theirs = said[key]
        if theirs and ours and theirs != ours:
            raise ModelFileError(
                f"{path}: was made for another target: {key} is {theirs!r}, the model's is {ours!r}"
            )
    if content is None:
        return "unknown"
    ours = content_of(model)
    if content != ours:
        raise ModelFileError(
            f"{path}: was made for another target: {TARGET_CONTENT} is {content}, the model's "
            f"is {ours}"
        )
    return "matches"


def content_of(model: ModelFile) -> str:
    """SHA-256 over what a drafter shares with its target: the bytes of token_embd.weight and
    output.weight as they lie in the file, then tokens and merges, each with a line feed. Reads
    both tensors."""
    hasher = hashlib.sha256()
    for name in ("token_embd.weight", "output.weight"):
        hasher.update(model.tensor(name).data.data)
    for key in (TOKENS, MERGES):
        for text in model.metadata[key]:
            hasher.update(text.encode() + b"\n")
    return hasher.hexdigest()


def _read(path: Path) -> Header:
    try:
        n_bytes = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER_LIMIT)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from None
    return read_header(str(path), memoryview(head), n_bytes)


def _compare_shapes(path: Path, header: Header, model: ModelFile) -> None:
    g = model.geometry
    blocks = [int(found[1]) for n in header.tensors if (found := _BLOCK.match(n))]
    if not blocks:
        raise ModelFileError(f"{path}: holds no tensor dspark.0.*: not a DSpark sidecar")
    for name, expected, what in (
        ("dspark.0.main_norm.weight", g.width, "width"),
        ("dspark.0.attn_sinks.weight", g.n_heads, "count of heads"),
        ("dspark.0.attn_kv_a_norm.weight", g.head_dim, "width of a head"),
        (f"dspark.{max(blocks)}.markov_w1.weight", g.n_vocab, "vocabulary"),
    ):
        tensor = header.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{path}: tensor {name} is missing: not a DSpark sidecar")
        if tensor.shape[0] != expected:
            raise ModelFileError(
                f"{path}: was made for another target: {name} has {tensor.shape[0]:,} rows, the "
                f"model's {what} is {expected:,}"
            )


def _text(path: Path, header: Header, key: str) -> str | None:
    field = header.metadata.field(key)
    if field is None:
        return None
    value = header.metadata[key]
    if not isinstance(value, str):
        raise ModelFileError(f"{path}: key {key} has type {field.type_name}, expected string")
    return value
