"""Secrets out of everything that is written: environment values, flags, overrides, URLs with credentials.

    clean = Redactor.from_command(argv, env)
    clean.text("HF_TOKEN=hf_abc...")  ->  "HF_TOKEN=[redacted]"

A name that looks secret hides its value wherever that value shows up later, also as JSON, shells, URLs and HTML spell
it; values that look secret by themselves (access tokens, keys, `user:password@host`) are hidden without a name.
"""

from __future__ import annotations

import itertools
import os
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from autotune.utils.secret_names import secret_name, strong_name

HIDDEN = "[redacted]"
SHORTEST = 4
"""Values shorter than this are not replaced everywhere (they would hit ordinary text)."""
NUMBER_LENGTH = 8
"""Numbers with fewer digits are counts and ports more often than secrets: they are hidden only where they are given.
So are shorter parts of a list in one value, unless they mix letters and digits."""
PASSWORD_DIGITS = 6
"""From so many digits on the number of a password is hidden everywhere, where no digit stands beside it."""
FLAG = re.compile(r"--[a-z]+(?:[-_.][a-z]+)*(?:[ =].*)?", re.S)
"""A flag's name under a secret-looking key is where the secret goes, not the secret."""
BEGINNING = 8
"""So many characters of a known value are taken for it where a text was cut off."""
CUT = ("'", '"', "`", "...")
ROUNDS = 4
GROUP_LENGTH = 8192
MOST_BRACKETS = 64

PREFIXES = ("hf_", "sk-", "sk_live_", "rk_live_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-",
            "xox", "xapp-", "AKIA", "ASIA", "AIza", "ya29.", "npm_", "pypi-", "dckr_pat_", "nvapi-",
            "gsk_", "r8_")
"""One of these begins every token of TOKENS: looking for them first keeps long logs cheap."""
TOKENS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|[sr]k_live_[A-Za-z0-9]{16,}|gh[pousr]_"
    r"[A-Za-z0-9]{20,}"
    r"|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}|xox[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{10,}"
    r"|xapp-[A-Za-z0-9-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[A-Za-z0-9_-]{20,}|ya29\.[A-Za-z0-9_.-]{10,}|npm_[A-Za-z0-9]{20,}"
    r"|pypi-[A-Za-z0-9_-]{16,}|dckr_pat_[A-Za-z0-9_-]{16,}|nvapi-[A-Za-z0-9_-]{16,}|gsk_[A-Za-z0-9]{20,}"
    r"|r8_[A-Za-z0-9]{20,})")
WEB_TOKEN = re.compile(r"\.(?=(?P<rest>eyJ[A-Za-z0-9_-]{10,}+\.[A-Za-z0-9_-]+))")
"""A JSON web token from its second part on. Its first part is looked for backwards from there: forwards, each of its
beginnings in one long word would be followed to the word's end."""
WEB_TOKEN_HEAD = re.compile(r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{10}")
WEB_TOKEN_LETTERS = string.ascii_letters + string.digits + "_-"
BEARER = re.compile(r"(?<=[Bb]earer )[A-Za-z0-9._~+/-]{8,}=*")
KEY_BLOCK = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)")
SIGNED = re.compile(r"[?&](?:sig|(?:X-Amz-|X-Goog-)?Signature|X-Amz-Security-Token)="
                    r"(?P<value>[A-Za-z0-9%+/=_-]{8,})", re.I)
URL = re.compile(r"://(?P<userinfo>(?P<user>[^\s/@:?#\"'<>`\[]{0,256}+)"
                 r"(?::(?P<password>(?:(?!://)[^\s\"'<>`]){1,1024}))?)@")
PORT = re.compile(r"\d{1,5}[/?#]")
HOST = re.compile(r"(?:localhost|.*[.].*)?", re.S)

