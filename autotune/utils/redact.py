"""Secrets out of everything that is written: values of secret-looking names, access tokens, credentials in URLs.

    clean = Redactor.from_command(argv, env)
    clean.text("HF_TOKEN=hf_abc...")  ->  "HF_TOKEN=[redacted]"

A value that the user gives to a secret-looking variable, flag, key or override is hidden wherever it occurs, in the
spellings that logs and reports use. Access tokens, keys and `user:password@host` are hidden without a name. Only the
standard library is imported: the supervisor of a server must start fast.
"""

from __future__ import annotations

import functools
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

HIDDEN = "[redacted]"
SHORTEST = 4  # shorter values are hidden only beside their name: anywhere else they would hit ordinary text
NUMBER_LENGTH = 8  # so are numbers with fewer digits, and parts of a list that do not mix letters and digits
ROUNDS = 4  # hiding one value may make its surroundings look like another
NAME_CHARS = 200  # the end of a name that is looked at and remembered: names in logs have any length
WORDS = {"none", "true", "false", "null"}
Span = tuple[int, int]
Item = TypeVar("Item")

TOKENS = [re.compile(pattern) for pattern in (
    r"(?<![A-Za-z0-9])(?:(?:hf_|gh[pousr]_|[sr]k_live_|npm_|gsk_|r8_)[A-Za-z0-9]{16,}|(?:xox[a-z](?:\.xox[a-z])?-|xapp-"
    r"|ya29\.)[\w.-]{10,}|(?:sk-|glpat-|nvapi-|pypi-|AIza|github_pat_|dckr_pat_)[\w-]{16,}|A[KS]IA[0-9A-Z]{16})",
    r"(?<![A-Za-z0-9])eyJ[\w-]{7,400}+\.eyJ[\w-]{10,}+\.[\w-]+",  # JSON web tokens
    r"(?<=[Bb]earer )[\w.~+/-]{8,}=*",
    r"(?i:(?<=[?&]sig=)|(?<=[?&]signature=)|(?<=-signature=)|(?<=-security-token=))[\w%+/=-]{8,}",
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)")]
URL = re.compile(r"://(?P<userinfo>(?P<user>[^\s/@:?#\"'<>`\[]{0,256}+)"
                 r"(?::(?P<password>(?:(?!://)[^\s\"'<>`]){1,1024}))?)@")
PORT_OF_HOST = re.compile(r"(?:localhost|[^:]*[.][^:]*|):\d{1,5}[/?#]")

# NAME=value, "name": "value", --flag value, ['--flag', 'value']; a quote may be escaped once or percent-encoded.
QUOTE = r"(?:\\?[\"'`]|&(?:quot|#34|#39|#x27);|%2[27])"
NAMED = re.compile(rf"(?<![\w.-])(?P<name>[\w.-]{{2,}}+)(?:\x1b\[[\d;]{{0,12}}m)?{QUOTE}?[ \t]*"
                   r"(?:[=:]{1,2}>?|%3[AaDd])[ \t]*b?", re.ASCII)
FLAGGED = re.compile(rf"(?<![\w-])(?P<name>--[A-Za-z][\w.-]*+){QUOTE}?(?:[ \t]*,[ \t]*|[ \t]+)(?!{QUOTE}?-)", re.ASCII)
VALUE = re.compile(rf"(?P<quote>{QUOTE})(?P<quoted>(?:(?!(?P=quote))(?:\\.|[^\n\\])){{1,1024}}+)(?P=quote)|{QUOTE}?"
                   r"(?P<bare>(?:(?:basic|bearer|digest|token)[ \t]+)?[^\s\"'`,;&]+)", re.I)
PLAIN = re.compile(r"[-+]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:e[-+]?\d+)?%?|\$\{[A-Z_][A-Z0-9_]*\}", re.I)
FLAG = re.compile(r"--[a-z]+(?:[-_.][a-z]+)*(?:[ =].*)?", re.S)
ASSIGNED = re.compile(r"(?P<name>[+~-]*[\w.@/-]+)=(?P<value>.+)", re.S)
MIXED = re.compile(rf"(?=\S*\d)(?=\S*[A-Za-z])\S{{{SHORTEST},}}")

# Secret names, as _lower_case_words_ between underscores: _hf_token_ is one, _max_total_tokens_ is not. After `token`
# come ABOUT and COUNT, before it SPECIAL; before `key` comes ENTRY. OWNER comes before keys and tokens.
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
PASSWORD = re.compile(r"(?:passwords?|passwd|passphrases?|passcodes?|secrets?)_|[a-z]_pwd_$")  # may be a number
ABOUT = "type|mode|method|enabled|ur[li]|provider|backend|sock|host|port|policy|file|path|dir|name|required|scheme"
COUNT = ("per|map|budget|capacity|limits?|usage|workers?|ids?|index|idx|counts?|counter|len|length|embeddings?|num"
         "|size|pool|ratio|rate|throughput|latency|dispatch|dispatcher|level|wise|time|bucket|merge|penalty|pos"
         "|position|logprobs?|probs?|healing|offset|step|group|timeout")
SPECIAL = ("max|min|num|total|per|pad|padding|mask|eos|bos|sep|unk|cls|special|stop|image|audio|video|think|begin|end"
           "|start|placeholder|prompt|draft|prefill|decode|cached|generated|output|input|first|next|last|skip|kv|each"
           "|single|bonus|accepted|running")
ENTRY = ("missing|unexpected|weight|state|dict|param|parameter|layer|cache|config|sort|primary|public|foreign|prefix"
         "|hash|block|tensor|module|lookup|partition|group")
OWNER = ("api|access|private|secret|session|signing|encryption|master|auth|ssh|hmac|account|admin|service|client"
         "|storage|shared|refresh|bearer|hf|gh|hub|huggingface|github|gitlab|git|slack|bot|oauth|deploy|registry|npm"
         "|pypi|login|csrf|xsrf|vault|user|license|subscription|security|jwt|id")
PASS_OWNER = ("db|database|usr|smtp|ftp|mail|email|imap|my|mysql|pg|postgres|postgresql|redis|mongo|mongodb|root"
              "|basic|proxy|ldap|https?|key|ssl|sudo|docker|kafka|rabbitmq|app|wifi|keystore|truststore|store|sql"
              "|server|grafana")
SECRET = re.compile(
    "_(?:credentials?|creds?|jwts?|authorization|p(?:s|ass)w(?:o?r)?d|webhooks?|otps?|(?!old)[a-z]+pwd|[a-z]+apikeys?)_"
    rf"|_(?:{OWNER})_?(?:keys?|tokens)_|_(?:{OWNER})tokens?_|_token_(?!(?:{ABOUT}|{COUNT})_)"
    rf"|_(?:auth|bearer|cookies?|dsn)_(?!(?:{ABOUT})_)|_key_$|_pat_$|^_pass_$|_(?:{OWNER}|{PASS_OWNER})_pass_$")
OTHER = re.compile(rf"_(?:{SPECIAL})_token_|_(?:{ENTRY})_key_$")


def secret_name(name: str) -> bool:
    """True for the name of a variable, flag or key that holds a secret (HF_TOKEN; not --max-total-tokens)."""
    return bool(_strength(name[-NAME_CHARS:]))


@functools.lru_cache(maxsize=8192)
def _strength(name: str) -> int:
    """0: not secret; 1: secret, unless the value is a number; 2: secret, also when the value is a number."""
    words = "_".join(["", *(word.lower() for word in WORD.findall(name)), ""])
    if PASSWORD.search(words):
        return 2
    lists = name.isupper() and words.endswith("_tokens_") and not re.search(rf"_(?:{SPECIAL})_", words)
    return int(lists or SECRET.search(OTHER.sub("_", words)) is not None)


class Redactor:
    """Replaces known secret values, in all their spellings, and unknown ones that look like secrets."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        known = {part for value in values for part in value.split(HIDDEN)
                 if len(part) >= SHORTEST and part.lower() not in WORDS}
        self.values = tuple(sorted(known, key=lambda v: (-len(v), v)))
        forms = {form for value in self.values for form in spellings(value)}
        self._forms = tuple(sorted(forms, key=lambda v: (-len(v), v)))
        self.longest = max((len(form.encode(errors="replace")) for form in forms), default=0)  # in bytes
        self._known = re.compile("|".join(map(re.escape, self._forms)))

    @classmethod
    def from_command(cls, argv: Sequence[str], *environments: Mapping[str, object]) -> Redactor:
        """Know the secrets in flags, overrides and variables; values may be nested lists and mappings."""
        return cls(value for source in (list(argv), *environments) for value in secrets(source))

    def text(self, text: str) -> str:
        """`text` without secrets."""
        for _ in range(ROUNDS):
            before = text
            if any(form in text for form in self._forms):
                text = HIDDEN.join(self._known.sub(HIDDEN, part) for part in text.split(HIDDEN))
            for pattern in TOKENS:
                text = pattern.sub(HIDDEN, text)
            kept, at = [], 0
            for start, end in sorted((*_in_urls(text), *_named(text)), key=lambda span: (span[0], -span[1])):
                if start >= at:
                    kept += [text[at:start], HIDDEN]
                at = max(at, end)
            text = "".join([*kept, text[at:]])
            if text == before:
                break
        return text

    def data(self, value: Any, strength: int = 0) -> Any:
        """The same for nested lists and mappings; everything under a secret-looking key or flag is hidden."""
        if isinstance(value, str):
            return HIDDEN if strength and _secret_value(value, strength) else self.text(value)
        if isinstance(value, Mapping):
            return {self.text(k) if isinstance(k, str) else k: self.data(v, max(strength, _strength(str(k))))
                    for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.data(item, max(strength, after)) for item, after in after_flags(value)]
        if isinstance(value, int) and not isinstance(value, bool) and (
                str(value) in self.values or strength and _secret_value(str(value), strength)):
            return HIDDEN
        return value

    def mapping(self, value: Mapping[str, object]) -> dict[str, Any]:
        """`data` for a mapping."""
        return dict(self.data(value))

    def argv(self, argv: Sequence[str]) -> list[str]:
        """An argument vector with secret values hidden."""
        shown: list[str] = []
        for arg, after_secret in after_flags(argv):
            given = ASSIGNED.fullmatch(arg)
            if after_secret and arg.lower() not in WORDS:
                shown.append(HIDDEN)
            elif given and secret_name(given["name"]) and given["value"].lower() not in WORDS:
                shown.append(f"{given['name']}={HIDDEN}")
            else:
                shown.append(self.text(arg))
        return shown


def secrets(value: object, strength: int = 0) -> Iterator[str]:
    """The secrets in nested lists, mappings and texts; not short numbers, which are hidden only beside their name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from secrets(inner, max(strength, _strength(str(key))))
    elif isinstance(value, list | tuple):
        for item, after in after_flags(value):
            given = ASSIGNED.fullmatch(item) if isinstance(item, str) else None
            yield from secrets(given["value"], _strength(given["name"])) if given else ()
            yield from secrets(item, max(strength, after))
    elif isinstance(value, str) or isinstance(value, int) and not isinstance(value, bool) and strength:
        text = str(value)
        found = [text] if strength else []
        found += [text[slice(*span)] for span in _named(text)] if len(text) < 8192 else ()
        found += [part for one in found for part in re.split(r"[\s,;\[\](){}\"']+", one)
                  if len(part) >= NUMBER_LENGTH or MIXED.fullmatch(part)]
        for span in _in_urls(text):
            password = text[slice(*span)].partition(":")[2]
            found += [text[slice(*span)], password, urllib.parse.unquote(password)]
        yield from (one for one in found if not FLAG.fullmatch(one) and (
            len(one) >= NUMBER_LENGTH or not _is_plain(one)))


def spellings(value: str) -> set[str]:
    """A text as it stands, and within JSON, Python, a shell, a URL or HTML."""
    if value.isascii() and value.replace("_", "").replace("-", "").isalnum():
        return {value}
    import html
    import json

    quoted = {urllib.parse.quote(value, safe=safe, errors="replace") for safe in ("", "/")}
    quoted.add(urllib.parse.quote_plus(value, errors="replace"))
    decimal = html.escape(value).replace("&#x27;", "&#39;")
    return {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1],
            value.replace("'", "'\"'\"'"), *quoted, *(re.sub("%..", lambda m: m[0].lower(), one) for one in quoted),
            html.escape(value), html.escape(value, quote=False), decimal, decimal.replace("&quot;", "&#34;")}


