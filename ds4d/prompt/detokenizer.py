"""Token ids to text while they arrive. Works on bytes: a character may span several tokens, and a
token may end in the middle of one. Knows nothing of turns or markers; those are literal text here.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Detokenizer:
    """Holds back the bytes of an unfinished character; bytes that can't be UTF-8 become U+FFFD.

    It starts empty whatever the prompt ended with: half a character there is the prompt's own.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, perhaps none."""
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        """U+FFFD for an unfinished character, else nothing. What follows starts afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