_QUOTE = r"(?:\\{0,16}[\"'`]|&(?:quot|apos|#39|#34|#x27);|%2[27])"
NAMED = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]{2,}+)(?:\x1b\[[0-9;]{0,12}m)?"
    rf"(?:{_QUOTE}?[ \t]*(?:[=:]{{1,2}}>?|%3[AaDd])[ \t]*b?|(?P<pair>{_QUOTE}[ \t]*,[ \t]*b?(?={_QUOTE})))", re.ASCII)
FLAGGED = re.compile(rf"(?<![\w-])(?P<name>--[A-Za-z][\w.-]*+)(?:{_QUOTE}?(?:[ \t]*,\s*|[ \t]+)(?!\\{{0,16}}[\"']?-))",
                     re.ASCII)
PAIRED = re.compile(rf"\(b?{_QUOTE}\Z")
VALUE = re.compile(
    rf"(?P<quote>{_QUOTE})(?:(?P<quoted>(?>\\\\\\[\"']|(?!(?P=quote))(?:\\.|[^\n\\])){{1,4096}}+)(?P=quote)"
    rf"|(?P<nearer>(?:(?!(?P=quote))(?:\\.|[^\n\\])){{1,4096}}+)(?P=quote))"
    rf"|{_QUOTE}?(?P<bare>(?:(?:basic|bearer|digest|token|apikey|negotiate)[ \t]+)?[^\s\"'`,;&]+)", re.I)
WHOLE_LINE = re.compile(r"authorization|cookie|passphrase", re.I)
ONE_WORD = re.compile(r"(?:basic|bearer|token|negotiate)[ \t]|[ \t]*[\"'`&]", re.I)
LINE = re.compile(r"[^\n]+")
QUOTED_LINE = re.compile(r"[^\n\"'`]+")
QUOTES = ("'", '"', "`")
ITEM = re.compile(r"[^\s\[\](){}\"',]+")
BRACKET = re.compile(r"[\[\](){}]")
WORDS = {"none", "true", "false", "null"}
PLAIN = re.compile(r"[-+]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:e[-+]?\d+)?%?|\$\{[A-Z_][A-Z0-9_]*\}", re.I)
PLAIN_GROUP = re.compile(r"(?:[\s\[\](){},:'\"+.\d-]|\b(?:None|True|False|null|true|false)\b)*")
MIXED = re.compile(rf"(?=\S*\d)(?=\S*[A-Za-z])\S{{{SHORTEST},}}\Z")
Span = tuple[int, int]
Item = TypeVar("Item")


def plain(value: str) -> bool:
    """Whether a value is nobody's secret, whatever its name: empty, None, a truth value, a number, a ${REFERENCE}."""
    return not value or value.lower() in WORDS or PLAIN.fullmatch(value) is not None


def _secret_value(value: str, hide: int) -> bool:
    """Whether what has a secret-looking name is a secret: no flag, and no number unless it is a password's."""
    number = hide > 1 and value.isdecimal() and len(value) >= SHORTEST
    return not FLAG.fullmatch(value) and (number or not plain(value))


