"""Change: what of a text is of a kind that is another in every request, by its form, in many languages."""

from __future__ import annotations

import re
import unicodedata
from itertools import takewhile
from typing import Literal

Change = Literal["date or time", "identifier", "version", "path", "number"]
"""What changes all the time."""

WINDOW = 128
"""Characters of a line looked at on either side of where two texts part."""


def changing(before: str, after: str, cached: str = "") -> Change | None:
    """What stands where two texts part, if it is of a kind that changes all the time.

    `before` is what they have in common, `after` and `cached` are how the one and the other go on. Where the other is
    known, it must be of such a kind too. A mere number is one only then: it may be what the text is about.
    """
    after, cached = after[: 2 * WINDOW], cached[: 2 * WINDOW]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(after, cached, strict=False)))
    if not cached[same:].strip():
        return _found(before, after, ends=False, numbers=False)
    before, after, cached = before + after[:same], after[same:], cached[same:]
    own, other = _found(before, after), _found(before, cached)
    if own is None and other is None:
        return None
    # One of the two may end there: the 5 of 5 apples, where the other has 50.
    own = own or _found(before, after, ends=True)
    other = other or _found(before, cached, ends=True)
    if own is None or other is None:
        return None
    return "number" if "number" in (own, other) else own


def _found(before: str, after: str, ends: bool = False, numbers: bool = True) -> Change | None:
    """The kind of what goes on or begins there; or of what `ends` there."""
    line, at = _line(before, after)
    if not ends and (gap := _GAP.match(line, at)):
        at = gap.end()
    if not _HINT.search(line):
        return None
    for kind, pattern in _FORMS if numbers else _FORMS[:-1]:
        for found in pattern.finditer(line):
            if found.start() > at:
                break
            if at < found.end() + ends:
                return kind
    return None


def _line(before: str, after: str) -> tuple[str, int]:
    """The line in which two texts part, in plain characters, and where."""
    start = _plain(_BREAK.split(before[-WINDOW:])[-1])[-WINDOW:]
    return start + _plain(_BREAK.split(after[:WINDOW], maxsplit=1)[0])[:WINDOW], len(start)


def _plain(text: str) -> str:
    """A text with every digit an ASCII one, every letter small and without accents."""
    text = unicodedata.normalize("NFKD", text.translate(_SIGNS))
    text = unicodedata.normalize("NFC", _ACCENT.sub("", text)).casefold()
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)


_GAP = re.compile(r"[^\w\\/~]{1,3}")
_BREAK = re.compile(r"[\n\r\v\f\x85\u2028\u2029]")
_ACCENT = re.compile(r"[\u0300-\u036f]")
# Marks of direction, joiners and soft hyphens stand between digits and are not seen.
_SIGNS = str.maketrans(
    {"№": "no.", "º": "°"}
    | dict.fromkeys("‐‑‒–—−", "-")
    | dict.fromkeys("\u00ad\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")
)


def _any(words: str) -> str:
    """A pattern of one of these words, with their accents or without."""
    return (
        "(?:" + "|".join(sorted({re.escape(_plain(w)) for w in words.split()}, key=len, reverse=True)) + ")"
    )


