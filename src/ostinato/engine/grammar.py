"""Grammars: replies that have a given form, whatever the model would rather say.

Which tokens may come next is computed by llguidance, from the bytes of the tokens, so that one grammar serves
every tokenizer. A grammar is compiled where the request is prepared, not on the engine's thread.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from ostinato.access.scope import Scope
from ostinato.cache.owned import Owned
from ostinato.errors import InvalidRequestError
from ostinato.models.tokenizer import Tokenizer

MAX_SOURCE = 2**17
"""Most characters of a grammar: a schema is read by the server for the client, so it costs the server time."""
KEPT = 256
"""Compiled grammars that are kept. Most clients send the same few."""

# What a grammar may cost: about 20 ms to compile its lexer, a few ms a token at the worst. The library's
# messages can quote its state at length, so they are asked to be short.
_LIMITS = llguidance.LLParserLimits(max_lexer_states=100_000, max_grammar_size=200_000, verbose_errors=False)

# A space, or a line break with an indent, between two parts of JSON: models that may write any amount of white
# space can go on writing it for ever.
_WHITESPACE = r"( |\n[ \t]{0,40})?"


@dataclass(frozen=True)
class Grammar:
    """The form that a reply must have, or the parts of it that follow a `trigger`."""

    source: str
    """In Lark, or as JSON, as llguidance reads it."""
    field: str = "grammar"
    """The field of the request that it came in: errors name it."""
    trigger: str = ""
    """The form begins behind this text, as often as that comes; all before and between is free."""
    once: bool = False
    """The reply ends with the first text of the form."""


class GrammarError(InvalidRequestError):
    """A grammar that cannot be followed any further: it is too complex at this point."""


def json_grammar(schema: Mapping[str, Any], field: str = "grammar", *, lenient: bool = False) -> Grammar:
    """JSON that is valid by a JSON schema; see `json_options`."""
    options = json_options(schema, lenient=lenient)
    return Grammar(json.dumps({"grammars": [{"json_schema": options}]}), field)


def json_options(schema: Mapping[str, Any], *, lenient: bool = False) -> dict[str, Any]:
    """A JSON schema as llguidance takes it, with this server's way of writing JSON. A client's own is dropped.

    `lenient` leaves out what the library does not know of the schema, which is else an error.
    """
    return {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE, "lenient": lenient}}


class Matcher:
    """How far one reply has come in its grammar."""

    def __init__(self, grammar: Grammar, compiled: llguidance.LLMatcher, vocabulary: _Vocabulary) -> None:
        self._grammar = grammar
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._trigger = grammar.trigger.encode()
        self._tail = b""
        self._active = None if self._trigger else compiled.deep_copy()
        self.ended = False
        """Nothing may follow any more."""

    def mask(self) -> NDArray[np.bool_] | None:
        """Which tokens may come next; None for any. Tokens past its end may not.

        Raises:
            GrammarError: that cannot be told, within the limits on time and memory.
        """
        if self._active is None:
            return None
        words = np.zeros(-(-self._vocabulary.compiled.vocab_size // 32), np.int32)
        self._active.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._active.is_error() or not words.any():
            raise GrammarError(
                f"{self._grammar.field} is too complex to be followed: {_brief(self._active.get_error())}",
                param=self._grammar.field,
            )
        return np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_)

    def take(self, token_id: int) -> None:
        """The reply goes on with this token, which was allowed."""
        if self._active is not None:
            self._active.consume_token(token_id)
        elif not self.ended:
            self._look_for_trigger(self._vocabulary.tokenizer.token_bytes(token_id))
        # In error, it is stopped too: then the next mask says so.
        if self._active is not None and self._active.is_stopped() and not self._active.is_error():
            self._active, self._tail = None, b""
            self.ended = not self._trigger or self._grammar.once

    def _look_for_trigger(self, read: bytes) -> None:
        before, found, rest = (self._tail + read).partition(self._trigger)
        if not found:
            self._tail = before[1 - len(self._trigger) :] if len(self._trigger) > 1 else b""
            return
        self._tail = b""
        active = self._compiled.deep_copy()
        # A token may reach over the end of the trigger. If it leaves the form there, it was no such text.
        if not rest or active.consume_tokens(self._vocabulary.compiled.tokenize_bytes(rest)):
            self._active = active


class Grammars:
    """Compiles grammars for a model's tokens, and keeps the latest. For all threads."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_token_ids = sorted(token for token in stop_token_ids if token < tokenizer.vocab_size)
        self._vocabulary: _Vocabulary | None = None
        # By whose they are: how soon one is compiled would tell what others have sent.
        self._compiled: Owned[Scope | None, str, llguidance.LLMatcher] = Owned(KEPT)
        self._forgettings = 0
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar, owner: Scope | None = None) -> Matcher:
        """The beginning of a reply in this grammar, to a user.

        Raises:
            InvalidRequestError: it is malformed, too large or too complex, or there is something in it that is
                not supported.
        """
        with self._lock:
            if not self._stop_token_ids:
                raise InvalidRequestError(
                    "The model has no token that ends a reply, which a grammar needs.", param=grammar.field
                )
            if self._vocabulary is None:  # made when first needed: it takes up to a second
                self._vocabulary = _Vocabulary(self._tokenizer, self._stop_token_ids)
            vocabulary = self._vocabulary
            compiled = self._compiled.get(owner, grammar.source)
            forgettings = self._forgettings
        if compiled is None:
            compiled = self._compile(grammar, vocabulary)
            with self._lock:
                if self._forgettings == forgettings:  # else it may be of what was forgotten meanwhile
                    self._compiled.put(owner, grammar.source, compiled)
        return Matcher(grammar, compiled, vocabulary)

    def forget(self, forgotten: Callable[[Scope], bool]) -> None:
        """Drop the grammars of users whose scopes are forgotten."""
        with self._lock:
            self._forgettings += 1
            self._compiled.forget(lambda owner, _: owner is not None and forgotten(owner))

    def _compile(self, grammar: Grammar, vocabulary: _Vocabulary) -> llguidance.LLMatcher:
        def refused(why: str) -> InvalidRequestError:
            return InvalidRequestError(f"{grammar.field}: {why}", param=grammar.field, code="invalid_value")

        if len(grammar.source) > MAX_SOURCE:
            raise refused(f"it has {len(grammar.source)} characters; {MAX_SOURCE} is the limit.")
        compiled = llguidance.LLMatcher(vocabulary.compiled, grammar.source, log_level=0, limits=_LIMITS)
        if compiled.is_error():
            raise refused(_brief(compiled.get_error()))
        return compiled


_SENTINEL = "\x02"


class _Vocabulary:
    """A model's tokens, as llguidance takes them."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: list[int]) -> None:
        self.tokenizer = tokenizer
        # What the library reads of a tokenizer:
        self.eos_token_id = stop_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.compiled = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), eos_token=stop_token_ids)

    def __call__(self, text: bytes) -> list[int]:
        """Token ids of a text that stands anywhere in a reply."""
        given = text.decode(errors="replace")
        if not self.tokenizer.strips_first_space:
            return self.tokenizer.encode(given, add_bos=False)
        # Encoding would put a space before the text, so something that is cut away again stands there.
        ids = self.tokenizer.encode(_SENTINEL + given, add_bos=False)
        sentinel = next(
            (at for at, token in enumerate(ids) if self.tokens[token] == _SENTINEL.encode()), None
        )
        return [] if sentinel is None else ids[sentinel + 1 :]


def _brief(message: str) -> str:
    """The library's message for people: on one line, cut."""
    return " ".join(message.split())[:300] or "no token can follow."
