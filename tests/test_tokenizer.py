"""Tokenizers from GGUF and from Hugging Face folders; golden ids are llama.cpp's for the same file."""

from __future__ import annotations

import functools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from ostinato.errors import InvalidRequestError, ModelFormatError
from ostinato.models.catalogue import resolve
from ostinato.models.tokenizer import IncrementalDecoder, Tokenizer

GOLDEN: dict[str, list[int]] = {
    "Hello, world!": [19556, 28, 905, 17],
    "def f(x):\n    return x ** 2  # 1,024\n": [
        1604,
        275,
        24,
        104,
        727,
        472,
        1003,
        1792,
        1903,
        216,
        34,
        216,
        907,
        216,
        33,
        28,
        32,
        34,
        36,
        198,
    ],
    "naïve café – “quotes” don't": [3546, 46494, 37366, 816, 619, 385, 2346, 573, 1326, 982],
    "日本語 и русский, مرحبا": [
        23274,
        115,
        40993,
        179,
        120,
        248,
        29972,
        216,
        9175,
        14714,
        9382,
        39511,
        7872,
        24958,
        28,
        36395,
        20602,
        44626,
        31462,
        10805,
    ],
    "😀👨\u200d👩\u200d👧 🇩🇪": [
        10813,
        242,
        218,
        10813,
        235,
        118,
        321,
        231,
        10813,
        235,
        119,
        321,
        231,
        10813,
        235,
        117,
        15107,
        225,
        119,
        10813,
        225,
        120,
    ],
    "  two leading,  trailing  ": [216, 827, 2899, 28, 216, 35079, 256],
    "\n\n\t \n x": [14436, 3717, 1792],
    "12345 3.14 ½ ٣": [33, 34, 35, 36, 37, 216, 35, 30, 33, 36, 216, 16738, 216, 164, 113],
    "<|im_start|>user": [44, 108, 306, 79, 3738, 108, 46, 4093],
    "a\xa0b\u200bc": [81, 15442, 82, 321, 229, 83],
    "'S 'll WE'RE": [23, 67, 637, 764, 26587, 23, 3256],
    '{"a": [1, null]}': [39428, 81, 1799, 933, 33, 28, 10034, 28852],
}


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer.from_path(resolve("smollm2-135m"))


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A vocabulary as Llama 2 and Gemma have it: scores, byte tokens, `▁` for a space."""
    pieces = ["▁", "a", "b", "c", "ab", "▁ab", "▁c", "bc", "abc", "▁▁"]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "<start_of_turn>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *pieces,
        "\n\n",
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 260 + [-float(i) for i in range(11)],
        "tokenizer.ggml.token_type": [2, 3, 3, 4] + [6] * 256 + [1] * 10 + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


@pytest.mark.parametrize("text", GOLDEN)
def test_ids_are_those_of_llama_cpp(text: str, smollm: Tokenizer) -> None:
    assert smollm.encode(text) == GOLDEN[text]
    assert smollm.decode(GOLDEN[text]) == text


def test_building_is_fast() -> None:
    path = resolve("smollm2-135m")
    start = time.perf_counter()
    Tokenizer.from_path(path)
    # It takes 0.15 s alone on two cores.
    assert time.perf_counter() - start < 2


def test_special_tokens_in_user_text_are_text(smollm: Tokenizer) -> None:
    text = "hi<|im_end|>\n<|im_start|>system"
    plain = smollm.encode(text)
    assert smollm.special_ids.isdisjoint(plain)
    assert smollm.decode(plain) == text
    parsed = smollm.encode(text, allow_special=True)
    assert parsed[1:4] == [2, 198, 1]
    assert smollm.decode(parsed) == "hi\nsystem"
    assert smollm.decode(parsed, skip_special=False) == text


def test_threads_do_not_see_each_others_setting(smollm: Tokenizer) -> None:
    text, wrong = "a<|im_end|>b", []
    expected = {allow: smollm.encode(text, allow_special=allow) for allow in (False, True)}

    def work(allow: bool) -> None:
        wrong.extend(1 for _ in range(500) if smollm.encode(text, allow_special=allow) != expected[allow])

    threads = [threading.Thread(target=work, args=(bool(i % 2),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert expected[False] != expected[True]
    assert not wrong


def test_attributes(smollm: Tokenizer) -> None:
    assert (smollm.vocab_size, smollm.bos_token_id, smollm.eos_token_ids) == (49152, 1, (2, 0))
    assert (smollm.bos_token, smollm.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm.chat_template is not None
    assert smollm.token_bytes(0) == b"<|endoftext|>"
    assert smollm.token_bytes(10**6) == b""
    assert smollm.token_bytes(-1) == b""


def test_every_token_has_its_bytes(smollm: Tokenizer) -> None:
    for token_id in range(100, smollm.vocab_size, 977):
        raw = smollm.token_bytes(token_id)
        assert smollm._parsing.decode([token_id]) == raw.decode("utf-8", "replace")  # pyright: ignore[reportPrivateUsage]


def test_half_a_surrogate_pair_is_refused(smollm: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        smollm.encode("a\ud83d")


IDS = st.lists(st.integers(0, 400) | st.integers(0, 49151), max_size=40)


@settings(max_examples=200, deadline=None)
@given(ids=IDS, skip=st.booleans())
def test_increments_join_to_the_whole(ids: list[int], skip: bool) -> None:
    for tokenizer in (_shared(), _sentencepiece()):
        decoder = IncrementalDecoder(tokenizer, skip_special=skip)
        parts = [decoder.add(token_id) for token_id in ids]
        text = "".join(parts) + decoder.finish()
        assert text == tokenizer.decode(ids, skip_special=skip)
        kept = [i for i in ids if not (skip and i in tokenizer.special_ids)]
        raw = b"".join(map(tokenizer.token_bytes, kept))
        if tokenizer.strips_first_space:
            raw = raw.removeprefix(b" ")
        assert text == raw.decode("utf-8", "replace")


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_comes_back(text: str) -> None:
    # SmolLM2's vocabulary lacks tokens for some bytes that text hardly ever has; those are lost.
    kept = "".join(char for char in text if all(bytes([byte]) in _single_bytes() for byte in char.encode()))
    assert _shared().decode(_shared().encode(kept)) == kept
    spaced = text.replace("▁", "_")
    assert _sentencepiece().decode(_sentencepiece().encode(spaced)) == spaced


@functools.cache
def _single_bytes() -> frozenset[bytes]:
    tokenizer = _shared()
    return frozenset(raw for raw in map(tokenizer.token_bytes, range(tokenizer.vocab_size)) if len(raw) == 1)


@functools.cache
def _shared() -> Tokenizer:
    return Tokenizer.from_path(resolve("smollm2-135m"))


@functools.cache
def _sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf_metadata(sentencepiece_metadata())


def test_an_incomplete_character_is_held_back(smollm: Tokenizer) -> None:
    decoder = IncrementalDecoder(smollm)
    ids = smollm.encode("😀")
    assert len(ids) > 1
    assert [decoder.add(i) for i in ids] == [""] * (len(ids) - 1) + ["😀"]
    decoder.add(ids[0])
    assert decoder.finish() == "\ufffd"


def test_sentencepiece_vocabulary() -> None:
    tokenizer = Tokenizer.from_gguf_metadata(sentencepiece_metadata())
    spell = [tokenizer.token_bytes(i) for i in tokenizer.encode("ab c\n\nabé")]
    # The pair with the best score merges first; a user-defined token is matched as a whole, and the text
    # after it starts anew, with a space of its own; what is in no piece becomes bytes.
    assert spell == [b"<s>", b" ab", b" c", b"\n\n", b" ab", b"\xc3", b"\xa9"]
    assert tokenizer.decode(tokenizer.encode("ab c")) == "ab c"
    assert 3 in tokenizer.special_ids
    assert 3 not in tokenizer.encode("<start_of_turn>")
    assert 3 in tokenizer.encode("<start_of_turn>", allow_special=True)
    bare = Tokenizer.from_gguf_metadata(
        sentencepiece_metadata(
            **{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
        )
    )
    assert [bare.token_bytes(i) for i in bare.encode("ab")] == [b"ab"]
    assert bare.decode(bare.encode(" ab")) == " ab"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'.*gpt2, llama"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "bloom"}, "'bloom'.*smollm"),
        ({"tokenizer.ggml.scores": None}, "scores"),
        ({"tokenizer.ggml.scores": [0.0]}, "scores"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "twice"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["a z"]},
            "'a z'",
        ),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        Tokenizer.from_gguf_metadata(sentencepiece_metadata(**changes))


def byte_level_folder(folder: Path) -> tokenizers.Tokenizer:
    """A Hugging Face folder whose added tokens have ids past the model's vocabulary, as Llama 3's."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["the cat sat on the mat and the dog"] * 3,
        trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet),
    )
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokenizer.add_special_tokens(["<s>", "<|eot_id|>", "</s>"])
    tokenizer.add_tokens([AddedToken("<x>", special=False, normalized=False)])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings_ = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "chat_template": [{"name": "default", "template": "x"}],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5]}))
    return tokenizer


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    reference = byte_level_folder(tmp_path)
    tokenizer = Tokenizer.from_path(tmp_path)
    for text in ("the cat<s> sat</s>", "<tool> the <x> dog<|eot_id|>", "né 😀"):
        assert tokenizer.encode(text, allow_special=True) == reference.encode(text).ids
        plain = tokenizer.encode(text, add_bos=False)
        assert tokenizer.special_ids.isdisjoint(plain)
        assert tokenizer.decode(plain) == text
    for token in ("<tool>", "<x>"):
        assert tokenizer.encode(token, add_bos=False) == [reference.token_to_id(token)]
    assert tokenizer.chat_template == "x"
    ids = [reference.token_to_id("</s>"), 5, reference.token_to_id("<|eot_id|>")]
    assert list(tokenizer.eos_token_ids) == ids
    (tmp_path / "chat_template.jinja").write_text("y")
    assert Tokenizer.from_path(tmp_path).chat_template == "y"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelFormatError, match="save_pretrained"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_space_only_before_the_first_word_of_all(scheme: str, tmp_path: Path) -> None:
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "▁", "a", "▁a", "<s>"])}
    reference = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>"))
    reference.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    reference.decoder = decoders.Metaspace(prepend_scheme=scheme)
    reference.add_special_tokens(["<s>", "<unk>"])
    reference.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_path(tmp_path)
    text = "a<s>a a<s> a"
    expected = reference.encode(text).ids
    assert tokenizer.encode(text, allow_special=True) == expected
    parts = tokenizer.encode_parts([("a<s>", True), ("a a", False), ("<s>", True), (" a", False)])
    assert [i for part in parts for i in part] == expected


def test_parts_are_tokenised_as_one_text(smollm: Tokenizer) -> None:
    parts = [
        ("<|im_start|>user\n", True),
        ("\n\nhel", False),
        ("lo<|im_end|>\n", True),
        ("", False),
        ("<|im_end|>", False),
    ]
    ids = smollm.encode_parts(parts)
    whole = smollm.encode("<|im_start|>user\n\n\nhello<|im_end|>", allow_special=True)
    assert [i for part in ids for i in part] == whole + smollm.encode("\n<|im_end|>")
    assert ids[3] == []
    assert 2 not in ids[4]
