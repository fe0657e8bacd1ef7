"""What an order costs, in cents: amounts of money are whole numbers."""

from dataclasses import dataclass

TAX_PERCENT = 19
FREE_SHIPPING_FROM = 5_000
SHIPPING = 490


@dataclass(frozen=True)
class Discount:
    """A percentage off, for orders of a certain value and more."""

    percent: int
    minimum: int = 0


def subtotal(prices: dict[str, int], items: dict[str, int]) -> int:
    """The price of the articles alone."""
    return sum(prices[article] * count for article, count in items.items())


def best_discount(value: int, discounts: list[Discount]) -> int:
    """The largest percentage that an order of this value gets; 0 if none applies."""
    return max((each.percent for each in discounts if value >= each.minimum), default=0)


def total(prices: dict[str, int], items: dict[str, int], discounts: list[Discount]) -> int:
    """What the customer pays: articles less discount, shipping, and tax on both."""
    value = subtotal(prices, items)
    value -= value * best_discount(value, discounts) // 100
    if value < FREE_SHIPPING_FROM:
        value += SHIPPING
    return value + value * TAX_PERCENT // 100
