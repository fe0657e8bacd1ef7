"""Claims: who finds a block of a shared scope, when, and when it goes, against a model of the rules."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ostinato.access.scope import Scope
from ostinato.cache.block import CLAIMS, NEVER, REQUESTS, Block, Claim
from ostinato.cache.index import Index
from ostinato.cache.keys import chain_keys
from ostinato.cache.policy import POLICIES
from ostinato.cache.pool import Pool
from ostinato.cache.use import Use

SIZE = 4
ORG = Scope("org", "acme")
USERS = [Scope("user", "acme", name) for name in ("ann", "bob", "cid", "dot")]
TEXTS = [tuple(range(10 * n, 10 * n + SIZE)) for n in range(3)]
ROOT = b"root"


def index_of(blocks: int = 64) -> Index:
    pool = Pool(
        layers=1,
        kv_heads=1,
        head_dim=2,
        blocks=blocks,
        block_size=SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pool.kv.zero_()
    return Index(pool, POLICIES["lru"](blocks))


def send(
    index: Index,
    user: Scope,
    text: tuple[int, ...],
    request: str,
    now: float,
    ttl: float,
    *,
    guarded: bool,
    scope: Scope = ORG,
) -> None:
    """What the engine does with a text that a user sends and that it does not find."""
    (block,) = index.allocate(1, now=now)
    block.blank = False
    index.pool.kv[:, :, :, block.number * SIZE : (block.number + 1) * SIZE] = 1
    block.scope, block.expires = scope, now + ttl
    block.claimed, block.guarded = True, guarded
    block.claim(user, Claim({request: now + ttl}))
    use = Use(now)
    index.release([index.publish(block, ROOT, text, use)], use)


def found(index: Index, user: Scope, text: tuple[int, ...], now: float) -> bool:
    keys = chain_keys(ROOT, text, SIZE)
    return index.match(ROOT, keys, text, SIZE, now=now, reader=user).tokens == SIZE


class Claims(RuleBasedStateMachine):
    """Users send, forget and look for texts; the model is a table of who has sent what, and until when."""

    guarded = False

    def __init__(self) -> None:
        super().__init__()
        self.index = index_of()
        self.now = 1.0
        self.sent: dict[tuple[int, ...], dict[tuple[Scope, str], float]] = {text: {} for text in TEXTS}
        self.requests = itertools.count()

    def alive(self, text: tuple[int, ...]) -> set[Scope]:
        return {user for (user, _), expires in self.sent[text].items() if expires > self.now}

    @rule(
        user=st.sampled_from(USERS), text=st.sampled_from(TEXTS), ttl=st.sampled_from((0.0, 5.0, 20.0, NEVER))
    )
    def send(self, user: Scope, text: tuple[int, ...], ttl: float) -> None:
        request = str(next(self.requests))
        send(self.index, user, text, request, self.now, ttl, guarded=self.guarded)
        self.sent[text][user, request] = self.now + ttl

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        all_sent = [each for sent in self.sent.values() for each in sent]
        if not all_sent:
            return
        user, request = data.draw(st.sampled_from(all_sent))
        before = [text for text in TEXTS if user in self.alive(text)]
        for sent in self.sent.values():
            sent.pop((user, request), None)
        told = self.index.unclaim(user, request, self.now)
        ended = [text for text in before if user not in self.alive(text)]
        assert sorted(block.token_ids for block in told) == ended, "one's own, and that alone, is counted"

    @rule(user=st.sampled_from(USERS), other=st.sampled_from(USERS))
    def forget_of_another(self, user: Scope, other: Scope) -> None:
        theirs = [request for sent in self.sent.values() for who, request in sent if who == other != user]
        for request in theirs:
            assert self.index.unclaim(user, request, self.now) == []

    @rule(seconds=st.sampled_from((1.0, 6.0, 30.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.index.sweep(self.now)

    @invariant()
    def each_finds_what_the_rules_say(self) -> None:
        for text, user in itertools.product(TEXTS, USERS):
            alive = self.alive(text)
            shared = len(alive - {user}) >= 2 if self.guarded else bool(alive)
            assert found(self.index, user, text, self.now) == (user in alive or shared)

    @invariant()
    def what_nobody_claims_is_erased(self) -> None:
        self.index.sweep(self.now)
        kept = {block.number for block in self.index.store.blocks.values()}
        assert len(kept) == sum(bool(self.alive(text)) for text in TEXTS)
        slots = [n * SIZE + i for n in range(self.index.pool.blocks) if n not in kept for i in range(SIZE)]
        assert not torch.count_nonzero(self.index.pool.kv[:, :, :, slots])


@pytest.mark.parametrize("guarded", [False, True])
def test_whoever_sends_and_forgets(guarded: bool) -> None:
    case = type("Case", (Claims,), {"guarded": guarded})
    run_state_machine_as_test(case, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))  # pyright: ignore[reportUnknownMemberType]


def test_claims_are_bounded() -> None:
    block = Block(0, claimed=True)
    for number in range(3 * CLAIMS):
        block.claim(Scope("user", "acme", str(number)), Claim({"r": float(number + 1)}))
    assert len(block.claims) == CLAIMS
    assert block.expires == NEVER
    ann = USERS[0]
    for number in range(3 * REQUESTS):
        block.claim(ann, Claim({str(number): NEVER}))
    assert len(block.claims[ann].requests) == REQUESTS
    for number in range(3 * REQUESTS):
        assert not block.unclaim(ann, str(number), 0.0), "those beyond are not told apart: it stays"


def test_what_others_have_sent_stays_beside_what_goes_on_from_it() -> None:
    """A longer block takes the place of a shorter only where nobody loses by it."""
    index = index_of()
    ann, bob = USERS[:2]
    send(index, ann, TEXTS[0][:2], "1", 1.0, NEVER, guarded=False)
    send(index, bob, TEXTS[0], "2", 1.0, NEVER, guarded=False)
    assert len(index) == 2
    index.unclaim(bob, "2", 1.0)
    assert index.match(ROOT, chain_keys(ROOT, TEXTS[0], SIZE), TEXTS[0], SIZE, reader=ann).tokens == 2
    send(index, ann, TEXTS[0][:3], "1", 1.0, NEVER, guarded=False)
    assert len(index) == 1, "of the same request the longer holds all"


def test_a_loss_is_told_to_those_who_sent_the_text() -> None:
    index = index_of(blocks=2)
    ann, bob, cid, _ = USERS
    send(index, ann, TEXTS[0], "1", 1.0, 5.0, guarded=False)
    send(index, bob, TEXTS[0], "2", 1.0, NEVER, guarded=False)
    send(index, cid, TEXTS[1], "3", 2.0, NEVER, guarded=False)
    send(index, cid, TEXTS[2], "4", 10.0, NEVER, guarded=False)
    (key,) = chain_keys(ROOT, TEXTS[0], SIZE)
    losses = {user: index.lost.get(user, key) for user in USERS}
    assert losses[cid] is None
    assert losses[ann] is not None
    assert losses[bob] is not None
    assert (losses[ann].how, losses[ann].when) == ("expired", 6.0), "as if nobody else had sent it"
    assert (losses[bob].how, losses[bob].when) == ("evicted", 10.0)
    index.unclaim(bob, "2", 10.0)
    assert index.lost.get(bob, key) is None, "it is forgotten with the request"
    send(index, ann, TEXTS[0], "5", 11.0, NEVER, guarded=False)
    assert index.lost.get(ann, key) is None