_MONTH = _any(
    """january february march april may june july august september october november december jan feb mar apr jun jul aug
    sep sept oct nov dec januar jänner februar märz mai juni juli oktober dezember okt dez janvier février mars avril
    juin juillet août septembre octobre novembre décembre janv févr avr juil enero febrero marzo abril mayo junio julio
    agosto septiembre setiembre octubre noviembre diciembre ene abr dic janeiro fevereiro março maio junho julho setembro
    outubro novembro dezembro fev gennaio febbraio aprile maggio giugno luglio settembre ottobre dicembre januari
    februari maart mei augustus mrt maj augusti marts desember stycznia lutego marca kwietnia maja czerwca lipca sierpnia
    września października listopada grudnia ledna února března dubna května června července srpna září října listopadu
    prosince января февраля марта апреля мая июня июля августа сентября октября ноября декабря січня лютого березня
    квітня травня червня липня серпня вересня жовтня листопада грудня ocak şubat mart nisan mayıs haziran temmuz ağustos
    eylül ekim kasım aralık ianuarie februarie martie aprilie iunie iulie septembrie octombrie noiembrie decembrie
    február március április május június július augusztus szeptember október tammikuuta helmikuuta maaliskuuta huhtikuuta toukokuuta kesäkuuta
    heinäkuuta elokuuta syyskuuta lokakuuta marraskuuta joulukuuta ιανουαρίου φεβρουαρίου μαρτίου απριλίου μαΐου ιουνίου
    ιουλίου αυγούστου σεπτεμβρίου οκτωβρίου νοεμβρίου δεκεμβρίου maret agustus يناير فبراير مارس أبريل مايو يونيو يوليو
    أغسطس سبتمبر أكتوبر نوفمبر ديسمبر जनवरी फरवरी मार्च अप्रैल मई जून जुलाई अगस्त सितंबर अक्टूबर नवंबर दिसंबर ינואר פברואר
    באוגוסט אוגוסט ספטמבר אוקטובר נובמבר דצמבר มกราคม กุมภาพันธ์ มีนาคม เมษายน พฤษภาคม มิถุนายน กรกฎาคม สิงหาคม กันยายน ตุลาคม
    พฤศจิกายน ธันวาคม"""
)
_DAY_NAME = _any(
    """monday tuesday wednesday thursday friday saturday sunday montag dienstag mittwoch donnerstag freitag samstag
    sonnabend sonntag lundi mardi mercredi jeudi vendredi samedi dimanche lunes martes miércoles jueves viernes sábado
    domingo segunda-feira terça-feira quarta-feira quinta-feira sexta-feira lunedì martedì mercoledì giovedì venerdì
    sabato domenica maandag dinsdag woensdag donderdag vrijdag zaterdag zondag poniedziałek wtorek środa czwartek piątek
    sobota niedziela pondělí úterý čtvrtek pátek neděle понедельник вторник четверг пятница суббота воскресенье
    понеділок вівторок четвер пʼятниця субота неділя måndag tisdag onsdag torsdag fredag lördag söndag mandag tirsdag
    lørdag søndag pazartesi çarşamba perşembe cumartesi maanantai tiistai keskiviikko torstai perjantai lauantai
    sunnuntai الاثنين الثلاثاء الأربعاء الخميس الجمعة السبت الأحد सोमवार मंगलवार बुधवार गुरुवार शुक्रवार शनिवार रविवार
    january february november december september october januar oktober dezember janvier février juillet octobre
    novembre décembre enero febrero septiembre octubre noviembre diciembre janeiro fevereiro setembro outubro novembro
    dezembro gennaio febbraio settembre ottobre dicembre января февраля апреля июня июля сентября октября ноября
    декабря"""
)
"""Days and months that mean nothing else, so that no number has to stand beside them."""

_UNIT = (
    r"\s?(?:[%€$£¥₩₽₹°]|[人名個件回円元块塊日天年个位次点분개명회원일건년]|"
    + _any(
        """day days week weeks month months year years hour hours minute minutes min second seconds sec ms euro euros eur
        usd dollar dollars cents pounds percent people persons times items tokens words characters lines pages users tage
        tagen stunden jahre jahren wochen minuten jours heures mois ans semaines días horas años meses dias anos giorni
        ore mesi anni dagen uur weken jaar dni godzin lat дней дня часов рублей лет kg km cm mm ml gb mb kb px"""
    )
    + r"(?!\w))"
)
"""A number of these is what the text is about."""

_END = r"(?![^\W\d_])"
_START = r"(?<![^\W\d_])"
_DAY = r"(?:3[01]|[12]\d|0?\d)"
_MON = r"(?:1[0-2]|0?[1-9])"
_YEAR = r"(?:1[349]|2[05])\d\d"
_CLOCK = r"(?:[01]?\d|2[0-4])[:.h-]?[0-5]\d(?:[:.-]?[0-5]\d(?:[.,]\d{1,9})?)?(?:z|\s?[+-]\d\d:?\d\d)?"
_HAN = r"(?:\d{1,2}|[〇零一二三四五六七八九十廿]{1,3})"
_OF = r"(?:(?:de|of|the|del|di|da|den)\s)?"

