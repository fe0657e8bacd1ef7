"""Orders, from the basket to the parcel."""

from dataclasses import dataclass, field
from enum import Enum

from stock import OutOfStockError, Stock


class State(Enum):
    OPEN = "open"
    CONFIRMED = "confirmed"
    SHIPPED = "shipped"


@dataclass
class Order:
    """What one customer wants, and how far it has got."""

    customer: str
    items: dict[str, int] = field(default_factory=dict)
    state: State = State.OPEN

    def add(self, article: str, count: int = 1) -> None:
        """Put articles into the basket."""
        if self.state is not State.OPEN:
            raise ValueError("a confirmed order cannot change")
        self.items[article] = self.items.get(article, 0) + count


def confirm(order: Order, stock: Stock) -> list[str]:
    """Reserve all articles of an order. If some are missing, reserve none and return their names."""
    missing = [article for article, count in order.items.items() if stock.available(article) < count]
    if missing:
        return missing
    for article, count in order.items.items():
        stock.reserve(article, count)
    order.state = State.CONFIRMED
    return []


def ship(order: Order, stock: Stock) -> None:
    """Send a confirmed order."""
    if order.state is not State.CONFIRMED:
        raise OutOfStockError("only a confirmed order has its articles reserved")
    for article, count in order.items.items():
        stock.ship(article, count)
    order.state = State.SHIPPED