def after_flags(items: Sequence[Item]) -> Iterator[tuple[Item, bool]]:
    """(item, True if it is a value of the secret-looking flag before it).

    A flag may take several values; after the first one, a path or a placeholder is no secret.
    """
    hide = first = False
    for item in items:
        word = item if isinstance(item, str) else ""
        hide = hide and (first or bool(word) and "/" not in word and "{" not in word)
        yield item, hide and not word.startswith("--")
        first = word.startswith("-")
        if first:
            hide = "=" not in word and secret_name(word)


def _is_plain(value: str) -> bool:
    """True for no secret, whatever its name: empty, None, a truth value, a number, a ${REFERENCE}."""
    return not value or value.lower() in WORDS or PLAIN.fullmatch(value) is not None


def _secret_value(value: str, strength: int) -> bool:
    number = strength > 1 and value.isdecimal() and len(value) >= SHORTEST
    return not FLAG.fullmatch(value) and (number or not _is_plain(value))


def _in_urls(text: str) -> Iterator[Span]:
    """Credentials in URLs; a mere user name stays, except in web addresses, where it may be a token."""
    for found in URL.finditer(text) if "://" in text else ():
        web = text[max(0, found.start() - 5):found.start()].lower().endswith(("http", "https"))
        if found["password"] is None:
            secret = found["user"] != "git" and (web or len(found["user"]) >= 20)
        else:
            secret = found["password"] != HIDDEN and not (web and PORT_OF_HOST.match(found["userinfo"]))
        if secret and found["userinfo"] != HIDDEN:
            yield found.span("userinfo")


def _named(text: str) -> Iterator[Span]:
    """Values of secret-looking names and flags."""
    for pattern, markers in ((NAMED, ("=", ":", "%3")), (FLAGGED, ("--",))):
        at = 0
        for found in pattern.finditer(text) if any(marker in text for marker in markers) else ():
            strength = _strength(found["name"][-NAME_CHARS:]) if found.start() >= at and found["name"] != "key" else 0
            path = text.endswith("/", 0, found.start())  # of a mount: /etc/passwd:/etc/passwd
            mount = path and found[0].endswith(":") and text.startswith("/", found.end())
            if not strength or mount or not (value := VALUE.match(text, found.end())):
                continue
            kind = "bare" if value["quoted"] is None else "quoted"
            start, end = value.span(kind)
            whole = text[start:end]
            while kind == "bare" and end > start and text[end - 1] in ")]}>" and not text.endswith(HIDDEN, start, end):
                end -= 1
            short = kind == "bare" and not found[0].rstrip(" \t").endswith("=") and end - start < SHORTEST
            if not short and all(_secret_value(one, strength) for one in (whole, text[start:end])):
                yield start, end
            at = end
