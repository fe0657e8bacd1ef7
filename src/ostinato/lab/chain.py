"""A chain: the typed tokens of a prompt, cut into blocks whose keys stand for all tokens up to their end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from ostinato.cache.use import TokenType


class Chain:
    """A prompt that grows at its end. Only full blocks have keys: what is left behind them cannot be found again.

    Token ids are any whole numbers below 2**64, equal where the text is.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.keys: list[bytes] = []
        self.kinds: list[TokenType] = []
        """What most tokens of each block are."""
        self.tokens = 0
        self.templated = False
        """It begins with text that is not the user's."""
        self._rest: list[int] = []
        self._counts: dict[TokenType, int] = {}

    def copy(self) -> Chain:
        """The same prompt, to be continued differently."""
        other = Chain(self.block_size)
        other.keys, other.kinds = [*self.keys], [*self.kinds]
        other.tokens, other.templated = self.tokens, self.templated
        other._rest, other._counts = [*self._rest], {**self._counts}
        return other

    def add(self, kind: TokenType, token_ids: Sequence[int]) -> None:
        """Continue the prompt with tokens of one type."""
        if not self.tokens:
            self.templated = kind in ("system", "tools", "template", "document")
        self.tokens += len(token_ids)
        done = 0
        while done < len(token_ids):
            part = token_ids[done : done + self.block_size - len(self._rest)]
            done += len(part)
            self._rest += part
            self._counts[kind] = self._counts.get(kind, 0) + len(part)
            if len(self._rest) == self.block_size:
                self._close()

    def behind(self, prompt: Chain) -> tuple[bytes, ...]:
        """Keys of the blocks that this chain has beyond `prompt`, which it continues."""
        return tuple(self.keys[len(prompt.keys) :])

    def _close(self) -> None:
        parent = self.keys[-1] if self.keys else b"\0" * 8
        content = array("Q", self._rest).tobytes()
        self.keys.append(hashlib.blake2b(parent + content, digest_size=8).digest())
        self.kinds.append(max(self._counts, key=self._counts.__getitem__))
        self._rest.clear()
        self._counts.clear()