class Redactor:
    """Replaces known secret values, and whatever looks like one."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        pieces = {part for value in values for part in value.split(HIDDEN) if part == value or len(part) >= BEGINNING}
        known = {value for value in pieces if len(value) >= SHORTEST and value.lower() not in WORDS}
        self.values = tuple(sorted(known, key=lambda v: (-len(v), v)))
        forms = {form for value in self.values for form in spellings(value)}
        self._forms = tuple(sorted(forms, key=lambda v: (-len(v), v)))
        self.longest = max((len(form.encode(errors="replace")) for form in forms), default=0)
        """Bytes of the longest known value, however it is spelled."""
        self._known = re.compile("|".join(map(_anywhere, self._forms))) if forms else None

    @classmethod
    def from_command(cls, argv: Sequence[str], *environments: Mapping[str, object]) -> Redactor:
        """Collect the values of secret-looking flags, overrides and variables, and of what looks secret in any."""
        given = (value for variables in environments for name, value in variables.items()
                 if isinstance(value, str) and secret_name(str(name)) and value.startswith("--"))
        return cls([*given, *(value for source in (list(argv), *environments) for value in secrets(source))])

    def text(self, text: str) -> str:
        """`text` without secrets."""
        for _ in range(ROUNDS):  # what was hidden may make what is left look like a secret
            before = text
            if self._known is not None and any(form in text for form in self._forms):
                text = HIDDEN.join(self._known.sub(HIDDEN, part) for part in text.split(HIDDEN))
            text = self._without_beginnings(text)
            text = _without(text, _shaped(text))
            text = _without(text, _flagged(text))
            text = _without(text, _named(text))
            if text == before:
                break
        return text

    def _without_beginnings(self, text: str) -> str:
        """Without what is left of known values where somebody cut a text off: at its end, or before a quote."""
        for form in self._forms:
            if len(form) > BEGINNING and form[:BEGINNING] in text:
                text = _without(text, _begun(text, form))
        return text

    def data(self, value: object, hide: int = 0) -> object:
        """The same for nested lists and mappings; what is under a secret-looking key or flag is hidden (`hide`: its
        `strength`)."""
        if isinstance(value, str):
            return HIDDEN if hide and _secret_value(value, hide) else self.text(value)
        if isinstance(value, Mapping):
            return {self.text(k) if isinstance(k, str) else k: self.data(v, max(hide, strength(k)))
                    for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.data(item, max(hide, after)) for item, after in after_flags(value)]
        if isinstance(value, int) and not isinstance(value, bool) and hide:
            return HIDDEN if _secret_value(str(value), hide) or str(value) in self.values else value
        return value

    def mapping(self, value: Mapping[str, object]) -> dict[str, object]:
        """`data` for a mapping."""
        return {self.text(k): self.data(v, strength(k)) for k, v in value.items()}

    def argv(self, argv: Sequence[str]) -> list[str]:
        """An argument vector with secret values hidden."""
        shown: list[str] = []
        for arg, hide in after_flags(argv):
            name, value = _assigned(arg)
            if hide and arg.lower() not in WORDS:
                shown.append(HIDDEN)
            elif value and secret_name(name) and value.lower() not in WORDS:
                shown.append(f"{name}={HIDDEN}")
            else:
                shown.append(self.text(arg))
        return shown


def strength(name: object) -> int:
    """What a name says of its value: 0 nothing, 1 a secret, 2 a password, which may be a number."""
    return 0 if not isinstance(name, str) or not secret_name(name) else 1 + strong_name(name)


def secrets(value: object, hide: int = 0) -> Iterator[str]:
    """The secrets in nested lists, mappings and texts that are to be known: what `Redactor.data` and `Redactor.argv`
    would hide, without short numbers. `hide`: the `strength` of the name that the value has."""
    return (found for found, strong in _found(value, hide) if not FLAG.fullmatch(found) and (
        not plain(found) or len(found) >= (PASSWORD_DIGITS if strong and found.isdecimal() else NUMBER_LENGTH)))


def _found(value: object, hide: int) -> Iterator[tuple[str, bool]]:
    """(what may be a secret, whether it is a password's)."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _found(inner, max(hide, strength(key)))
    elif isinstance(value, list | tuple):
        for item, after in after_flags(value):
            name, assigned = _assigned(item) if isinstance(item, str) else ("", "")
            if assigned and secret_name(name):
                yield from _found(assigned, strength(name))
            yield from _found(item, max(hide, after))
    elif isinstance(value, int) and not isinstance(value, bool) and hide:
        yield str(value), hide > 1
    elif isinstance(value, str):
        if hide:
            yield value, hide > 1
            yield from ((part, False) for part in re.split(r"[,;\s]+", value) if len(part) < len(value) and (
                len(part) >= NUMBER_LENGTH or MIXED.match(part)))
        spans = [*_shaped(value), *_flagged(value), *_named(value)] if len(value) < GROUP_LENGTH else _shaped(value)
        for start, end in spans:
            found = value[start:end]
            yield from ((one, False) for one in (ITEM.findall(found) if found[:1] in "[({" else [found]))
            if ":" in found and value[max(0, start - 3):start] == "://":
                yield from ((one, False) for one in _password(found.partition(":")[2]))


def _anywhere(form: str) -> str:
    """A pattern for a known value; a short number is none within a longer one."""
    short = form.isdecimal() and len(form) < NUMBER_LENGTH
    return rf"(?<!\d)(?<!\d\.){form}(?!\d)" if short else re.escape(form)


def spellings(value: str) -> set[str]:
    """A text as it stands, and within JSON, Python, shells, URLs, HTML and two of them in one another."""
    if value.isascii() and value.replace("_", "").replace("-", "").isalnum():
        return {value}
    import html
    import json
    import urllib.parse

    def once(text: str) -> set[str]:
        percent = {urllib.parse.quote(text, safe=safe, errors="replace") for safe in ("", "/")}
        percent.add(urllib.parse.quote_plus(text, errors="replace"))
        escaped = {html.escape(text), html.escape(text, quote=False), html.escape(text).replace("&#x27;", "&#39;")}
        return {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1], *escaped,
                text.replace("'", "'\"'\"'"), text.replace("'", "\\'"), *percent,
                *(re.sub("%..", lambda m: m[0].lower(), one) for one in percent)}

    first = once(value)
    return {value, *first, *(twice for text in first for twice in once(text))}


