"""Text to token ids and back, for Hugging Face folders and GGUF files."""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from ostinato.errors import InvalidRequestError, ModelFormatError, ModelNotFoundError
from ostinato.models import gguf_tokenizer
from ostinato.models.config_readers import END_OF_TURN_TOKENS, gguf_eos_token_ids
from ostinato.models.fields import Fields
from ostinato.models.gguf_file import GGUFFile

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TURN_MARKER = re.compile(r"<\|[a-z_]+\|>|<(start|end)_of_turn>")
"""Tokens that structure a conversation, also where a checkpoint does not call them special."""


class Tokenizer:
    """Encodes and decodes text. All methods may be called from several threads at once.

    Args:
        parsing: the tokenizer; its post-processor is not used.
        adds_bos: whether `encode` starts with BOS when asked to.
        bos_token_id, eos_token_ids: of the model.
        chat_template: the model's Jinja template, if it has one.
    """

    def __init__(
        self,
        parsing: tokenizers.Tokenizer,
        *,
        adds_bos: bool,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        chat_template: str | None = None,
    ) -> None:
        self._parsing = parsing
        self._added: dict[int, str] = {}
        special: dict[int, tokenizers.AddedToken] = {}
        added = sorted(parsing.get_added_tokens_decoder().items())
        for token_id, token in added:
            self._added[token_id] = token.content
            if token.special or _TURN_MARKER.fullmatch(token.content):
                special[token_id] = token
        self.special_ids = frozenset(special)
        """Tokens that are no text: never produced from user text, skipped by `decode`."""
        self._special_by_text = {token.content: token_id for token_id, token in special.items()}
        self.special_pattern = _pattern(special.values())
        """Matches special tokens' strings, and the white space that such a token swallows."""
        self._plain = _without_special(parsing, added, self.special_ids)
        self._continuing = _without_first_prefix(self._plain)
        self.adds_bos = adds_bos and bos_token_id is not None
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.vocab_size: int = parsing.get_vocab_size(with_added_tokens=True)
        self._byte_level, self._strips_prefix = _decoder_kind(parsing)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_path(cls, path: Path) -> Tokenizer:
        """The tokenizer of a `.gguf` file or of a Hugging Face folder."""
        if path.is_dir():
            return _from_hf(path)
        if not path.exists():
            raise ModelNotFoundError(f"{path} does not exist. Give a .gguf file or a Hugging Face folder.")
        return cls.from_gguf_metadata(GGUFFile(path).metadata)

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that GGUF metadata holds."""
        tokenizer, adds_bos = gguf_tokenizer.build(metadata)
        fields = Fields(metadata, "GGUF metadata", "tokenizer.")
        bos = fields.token_ids("ggml.bos_token_id")
        return cls(
            tokenizer,
            adds_bos=adds_bos,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=gguf_eos_token_ids(metadata),
            chat_template=fields.text("chat_template") if fields.get("chat_template") is not None else None,
        )

    @property
    def bos_token(self) -> str | None:
        """The text of BOS, as chat templates use it."""
        return None if self.bos_token_id is None else self._parsing.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """The text of the first EOS, as chat templates use it."""
        return self._parsing.id_to_token(self.eos_token_ids[0]) if self.eos_token_ids else None

    def encode(self, text: str, *, add_bos: bool = True, allow_special: bool = False) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any text.
            add_bos: start with BOS if the model's texts do.
            allow_special: read special tokens' strings in `text` as those tokens. Only for trusted text:
                without it a user cannot end a turn or open one by writing its marker.
        """
        ids = _encoding(self._parsing if allow_special else self._plain, text).ids
        if not allow_special and not self.special_ids.isdisjoint(ids):
            ids = self._encode_by_character(text)
        return (
            [self.bos_token_id, *ids] if add_bos and self.adds_bos and self.bos_token_id is not None else ids
        )

    def encode_parts(
        self, parts: Sequence[tuple[str, bool]], *, breaks: Container[int] = ()
    ) -> list[list[int]]:
        """Token ids of adjacent texts, each marked with whether special tokens may be read in it.

        The parts are tokenised as the one text they form, as in training, so tokens may reach across their
        borders, but for those before the parts whose numbers are in `breaks`; a token counts to the part in which
        it starts. No BOS is added.
        """
        ids: list[list[int]] = [[] for _ in parts]
        run: list[tuple[str, int]] = []
        tokenizer = self._plain
        for index, (text, allow_special) in enumerate(parts):
            at = 0
            if index in breaks:
                self._encode_run(tokenizer, run, ids)
                run.clear()
                tokenizer = self._continuing
            for match in self.special_pattern.finditer(text) if allow_special else ():
                run.append((text[at : match.start()], index))
                self._encode_run(tokenizer, run, ids)
                run.clear()
                tokenizer = self._continuing
                text_of = match[0] if match[0] in self._special_by_text else match[0].strip()
                ids[index].append(self._special_by_text[text_of])
                at = match.end()
            run.append((text[at:], index))
        self._encode_run(tokenizer, run, ids)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become replacement characters."""
        decoder = IncrementalDecoder(self, skip_special=skip_special)
        return "".join(map(decoder.add, ids)) + decoder.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; none for an id past the vocabulary (a padded embedding row)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    @functools.cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text has at least its size divided by this many tokens."""
        return max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        return self._parsing.token_to_id(token)

    @property
    def strips_first_space(self) -> bool:
        """Whether encoding puts a space before a text, which decoding takes away again."""
        return self._strips_prefix

    def _encode_run(
        self, tokenizer: tokenizers.Tokenizer, run: Sequence[tuple[str, int]], ids: list[list[int]]
    ) -> None:
        """Encodes texts without special tokens as one, and adds to `ids` by the parts they are of."""
        if not (text := "".join(piece for piece, _ in run)):
            return
        encoded = _encoding(tokenizer, text)
        if not self.special_ids.isdisjoint(encoded.ids):
            for piece, index in run:
                ids[index] += self._encode_by_character(piece)
            return
        ends = list(itertools.accumulate(len(piece) for piece, _ in run))
        at = 0
        for token_id, (start, _) in zip(encoded.ids, encoded.offsets, strict=True):
            while start >= ends[at] and at < len(ends) - 1:
                at += 1
            ids[run[at][1]].append(token_id)

    def _encode_by_character(self, text: str) -> list[int]:
        """For vocabularies in which ordinary merging arrives at a special token."""
        return [token_id for char in text for token_id in _encoding(self._continuing, char).ids]

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._added.get(token_id) or self._parsing.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_level:
            if token_id not in self._added and all(char in _BYTE_OF for char in token):
                return bytes(_BYTE_OF[char] for char in token)
            return token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


