"""A prompt as the engine sees it: chains of tokens, each with its positions and what it may look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ostinato.access.scope import Level, Scope

SpanKind = Literal[
    "text", "system", "tools", "template", "document", "user", "tool", "assistant", "reasoning"
]
"""What tokens of a prompt are: of unknown kind, system prompt, tool definitions, what a template writes, a document
or module, the user's, a tool's output, the assistant's earlier answers, or its earlier chain of thought."""


@dataclass(frozen=True)
class Span:
    """A stretch of a prompt of one kind and one scope."""

    token_ids: tuple[int, ...]
    kind: SpanKind = "text"
    scope: Level | Scope | None = None
    """Who may reuse it: a level is the request's wish, a scope the server's word, None what all of the request has."""
    ttl: float | None = None
    """Seconds since its latest use after which it counts as forgotten; None for what all of the request has."""
    registered: Scope | None = None
    """The scope of the document or schema whose text it is, wherever it is computed: they are forgotten together."""


@dataclass(frozen=True)
class View:
    """What a chain sees of an earlier one: tokens number `start` to `end` (excluded; None is all)."""

    chain: int
    start: int = 0
    end: int | None = None


@dataclass(frozen=True)
class Chain:
    """Tokens at consecutive positions from `start`, which see the `sees` of earlier chains and themselves.

    What is seen always precedes in position: a token at position p looks at positions up to p. The chain's
    root is the hash of exactly that context, so the KV of a chain is reused wherever context, position and
    tokens are the same.
    """

    spans: tuple[Span, ...]
    start: int = 0
    sees: tuple[View, ...] = ()
    name: str = ""
    """For reports: the path of a module ("city/paris"), or empty for text."""
    home: int | None = None
    """Where the chain is encoded, right behind what it sees, if it is moved from there to `start`. Its states
    stay those of its home; only its keys turn with the position."""
    scope: Scope | None = None
    """Who may reuse it; None for the asker's own."""
    ttl: float | None = None
    continues: bool = False
    """Whether it only goes on where the chain before it ends, in another scope."""
    behind: bool = False
    """Whether its position tells how long the chains are that stand before it, though it does not see them."""

    @property
    def registered(self) -> frozenset[Scope]:
        """The scopes of the documents and schemas with text in it, as far as they are not its own."""
        return frozenset(span.registered for span in self.spans if span.registered) - {self.scope}

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for span in self.spans for token in span.token_ids)


@dataclass(frozen=True)
class Prompt:
    """What a request asks the model to continue: `chains` in order of position; the reply continues the last."""

    chains: tuple[Chain, ...]

    @property
    def token_ids(self) -> list[int]:
        return [token for chain in self.chains for token in chain.token_ids]


def plain(*spans: Span) -> Prompt:
    """An ordinary prompt: one chain from position 0."""
    return Prompt((Chain(spans),))