def _password(text: str) -> list[str]:
    import urllib.parse

    return [text, urllib.parse.unquote(text)]


def after_flags(items: Sequence[Item]) -> Iterator[tuple[Item, bool]]:
    """(item, whether it is a value of the secret-looking flag before it).

    A flag may take several; after the first one a path or a placeholder is taken for something else.
    """
    hide = first = False
    for item in items:
        word = item if isinstance(item, str) else ""
        hide = hide and (first or bool(word) and "/" not in word and "{" not in word)
        yield item, hide and not word.startswith("--")
        first = word.startswith("-")
        if first:
            hide = "=" not in word and secret_name(word)


def _assigned(word: str) -> tuple[str, str]:
    """(name, value) of a whole word like name=value, --name=value or +a.b=value; else two empty texts."""
    name, _, value = word.partition("=")
    return (name, value) if value and re.fullmatch(r"[+~-]*[\w.@/-]+", name) else ("", "")


def _without(text: str, spans: Iterator[Span]) -> str:
    """`text` with spans, which come in order, hidden."""
    kept, at = [], 0
    for start, end in spans:
        kept += [text[at:start], HIDDEN]
        at = end
    return "".join([*kept, text[at:]]) if kept else text


def _begun(text: str, form: str) -> Iterator[Span]:
    """Where a known value begins and is cut off."""
    at = text.find(form[:BEGINNING])
    while at >= 0:
        end = at + len(os.path.commonprefix([form, text[at:at + len(form)]]))
        if end == len(text) or text.startswith(CUT, end):
            yield at, end
        at = text.find(form[:BEGINNING], end)


def _shaped(text: str) -> Iterator[Span]:
    """Where values stand that look secret by themselves."""
    spans = []
    if "-----BEGIN " in text:
        spans += [m.span() for m in KEY_BLOCK.finditer(text)]
    if any(prefix in text for prefix in PREFIXES):
        spans += [m.span() for m in TOKENS.finditer(text)]
    if ".eyJ" in text:
        spans += _web_tokens(text)
    if "earer " in text:
        spans += [m.span() for m in BEARER.finditer(text)]
    if "sig=" in text or "ignature=" in text or "-Token=" in text:
        spans += [m.span("value") for m in SIGNED.finditer(text)]
    if "://" in text:
        spans += [m.span("userinfo") for m in URL.finditer(text) if _opens(text, m)]
    at = 0
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        if start >= at:
            yield start, end
        at = max(at, end)


def _web_tokens(text: str) -> Iterator[Span]:
    """Where JSON web tokens stand."""
    for found in WEB_TOKEN.finditer(text):
        before = text[text.rfind(".", 0, found.start()) + 1:found.start()]
        word = before[len(before.rstrip(WEB_TOKEN_LETTERS)):]
        if head := WEB_TOKEN_HEAD.search(word):
            yield found.start() - len(word) + head.start(), found.end("rest")