class IncrementalDecoder:
    """Decodes a stream of tokens; the outputs joined equal `Tokenizer.decode` of all of them.

    Each token costs its own bytes only: an incomplete UTF-8 sequence waits inside the codec.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._codec = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_first_space

    def add(self, token_id: int) -> str:
        """The text that this token completes, possibly none."""
        if token_id in self._skipped:
            return ""
        raw = self._tokenizer.token_bytes(token_id)
        if self._at_start and raw:
            self._at_start = False
            raw = raw.removeprefix(b" ")
        return self._codec.decode(raw)

    def finish(self) -> str:
        """What was held back: a replacement character if the last sequence stayed incomplete."""
        return self._codec.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _encoding(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    try:
        # A batch of one: unlike `encode` it releases the GIL, which megabytes of text would hold for seconds.
        return tokenizer.encode_batch([text], add_special_tokens=False)[0]
    except (UnicodeEncodeError, TypeError) as error:  # the library's versions differ
        raise InvalidRequestError(
            "The text holds half of a surrogate pair, which is no character. Send valid Unicode."
        ) from error


def _pattern(special: Iterable[tokenizers.AddedToken]) -> re.Pattern[str]:
    """Longest first, as the tokenizers library matches. With no special token it matches nothing."""
    parts = [
        (r"\s*" if token.lstrip else "") + re.escape(token.content) + (r"\s*" if token.rstrip else "")
        for token in sorted(special, key=lambda token: len(token.content), reverse=True)
    ]
    return re.compile("|".join(parts) or r"(?!)")


def _without_first_prefix(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """For text after a special token: some tokenizers put a space only before the first word of all."""
    if not isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace):
        return tokenizer
    if tokenizer.pre_tokenizer.prepend_scheme != "first":
        return tokenizer
    continuing = _sharing_model(tokenizer)
    continuing.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=tokenizer.pre_tokenizer.replacement,
        prepend_scheme="never",
        split=tokenizer.pre_tokenizer.split,
    )
    continuing.add_tokens([token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())])
    return continuing


def _sharing_model(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer of the same model and text processing, without added tokens."""
    shared = tokenizers.Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        value = getattr(tokenizer, part)
        if value is not None:
            setattr(shared, part, value)
    return shared


