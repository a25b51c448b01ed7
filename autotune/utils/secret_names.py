"""Names that hold secrets: HF_TOKEN, --api-key, clientSecret, PGPASSWORD; and not --max-total-tokens or bos_token_id.

A name is taken apart into words (at punctuation, digits and capitals); a word decides by itself or by its neighbours.
"""

from __future__ import annotations

import functools
import re

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

LOOKED_AT = 200
"""So many of a name's last characters are looked at, and remembered: a server's log may hold names of any length."""
STRONG = re.compile(r".*(?:passwords?|passwd|passphrases?|passcodes?|secrets?)")
"""Words that hide even a number."""
ALWAYS = re.compile(
    r"credentials?|creds?|jwts?|authorization|p(?:s|ass)w(?:o?r)?d|webhooks?|otps?|(?!old).+pwd|.+apikeys?"
    r"|(?:api|access|private|secret|session|signing|encryption|master|auth|ssh|hmac)keys?"
    r"|(?:hf|gh|git|github|gitlab|npm|pypi|api|auth|access|refresh|id|bearer|session|csrf|xsrf|slack|bot|jwt|oauth|user"
    r"|admin|client|login|security|service)tokens?")
OWNERS = {
    "api", "access", "private", "secret", "session", "signing", "encryption", "master", "auth", "ssh", "hmac",
    "account", "admin", "service", "client", "storage", "shared", "refresh", "bearer", "hf", "hub", "huggingface",
    "github", "gitlab", "git", "slack", "bot", "oauth", "deploy", "registry", "npm", "pypi", "login", "csrf", "vault",
    "user", "license", "subscription"}
"""Before `keys` and `tokens` these make them secret; without, many keys and tokens are entries and counts."""
ENTRIES = {
    "missing", "unexpected", "weight", "state", "dict", "param", "parameter", "layer", "cache", "config", "sort",
    "primary", "public", "foreign", "prefix", "hash", "block", "tensor", "module", "lookup", "partition", "group"}
"""Before a last word `key`: what somebody looks up, not what opens a door."""
KINDS = {
    "type", "mode", "method", "enabled", "url", "uri", "provider", "backend", "sock", "host", "port", "policy",
    "file", "path", "dir", "name", "required", "scheme"}
"""After `auth`, `cookie` and `token`: about it, not itself."""
COUNTED = {
    "per", "map", "budget", "capacity", "limit", "limits", "usage", "worker", "workers", "id", "ids", "index", "idx",
    "count", "counts", "counter", "len", "length", "embedding", "embeddings", "num", "size", "pool", "ratio", "rate",
    "throughput", "latency", "dispatch", "dispatcher", "level", "wise", "time", "bucket", "merge", "penalty", "pos",
    "position", "logprob", "logprobs", "prob", "probs", "healing", "offset", "step", "group", "timeout"}
"""After `token`: figures about a model's tokens."""
SPECIAL = {
    "max", "min", "num", "total", "per", "pad", "padding", "mask", "eos", "bos", "sep", "unk", "cls", "special",
    "stop", "image", "audio", "video", "think", "begin", "end", "start", "placeholder", "prompt", "draft", "prefill",
    "decode", "cached", "generated", "output", "input", "first", "next", "last", "skip", "kv", "each", "single",
    "bonus", "accepted", "running"}
"""Before `token`: one of a model's own."""
USERS = {
    "db", "database", "user", "usr", "smtp", "ftp", "mail", "email", "imap", "mysql", "pg", "postgres", "postgresql",
    "redis", "mongo", "mongodb", "admin", "root", "api", "login", "basic", "proxy", "ldap", "ssh", "http", "https",
    "key", "ssl", "sudo", "auth", "registry", "docker", "git", "kafka", "rabbitmq", "app", "service", "account",
    "wifi", "vault", "keystore", "truststore", "store", "sql", "server", "master", "storage", "my", "grafana"}
"""Before a last word `pass`."""


def words(name: str) -> list[str]:
    """The words of a name in lower case: HFToken2 and hf-token are [hf, token]."""
    return [word.lower() for word in WORD.findall(name)]


def strong_name(name: str) -> bool:
    """Whether a name is a password's or secret's, whose value may well be a number."""
    return _strong(name[-LOOKED_AT:])


def secret_name(name: str) -> bool:
    """Whether a variable, flag or key of this name holds a secret (HF_TOKEN does, --max-total-tokens does not)."""
    return _secret_name(name[-LOOKED_AT:])


@functools.lru_cache(maxsize=8192)
def _strong(name: str) -> bool:
    found = words(name)
    return any(STRONG.fullmatch(word) for word in found) or (found[-1:] == ["pwd"] and len(found) > 1)


@functools.lru_cache(maxsize=8192)
def _secret_name(name: str) -> bool:
    if _strong(name):
        return True
    found = words(name)
    if found[-1:] == ["tokens"] and name.isupper() and not SPECIAL & set(found):
        return True  # a variable such as TOKENS; counts, which are called so too, are numbers
    padded = ["", *found, ""]
    return any(_secret(*padded[i:i + 3]) for i in range(len(found)))


def _secret(before: str, word: str, after: str) -> bool:
    """Whether one word of a name, between its neighbours, makes it a secret's."""
    if word in ("key", "keys"):
        return before in OWNERS or (word == "key" and not after and before not in ENTRIES)
    if word == "token":
        return after not in COUNTED | KINDS and before not in SPECIAL
    if word == "tokens":
        return before in OWNERS
    if word in ("auth", "bearer", "cookie", "cookies", "dsn"):
        return after not in KINDS
    if word in ("pass", "pat"):
        return not after and (word == "pat" or not before or before in USERS)
    return ALWAYS.fullmatch(word) is not None
