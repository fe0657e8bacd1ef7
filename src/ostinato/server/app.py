"""The HTTP server of one engine: its routes, and the care of clients that are slow or vanish."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from ostinato import __version__
from ostinato.access.access import Access
from ostinato.access.errors import ForbiddenError
from ostinato.access.principal import Principal
from ostinato.engine.engine import Engine
from ostinato.engine.intake import LINK_TOKENS, Options, PromptLike
from ostinato.engine.request import Chunk, Reply, SamplingParams
from ostinato.engine.stream import collect as collect_reply
from ostinato.errors import EngineClosedError, ModelNotFoundError
from ostinato.prompt.cache_control import CacheControl, cache_control
from ostinato.prompt.resolve import Placement, ReuseMode
from ostinato.prompt.schema import SchemaPrompt, Text
from ostinato.prompt.scopes import Asker
from ostinato.server.answer import Answer
from ostinato.server.anthropic import Conversation, MessagesRequest
from ostinato.server.anthropic_answer import MessagesAnswer
from ostinato.server.cache import cache_routes, explanation_json
from ostinato.server.documents import document_routes
from ostinato.server.errors import add_error_handlers, describe, request_id
from ostinato.server.lookup import Lookup
from ostinato.server.metrics import Metrics
from ostinato.server.middleware import Authenticate, BodyLimit, CountRequests, RequestIds, principal_of
from ostinato.server.openai import ChatCompletionRequest, CompletionRequest, Json, Prompt
from ostinato.server.openai_answer import ChatAnswer, CompletionAnswer, fingerprint
from ostinato.server.schemas import schema_routes
from ostinato.server.tools import Calls

log = logging.getLogger(__name__)

T = TypeVar("T")
EngineRequest = tuple[PromptLike, SamplingParams]
Pieces = AsyncGenerator[tuple[int, Chunk], None]


class Body(Protocol):
    """A request for text, in the words of any API."""

    stream: bool | None
    explain: bool | None

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


CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left before the answer: nobody receives it, the metrics count it."""


def create_app(engine: Engine, access: Access | None = None) -> FastAPI:
    """The server of `engine`.

    `access` says who may use it, and keeps what they register; without one, whoever reaches it may, and what is
    registered is gone with the process.
    """
    access = access or Access(":memory:")
    lookup = Lookup(engine, access)
    app = FastAPI(title="Ostinato", version=__version__, redoc_url=None)
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
    app.add_middleware(BodyLimit)
    app.add_middleware(Authenticate, access=access)
    app.add_middleware(CountRequests, metrics=metrics)
    app.add_middleware(RequestIds)
    add_error_handlers(app)

    def check_model(name: str) -> None:
        if name != engine.model_name:
            raise ModelNotFoundError(f"There is no model {name[:100]!r} here, only {engine.model_name!r}.")

    async def respond(request: Request, body: Body, answer: Answer) -> Response:
        # The engine calls whatever it is given the prompt; errors name the field that it came in.
        request.state.prompt_field = body.prompt_field
        principal, control = principal_of(request), body.control
        options = Options(principal=principal, session=body.session, request_id=answer.id)
        if control.level is not None:
            options["scope"] = control.level
        if control.ttl is not None:
            options["ttl"] = control.ttl
        if body.explain:
            answer.explain = partial(_explained, engine, answer.id, principal)
        try:
            # What follows narrower text is narrowed, and still not for everyone to ask for.
            asker = Asker(principal, body.session, control.level or "user")
            for at, named in body.controls():
                asker.scope(cache_control(named, at).level)
            requests, answer.placements = await placed(lookup, principal, body, calls)
            pieces = run(engine, metrics, requests, options)
            if not body.stream:
                replies = await unless_gone(request.receive, collect(pieces, len(requests)))
                return JSONResponse(answer.whole(replies))
            events = stream(pieces, len(requests), answer)
            # Nothing is sent before the first event, so that what the engine refuses still gets its status.
            return EventStream(await unless_gone(request.receive, anext(events)), events)
        except ForbiddenError as error:
            await asyncio.to_thread(access.audit.refused, principal, "escalation", error.param or "")
            raise

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:  # noqa: ARG001
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
        """Answer a conversation."""
        check_model(body.model)
        answer = ChatAnswer(
            engine.model_name,
            system_fingerprint,
            choices=body.choices,
            include_usage=body.include_usage,
            logprobs=bool(body.logprobs),
            parser=partial(body.parser, calls),
        )
        return await respond(request, body, answer)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue a text."""
        check_model(body.model)
        prompts = body.prompts() if body.echo else []
        # Many token ids take a while to become text; the event loop serves others meanwhile.
        echoes = await asyncio.to_thread(lambda: [_text(engine, prompt) for prompt in prompts])
        answer = CompletionAnswer(
            engine.model_name,
            system_fingerprint,
            choices=body.choices,
            include_usage=body.include_usage,
            logprobs=body.logprobs is not None,
            echoes=echoes,
        )
        return await respond(request, body, answer)

    @app.post("/v1/messages")
    async def messages(request: Request, body: MessagesRequest) -> Response:
        """Answer a conversation, in the dialect of Anthropic's API."""
        check_model(body.model)
        request.state.prompt_field = body.prompt_field
        body.check()
        answer = MessagesAnswer(
            engine.model_name,
            await asyncio.to_thread(body.parser, calls),
            request_id(request.scope),
            cacheable=await asyncio.to_thread(cacheable_tokens, engine, lookup, principal_of(request), body),
            long=body.long,
            silent=body.max_tokens == 0,
        )
        return await respond(request, body, answer)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, body: Conversation) -> Json:
        """How many tokens a conversation has as a prompt."""
        check_model(body.model)
        request.state.prompt_field = body.prompt_field
        body.check()
        tokens = await asyncio.to_thread(prompt_tokens, engine, lookup, principal_of(request), body)
        return {"input_tokens": len(tokens)}

    @app.get("/v1/models")
    async def models() -> Json:
        """The models of this server."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Json:
        """One model of this server."""
        check_model(name)
        return model

    app.include_router(schema_routes(engine, access, lookup))
    app.include_router(document_routes(engine, access))
    app.include_router(cache_routes(engine, access))

    @app.get("/health")
    async def health() -> Json:
        """200 while the engine lives."""
        if not engine.alive:
            raise EngineClosedError("The engine has stopped.")
        return {"status": "ok"}

    @app.get("/metrics")
    async def prometheus() -> Response:
        """The server's state in Prometheus' text format."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


