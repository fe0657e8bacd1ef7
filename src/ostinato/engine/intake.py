"""The intake: from what a caller asks to a sequence that the scheduler takes. Runs on the caller's thread."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import TypedDict

from ostinato.access.principal import LOCAL, Principal
from ostinato.access.scope import Level, Scope, Secrets, session_name
from ostinato.cache.pool import Pool
from ostinato.engine.grammar import Grammars
from ostinato.engine.request import MAX_SESSION_NAME, SamplingParams
from ostinato.engine.sequence import Sequence, SequenceChain, request_tag, root_of, sequence_chains
from ostinato.errors import InvalidRequestError, PromptTooLongError
from ostinato.models.config import ModelConfig
from ostinato.models.tokenizer import Tokenizer
from ostinato.prompt.chat import Chat, encode_chat
from ostinato.prompt.pml import is_prompt, parse_prompt
from ostinato.prompt.registry import Registry
from ostinato.prompt.resolve import ReuseMode
from ostinato.prompt.schema import SchemaPrompt, Text
from ostinato.prompt.scopes import Asker, scoped
from ostinato.prompt.span import Prompt, Span, plain

PromptLike = str | Text | Prompt | SchemaPrompt | Chat | Seq[int] | Seq[Mapping[str, object]]
"""Plain text or PML, token ids, chat messages (with tools: `Chat`), a prompt over a schema, or a `Prompt`."""

LINK_TOKENS = 16
"""Tokens of each module that mode `linked` computes anew (the knee of DESIGN's measurements)."""


class Options(TypedDict, total=False):
    """What a request may say beside its prompt and how to sample."""

    mode: ReuseMode
    """What is reused of modules ("modular")."""
    link_tokens: int
    """First tokens of each module that mode `linked` computes anew (16)."""
    session: str
    """The conversation or agent run that the request belongs to, which tells the cache what will be asked for again.
    It never decides what others may reuse."""
    principal: Principal
    """Who asks; `LOCAL`, this process, if not given."""
    scope: Level
    """Who may reuse what the request computes, where nothing in the prompt says so ("user")."""
    ttl: float
    """Seconds since its latest use after which it counts as forgotten; without it, it stays until it is evicted."""
    choice: int
    """Number among the answers to one request; they are one turn of its session, for which the first stands."""
    request_id: str
    """A name to ask by for the request's explanation, and to forget it."""
    end_user: str
    """Of the principal's own users, whose request it is: what it computes in the user's scope is found for that one
    alone."""
    cache_salt: str
    """What it computes, in whatever scope, is found with the same salt alone."""
    epoch: int
    """`Engine.epoch` of before the first of its text was read, where that was read from somewhere."""


class Intake:
    """Tokenises, checks, scopes and keys prompts.

    Args:
        config: of the model.
        tokenizer: the model's.
        schemas: those that prompts may name.
        pool: what prompts have to fit.
        max_length: most tokens of a prompt with its reply.
        fingerprint: the model's.
        secrets: of the scopes.
        grammars: that replies may be in.
        ttls: longest time to live of each scope.
        release_once: see `Engine`.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        schemas: Registry,
        pool: Pool,
        *,
        max_length: int,
        fingerprint: bytes,
        secrets: Secrets,
        grammars: Grammars,
        ttls: Mapping[Level, float],
        release_once: bool,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._schemas = schemas
        self._pool = pool
        self._max_length = max_length
        self._fingerprint = fingerprint
        self._secrets = secrets
        self._grammars = grammars
        self._ttls = ttls
        self._release_once = release_once
        self._ids = itertools.count()

    def encode(
        self,
        prompt: PromptLike,
        *,
        mode: ReuseMode = "modular",
        link_tokens: int = LINK_TOKENS,
        level: Level = "user",
    ) -> Prompt:
        """The prompt as chains of tokens, `level` being the scope of what names none.

        Text is taken as it stands, unless it is a PML prompt (`Text` never is one); chat messages go through
        the model's template; what names a schema is laid out by it.
        """
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str) and is_prompt(prompt):
            prompt = parse_prompt(prompt)
        if isinstance(prompt, SchemaPrompt):
            return self._schemas.resolve(prompt, mode, link_tokens).prompt
        if isinstance(prompt, str | Text):
            text = prompt.text if isinstance(prompt, Text) else prompt
            self._check_text(len(text.encode(errors="replace")))
            return plain(Span(tuple(self._tokenizer.encode(text))))
        if not isinstance(prompt, Chat) and prompt and all(isinstance(item, int) for item in prompt):
            return plain(Span(tuple(prompt)))  # pyright: ignore[reportArgumentType]
        chat = prompt if isinstance(prompt, Chat) else Chat(prompt)  # pyright: ignore[reportArgumentType]
        self._check_text(sum(len(str(item)) for item in (*chat.messages, *chat.tools)))
        return plain(*encode_chat(self._tokenizer, chat.messages, tools=chat.tools, default=level))

    def prepare(
        self,
        prompt: PromptLike,
        params: SamplingParams | None,
        arrived: float,
        *,
        session: str = "",
        mode: ReuseMode = "modular",
        link_tokens: int = LINK_TOKENS,
        principal: Principal = LOCAL,
        scope: Level = "user",
        ttl: float | None = None,
        choice: int = 0,
        request_id: str = "",
        end_user: str = "",
        cache_salt: str = "",
        epoch: int = 0,
    ) -> Sequence:
        """Tokenise and check a request that came in at `arrived`."""
        params = params or SamplingParams()
        if len(session) > MAX_SESSION_NAME:
            raise InvalidRequestError(
                f"The session's name has {len(session)} characters; {MAX_SESSION_NAME} is the limit.",
                param="session",
            )
        named = session_name(session)
        beneath = session_name(end_user), session_name(cache_salt)
        asker = Asker(principal, named, scope, ttl, self._ttls, *beneath)
        encoded = self.encode(prompt, mode=mode, link_tokens=link_tokens, level=scope)
        vocab = self._config.vocab_size
        if not encoded.chains[-1].token_ids:
            raise InvalidRequestError("The prompt is empty: send at least one token.", param="prompt")
        if not all(0 <= token < vocab for token in encoded.token_ids):
            raise InvalidRequestError(f"Token ids must be between 0 and {vocab - 1}.", param="prompt")
        if not all(0 <= token < vocab for token in params.logit_bias):
            raise InvalidRequestError(
                f"logit_bias names a token id outside 0 to {vocab - 1}.", param="logit_bias"
            )
        chains = self.chains(encoded, asker)
        room = min(self._context_room(chains), self._pool_room(chains))
        if room < 1:
            raise self._too_long(f"The prompt has {len(encoded.token_ids)} tokens")
        sequence = Sequence(next(self._ids), chains, params, min(params.max_tokens or room, room), arrived)
        sequence.asker = principal.scope("user")
        if params.grammar is not None:
            sequence.matcher = self._grammars.matcher(params.grammar, sequence.asker)
        sequence.epoch, sequence.publishes = epoch, asker.publishes
        if named and not choice:
            # The same name is another session for another user.
            of_user = principal.scope("session", named).beneath(end_user=beneath[0], salt=beneath[1])
            sequence.session = hashlib.sha256(of_user.encoded()).hexdigest()
        sequence.request_id = request_id or f"req-{sequence.id}"
        sequence.choice = choice
        sequence.tag = request_tag(sequence.asker, sequence.request_id)
        return sequence

    def chains(self, prompt: Prompt, asker: Asker) -> list[SequenceChain]:
        """The chains of a prompt, each in one scope and keyed under its secret."""
        size = self._pool.block_size
        chains = sequence_chains(
            scoped(prompt, asker, smallest=size), self._fingerprint, size, self._secrets.secret
        )
        for chain in chains:
            # The server's own text is nobody's.
            if not chain.scope.private and any(kind != "template" for _, kind in chain.kinds):
                chain.sender = asker.principal.scope("user")
                # What is registered says itself who may.
                chain.guarded = self._release_once and not chain.scope.resource
        return chains

    def forget(self, scopes: Callable[[Scope], bool], user: Scope) -> None:
        """Drop what is kept of the texts of users whose scopes are forgotten, and of `user`, who asks for it."""
        self._grammars.forget(lambda owner: owner == user or scopes(owner))

    def root(self, origin: tuple[str, int, bytes], scope: Scope) -> bytes:
        return root_of(self._fingerprint, origin, self._secrets.secret(scope))

    def _context_room(self, chains: list[SequenceChain]) -> int:
        """Positions left after the last chain."""
        return self._max_length - chains[-1].start - len(chains[-1].token_ids)

    def _pool_room(self, chains: list[SequenceChain]) -> int:
        """Slots left for the reply when all of the prompt is in the pool."""
        pool = self._pool
        blocks = [-(-len(chain.token_ids) // pool.block_size) for chain in chains]
        in_last_block = blocks[-1] * pool.block_size - len(chains[-1].token_ids)
        return (pool.blocks - sum(blocks)) * pool.block_size + in_last_block

    def _check_text(self, size: int) -> None:
        """Refuse text that cannot fit without tokenising it, which takes seconds for megabytes."""
        if size <= 16 * self._max_length:
            return
        least = size // self._tokenizer.longest_token
        if least > self._max_length:
            raise self._too_long(f"The prompt has {size} bytes, at least {least} tokens")

    def _too_long(self, what: str) -> PromptTooLongError:
        of_model = self._max_length == self._config.context_length
        return PromptTooLongError(
            f"{what}; with one to answer, {'the context of the model' if of_model else 'the KV pool'} holds "
            f"{self._max_length}. Shorten the prompt{'.' if of_model else ', or start with more kv_tokens.'}"
        )
