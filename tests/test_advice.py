"""Advice: what changes is told by its form, in any language; what is claimed to be the same is; no text is quoted."""

from __future__ import annotations

import random
import re
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ostinato.cache.use import TokenType
from ostinato.engine.advice import (
    WORTH,
    After,
    Divergence,
    Loss,
    advise,
    after_change,
    around,
)
from ostinato.engine.change import WINDOW, Change, changing
from ostinato.prompt.span import SpanKind

CHANGES: list[tuple[Change, str, str]] = [
    # Dates
    ("date or time", "Today is 2026-11-29. Be brief.", "Today is 2026-11-30. Be brief."),
    ("date or time", "Heute ist der 12.08.2026.", "Heute ist der 13.08.2026."),
    ("date or time", "Stand: 12.08.26, Entwurf", "Stand: 13.08.26, Entwurf"),
    ("date or time", "Dnes je 12. 8. 2026.", "Dnes je 3. 9. 2026."),
    ("date or time", "Date: 8/12/2026", "Date: 8/13/2026"),
    ("date or time", "As of 8/12/26, prices", "As of 9/12/26, prices"),
    ("date or time", "Current date: August 12, 2026", "Current date: August 13, 2026"),
    ("date or time", "Current date: August 12, 2026", "Current date: September 1, 2026"),
    ("date or time", "Today's date is May 12, 2026.", "Today's date is June 12, 2026."),
    ("date or time", "It is the 12th of August.", "It is the 13th of August."),
    ("date or time", "Today is 12 May 2026.", "Today is 13 May 2026."),
    ("date or time", "Today is Monday.", "Today is Tuesday."),
    ("date or time", "It is November.", "It is December."),
    ("date or time", "Knowledge cutoff: 2026-06", "Knowledge cutoff: 2026-07"),
    ("date or time", "Week 2026-W32", "Week 2026-W33"),
    ("date or time", "Wir haben das Jahr 2026.", "Wir haben das Jahr 2025."),
    ("date or time", "Heute ist Dienstag, der 12. März 2026.", "Heute ist Dienstag, der 13. März 2026."),
    ("date or time", "Heute ist Dienstag.", "Heute ist Mittwoch."),
    ("date or time", "Nous sommes le 12 août 2026.", "Nous sommes le 13 août 2026."),
    ("date or time", "Nous sommes le 12 août 2026.", "Nous sommes le 12 juillet 2026."),
    ("date or time", "Nous sommes le 1er février.", "Nous sommes le 2 février."),
    ("date or time", "On est mercredi.", "On est jeudi."),
    ("date or time", "Hoy es 12 de agosto de 2026.", "Hoy es 13 de agosto de 2026."),
    ("date or time", "Hoy es miércoles.", "Hoy es sábado."),
    ("date or time", "Hoje é 3 de março de 2026.", "Hoje é 3 de abril de 2026."),
    ("date or time", "Hoje é terça-feira.", "Hoje é quinta-feira."),
    ("date or time", "Oggi è il 12 agosto 2026.", "Oggi è il 14 agosto 2026."),
    ("date or time", "Oggi è lunedì.", "Oggi è martedì."),
    ("date or time", "Vandaag is 12 maart 2026.", "Vandaag is 13 maart 2026."),
    ("date or time", "Dzisiaj jest 12 sierpnia 2026.", "Dzisiaj jest 13 września 2026."),
    ("date or time", "Dnes je 12. srpna 2026.", "Dnes je 13. srpna 2026."),
    ("date or time", "Сегодня 12 августа 2026 года.", "Сегодня 13 августа 2026 года."),
    ("date or time", "Сегодня понедельник.", "Сегодня вторник."),
    ("date or time", "Сьогодні 12 серпня 2026.", "Сьогодні 13 серпня 2026."),
    ("date or time", "Bugün 12 Ağustos 2026.", "Bugün 13 Ağustos 2026."),
    ("date or time", "Idag är det måndag.", "Idag är det lördag."),
    ("date or time", "Tänään on 12. elokuuta 2026.", "Tänään on 13. elokuuta 2026."),
    ("date or time", "Ma 2026. augusztus 12. van.", "Ma 2026. augusztus 13. van."),
    ("date or time", "Σήμερα είναι 12 Αυγούστου 2026.", "Σήμερα είναι 13 Αυγούστου 2026."),
    ("date or time", "今日は8月12日です。", "今日は8月13日です。"),
    ("date or time", "今日は８月１２日です。", "今日は８月１３日です。"),
    ("date or time", "本日：2026年8月12日（水）", "本日：2026年8月13日（木）"),
    ("date or time", "本日：2026年8月12日（水）", "本日：2025年8月12日（火）"),
    ("date or time", "今日は令和8年8月12日", "今日は令和8年9月12日"),
    ("date or time", "今日は水曜日です", "今日は木曜日です"),
    ("date or time", "今天是2026年8月12日。", "今天是2026年9月1日。"),
    ("date or time", "今天是二〇二六年八月十二日。", "今天是二〇二六年八月十三日。"),
    ("date or time", "今天是星期三。", "今天是星期四。"),
    ("date or time", "오늘은 2026년 8월 12일입니다.", "오늘은 2026년 8월 13일입니다."),
    ("date or time", "오늘은 수요일입니다.", "오늘은 목요일입니다."),
    ("date or time", "اليوم ١٢ أغسطس ٢٠٢٦", "اليوم ١٣ أغسطس ٢٠٢٦"),
    ("date or time", "التاريخ: ٢٠٢٦-٠٨-١٢", "التاريخ: ٢٠٢٦-٠٨-١٣"),
    ("date or time", "आज १२ अगस्त २०२६ है", "आज १३ अगस्त २०२६ है"),
    ("date or time", "आज सोमवार है", "आज मंगलवार है"),
    ("date or time", "วันนี้ 12 สิงหาคม 2569", "วันนี้ 13 สิงหาคม 2569"),
    ("date or time", "Hôm nay là ngày 12 tháng 8 năm 2026", "Hôm nay là ngày 13 tháng 8 năm 2026"),
    ("date or time", "היום 12 באוגוסט 2026", "היום 13 באוגוסט 2026"),
    # Times
    ("date or time", "It is 10:31 now.", "It is 10:32 now."),
    ("date or time", "It is 9:05 pm.", "It is 9:06 pm."),
    ("date or time", "It is 3 pm here.", "It is 4 pm here."),
    ("date or time", "Es ist 10 Uhr.", "Es ist 11 Uhr."),
    ("date or time", "Il est 10h31.", "Il est 10h32."),
    ("date or time", "Klokken er kl. 10.31 nå", "Klokken er kl. 10.32 nå"),
    ("date or time", "現在10時31分です", "現在10時32分です"),
    ("date or time", "現在午後3時です", "現在午前9時です"),
    ("date or time", "现在下午3点20分", "现在下午4点20分"),
    ("date or time", "지금은 오후 3시 20분", "지금은 오후 4시 20분"),
    ("date or time", "الساعة ١٠:٣١", "الساعة ١٠:٣٢"),
    ("date or time", "now=2026-08-12T10:31:07.123Z", "now=2026-08-12T10:31:09.456Z"),
    ("date or time", "Date: Wed, 12 Aug 2026 10:31:00 +0200", "Date: Wed, 12 Aug 2026 10:31:02 +0200"),
    ("date or time", "Date: Wed, 12 Aug 2026 10:31:00 +0200", "Date: Thu, 13 Aug 2026 10:31:00 +0200"),
    ("date or time", "Wed Aug 12 10:31:00 UTC 2026", "Tue Aug 11 10:31:00 UTC 2026"),
    ("date or time", "Timestamp: 1786530667", "Timestamp: 1786530912"),
    ("date or time", '{"ts": 1786530667123}', '{"ts": 1786530912456}'),
    ("date or time", "run-20260812-103107", "run-20260812-110000"),
    ("date or time", "Timezone: UTC+2", "Timezone: UTC+9"),
    # Identifiers
    ("identifier", "Session 8f14e45fceea167a.", "Session 8f14e45fceea999a."),
    ("identifier", "7d444840-9dc0-11d1-b245-5ffdce74fad2", "7d444840-9dc0-11d1-b245-5ffdce74fad3"),
    ("identifier", "trace 01ARZ3NDEKTSV4RRFFQ69G5FAV", "trace 01ARZ3NDEKTSV4RRFFQ69G5FBW"),
    ("identifier", "req_011CSHoEeqs5C35K2UUqR7Fy", "req_011CSHoEeqs5C35K2UUqR9Ab"),
    ("identifier", "X: dGhpcyBpcyBh3Q2hlY2s1", "X: dGhpcyBpcyBh7Z2hlY9s8"),
    ("identifier", "ユーザーID 8823 さん", "ユーザーID 9914 さん"),
    ("identifier", "ユーザー番号：８８２３", "ユーザー番号：９９１４"),
    ("identifier", "ご注文番号は4711です", "ご注文番号は4712です"),
    ("identifier", "用户编号 8823", "用户编号 8824"),
    ("identifier", "会话ID：42", "会话ID：43"),
    ("identifier", "사용자 ID: 8823", "사용자 ID: 9914"),
    ("identifier", "주문번호 4711", "주문번호 4712"),
    ("identifier", "user id: 8823", "user id: 99"),
    ("identifier", '{"user_id": "8823", "plan": 1}', '{"user_id": "8824", "plan": 1}'),
    ("identifier", "customerId=42", "customerId=43"),
    ("identifier", "**Session ID:** 17", "**Session ID:** 18"),
    ("identifier", "This is session #42.", "This is session #43."),
    ("identifier", "session 5 begins", "session 50 begins"),
    ("identifier", "Order No. 4711", "Order No. 4712"),
    ("identifier", "Заказ № 4711", "Заказ № 4712"),
    ("identifier", "Пользователь: 8823", "Пользователь: 8824"),
    ("identifier", "Kunden-Nr. 4711", "Kunden-Nr. 4712"),
    ("identifier", "Commande n° 4711", "Commande n° 4712"),
    ("identifier", "Número de pedido: pedido #88", "Número de pedido: pedido #89"),
    ("identifier", "Numer sesji: sesja 12", "Numer sesji: sesja 13"),
    ("identifier", "Kullanıcı 8823", "Kullanıcı 8824"),
    ("identifier", "رقم ٨٨٢٣", "رقم ٨٨٢٤"),
    ("identifier", "Ticket ABC-1234", "Ticket ABC-1299"),
    ("identifier", "client 192.168.1.14", "client 192.168.1.15"),
    ("identifier", "You help ann@example.com.", "You help bob@example.com."),
    ("identifier", "case 00123456", "case 00123457"),
    (
        "identifier",
        "x-anthropic-billing-header: cc_entrypoint=cli; cch=a1b2c;",
        "x-anthropic-billing-header: cc_entrypoint=cli; cch=09f3d;",
    ),
    # Versions
    ("version", "claude-cli/2.1.37 (external)", "claude-cli/2.1.38 (external)"),
    ("version", "cc_version=2.1.15.abc;", "cc_version=2.1.37.f02;"),
    ("version", "You are Helper v2.1.0.", "You are Helper v2.2.0."),
    ("version", "Version: 7", "Version: 8"),
    ("version", "build a1b2c3d", "build 0f9e8d7"),
    ("version", "バージョン 3.2", "バージョン 3.3"),
    ("version", "版本：3.2", "版本：3.3"),
    ("version", "node 22.14.1 on linux", "node 22.15.0 on linux"),
    # Paths
    ("path", "Working directory: /home/ann/project", "Working directory: /home/bob/project"),
    ("path", "cwd: /app", "cwd: /srv"),
    ("path", "You are in ~/src/api today", "You are in ~/src/web today"),
    ("path", "<cwd>C:\\Users\\Ann Smith\\code</cwd>", "<cwd>C:\\Users\\Bob Smith\\code</cwd>"),
    ("path", "<cwd>C:\\Users\\Ann Smith\\code</cwd>", "<cwd>C:\\Users\\Ann Jones\\code</cwd>"),
    ("path", '{"cwd": "C:\\\\Users\\\\ann\\\\x"}', '{"cwd": "C:\\\\Users\\\\bob\\\\x"}'),
    ("path", "作業ディレクトリ: /srv/甲/x", "作業ディレクトリ: /srv/乙/x"),
    # Numbers
    ("number", "This is step 3 of 10.", "This is step 4 of 10."),
    ("number", "Attempt 2: think again", "Attempt 3: think again"),
    ("number", "第3步：思考", "第4步：思考"),
    ("number", "Temperature outside: 21.5 °C", "Temperature outside: -3 °C"),
    ("number", "Tokens remaining: 18723", "Tokens remaining: 9114"),
    ("number", "There are 28 days of paid leave.", "There are 30 days of paid leave."),
    ("number", "It costs 140 euros.", "It costs 99 euros."),
    ("number", "The budget is 2026 euros.", "The budget is 1400 euros."),
    ("number", "有給休暇は28日です", "有給休暇は30日です"),
    ("number", "3時間かかります", "5時間かかります"),
    ("number", "1.350.000 Einwohner", "1.420.000 Einwohner"),
    ("number", "Population 1350000 today", "Population 1420000 today"),
]

