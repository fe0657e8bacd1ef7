"""Shares: what each user gets of a step, so that no one's requests hold up another's.

The time of a step is a fixed part (all weights are read once) and a part for each token. While one user's requests are
alone, a step is as full as can be. Beside another's, it takes no longer than both users' own would one after the
other, where the one with less to do is done: whoever decodes one reply finds each step twice as long as alone, and not
sixty-four times. Tokens are split by max-min fairness, between organisations first and then between their users, and
where they cannot be split those get them that have had least (deficit round robin, Shreedhar and Varghese 1995, by
tokens computed).
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


class Pace:
    """Learns how many tokens take as long as a step's fixed part: a line through (tokens, seconds) of the latest steps."""

    _FORGET = 0.98
    _LEAST, _MOST = 8.0, 512.0

    def __init__(self, fixed: float = 32.0) -> None:
        self.fixed = fixed
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        keep = self._FORGET
        self._count = self._count * keep + 1
        self._x = self._x * keep + tokens
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + tokens * tokens
        self._xy = self._xy * keep + tokens * seconds
        spread = self._count * self._xx - self._x**2
        if spread < self._count**2:  # all about as long: no line to be seen
            return
        each = (self._count * self._xy - self._x * self._y) / spread
        base = (self._y - each * self._x) / self._count
        if each > 0:
            self.fixed = min(max(base / each, self._LEAST), self._MOST)


class Shares:
    """Splits steps between the users with something to compute, and remembers who has had how much."""

    def __init__(self) -> None:
        self.pace = Pace()
        self._served: dict[User, float] = {}

    def split(self, demands: Mapping[User, int], most: int) -> dict[User, int]:
        """How many of the tokens that they could compute each user gets in a step of at most `most` tokens."""
        users = len(demands)
        least = min(demands.values())
        # The fixed part is paid once, and each user has the time of whoever needs least.
        contested = users * least + (users - 1) * round(self.pace.fixed)
        budget = min(most, sum(demands.values()) if users == 1 else contested)
        self._known(demands)
        by_org: dict[str, dict[User, int]] = {}
        for user, wanted in demands.items():
            by_org.setdefault(_org(user), {})[user] = wanted
        served = {org: sum(self._served[user] for user in own) for org, own in by_org.items()}
        of_org = fair(budget, {org: sum(own.values()) for org, own in by_org.items()}, served)
        shares: dict[User, int] = {}
        for org, own in by_org.items():
            shares |= fair(of_org[org], own, self._served)
        for user, tokens in shares.items():
            self._served[user] += tokens
        return shares

    def _known(self, users: Iterable[User]) -> None:
        """Whoever comes back begins where the one stands who has had least: idling saves nothing up."""
        known = [self._served[user] for user in users if user in self._served]
        floor = min(known, default=0.0)
        self._served = {user: self._served.get(user, floor) - floor for user in users}


def fair(budget: int, demands: Mapping[K, int], served: Mapping[K, float]) -> dict[K, int]:
    """Max-min fair shares: nobody gets more while somebody who wants it has less, but by the odd token, which goes to
    those with the least `served`."""
    shares: dict[K, int] = {}
    ordered = sorted(demands, key=lambda who: (demands[who], -served[who]))
    for number, who in enumerate(ordered):
        shares[who] = min(demands[who], budget // (len(ordered) - number))
        budget -= shares[who]
    return shares