_DIGITS_FIRST = "|".join(
    (
        rf"(?<!\d){_YEAR}([-/._])\s?{_MON}\1\s?{_DAY}(?!\d)(?:[t_ ,-]{{1,2}}{_CLOCK})?",
        r"(?<!\d)20\d\d-(?:w\d\d|(?:0[1-9]|1[0-2]))(?!\d)",
        rf"(?<![\w./-]){_DAY}([./-])\s?{_DAY}\2\s?{_YEAR}(?!\d)",
        r"(?<![\w./-])(?:0[1-9]|[12]\d|3[01])([./-])(?:0[1-9]|[12]\d|3[01])\3\d\d(?![\d/-]|\.\d)",
        rf"(?<![\w./-]){_DAY}/{_DAY}/\d\d(?![\d/])",
        r"(?<!\w)20[0-4]\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:[t_-]?\d{4,6}z?)?(?!\w)",
        # 12 August 2026, 12. August, 12 de agosto de 2026. Who may 5 times needs a year beside it.
        rf"(?<!\d)\d{{1,2}}(?:st|nd|rd|th|er|\.|°)?[\s-]?{_OF}(?!(?:may|march)\s[^\d]){_MONTH}{_END}\.?"
        rf"(?:[\s,-]{{1,2}}{_OF}'?\d{{2,4}}(?!\d))?",
        rf"(?:(?:19|20)\d\d|\d\d(?=年\s?{_MON}月))\s?[年년](?:\s?{_MON}\s?[月월](?:\s?{_DAY}\s?[日號号일])?)?",
    )
)
_DATE = "|".join(
    (
        rf"(?=\d)(?:{_DIGITS_FIRST})",
        rf"{_START}{_MONTH}\.?\s?(?:\d{{1,2}}(?:st|nd|rd|th)?(?!\d|{_UNIT})(?:,?\s\d{{4}}(?!\d))?|{_OF}{_YEAR}(?!\d))",
        rf"{_START}{_DAY_NAME}{_END}",
        rf"{_START}(?:mon|tue|wed|thu|fri|sat|sun),?\s(?={_DAY}\s|{_MONTH}\s)",
        rf"(?<!\w)(?:am|vom|bis|den|der|dem|ab)\s{_DAY}\.\s?{_MON}\.(?!\d)",
        r"(?<!\w)ngay\s\d{1,2}(?:\sthang\s\d{1,2})?(?:\snam\s\d{4})?",
        r"(?:令和|平成|昭和|民國|民国)\s?(?:\d{1,3}|元)\s?年|[〇零一二三四五六七八九]{4}年",
        rf"(?<!\d){_HAN}\s?[月월](?:\s?(?:\d{{1,2}}|[一二三四五六七八九十廿]{{1,4}})\s?[日號号일])?",
        r"[月火水木金土日]曜日?|(?:星期|礼拜|禮拜|周|週)[一二三四五六日天](?![\d间間末回次度])|[월화수목금토일]요일",
        r"[(][月火水木金土日월화수목금토일][)]",
    )
)
_TIME = "|".join(
    (
        r"(?<![\d:.])(?:[01]?\d|2[0-4]):[0-5]\d(?::[0-5]\d(?:[.,]\d{1,9})?)?(?!\d)"
        r"(?:\s?(?:[ap]\.?m\b\.?|uhr|z|utc|gmt|cest?|[ecmp][sd]t)(?!\w))?(?:\s?[+-]\d\d:?\d\d(?!\d))?",
        r"(?<![\d.:,])(?:1[0-2]|0?[1-9])(?:[.:][0-5]\d)?\s?[ap]\.?m(?!\w)\.?",
        r"(?<![\d.:,])\d{1,2}\s?h\s?[0-5]\d(?!\d)|(?<![\d.:,])\d{1,2}(?:\.\d\d)?\s?uhr(?!\w)",
        r"(?<!\w)(?:kl|klo|ore|alle|godz|um|a las)\.?\s\d{1,2}[.:][0-5]\d(?!\d)",
        r"(?<!\w)(?:utc|gmt)\s?[+-]\d{1,2}(?::?\d\d)?",
        rf"(?:午前|午後|上午|下午|早上|晚上|凌晨|中午|오전|오후)\s?{_HAN}\s?[時时点點시:](?:\s?(?:{_HAN}|半)\s?分?|\s?\d{{1,2}}분)?",
        rf"(?<!\d){_HAN}\s?[時时시](?![間间간])(?:\s?{_HAN}\s?[分분])?(?:\s?{_HAN}\s?[秒초])?|(?<!\d){_HAN}[点點]{_HAN}分",
    )
)
# Seconds since 1970, or parts of them; a year of these days.
_STAMP = (
    r"(?<![\w.])1[5-9]\d{8}(?:\d{3}|\d{6}|\d{9})?(?:\.\d{1,9})?(?!\w)|"
    rf"(?<![\w.,$€£¥#])20[23]\d(?!\w|[.,]\d|{_UNIT})"
)

