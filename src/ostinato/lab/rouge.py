"""ROUGE-L: how much of a reference text a reply has, in the reference's order."""

from __future__ import annotations

import re


def rouge_l(reply: str, reference: str) -> float:
    """F-measure of the longest common subsequence of words, 0 to 1."""
    a, b = (re.findall(r"[a-z0-9]+", text.lower()) for text in (reply, reference))
    if not a or not b:
        return 0.0
    row = [0] * (len(b) + 1)
    for word in a:
        diagonal = 0
        for i, other in enumerate(b, start=1):
            diagonal, row[i] = row[i], diagonal + 1 if word == other else max(row[i], row[i - 1])
    return 2 * row[-1] / (len(a) + len(b))