OTHER_WORDS = [
    ("You are kind. Be brief.", "You are stern. Be brief."),
    ("You may ask.", "You must ask."),
    ("Good morning, Ann.", "Good evening, Ann."),
    ("March on!", "Run on!"),
    ("Nach Mars und Mond", "Nach Venus und Mond"),
    ("An august person", "A young person"),
    ("She paid him.", "She thanked him."),
    ("окружающая среда", "окружающая природа"),
    ("Answer in English and/or French.", "Answer in English and not French."),
    ("What is the capital of France?", "What is the tallest tree?"),
    ("東京の天気は？", "大阪の天気は？"),
    ("三つの質問", "二つの質問"),
    ("Today is 2026-08-12. You are kind.", "Today is 2026-08-12 and you are kind."),
    ("Order 5 is late", "Order five is late"),
    ("Section 2.1.3 says SHA-256 twice", "Section 2.1.4 says SHA-256 twice"),
    ("# 1 Introduction", "# Introduction"),
    ("He met a user. 5 apples", "He met a user. Some apples"),
    ("Donaudampfschifffahrt", "Donaudampfer"),
    ("getUserInformation()", "getUserName()"),
    ("\n", " "),
    ("", "x"),
]


def parted(mine: str, cached: str) -> tuple[str, str, str]:
    at = next(
        (i for i, (a, b) in enumerate(zip(mine, cached, strict=False)) if a != b), min(len(mine), len(cached))
    )
    return mine[:at], mine[at:], cached[at:]