_UUID = r"(?<![0-9a-z])[0-9a-f]{8}-[0-9a-f]{4}(?:-[0-9a-f]{1,12}){0,3}(?![0-9a-z])"
_NUMBERED = _any(
    """id ids uid uuid guid ulid identifier identifiant identificador identificativo identificatore identyfikator
    идентификатор kennung no. nr nr. num. n° numero número numéro nummer number numer numara numarası číslo номер номером
    номера αριθμός ref ref. reference referenz référence session sesión sessão sitzung sessione sessie sesja oturum relace
    сессия сеанс συνεδρία user utilisateur usuario usuário utente benutzer nutzer gebruiker użytkownik kullanıcı användare
    bruker bruger utilizador uživatel käyttäjä пользователь користувач χρήστης matricule aktenzeichen nonce userid sessionid
    requestid orderid customerid accountid clientid conversationid threadid traceid messageid runid jobid
    رقم معرف المستخدم الجلسة आईडी उपयोगकर्ता सत्र क्रमांक รหัส ผู้ใช้ משתמש מספר מזהה mã"""
)
"""A number right behind one of these is one of its kind."""
_NAMED = _any(
    """request order ticket case invoice account customer client conversation thread trace transaction message chat
    run job employee member patient record reservation booking tracking commande requête facture compte dossier pedido
    solicitud cuenta factura cliente expediente solicitação conta ordine richiesta fattura conto kunde anfrage bestellung
    auftrag rechnung konto vorgang bestelling klant verzoek zamówienie klient zadanie sipariş müşteri objednávka заказ заказа
    заявка клиент запрос счёт замовлення đơn طلب cch"""
)
"""Behind these a number may be of something else, unless a sign stands between or it is long."""
_VALUE = rf"(?=[a-z_-]{{0,12}}\d)(?!\d+{_UNIT})[a-z0-9][a-z0-9_-]*"
_GLUE = r"(?:[^\w.,;!?]|_)"
_ID_OF = (
    r"(?:ユーザー?|利用者|会員|顧客|お客様|セッション|リクエスト|注文|受付|伝票|社員|患者|用户|用戶|会话|會話|请求|請求|订单|訂單|客户|客戶|"
    r"工单|账号|帳號|账户|사용자|세션|요청|주문|고객|회원|접수|계정|유저)"
)
_ID_SIGN = r"(?:id|番号|号码|號碼|编号|編號|单号|單號|번호|아이디)"
_LABELLED = "|".join(
    (
        rf"{_START}(?:{_NUMBERED}|[a-z]{{3,20}}(?:nummer|kennung))(?:\s(?:is|ist|est|es))?(?:{_GLUE}{{1,6}}|(?=\d)){_VALUE}",
        rf"{_START}{_NAMED}(?:\s?[#=_]{_GLUE}{{0,3}}|{_GLUE}{{1,4}}(?=[a-z-]{{0,6}}\d{{3}})){_VALUE}",
        r"#\d{2,}",
        rf"(?:{_ID_OF}\s?{_ID_SIGN}?|{_ID_SIGN})\s?(?:は|是|为|為|는|은)?{_GLUE}{{0,5}}{_VALUE}",
    )
)
_ID = "|".join(
    (
        r"(?<![0-9a-z])(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}(?![0-9a-z])|0x[0-9a-f]{4,}",
        r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)",
        r"(?<![\w.+-])[a-z0-9_.+-]{1,64}@[a-z0-9-]{1,64}\.[a-z0-9.-]{2,64}",
        r"(?<![a-z0-9])(?!(?:iso|rfc|utf|sha|aes|din|cve|ieee|ansi|covid|ascii|avx)-)[a-z]{2,10}-\d{3,}(?!\w)",
        r"(?<![a-z0-9])(?:req|msg|run|sess|usr|cus|ord|chatcmpl|call|toolu|thread|asst|conv|trace|tx|acct|inv|resp)[-_]"
        r"[a-z0-9]*\d[a-z0-9]*",
        # Letters and digits mixed as only a machine mixes them: base64, ULIDs, nano ids.
        r"(?<![a-z0-9])(?=[a-z0-9]{10})[a-z]*(?:\d+[a-z]+){2,}\d*(?![a-z0-9])",
        rf"(?<![\w.,$€£¥+-])(?!\d+000(?!\d))\d{{6,}}(?!\w|[.,]\d|{_UNIT})",
    )
)

