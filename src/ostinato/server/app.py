"""The HTTP server of one engine: its routes, and the care of clients that are slow or vanish."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from ostinato import __version__
from ostinato.access.access import Access
from ostinato.access.errors import ForbiddenError
from ostinato.access.principal import Principal
from ostinato.engine.engine import Engine
from ostinato.engine.intake import LINK_TOKENS, Options, PromptLike
from ostinato.engine.request import Chunk, Reply, SamplingParams, Usage
from ostinato.engine.stream import collect as collect_reply
from ostinato.errors import EngineClosedError, InvalidRequestError, ModelNotFoundError
from ostinato.prompt.cache_control import CacheControl, cache_control
from ostinato.prompt.resolve import Placement, ReuseMode
from ostinato.prompt.schema import SchemaPrompt, Text
from ostinato.prompt.scopes import Asker
from ostinato.server.answer import Answer
from ostinato.server.anthropic import Conversation, MessagesRequest
from ostinato.server.anthropic_answer import MessagesAnswer
from ostinato.server.authenticate import Authenticate, principal_of
from ostinato.server.bodies import BodyRoute
from ostinato.server.cache import cache_routes, explanation_json
from ostinato.server.clients import CLIENT_CLOSED_REQUEST, ClientGone, EventStream, cancelled
from ostinato.server.documents import document_routes
from ostinato.server.errors import add_error_handlers, describe, request_id
from ostinato.server.limits import Limits, Place
from ostinato.server.lookup import Lookup
from ostinato.server.messages import MAX_NAME
from ostinato.server.metrics import Metrics
from ostinato.server.middleware import (
    BODY_WITHIN,
    TEXT_BYTES,
    BodyLimit,
    CountRequests,
    Limited,
    RequestIds,
    place_of,
)
from ostinato.server.openai import ChatCompletionRequest, CompletionRequest, Json, Prompt
from ostinato.server.openai_answer import ChatAnswer, CompletionAnswer, fingerprint
from ostinato.server.schemas import schema_routes
from ostinato.server.tools import Calls
from ostinato.server.workers import Workers

log = logging.getLogger(__name__)

EngineRequest = tuple[PromptLike, SamplingParams]
Pieces = AsyncGenerator[tuple[int, Chunk], None]

TOKEN_BYTES = 32
"""Most bytes of a body for each token that a prompt may have."""


class Body(Protocol):
    """A request for text, in the words of any API."""

    stream: bool | None
    explain: bool | None
    cache_salt: str | None
    end_user: str | None

    @property
    def session(self) -> str:
        """The conversation or agent run that the request belongs to."""
        ...

    @property
    def control(self) -> CacheControl:
        """Who may reuse, and for how long, what nothing in the prompt says more of."""
        ...

    def controls(self) -> Iterable[tuple[str, Json | None]]:
        """All that the body says of who may reuse what, and in which field."""
        ...

    @property
    def mode(self) -> ReuseMode:
        """What is reused of modules."""
        ...

    @property
    def link_tokens(self) -> int | None:
        """First tokens of each module that mode `linked` computes anew."""
        ...

    @property
    def prompt_field(self) -> str:
        """The field that the prompt came in."""
        ...

    def engine_requests(self, calls: Calls) -> Sequence[EngineRequest]:
        """What it asks of the engine; `calls` is how the model writes calls of tools."""
        ...


def create_app(
    engine: Engine,
    access: Access | None = None,
    *,
    limits: Limits | None = None,
    body_within: float = BODY_WITHIN,
) -> FastAPI:
    """The server of `engine`.

    `access` says who may use it, and keeps what they register; without one, whoever reaches it may, and what is
    registered is gone with the process. `limits` says how much of it each may use at once. A body that has not come
    whole after `body_within` seconds is refused.
    """
    access = access or Access(":memory:")
    lookup = Lookup(engine, access)
    workers = Workers()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        workers.close()

    # The pages that describe the API would load scripts from elsewhere; `/openapi.json` says the same.
    app = FastAPI(title="Ostinato", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.workers = workers
    app.router.route_class = BodyRoute
    metrics = Metrics(engine)
    system_fingerprint = fingerprint(engine.fingerprint, __version__)
    calls = Calls.of(engine.tokenizer)
    model: Json = {
        "id": engine.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "ostinato",
        "max_model_len": engine.max_model_len,
    }

    # The last added is the outermost. All are plain ASGI: Starlette's BaseHTTPMiddleware would stand
    # between the client and the response, where it hides disconnects.
    app.add_middleware(
        BodyLimit, text_bytes=max(TEXT_BYTES, TOKEN_BYTES * engine.max_model_len), within=body_within
    )
    app.add_middleware(Limited, limits=limits or Limits())
    app.add_middleware(Authenticate, access=access)
    app.add_middleware(CountRequests, metrics=metrics)
    app.add_middleware(RequestIds)
    add_error_handlers(app)

    def check_model(name: str) -> None:
        if name != engine.model_name:
            raise ModelNotFoundError(f"There is no model {name[:100]!r} here, only {engine.model_name!r}.")

    def prepared(
        principal: Principal, body: Body, make: Callable[[], Answer]
    ) -> tuple[Answer, list[EngineRequest]]:
        """The answer to a body, yet to be given, and what the engine is to be asked for it. Not for an event loop."""
        answer = make()
        # What follows narrower text is narrowed, and still not for everyone to ask for.
        asker = Asker(principal, body.session, body.control.level or "user")
        for at, named in body.controls():
            asker.scope(cache_control(named, at).level)
        if body.explain:
            answer.explain = partial(_explained, engine, answer.id, principal)
        requests, answer.placements = placed(lookup, principal, body, calls)
        return answer, requests

    async def respond(request: Request, body: Body, make: Callable[[], Answer]) -> Response:
        # Before any text is looked up: what is forgotten from now on is not to be kept of the answer.
        options = Options(epoch=engine.epoch, session=body.session)
        # The engine calls whatever it is given the prompt; errors name the field that it came in.
        request.state.prompt_field = body.prompt_field
        place, principal, control = place_of(request), principal_of(request), body.control
        place.afford()
        options["end_user"] = named(request, "X-End-User", body.end_user)
        options["cache_salt"] = named(request, "X-Cache-Salt", body.cache_salt)
        if control.level is not None:
            options["scope"] = control.level
        if control.ttl is not None:
            options["ttl"] = control.ttl
        try:
            answer, requests = await workers.run(principal, prepared, principal, body, make)
            options["request_id"] = answer.id
            place.hold(len(requests))
            pieces = run(engine, workers, metrics, place, principal, requests, options)
            if not body.stream:
                return JSONResponse(answer.whole(await collect(pieces, len(requests))))
            events = stream(pieces, len(requests), answer)
            # Nothing is sent before the first event, so that what the engine refuses still gets its status.
            return EventStream(await anext(events), events)
        except ForbiddenError as error:
            await workers.run(principal, access.audit.refused, principal, "escalation", error.param or "")
            raise

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:  # noqa: ARG001
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
        """Answer a conversation."""
        check_model(body.model)

        def make() -> ChatAnswer:
            return ChatAnswer(
                engine.model_name,
                system_fingerprint,
                choices=body.choices,
                include_usage=body.include_usage,
                logprobs=bool(body.logprobs),
                parser=body.parser(calls),
            )

        return await respond(request, body, make)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue a text."""
        check_model(body.model)

        def make() -> CompletionAnswer:
            return CompletionAnswer(
                engine.model_name,
                system_fingerprint,
                choices=body.choices,
                include_usage=body.include_usage,
                logprobs=body.logprobs is not None,
                echoes=[_text(engine, prompt) for prompt in body.prompts()] if body.echo else [],
            )

        return await respond(request, body, make)

    @app.post("/v1/messages")
    async def messages(request: Request, body: MessagesRequest) -> Response:
        """Answer a conversation, in the dialect of Anthropic's API."""
        check_model(body.model)
        id, principal = request_id(request.scope), principal_of(request)

        def make() -> MessagesAnswer:
            body.check()
            return MessagesAnswer(
                engine.model_name,
                body.parser(calls),
                id,
                cacheable=cacheable_tokens(engine, lookup, principal, body),
                long=body.long,
                silent=body.max_tokens == 0,
            )

        return await respond(request, body, make)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, body: Conversation) -> Json:
        """How many tokens a conversation has as a prompt."""
        check_model(body.model)
        request.state.prompt_field = body.prompt_field
        principal = principal_of(request)

        def counted() -> int:
            body.check()
            return len(prompt_tokens(engine, lookup, principal, body))

        return {"input_tokens": await workers.run(principal, counted)}

    @app.get("/v1/models")
    async def models() -> Json:
        """The models of this server."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Json:
        """One model of this server."""
        check_model(name)
        return model

    app.include_router(schema_routes(engine, access, lookup, workers))
    app.include_router(document_routes(engine, access, workers, lookup))
    app.include_router(cache_routes(engine, access, workers, lookup))

    @app.get("/health")
    async def health() -> Json:
        """200 while the engine lives."""
        if not engine.alive:
            raise EngineClosedError("The engine has stopped.")
        return {"status": "ok"}

    @app.get("/metrics")
    async def prometheus(request: Request) -> Response:
        """The server's state in Prometheus' text format."""
        principal = principal_of(request)
        if not principal.may("metrics"):
            # Totals tell what others ask, to whoever reads them often enough.
            await workers.run(principal, access.audit.refused, principal, "escalation", "metrics")
            raise ForbiddenError(
                "Reading the metrics needs a key with the permission metrics, which this one lacks.",
                code="metrics_not_permitted",
            )
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def placed(
    lookup: Lookup, principal: Principal, body: Body, calls: Calls
) -> tuple[list[EngineRequest], tuple[Placement, ...] | None]:
    """The engine requests of a body, and where the parts of its prompt stand if that is over a schema."""
    requests = body.engine_requests(calls)
    prompt, _ = requests[0]
    if not isinstance(prompt, SchemaPrompt):
        return list(requests), None
    resolved = lookup.resolve(
        prompt,
        principal,
        session=body.session,
        mode=body.mode,
        link_tokens=body.link_tokens or LINK_TOKENS,
    )
    return [(resolved.prompt, params) for _, params in requests], resolved.placements


def named(request: Request, header: str, field: str | None) -> str:
    """What a body names in a field, or else the request in a header; "" if neither does."""
    if field is not None:
        return field
    given = request.headers.get(header)
    if given is None:
        return ""
    try:
        name = given.encode("latin-1").decode()  # the same name in either place is the same
    except UnicodeDecodeError:
        raise InvalidRequestError(f"The header {header} is not in UTF-8.", param=header) from None
    if not 1 <= len(name) <= MAX_NAME:
        raise InvalidRequestError(
            f"The header {header} has {len(name)} characters; 1 to {MAX_NAME} make a name.", param=header
        )
    return name


def _explained(engine: Engine, request_id: str, principal: Principal) -> Json | None:
    found = engine.explain(request_id, principal)
    return None if found is None else explanation_json(found)


def prompt_tokens(
    engine: Engine, lookup: Lookup, principal: Principal, body: Conversation
) -> tuple[int, ...]:
    """The tokens of a conversation as a prompt."""
    prompt, links = body.prompt(), body.link_tokens or LINK_TOKENS
    if isinstance(prompt, SchemaPrompt):
        resolved = lookup.resolve(prompt, principal, mode=body.mode, link_tokens=links)
        return tuple(resolved.prompt.token_ids)
    return tuple(engine.encode(prompt).token_ids)


def cacheable_tokens(engine: Engine, lookup: Lookup, principal: Principal, body: Conversation) -> int:
    """How many tokens of its prompt a client asks to be cached: those up to its last breakpoint."""
    part = body.cached_part()
    if part is None:
        return 0
    if part is body:
        return engine.max_model_len
    cut, whole = (prompt_tokens(engine, lookup, principal, each) for each in (part, body))
    # What ends the shorter prompt is the template's, and not in the longer one.
    differing = (at for at, (a, b) in enumerate(zip(cut, whole, strict=False)) if a != b)
    return next(differing, min(len(cut), len(whole)))


def _text(engine: Engine, prompt: Prompt) -> str:
    if isinstance(prompt, Text):
        return prompt.text
    return engine.tokenizer.decode(prompt if isinstance(prompt, list) else [])


async def run(
    engine: Engine,
    workers: Workers,
    metrics: Metrics,
    place: Place,
    principal: Principal,
    requests: Sequence[EngineRequest],
    options: Options,
) -> Pieces:
    """Run engine requests at once; their chunks as they come, each with the index of its request.

    Together they are one turn of their session, so the first stands for all.
    Chunks wait here for a slow client, so that the engine never does. Closing the generator cancels the
    requests that still run; so does an error in one of them.
    """
    arrived: asyncio.Queue[tuple[int, Chunk] | Exception | None] = asyncio.Queue()

    async def follow(index: int, prompt: PromptLike, params: SamplingParams) -> None:
        previous, sequence = None, None
        try:
            asked: Options = {**options, "principal": principal, "choice": index}
            # Nothing is submitted by the thread: the client may leave while it works.
            sequence = await workers.run(principal, engine.prepare, prompt, params, **asked)
            async with aclosing(engine.afollow(sequence)) as chunks:
                async for chunk in chunks:
                    if chunk.finish_reason == "cancelled":
                        raise EngineClosedError("The server is shutting down.")
                    metrics.observe(chunk, previous)
                    place.charge(computed(chunk.usage) - (computed(previous.usage) if previous else 0))
                    previous = chunk
                    arrived.put_nowait((index, chunk))
            arrived.put_nowait(None)
        except Exception as error:  # handed on: it is raised where the chunks are read
            arrived.put_nowait(error)
        finally:
            if previous is None and sequence is not None and sequence.admitted:
                # Who leaves before the first token has had the prompt computed all the same.
                place.charge(sequence.prompt_kinds.total() - sequence.cached_kinds.total())

    tasks = [asyncio.create_task(follow(index, *request)) for index, request in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            match await arrived.get():
                case None:
                    running -= 1
                case Exception() as error:
                    raise error
                case piece:
                    yield piece
    finally:
        await cancelled(tasks)


def computed(usage: Usage) -> int:
    """Tokens that a reply has cost so far."""
    return usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens


async def collect(pieces: Pieces, count: int) -> list[Reply]:
    """The whole replies of `count` engine requests."""
    chunks: list[list[Chunk]] = [[] for _ in range(count)]
    async with aclosing(pieces):
        async for index, chunk in pieces:
            chunks[index].append(chunk)
    return [collect_reply(each) for each in chunks]


async def stream(pieces: Pieces, count: int, answer: Answer) -> AsyncGenerator[str, None]:
    """The server-sent events of a streamed answer.

    Raises what goes wrong before the first event; later the headers are out, and the error is an event.
    """
    begun = False
    running = count
    try:
        async with aclosing(pieces):
            async for index, chunk in pieces:
                running -= chunk.finish_reason is not None
                for event in answer.events(index, chunk, last=not running):
                    begun = True
                    yield event
    except Exception as error:
        if not begun:
            raise
        told = describe(error)
        if told.status == 500:
            log.exception("a stream broke off")
        yield answer.failed(told)
        return
    for event in answer.end():
        yield event
