"""From a prompt to one whose every chain has one scope: who may reuse which stretch of it.

Scopes narrow along what is seen. A chain is cut where its scope gets narrower; each piece goes on where the one
before it ends and sees all of it, so the model computes what it would compute of the whole, but the wide beginning is
keyed, and found, without the narrow rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ostinato.access.errors import ForbiddenError
from ostinato.access.principal import LOCAL, Permission, Principal
from ostinato.access.scope import PUBLIC, Level, Scope, narrower, rank
from ostinato.errors import InvalidRequestError
from ostinato.prompt.cache_control import shorter
from ostinato.prompt.span import Chain, Prompt, Span, View

_PERMISSIONS: Mapping[Level, Permission] = {"public": "publish:public", "org": "publish:org"}


@dataclass(frozen=True)
class Asker:
    """Who asks, and what holds of all that a request leaves open."""

    principal: Principal = LOCAL
    session: str = ""
    """The client's name of the session; it names a scope only within the principal's own."""
    level: Level = "user"
    ttl: float | None = None
    limits: Mapping[Level, float] = field(default_factory=dict[Level, float])
    """Longest time to live that a scope of each level may have, in seconds."""
    end_user: str = ""
    """Of the principal's own users, whose request it is; like `session` a name that narrows, and never widens."""
    salt: str = ""
    """What narrows every scope of the request's text to those who name the same."""

    @property
    def own(self) -> Scope:
        """The scope of what names none."""
        return self.scope(self.level)

    @property
    def alone(self) -> Scope:
        """The scope of what is computed from texts that no wider one holds together."""
        own = self.own  # refused here too, if it is not the principal's to publish in
        return self._narrowed("user") if rank(self.level) < rank("user") else own

    @property
    def publishes(self) -> frozenset[Level]:
        """The levels beyond its user that the principal may publish in."""
        return frozenset(level for level, needed in _PERMISSIONS.items() if self.principal.may(needed))

    def scope(self, wanted: Level | Scope | None) -> Scope:
        """The scope that a span gets which asks for `wanted`.

        Raises:
            ForbiddenError: it would be shared further than the principal may.
            InvalidRequestError: it asks for the scope of a session that it does not name.
        """
        if isinstance(wanted, Scope):
            # Alone, nobody shares with anybody: a scope of its own would be a border for nothing.
            return self.own if wanted == PUBLIC and self.principal is LOCAL else wanted
        level = wanted or self.level
        needed = _PERMISSIONS.get(level)
        if needed is not None and not self.principal.may(needed):
            raise ForbiddenError(
                f"Scope '{level}' shares text beyond its user, which this key may not: it lacks the permission "
                f"{needed}. Leave the scope out, or ask for a key that has it.",
                param="cache_control.scope",
                code="scope_not_permitted",
            )
        if level == "session" and not self.session:
            raise InvalidRequestError(
                "Scope 'session' needs a session: name it in prompt_cache_key or metadata.session_id.",
                param="cache_control.scope",
            )
        return self._narrowed(level)

    def _narrowed(self, level: Level) -> Scope:
        return self.principal.scope(level, self.session).beneath(end_user=self.end_user, salt=self.salt)

    def ttl_of(self, span: Span, scope: Scope) -> float | None:
        asked = self.ttl if span.ttl is None else span.ttl
        return shorter(asked, self.limits.get(scope.level))


def scoped(prompt: Prompt, asker: Asker, *, smallest: int) -> Prompt:
    """The prompt in chains of one scope each, with times to live that only get shorter along what is seen.

    Args:
        prompt: what to scope.
        asker: whose it is.
        smallest: a template's text at the beginning that has fewer tokens stays with what follows it.
    """
    made: list[Chain] = []
    pieces: list[list[tuple[int, int, int]]] = []
    """Of each chain of the prompt: the chains made of it, and which of its tokens each has."""
    # Modules mostly see the same as their neighbours.
    known: dict[int, tuple[tuple[View, ...], Scope | None, float | None]] = {}
    for chain in prompt.chains:
        if id(chain.sees) not in known:
            moved = tuple(part for view in chain.sees for part in _moved(view, pieces))
            known[id(chain.sees)] = (moved, *_seen([made[view.chain] for view in moved], asker))
        sees, scope, ttl = known[id(chain.sees)]
        if chain.behind:
            scope, ttl = _seen(made, asker)
        pieces.append([])
        begin = 0
        for number, group in enumerate(_groups(chain, scope, ttl, asker, smallest)):
            earlier = tuple(View(piece) for piece, _, _ in pieces[-1])
            count = sum(len(span.token_ids) for span in group)
            pieces[-1].append((len(made), begin, begin + count))
            made.append(
                replace(
                    chain,
                    spans=tuple(group),
                    start=chain.start + begin,
                    sees=(*sees, *earlier),
                    scope=_scope(group[-1]),
                    ttl=group[-1].ttl,
                    continues=number > 0,
                )
            )
            begin += count
    return Prompt(tuple(made))


def _seen(chains: Sequence[Chain], asker: Asker) -> tuple[Scope | None, float | None]:
    """The narrowest scope and the shortest time to live of what a chain sees."""
    scope: Scope | None = None
    ttl: float | None = None
    for chain in chains:
        assert chain.scope is not None
        scope = chain.scope if scope is None else narrower(scope, chain.scope, asker=asker.alone)
        ttl = shorter(ttl, chain.ttl)
    return scope, ttl


def _groups(
    chain: Chain, scope: Scope | None, ttl: float | None, asker: Asker, smallest: int
) -> list[list[Span]]:
    """The spans of a chain with the scopes and times they have in effect, those of one scope together.

    `scope` and `ttl` are those of what the chain sees.
    """
    spans: list[Span] = []
    waiting: list[Span] = []
    for span in chain.spans:
        wanted = chain.scope if span.scope is None else span.scope
        if span.kind == "template" and wanted is None:
            if scope is None:  # a template's text at the beginning goes with what follows it
                waiting.append(span)
                continue
            own = scope
        else:
            own = asker.scope(wanted)
        scope = own if scope is None else narrower(scope, own, asker=asker.alone)
        registered = wanted if isinstance(wanted, Scope) and wanted.resource else None
        asked = replace(span, ttl=chain.ttl if span.ttl is None else span.ttl, registered=registered)
        ttl = shorter(ttl, asker.ttl_of(asked, scope))
        spans += [replace(each, scope=scope, ttl=ttl) for each in (*waiting, asked)]
        waiting.clear()
    own = scope or asker.own
    spans += [replace(each, scope=own, ttl=shorter(ttl, asker.ttl_of(each, own))) for each in waiting]
    groups: list[list[Span]] = []
    for span in spans or [Span((), scope=own, ttl=ttl)]:
        if groups and (_scope(groups[-1][-1]) == span.scope or _too_short(groups[-1], smallest)):
            groups[-1] = [replace(each, scope=span.scope) for each in groups[-1]]
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _too_short(group: Sequence[Span], smallest: int) -> bool:
    return all(span.kind == "template" for span in group) and smallest > sum(
        len(span.token_ids) for span in group
    )


def _scope(span: Span) -> Scope:
    assert isinstance(span.scope, Scope)
    return span.scope


def _moved(view: View, pieces: Sequence[Sequence[tuple[int, int, int]]]) -> Iterator[View]:
    """What a view of a chain is of the chains made of it."""
    for piece, begin, end in pieces[view.chain]:
        first = max(view.start, begin)
        last = end if view.end is None else min(view.end, end)
        if first < last:
            yield View(piece, first - begin, None if last == end else last - begin)