@pytest.mark.parametrize(("kind", "mine", "cached"), CHANGES)
def test_what_changes_is_told_by_its_form(kind: Change, mine: str, cached: str) -> None:
    for one, other in ((mine, cached), (cached, mine)):
        assert changing(*parted(one, other)) == kind
        before, after, known = parted(one + " And so on.", other + " And so on.")
        assert changing("First line.\n" + before, after + "\nLast line.", known + "\nLast line.") == kind


@pytest.mark.parametrize(("kind", "mine", "cached"), [case for case in CHANGES if case[0] != "number"])
def test_so_it_is_where_the_other_text_is_not_known(kind: Change, mine: str, cached: str) -> None:
    before, after, _ = parted(mine, cached)
    assert changing(before, after) in (kind, None)
    if after[:1].isalnum():
        assert changing(before, after) == kind


@pytest.mark.parametrize(("mine", "cached"), OTHER_WORDS)
def test_other_words_are_no_such_thing(mine: str, cached: str) -> None:
    before, after, known = parted(mine, cached)
    assert changing(before, after, known) is None
    assert changing(before, known, after) is None


def test_a_number_alone_is_one_only_where_both_are_known() -> None:
    assert changing("There are ", "28 days of paid leave.") is None
    assert changing("There are ", "28 days of paid leave.", "many days of paid leave.") is None
    assert changing("It uses SHA-", "256.") is None
    assert changing("There are ", "28 days of paid leave.", "30 days of paid leave.") == "number"


