"""Limits: how much of the server one principal may have at once, and in a minute.

A limit is nobody's business but its principal's: what others do changes nothing of what it is told.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ostinato.errors import InvalidRequestError
from ostinato.server.errors import RefusedError

REQUESTS = 256
"""Requests that a principal may have running and waiting, unless the operator says otherwise."""

PLACE_BYTES = 2**20
"""A body takes a place for each of these it begins, until it has become requests."""


class LimitedError(RefusedError):
    """The principal is at a limit."""

    def __init__(self, message: str, *, seconds: int) -> None:
        super().__init__(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})


@dataclass
class _Account:
    """What a principal has of its limits."""

    places: int = 0
    used: float = 0.0
    """Tokens that have been charged and not been refilled yet."""
    at: float = 0.0
    """When `used` was right."""


class Limits:
    """Places for requests, and a bucket of tokens, for each principal. For one event loop.

    Tokens are charged once they are computed, so a principal may end a minute with more than its limit; it then waits
    until that is made up for.

    Args:
        requests: places of a principal.
        tokens: that a principal may have computed in a minute; None: any number.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        requests: int = REQUESTS,
        tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requests = requests
        self.tokens = tokens
        self._clock = clock
        self._accounts: OrderedDict[Hashable, _Account] = OrderedDict()

    def place(self, whose: Hashable) -> Place:
        """A place for one request, to be left when it is answered.

        Raises:
            LimitedError: the principal has as many already as it may have.
        """
        place = Place(self, whose)
        place.hold(1)
        return place

    def running(self, whose: Hashable) -> int:
        """Places that a principal holds."""
        account = self._accounts.get(whose)
        return 0 if account is None else account.places

    @property
    def known(self) -> int:
        """How many principals anything is kept of."""
        return len(self._accounts)

    def move(self, whose: Hashable, held: int, wanted: int) -> None:
        """Have a principal hold `wanted` places where it held some; LimitedError, and no change, if that is too many."""
        if wanted > self.requests:
            raise InvalidRequestError(
                f"The request asks for {wanted} answers at once; a principal may have {self.requests} requests "
                "running and waiting here. Ask for fewer.",
                param="n",
            )
        account = self._account(whose)
        if wanted > held and account.places - held + wanted > self.requests:
            self._drop(whose)
            raise LimitedError(
                f"You have {account.places} requests running and waiting of the {self.requests} you may have at once. "
                "Wait until some are answered.",
                seconds=1,
            )
        account.places += wanted - held
        self._drop(whose)

    def afford(self, whose: Hashable) -> None:
        """Raise LimitedError if a principal has used up its tokens."""
        if self.tokens is None or whose not in self._accounts:
            return
        over = self._used(self._accounts[whose]) - self.tokens
        if over >= 0:
            raise LimitedError(
                f"You have used up the {self.tokens:,} tokens a minute that you may have computed. "
                "Wait as long as Retry-After says.",
                seconds=int(over * 60 / self.tokens) + 1,
            )

    def charge(self, whose: Hashable, tokens: int) -> None:
        """Count tokens that were computed for a principal."""
        if self.tokens is not None:
            account = self._account(whose)
            account.used = self._used(account) + tokens
            account.at = self._clock()

    def _used(self, account: _Account) -> float:
        assert self.tokens is not None
        return max(0.0, account.used - (self._clock() - account.at) * self.tokens / 60)

    def _account(self, whose: Hashable) -> _Account:
        if whose not in self._accounts:
            # Two are looked at for each that comes, so that those who have left are not kept.
            for other in list(self._oldest(2)):
                self._accounts.move_to_end(other)
                self._drop(other)
            self._accounts[whose] = _Account(at=self._clock())
        return self._accounts[whose]

    def _oldest(self, count: int) -> list[Hashable]:
        return [whose for whose, _ in zip(self._accounts, range(count), strict=False)]

    def _drop(self, whose: Hashable) -> None:
        """Keep nothing of a principal that holds nothing and owes nothing."""
        account = self._accounts[whose]
        if not account.places and (self.tokens is None or not self._used(account)):
            del self._accounts[whose]


class Place:
    """What one request holds of its principal's limits."""

    def __init__(self, limits: Limits, whose: Hashable) -> None:
        self._limits = limits
        self._whose = whose
        self._held = 0

    def hold(self, count: int) -> None:
        """Hold that many places from now on; LimitedError, and no change, if the principal may not."""
        self._limits.move(self._whose, self._held, count)
        self._held = count

    def weigh(self, size: int) -> None:
        """Hold as many places as a body of that size takes."""
        self.hold(min(1 + size // PLACE_BYTES, self._limits.requests))

    def afford(self) -> None:
        """Raise LimitedError if the principal has used up its tokens."""
        self._limits.afford(self._whose)

    def charge(self, tokens: int) -> None:
        """Count tokens that were computed."""
        self._limits.charge(self._whose, tokens)

    def leave(self) -> None:
        """Give back what is held."""
        if self._held:
            self.hold(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()