async def placed(
    lookup: Lookup, principal: Principal, body: Body, calls: Calls
) -> tuple[list[EngineRequest], tuple[Placement, ...] | None]:
    """The engine requests of a body, and where the parts of its prompt stand if that is over a schema."""
    # Reading PML may take a while; the event loop serves others meanwhile.
    requests = await asyncio.to_thread(body.engine_requests, calls)
    prompt, _ = requests[0]
    if not isinstance(prompt, SchemaPrompt):
        return list(requests), None
    resolved = await asyncio.to_thread(
        lookup.resolve,
        prompt,
        principal,
        session=body.session,
        mode=body.mode,
        link_tokens=body.link_tokens or LINK_TOKENS,
    )
    return [(resolved.prompt, params) for _, params in requests], resolved.placements


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
    engine: Engine, metrics: Metrics, requests: Sequence[EngineRequest], options: Options
) -> Pieces:
    """Run engine requests at once; their chunks as they come, each with the index of its request.

    Together they are one turn of their session, so the first stands for all.
    Chunks wait here for a slow client, so that the engine never does. Closing the generator cancels the
    requests that still run; so does an error in one of them.
    """
    arrived: asyncio.Queue[tuple[int, Chunk] | Exception | None] = asyncio.Queue()

    async def follow(index: int, prompt: PromptLike, params: SamplingParams) -> None:
        previous = None
        try:
            asked: Options = {**options, "choice": index}
            async with aclosing(engine.astream(prompt, params, **asked)) as chunks:
                async for chunk in chunks:
                    if chunk.finish_reason == "cancelled":
                        raise EngineClosedError("The server is shutting down.")
                    metrics.observe(chunk, previous)
                    previous = chunk
                    arrived.put_nowait((index, chunk))
            arrived.put_nowait(None)
        except Exception as error:  # handed on: it is raised where the chunks are read
            arrived.put_nowait(error)

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
        await _cancel(tasks)


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


class EventStream(StreamingResponse):
    """Server-sent events. However the response ends, the events are closed, and with them the requests.

    Listens for the disconnect itself: whether Starlette does depends on the ASGI version of the server.
    """

    def __init__(self, first: str, events: AsyncGenerator[str, None]) -> None:
        async def body() -> AsyncGenerator[str, None]:
            yield first
            async for event in events:
                yield event

        super().__init__(
            body(),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            await unless_gone(receive, self.stream_response(send))
        except (ClientGone, OSError):
            pass
        finally:
            await self._events.aclose()


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; if the client leaves first, `work` is cancelled and ClientGone raised."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        await _cancel((working, leaving))


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
