"""What the tests of access share: a clock that they turn, people, and names."""

from __future__ import annotations

from ostinato.access.principal import PERMISSIONS, Principal

NOW = 1_800_000_000.0

ALICE = Principal("acme", "alice", groups=frozenset({"finance"}))
BOB = Principal("acme", "bob")
MALLORY = Principal("evil", "mallory", permissions=frozenset({"publish:org", "publish:public", "admin:org"}))
ADMIN = Principal("acme", "root", permissions=frozenset({"admin:org"}))
ROOT = Principal("hq", "root", permissions=frozenset(PERMISSIONS))

BAD_NAMES = ("", " ", "a\0b", "a\nb", "a\x1b[31mb", "a\u202eb", "a\u200bb", "\ud800", " alice", "x" * 257)
ODD_NAMES = (
    "o'brien",
    'say "hi"',
    "x'; DROP TABLE api_keys; --",
    "../../etc/passwd",
    "C:\\windows",
    "100%_*?",
    "аlice",  # the first letter is Cyrillic
    "alice@acme.com",
    "名前 的",
    "[bold]x[/bold]",
    "x" * 256,
)


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now