def test_only_the_line_is_looked_at() -> None:
    assert changing("Today is 2026-08-12.\n", "You are kind.", "You are stern.") is None
    assert changing("Be ", "kind.\nToday is 2026-08-12.", "brief.\nToday is 2026-08-12.") is None
    assert changing("user id: ", "ann\n8823", "bob\n8823") is None


def test_where_two_characters_share_a_byte_they_part_before_it() -> None:
    def decode(tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    mine, cached = "今日は８月１２日です".encode(), "今日は８月１３日です".encode()
    at = next(i for i, (a, b) in enumerate(zip(mine, cached, strict=True)) if a != b)
    assert decode(list(mine[:at])).endswith("\ufffd")
    texts = around(decode, mine[:at], mine[at:], cached[at:])
    assert texts == ("今日は８月１", "２日です", "３日です")
    assert changing(*texts) == "date or time"
    assert around(decode, mine[:at], mine[at:]) == ("今日は８月１", "２日です", "")


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=300)
LINES = st.lists(st.sampled_from([text for _, *texts in CHANGES for text in texts]), max_size=4).map(" ".join)


@given(ANY_TEXT | LINES, ANY_TEXT | LINES, ANY_TEXT | LINES)
@example("\ud800", "\udc00", "\ud800")
@example("a\u0301" * 200, "\u0301" * 300, "")
def test_any_text_is_judged_the_same_in_either_direction(before: str, one: str, other: str) -> None:
    kinds = {"date or time", "identifier", "version", "path", "number", None}
    assert changing(before, one) in kinds
    assert changing(before, one, other) in kinds
    if one.strip() and other.strip() and not one.startswith(other) and not other.startswith(one):
        assert (changing(before, one, other) is None) == (changing(before, other, one) is None)
    assert changing(before, one, one) in kinds