def _without_special(
    parsing: tokenizers.Tokenizer, added: list[tuple[int, tokenizers.AddedToken]], special: frozenset[int]
) -> tokenizers.Tokenizer:
    """A tokenizer that reads special tokens' strings as text. It shares the model, so it costs little.

    `encode_special_tokens` is a setting of a whole tokenizer: switching it per call would race.
    """
    plain = _sharing_model(parsing)
    ordinary = [token for token_id, token in added if token_id not in special]
    plain.add_tokens(ordinary)
    if all(plain.token_to_id(token.content) == parsing.token_to_id(token.content) for token in ordinary):
        return plain
    # Ids past the model's vocabulary are given out in order, so every added token must take its place.
    copy = tokenizers.Tokenizer.from_str(parsing.to_str())
    copy.add_special_tokens([token for token_id, token in added if token_id in special])
    copy.encode_special_tokens = True
    return copy


def _decoder_kind(tokenizer: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Whether tokens spell bytes in GPT-2's alphabet, and whether decoding strips a first space."""
    if tokenizer.decoder is None:
        raise ModelFormatError(
            "The model's tokenizer has no decoder. Use a checkpoint with a full tokenizer.json."
        )
    state: Any = json.loads(tokenizer.decoder.__getstate__())
    parts: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    types = {part["type"] for part in parts}
    if "ByteLevel" in types:
        return True, False
    if not types & {"ByteFallback", "Metaspace", "Replace"}:
        raise ModelFormatError(
            f"The model's tokenizer has a {' and '.join(sorted(types))} decoder; "
            "byte-level BPE and SentencePiece are supported."
        )
    strips = any(
        (part["type"] == "Strip" and part["start"] > 0)
        or (part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
        for part in parts
    )
    return False, strips


def _from_hf(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelFormatError(
            f"{folder} holds no tokenizer.json. Load its tokenizer with transformers' AutoTokenizer and "
            "save it there with save_pretrained."
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelFormatError(f"{path} cannot be read: {error}. Download it again.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _json_object(folder / "tokenizer_config.json")
    bos = tokenizer.token_to_id(_token_text(settings.get("bos_token")) or "")
    eos = tokenizer.token_to_id(_token_text(settings.get("eos_token")) or "")
    first = tokenizer.encode("a").ids[:1]
    ids: list[int] = [] if eos is None else [eos]
    for name in ("generation_config.json", "config.json"):
        ids += Fields(_json_object(folder / name), name).token_ids("eos_token_id")
    known = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    ids += [known[token] for token in END_OF_TURN_TOKENS if token in known]
    return Tokenizer(
        tokenizer,
        adds_bos=bos is not None and first == [bos],
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ids)),
        chat_template=_hf_chat_template(folder, settings),
    )


def _hf_chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        return own_file.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        # Several named templates: the default one answers for all.
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(token: Any) -> str | None:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _json_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{path} cannot be read: {error}.") from error
    return value if isinstance(value, dict) else {}