def _opens(text: str, found: re.Match[str]) -> bool:
    """Whether what stands before the @ of a URL is no mere user, and no host with a port and an @ in its path."""
    user, password = found["user"], found["password"]
    web = text[max(0, found.start() - 5):found.start()].lower().endswith(("http", "https"))
    if password is None:
        return user != "git" and (web or len(user) >= 20)
    return password != HIDDEN and not (web and PORT.match(password) and HOST.fullmatch(user))


def _named(text: str) -> Iterator[Span]:
    """Where values of secret-looking names stand: NAME=value, "name": "value", name: [a, b], ("name", "value")."""
    at = 0
    for found in NAMED.finditer(text) if "=" in text or ":" in text or "%3" in text or "(" in text else ():
        name = found["name"]
        if found.start() < at or name == "key" or not secret_name(name):
            continue
        before = text[max(0, found.start() - 1):found.start()]
        if before == "/" and found[0].endswith(":") and text.startswith("/", found.end()):
            continue  # a mount such as /etc/passwd:/etc/passwd
        if found["pair"] and not PAIRED.search(text, max(0, found.start() - 24), found.start()):
            continue
        span = None
        if not found["pair"] and ":" in found[0] and WHOLE_LINE.search(name):
            quoted = text[max(0, found.start() - 1):found.start()] in QUOTES
            line = None if ONE_WORD.match(text, found.end()) else (QUOTED_LINE if quoted else LINE).match(
                text, found.end())
            span = _trimmed(text, *line.span()) if line and line[0].strip() else None
        span = span or _value(text, found.end(), "=" in found[0], strong_name(name))
        if span is not None:
            yield span
            at = span[1]


def _flagged(text: str) -> Iterator[Span]:
    """Where values of secret-looking flags stand: --api-key value, ['--api-key', 'value']."""
    at = 0
    for found in FLAGGED.finditer(text) if "--" in text else ():
        if found.start() >= at and secret_name(found["name"]):
            span = _value(text, found.end(), "," in found[0], strong_name(found["name"]))
            if span is not None:
                yield span
                at = span[1]


def _value(text: str, start: int, short: bool, numbers: bool) -> Span | None:
    """The value at `start`; None for what is no secret. `short`: a bare one may be; `numbers`: it may be a number."""
    if text[start:start + 1] in ("[", "{", "(") and not text.startswith(HIDDEN, start):
        end = _closing(text, start)
        if end:
            return None if PLAIN_GROUP.fullmatch(text, start, end) else (start, end)
    found = VALUE.match(text, start)
    if found is None:
        return None
    group = next((name for name in ("quoted", "nearer") if found[name] is not None), "bare")
    quoted = group != "bare"
    span = found.span(group) if quoted else _trimmed(text, *found.span("bare"))
    value = text[slice(*span)]
    if value == HIDDEN or plain(value if quoted else found["bare"]):
        number = numbers and value.isdecimal() and len(value) >= SHORTEST
        return span if number else None
    return span if quoted or len(value) >= (1 if short else SHORTEST) and not plain(value) else None


def _trimmed(text: str, start: int, end: int) -> Span:
    """Without blanks around it, and without the brackets that close what began before it."""
    while start < end and text[start].isspace():
        start += 1
    while start < end and not text.endswith(HIDDEN, start, end) and (
            text[end - 1].isspace() or text[end - 1] in ")]}>,;"):
        end -= 1
    return start, end


def _closing(text: str, start: int) -> int:
    """Where the bracket at `start` is closed; 0 when it is not, or far away."""
    depth = 0
    for found in itertools.islice(BRACKET.finditer(text, start, start + GROUP_LENGTH), MOST_BRACKETS):
        depth += 1 if found[0] in "[({" else -1
        if depth == 0:
            return found.end()
    return 0