LONG = """1|a-|a.|1.|1:|/a|\\a|a1|0a|#|id |id: |1 |a@|_|=|月1|c:\\a |user |8月|年|2026-|12.|v1.|٣|ﷺ|"|a/b|1,|('"""


@pytest.mark.parametrize("unit", [*LONG.split("|"), "\u0301", "a\u0301", "\ud800"])
def test_no_text_is_too_long_to_be_judged(unit: str) -> None:
    long = unit * 10_000
    for before, mine, cached in ((long, long, ""), (long, "x" + long, "y" + long), ("", long, long[1:])):
        bounded = changing(before[-WINDOW:], mine[: 2 * WINDOW], cached[: 2 * WINDOW])
        assert changing(before, mine, cached) == bounded, "what is far away is not looked at"


# What is the same behind the change

TOKEN = st.integers(0, 100_000)


def words(count: int, seed: int = 0) -> list[int]:
    """Tokens of a text that does not repeat itself."""
    return random.Random(seed).sample(range(1000, 200_000), count)


@given(
    st.lists(st.integers(0, 400), max_size=30),
    st.lists(st.integers(500, 900), max_size=30),
    st.integers(WORTH, 600),
    st.lists(st.integers(200_000, 200_400), max_size=40),
    st.lists(st.integers(200_500, 200_900), max_size=40),
)
def test_a_moved_date_yields_exactly_the_stretch_behind(
    old: list[int], new: list[int], size: int, old_end: list[int], new_end: list[int]
) -> None:
    rest = words(size)
    found = after_change([*old, *rest, *old_end], [*new, *rest, *new_end])
    assert (found.unchanged, found.cached, found.mine, found.reordered) == (size, len(old), len(new), 0)


@given(
    st.lists(st.integers(0, 3) | TOKEN, max_size=300),
    st.lists(st.integers(0, 3) | TOKEN, max_size=300),
    st.data(),
)
def test_what_is_said_to_be_the_same_is(cached: list[int], mine: list[int], data: st.DataObject) -> None:
    shared = data.draw(st.lists(st.integers(0, 3) | TOKEN, max_size=200))
    cached, mine = cached + shared, mine + shared
    for one, other in ((cached, mine), (mine, cached), (cached, cached)):
        found = after_change(one, other)
        assert 0 <= found.unchanged <= min(len(one) - found.cached, len(other) - found.mine)
        assert one[found.cached :][: found.unchanged] == other[found.mine :][: found.unchanged]
        assert 0 <= found.reordered <= len(other)


def test_a_long_stretch_is_counted_to_its_end() -> None:
    rest = words(150_000)
    assert after_change([1, *rest], [2, 3, *rest]) == After(len(rest), 2, 1)
    found = after_change((1, *rest), [2, 3, *rest[:9000], 5])
    assert (found.unchanged, found.whole) == (9000, False)
    assert after_change(rest[:3000], rest[3000:6000]) == After(0, 3000, 3000, whole=True)
    assert after_change(rest[: WORTH - 1], rest[:3000]).unchanged == 0


