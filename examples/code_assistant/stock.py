"""How much there is of each article."""


class OutOfStockError(Exception):
    """Somebody wants more of an article than there is."""


class Stock:
    """Counts articles. What is reserved is still on the shelf but is promised to an order."""

    def __init__(self) -> None:
        self._on_shelf: dict[str, int] = {}
        self._reserved: dict[str, int] = {}

    def receive(self, article: str, count: int) -> None:
        """Add articles that a supplier has delivered."""
        if count <= 0:
            raise ValueError("count must be positive")
        self._on_shelf[article] = self._on_shelf.get(article, 0) + count

    def available(self, article: str) -> int:
        """How many can still be promised."""
        return self._on_shelf.get(article, 0) - self._reserved.get(article, 0)

    def reserve(self, article: str, count: int) -> None:
        """Promise articles to an order; OutOfStockError if there are too few."""
        if count > self.available(article):
            raise OutOfStockError(f"{count} of {article} wanted, {self.available(article)} available")
        self._reserved[article] = self._reserved.get(article, 0) + count

    def ship(self, article: str, count: int) -> None:
        """Take reserved articles from the shelf."""
        self._reserved[article] -= count
        self._on_shelf[article] -= count
