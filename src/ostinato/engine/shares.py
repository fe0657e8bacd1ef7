"""Shares: what each user gets of a step, so that no one's requests hold up another's.

While one user's requests are alone, a step is as full as can be. Beside another's, it takes no longer than both users'
own would one after the other: whoever decodes one reply finds each step twice as long as alone, and not sixty-four
times. Tokens are split by max-min fairness, between organisations first and then between their users, and where they
cannot be split those get them that have had least time (as in deficit round robin, Shreedhar and Varghese 1995).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ostinato.access.scope import Scope

User = Scope | None
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Holding:
    """What a user's running requests have of the engine, and what is its part while others ask too."""

    seats: int
    blocks: int
    seats_part: int
    blocks_part: int

    @property
    def seats_over(self) -> float:
        return self.seats / self.seats_part

    @property
    def blocks_over(self) -> float:
        return self.blocks / max(1, self.blocks_part)

    @property
    def may_have_seat(self) -> bool:
        """Whether one more is within its part, so that another's gives way."""
        return self.seats < self.seats_part

    def may_have_blocks(self, more: int) -> bool:
        """Whether so many more are within its part."""
        return self.blocks + more <= self.blocks_part


def holdings_of(held: Mapping[User, tuple[int, int]], seats: int, blocks: int) -> dict[User, Holding]:
    """What each user has, from seats and blocks held by each, and its part of all that there are: of its
    organisation's, which share alike."""
    users = Counter(_org(user) for user in held)
    return {
        user: Holding(
            *of_user,
            seats_part=max(1, seats // (len(users) * users[_org(user)])),
            blocks_part=blocks // (len(users) * users[_org(user)]),
        )
        for user, of_user in held.items()
    }


def _org(user: User) -> str:
    return "" if user is None else user.org


class Shares:
    """Splits steps between the users with something to compute, and remembers who has had how much time.

    What a step costs depends on the processor, the model and what is in it, so that is not foretold but steered: where
    a step took longer than it should, the next has fewer tokens. Where two users' tokens in one step take longer than
    in one each (a matrix times two vectors may), the users take turns instead.
    """

    SLOW = 3
    """Steps in a row that may take longer for all users together, with as little as can be for each, than they should."""
    TURNS = 256
    """Steps that users take turns for, before it is tried again to compute for them together."""
    TURN = 0.25
    """Seconds that a turn of prefill takes."""
    WATCHFUL = 512
    """Steps for which, after users had to share, prefill goes on in turns: whoever comes back waits for one at most."""
    LATEST = 0.1
    """Weight of the latest step in what is known of steps."""

    def __init__(self) -> None:
        self.alone = 0.0
        """Seconds that the next token of a reply takes, alone."""
        self._token = 0.0
        self._room = 16.0
        self._turns = self._watchful = self._slow = 0
        self._should: float | None = None
        self._shares: dict[User, int] = {}
        self._served: dict[User, float] = {}
        self._orgs: dict[str, float] = {}

    def split(self, demands: Mapping[User, int], most: int) -> dict[User, int]:
        """How many of the tokens that it could compute each user gets in a step; alone, up to `most`."""
        self._known(demands)
        self._should = None
        self._watchful = self.WATCHFUL if len(demands) > 1 else max(0, self._watchful - 1)
        turn = min(most, max(64, round(self.TURN / self._token))) if self._token and self._watchful else most
        if len(demands) == 1:
            self._shares = dict.fromkeys(demands, turn)
        elif self._turns:
            self._turns -= 1
            self._shares = {self._least_served(demands): turn}
        else:
            # Each user has the time of whoever needs least, and at least as many tokens.
            least = min(demands.values())
            self._should = len(demands) * (self.alone + (least - 1) * self._token)
            self._shares = self._together(demands, min(most, len(demands) * least + int(self._room)))
        return self._shares

    def took(self, prefill: int, replies: int, seconds: float) -> None:
        """The step that was split last, with so much prefill and the next token of so many replies, took so long."""
        # Who computes together is meant to have the same time, organisations first.
        users = Counter(_org(user) for user in self._shares)
        for org in users:
            self._orgs[org] += seconds / len(users)
        for user in self._shares:
            self._served[user] += seconds / len(users) / users[_org(user)]
        if self._should is None:
            self._learn(prefill, replies, seconds)
            return
        self._slow = self._slow + 1 if seconds > self._should and self._room == 1.0 else 0
        if self._slow >= self.SLOW:
            self._slow, self._turns = 0, self.TURNS
        self._room = min(max(self._room * min(max(self._should / seconds, 0.25), 1.25), 1.0), 512.0)

    def _learn(self, prefill: int, replies: int, seconds: float) -> None:
        """Note what a lone reply's token takes, and a token of a long prefill."""
        if replies == 1 and not prefill:
            self.alone += (seconds - self.alone) * (self.LATEST if self.alone else 1.0)
        elif prefill >= 64 and not replies:
            token = max(0.0, seconds - self.alone) / prefill
            self._token += (token - self._token) * (self.LATEST if self._token else 1.0)

    def _together(self, demands: Mapping[User, int], budget: int) -> dict[User, int]:
        by_org: dict[str, dict[User, int]] = {}
        for user, wanted in demands.items():
            by_org.setdefault(_org(user), {})[user] = wanted
        of_org = fair(budget, {org: sum(own.values()) for org, own in by_org.items()}, self._orgs)
        shares: dict[User, int] = {}
        for org, own in by_org.items():
            shares |= fair(of_org[org], own, self._served)
        return shares

    def _least_served(self, demands: Mapping[User, int]) -> User:
        """Of the organisation that has had least, the user that has had least, or needs least."""
        return min(demands, key=lambda user: (self._orgs[_org(user)], self._served[user], demands[user]))

    def _known(self, users: Iterable[User]) -> None:
        """Know those who have something to compute now, and nobody else."""
        of_org: dict[str, list[User]] = {}
        for user in users:
            of_org.setdefault(_org(user), []).append(user)
        self._orgs = _joined(self._orgs, of_org)
        self._served = {k: v for own in of_org.values() for k, v in _joined(self._served, own).items()}


def _joined(served: Mapping[K, float], who: Iterable[K]) -> dict[K, float]:
    """Whoever comes back begins where the one stands who has had least: idling saves nothing up."""
    floor = min((served[each] for each in who if each in served), default=0.0)
    return {each: served.get(each, floor) - floor for each in who}


def fair(budget: int, demands: Mapping[K, int], served: Mapping[K, float]) -> dict[K, int]:
    """Max-min fair shares: nobody gets more while somebody who wants it has less, but by the odd token; of those who
    want as much that goes to whoever was least `served`."""
    shares: dict[K, int] = {}
    ordered = sorted(demands, key=lambda who: (demands[who], -served[who]))
    for number, who in enumerate(ordered):
        shares[who] = min(demands[who], budget // (len(ordered) - number))
        budget -= shares[who]
    return shares