@pytest.mark.parametrize(
    ("cached", "mine"),
    [
        ([1] * 200_000, [1] * 100 + [2] + [1] * 150_000),
        (([1] * 100 + [3]) * 2000, ([1] * 101 + [2]) * 2000),
        (([1] * 9 + [3]) * 20_000, ([1] * 8 + [2]) * 20_000),
        (list(range(8)) * 25_000, list(range(8, 0, -1)) * 25_000),
        (words(150_000, 1), words(150_000, 2)),
        ([*range(12)] * 16_000, [*range(12), 13] * 16_000),
    ],
)
def test_texts_that_repeat_themselves_take_no_longer(cached: list[int], mine: list[int]) -> None:
    found = after_change(cached, mine)
    assert found.unchanged <= len(mine) - found.mine
    assert cached[found.cached :][: found.unchanged] == mine[found.mine :][: found.unchanged]


def test_a_text_that_repeats_itself_is_found_whole() -> None:
    rules = list(b"Answer briefly, and say so when you do not know. " * 3)
    found = after_change([*b"kind. ", *rules], [*b"stern. ", *rules])
    assert found.unchanged >= len(rules)


# Another order


def shuffled(pieces: list[list[int]], seed: int) -> list[int]:
    order = [*range(len(pieces))]
    random.Random(seed).shuffle(order)
    order = order if order != sorted(order) else order[::-1]
    return [token for number in order for token in pieces[number]]


@given(st.integers(4, 12), st.integers(40, 150), st.integers(0, 1000), st.integers(0, 300))
def test_pieces_in_another_order_are_counted(count: int, size: int, seed: int, behind: int) -> None:
    everything = words(count * size + behind)
    pieces = [everything[i * size : (i + 1) * size] for i in range(count)]
    tail = everything[count * size :]
    # The first piece is another one, as where the texts part.
    ones, others = everything, [*shuffled(pieces, seed), *tail]
    at = next(i for i, (a, b) in enumerate(zip(ones, others, strict=True)) if a != b)
    found = after_change(ones[at:], others[at:])
    assert WORTH // 2 <= found.reordered <= count * size


def test_what_stays_in_order_is_not_counted() -> None:
    text = words(3000)
    a, b, tail = text[:300], text[300:500], text[500:]
    assert after_change([*a, *b, *tail], [*b, *a, *tail]).reordered == 500
    assert after_change([1, *a, 2, *b, 3, *tail], [4, *a, 5, *b, 6, 7, *tail]).reordered == 0
    # One sentence that stands elsewhere is no other order of all that it passed.
    assert after_change([1, *a[:20], *tail], [2, *tail, *a[:20]]).reordered == 0
    assert after_change(a, [*b, *tail]).reordered == 0
    # Said twice is not said in another order.
    assert after_change([*a, *tail], [*b, *a, *a, *tail]).reordered == 0


def test_keys_of_objects_in_another_order() -> None:
    names, seed = words(8 * 60), random.Random(5)
    objects = [[names[o * 8 : o * 8 + 8][k : k + 4] for k in (0, 4)] for o in range(60)]

    def written(flip: bool) -> list[int]:
        return [
            t for first, second in objects for t in ((*second, 7, *first) if flip else (*first, 7, *second))
        ]

    tail = [seed.randrange(200_000, 300_000) for _ in range(100)]
    assert after_change([*written(False), *tail], [*written(True), *tail]).reordered == 8 * 60 + 60
    edited = written(False)
    edited[::40] = [9] * len(edited[::40])
    assert after_change([*written(False), *tail], [*edited, *tail]).reordered == 0


# The line of advice

DATE = ("Today is 2026-11-", "29. Be brief.", "30. Be brief.")
WORDS = ("You are ", "kind.", "stern.")


def test_advice_with_proof() -> None:
    after = after_change([1, 2, *words(2310)], [3, *words(2310)])
    assert advise(Divergence("system", 41, 2900, *DATE, after)) == (
        "The date or time at token 41, in the system prompt, changes from request to request; the 2,310 tokens behind "
        "it were the same as last time: move it behind them."
    )
    assert advise(Divergence("tools", 0, 2900, *WORDS, after)) == (
        "The tool definitions differ from token 0 on, but the 2,310 tokens from 1 on were the same as last time: put "
        "what stays the same first, and what changes behind it."
    )
    # What is the same may have been found after all: no more is claimed than had to be computed.
    assert "the 500 tokens" in str(advise(Divergence("system", 41, 500, *DATE, after)))


