"""The 4,096 tokens of ds4-tiny: `python -m ops.tiny.vocabulary` writes vocabulary.json.

Owns the byte-pair merges and the list of added tokens. Ids: bos, eos, pad; 256 bytes; merges in
order of rank; the added tokens that the prompt format uses, the drafter's noise token last.

Merges are trained so that a run of letters has the same tokens wherever it stands (` city`,
`"city`, `_city`): no merge joins letters with what precedes them, except a short list of common
words with their space, none of which the dialogues use as a name or a value. A small model copies
much better so. Digits are never merged. The V4
pre-tokeniser (spec/model.md 8) cuts text more coarsely, so the same merges give the same ids there.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from ops.tiny import catalog, mixture
from ops.tiny.encode import BYTES, PATH, constants, rendered
from ops.tiny.tools.known import words_of
from ops.tiny.tools.results import STATUSES
from ops.tiny.words import POOLS

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 4096
COMMON = 80  # words that have a token with their leading space
FIRST = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
ADDED = """<｜fim▁hole｜> <｜fim▁begin｜> <｜fim▁end｜> <｜User｜> <｜Assistant｜> <think> </think>
｜DSML｜ <｜latest_reminder｜> <｜action｜> <｜query｜> <｜authority｜> <｜domain｜> <｜title｜>
<｜read_url｜> <｜place▁holder▁no▁799｜>""".split()
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def corpus(folder: Path, n: int) -> Iterator[str]:
    """Rendered dialogues, some plain text beside them; digits thinned out."""
    rng = random.Random(2)
    plain = (folder / "kjv.txt").read_text("utf-8").splitlines()
    plain += (folder / "chat.txt").read_text("utf-8").splitlines() * 3
    texts = constants()
    for i in range(n):
        for piece, _ in rendered(mixture.draw(rng, stage=1.0, novelty=0.0), texts):
            if isinstance(piece, str):
                yield re.sub(r"\d+", "0", piece)
        if i % 20 == 0:
            yield rng.choice(plain)


def _names() -> Iterator[str]:
    """Everything in the catalogue that a call copies from a schema."""
    for entry in catalog.training():
        yield from entry.names
        for param in entry.params:
            yield from (*param.names, *param.kind.choices)
            yield from (key for key, _ in param.kind.members)


def train(folder: Path, n: int = 40000) -> dict[str, list[str] | list[int]]:
    letters = pre_tokenizers.Split(Regex(r"[\p{L}\p{M}]+"), "isolated")
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    stops = pre_tokenizers.Split(Regex(r" ?[\p{P}\p{S}]+[\r\n]*"), "isolated")
    space = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence([digits, letters, stops, space])
    n_merges = SIZE - len(FIRST) - len(BYTES) - len(ADDED) - COMMON
    trainer = trainers.BpeTrainer(
        vocab_size=len(BYTES) + n_merges,
        initial_alphabet=BYTES,
        special_tokens=[],
        show_progress=False,
    )
    texts = list(corpus(folder, n))
    learner.train_from_iterator(texts, trainer)
    merges = [" ".join(m) for m in json.loads(learner.to_str())["model"]["merges"]]
    known = {m.replace(" ", "") for m in merges} | set(BYTES)
    counts = Counter(w for text in texts for w in re.findall(r" ([A-Za-z]+)", text))
    copied = set(re.findall("[A-Za-z]+", " ".join(POOLS.values())))
    copied |= {word.capitalize() for word in copied}
    copied |= set(STATUSES)
    parts = {part for name in _names() for part in words_of(name)}
    copied |= parts | {part.capitalize() for part in parts}
    common = [w for w, _ in counts.most_common(4000) if w in known and w not in copied][:COMMON]
    if len(common) < COMMON:
        raise SystemExit(f"only {len(common)} common words; lower COMMON, {COMMON}")
    merges += [f"Ġ {w}" for w in common]
    tokens = FIRST + BYTES + [m.replace(" ", "") for m in merges] + ADDED
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3 - len(ADDED)) + [USER_DEFINED] * len(ADDED)
    types[-1] = CONTROL  # the noise token never appears in text
    if len(tokens) != SIZE or len(set(tokens)) != SIZE:
        raise SystemExit(f"{len(tokens)} tokens, {len(set(tokens))} different; expected {SIZE}")
    return {"tokens": tokens, "types": types, "merges": merges}


if __name__ == "__main__":
    made = train(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(".carry/tiny"))
    PATH.write_text(json.dumps(made, ensure_ascii=False, indent=0) + "\n", "utf-8")
