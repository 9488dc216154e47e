"""Answers that a file has given, kept on disk: an evaluation that was cut off goes on.

One file of JSON lines per model file and version of the kernels; a line is whole or not there.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np

from ds4d.cpu.jit import source_key

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Answers:
    """What `model` answered greedily, by prompt. `folder` is made if need be."""

    def __init__(self, folder: Path, model: Path) -> None:
        digest = hashlib.blake2b(model.read_bytes(), digest_size=8).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{model.stem}-{digest}-{source_key()[:8]}.jsonl"
        self._known: dict[str, list[int]] = {}
        self._read()
        self._file = self.path.open("a", encoding="utf-8")

    def _read(self) -> None:
        """A line that a killed process left unfinished is cut off: the next one starts afresh."""
        if not self.path.is_file():
            return
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        for line in whole.splitlines():
            record = json.loads(line)
            self._known[record["prompt"]] = record["ids"]

    def get(self, prompt: Sequence[int], most: int) -> list[int] | None:
        return self._known.get(_key(prompt, most))

    def put(self, prompt: Sequence[int], most: int, ids: list[int]) -> None:
        key = _key(prompt, most)
        self._known[key] = ids
        self._file.write(json.dumps({"prompt": key, "ids": ids}) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _key(prompt: Sequence[int], most: int) -> str:
    """The prompt and the most ids of its answer, in a few characters."""
    data = np.asarray([most, *prompt], np.int32).tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()
