"""Rebuilds a `tokenizers.Tokenizer` from the vocabulary in GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ostinato.models.fields import Fields

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of `tokenizer.ggml.token_type` for tokens that are matched as a whole."""
NORMAL, BYTE = 1, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + _WORDS + r"\p{N}" + _REST
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
"""`tokenizer.ggml.pre` to the patterns by which text is cut before byte-pair merging, one after another."""
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""Vocabularies in which a word that is a token stays one, whatever the merges say; they start with BOS."""


def build(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """The tokenizer, without a post-processor, and whether its texts start with BOS."""
    fields = Fields(metadata, "GGUF metadata", "tokenizer.ggml.")
    kind = fields.text("model")
    tokens = fields.strings("tokens")
    kinds = _numbers(fields, "token_type", len(tokens)) or [NORMAL] * len(tokens)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise fields.error("tokenizer.ggml.tokens holds a token twice. Convert the model again.")
    if kind == "gpt2":
        pre = fields.text("pre", "default")
        tokenizer = _byte_level(fields, vocabulary, pre)
        starts_with_bos = pre in _WHOLE_WORDS_FIRST
    elif kind == "llama":
        tokenizer = _sentencepiece(fields, tokens, kinds, vocabulary)
        starts_with_bos = True
    else:
        raise fields.error(f"tokenizer model {kind!r} is not supported; supported are gpt2, llama.")
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]
    tokenizer.add_tokens(added)
    return tokenizer, fields.flag("add_bos_token", starts_with_bos)


def _byte_level(fields: Fields, vocabulary: dict[str, int], pre: str) -> Tokenizer:
    patterns = _SPLITS.get(pre)
    if patterns is None:
        raise fields.error(f"pre-tokenizer {pre!r} is not supported; supported are {', '.join(_SPLITS)}.")
    merges: list[tuple[str, str]] = []
    for merge in fields.strings("merges"):
        left, found, right = merge.partition(" ")
        # An entry outside of the vocabulary would fail in the tokenizers library without a usable message.
        if not found or left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise fields.error(
                f"tokenizer.ggml.merges holds {merge!r}, which does not join two tokens to a third."
            )
        merges.append((left, right))
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    fields: Fields, tokens: Sequence[str], kinds: Sequence[float], vocabulary: dict[str, int]
) -> Tokenizer:
    scores = _numbers(fields, "scores", len(tokens))
    if scores is None:
        raise fields.error("tokenizer.ggml.scores is missing. Convert the model again.")
    unknown = fields.token_ids("unknown_token_id")
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_by_score(tokens, kinds, scores),
        unk_token=tokens[unknown[0]] if unknown and unknown[0] < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=BYTE in kinds,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.flag("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _merges_by_score(
    tokens: Sequence[str], kinds: Sequence[float], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose union scores best: every split of every piece, in that order."""
    mergeable = {token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL and token}
    merges: list[tuple[str, str]] = []
    for index in sorted(range(len(tokens)), key=scores.__getitem__, reverse=True):
        token = tokens[index]
        if token in mergeable:
            # Longest left part first, as in the conversion by which checkpoints got their tokenizer.json.
            merges += [
                (token[:cut], token[cut:])
                for cut in range(len(token) - 1, 0, -1)
                if token[:cut] in mergeable and token[cut:] in mergeable
            ]
    return merges


def _numbers(fields: Fields, key: str, count: int) -> list[float] | None:
    """A list of one number per token, or None where it is absent."""
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != count or not isinstance(value[0], int | float):
        raise fields.error(f"tokenizer.ggml.{key} must hold one number for each of the {count} tokens.")
    return value