def test_advice_without_proof() -> None:
    assert advise(Divergence("system", 41, 2310, *DATE)) == (
        "The date or time at token 41, in the system prompt, changes from request to request, which costs 2,310 tokens: "
        "move it behind everything that stays the same."
    )
    assert advise(Divergence("system", 41, 2310, *WORDS)) == (
        "The system prompt differs from token 41 on, which costs 2,310 tokens: keep it the same in every request, and "
        "move what changes to the end of the prompt."
    )
    assert "keep them the same" in str(advise(Divergence("tools", 41, 2310, *WORDS)))
    assert "The identifier at token 0, in the text," in str(
        advise(Divergence("text", 0, 90, "user id: ", "8823"))
    )


@pytest.mark.parametrize("kind", ["user", "assistant", "tool", "reasoning", "text"])
def test_a_new_question_needs_no_advice(kind: TokenType) -> None:
    for after in (None, after_change(words(500, 1), words(500, 2)), after_change(words(9), words(500, 2))):
        assert advise(Divergence(kind, 700, 500, *WORDS, after)) is None
    assert advise(Divergence(kind, 700, 500, *DATE, after_change(words(500, 1), words(500, 2)))) is None


def test_nor_does_a_date_that_stands_last() -> None:
    for behind in (80, 30):
        after = after_change(words(500, 1), words(behind, 2))
        assert advise(Divergence("system", 900, behind, *DATE, after)) is None


def test_advice_for_a_users_text_that_has_something_unchanged_behind() -> None:
    after = after_change([*words(90, 1), *words(800)], [*words(40, 2), *words(800)])
    assert advise(Divergence("user", 12, 840, *WORDS, after)) == (
        "The user message differs from token 12 on, but the 800 tokens from 52 on were the same as last time: put what "
        "stays the same first, and what changes behind it."
    )
    dated = after_change([1, *words(800)], [2, *words(800)])
    assert "date or time at token 12, in the user message" in str(
        advise(Divergence("user", 12, 801, *DATE, dated))
    )
    cut = after_change([*words(90, 1), *words(800)], words(800))
    assert advise(Divergence("user", 12, 840, *WORDS, cut)) == (
        "90 tokens are left out at token 12, in the user message; the 800 tokens behind them are the same as last time: "
        "leave out from the end, or seldom and much at once."
    )


def test_advice_for_another_order() -> None:
    text = words(900)
    after = after_change(text, [*text[300:], *text[:300]])
    assert advise(Divergence("document", 5, 1000, *WORDS, after)) == (
        "From token 5 on, in the document, 900 tokens are the same as last time but in another order, which costs 1,000: "
        "keep them in one order (sort them), or register them as modules or documents, which are found in any order."
    )


def test_advice_for_what_was_lost() -> None:
    assert "more --kv-tokens than 2,048" in str(advise(Loss("evicted", 1500, slots=2048)))
    assert "1,500 tokens had expired: ask for a longer ttl" in str(advise(Loss("expired", 1500)))
    assert "in scope org:acme:" in str(advise(Loss("scope", scope="org:acme")))
    assert "ttl 0" in str(advise(Loss("caching off")))


@given(
    st.sampled_from((*get_args(SpanKind), "decode")),
    st.integers(0, 10_000),
    st.integers(1, 10_000),
    st.tuples(LINES, LINES, LINES),
    st.none() | st.builds(After, *[st.integers(0, 9000)] * 4, st.booleans()),
)
def test_advice_quotes_no_text(
    kind: TokenType, at: int, tokens: int, texts: tuple[str, str, str], after: After | None
) -> None:
    told = advise(Divergence(kind, at, tokens, *texts, after))
    for word in {w for text in texts for w in re.findall(r"[^\W\d]{8,}", text)} - {"tokens", "identifier"}:
        assert told is None or word not in told
    numbers = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", told or "")]
    counts = {at, tokens, *((min(after.unchanged, tokens), min(after.reordered, tokens)) if after else ())}
    assert set(numbers) <= counts | ({after.cached, at + after.mine} if after else set())