_RELEASE = "|".join(
    (
        rf"{_START}(?:{_any('version versione versión versão versie wersja sürüm версия ver ver.')}|版本|バージョン|버전)"
        r"[\s:=\"'#]{0,3}v?\d[\w.+-]*",
        r"(?<![a-z])(?!sha-?\d)(?:build|release|rel|commit|rev|revision|sha|git)[\s:=#@\"'-]{1,3}"
        r"(?:\d+\.\d[\w.+-]*|\d{3,}(?!\w)|(?=[a-f]*\d)[0-9a-f]{7,40}(?!\w))",
    )
)
_VERSION = "|".join(
    (
        r"(?<![a-z0-9])v\d+(?:\.\d+)+(?:[-+.][a-z0-9]+)*",
        r"(?<![\w.-])[a-z][\w.+-]{0,40}[/=]v?\d+(?:\.\d+)+[\w.+-]*",
        r"(?<![\w.,-])(?!\d{1,3}(?:\.\d{3})+(?!\.?\d))\d+\.\d+\.\d+(?:[-+.][a-z0-9]+)*(?!\w)",
    )
)

_NAME = r"[^\s\"'<>|*?:;,`()\[\]{}/\\]+"
_PATH = "|".join(
    (
        r"(?<![a-z0-9])[a-z]:\\+(?:[^\\\"'<>|*?:;,`]{1,64}\\+)*[^\\\s\"'<>|*?:;,`]*",
        rf"(?<![a-z0-9])[a-z]:/{_NAME}(?:/{_NAME})*/?",
        rf"\\\\{_NAME}(?:\\{_NAME})+",
        rf"(?<![\w/.)\]~])(?:~|\.{{1,2}})?/{_NAME}(?:/{_NAME})+/?",
        rf"(?:{_any('cwd pwd directory dir path folder home workspace verzeichnis ordner répertoire dossier carpeta')}|"
        rf"{_any('directorio cartella diretório папка каталог')}|目录|路径|ディレクトリ|フォルダ|パス|경로|디렉터리)"
        rf"[\s:=\"'`*]{{0,5}}~?/{_NAME}(?:/{_NAME})*",
    )
)

_HEADING = r"(?<!\w)(?:section|chapter|kapitel|abschnitt|chapitre|capitulo|figure|table|art\.|article)\s\d+(?:\.\d+)*|§\s?\d+"
_COUNTED = (
    rf"{_START}(?:"
    + _any(
        """step turn iteration attempt round schritt runde versuch durchgang étape tentative paso turno intento passo
        tentativa stap beurt poging krok шаг попытка ход remaining used left"""
    )
    + r"|ステップ|ターン|步骤|步驟|단계|턴)[\s:=#\"]{0,3}\d+(?:\s?(?:of|/|von|de|di|sur|van|z|из)\s?\d+)?|第\s?\d+\s?[步轮輪回]"
)
_NUMBER = r"(?<![a-z])[+-]?\d+(?:[.,:' ]\d+)*"

_HINT = re.compile(rf"[\d/\\@一二三四五六七八九十日月曜요]|{_DAY_NAME}")
"""A line without any of it has none of the forms below."""
_FORMS: tuple[tuple[Change | None, re.Pattern[str]], ...] = (
    ("identifier", re.compile(_UUID)),
    ("version", re.compile(_RELEASE)),
    ("date or time", re.compile(_DATE)),
    ("date or time", re.compile(_TIME)),
    ("number", re.compile(_COUNTED)),
    (None, re.compile(_HEADING)),
    ("identifier", re.compile(_LABELLED)),
    ("date or time", re.compile(_STAMP)),
    ("identifier", re.compile(_ID)),
    ("version", re.compile(_VERSION)),
    ("path", re.compile(_PATH)),
    ("number", re.compile(_NUMBER)),
)
"""In the order in which they are asked: the first that stands there is what it is."""
