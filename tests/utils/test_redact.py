"""Redaction: secrets go, ordinary text stays."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.utils.redact import HIDDEN, Redactor
from autotune.utils.secret_names import secret_name


@pytest.mark.parametrize("name", ["HF_TOKEN", "--api-key", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "password",
                                  "--admin-api-key", "GITHUB_PAT", "db_passwd", "DB_PWD", "Authorization-Token",
                                  "PGPASSWORD", "DB_PASS", "API_KEYS", "API_TOKENS", "SECRETS", "HF_TOKEN2", "JWT",
                                  "AUTHORIZATION", "accessToken", "authToken", "clientSecret", "apiKey", "APIKey",
                                  "GitHubToken", "CACHE_TOKEN", "MASK_TOKEN_SECRET", "INPUT_API_TOKEN", "MYSQL_PWD",
                                  "x-api-key", "Set-Cookie", "AccountKey", "+engine.env.HF_TOKEN", "SSH_PRIVATE_KEY"])
def test_secret_names_are_known(name: str) -> None:
    assert secret_name(name)


@pytest.mark.parametrize("name", [
    "--max-total-tokens", "max_new_tokens", "tokenizer", "--tokenizer-path", "output_tokens", "token_usage", "keyboard",
    "--speculative-num-draft-tokens", "monkey", "tokens_per_s", "--speculative-token-map", "best_first_tokens",
    "SGLANG_X_NUM_MAX_DISPATCH_TOKENS", "PWD", "OLDPWD", "tokens_per_joule", "num_draft_tokens", "key_cache_dtype",
    "TOKENIZERS_PARALLELISM", "bos_token_id", "pad_token", "num_tokens", "max_prefill_tokens", "author", "compass",
    "num_key_value_heads", "tokenizer_mode", "SSH_AUTH_SOCK", "first_token_timeout_s", "image_token_id", "missing_keys",
    "post_grad_custom_post_pass", "secretary", "bypass", "cookbook", "path", "cached_tokens", "HF_TOKEN_PATH"])
def test_names_of_counts_and_paths_are_not_secret(name: str) -> None:
    assert not secret_name(name)


def test_a_secret_flag_hides_its_value_everywhere() -> None:
    clean = Redactor.from_command(["serve", "--api-key", "open-sesame", "--port", "1"], {"HF_TOKEN": "tok-12345"})
    assert clean.argv(["serve", "--api-key", "open-sesame", "--port", "1"]) == [
        "serve", "--api-key", HIDDEN, "--port", "1"]
    assert clean.argv(["--api-key=open-sesame"]) == [f"--api-key={HIDDEN}"]
    assert clean.text("got open-sesame and tok-12345") == f"got {HIDDEN} and {HIDDEN}"


@pytest.mark.parametrize("secret", [
    "hf_abcdefghijklmnopqrst", "sk-abcdefghijklmnop1234", "ghp_abcdefghijklmnopqrstuvwx", "AKIAABCDEFGHIJKLMNOP",
    "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.abcdef-123", "github_pat_11ABCDEFG0abcdefghijklmnop", "ASIAABCDEFGHIJKLMNOP",
    "AIzaSyA-abcdefghijklmnopqrstuvwxyz12345", "npm_abcdefghijklmnopqrstuvwxyz0123456789", "xapp-1-A0123456789-abcdef",
    "ya29.a0AfH6SMBabcdefghijkl"])
def test_values_that_look_secret_are_hidden_without_a_name(secret: str) -> None:
    assert secret not in Redactor().text(f"loading with {secret}, done")


def test_credentials_in_urls_are_hidden_and_the_host_stays() -> None:
    text = Redactor().text("postgresql://anna:s3cret!@db.example/x and https://tok:en@h/")
    assert "s3cret" not in text and "tok:en" not in text and "@db.example/x" in text


def test_assignments_are_hidden_by_their_name() -> None:
    assert Redactor().text("HF_TOKEN=abcdef123 max_tokens=4096 password: hunter22") == \
        f"HF_TOKEN={HIDDEN} max_tokens=4096 password: {HIDDEN}"


@pytest.mark.parametrize("text", [
    "ServerArgs(model_path='x', admin_api_key=None, api_key='', token=None, hf_token: null, key_cache_dtype='auto')",
    "ServerArgs(tokenizer_path='/m/x', max_prefill_tokens=16384, mask_token='<mask>', eos_token_id=[1, 2, 3])",
    "[2026-01-01 12:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 8, #cached-token: 0, token usage: 0.01, #q: 0",
    "Decode batch, #running-req: 12, #token: 40960, token usage: 0.31, gen throughput (token/s): 123.4, cuda: True",
    "prompt tokens: 12, generated tokens: 88, pass@1: 0.3 author: Anna, compass=north",
    "Avg prompt throughput: 12.0 tokens/s, Running: 1 reqs, GPU KV cache usage: 0.4%, Prefix cache hit rate: 0.0%",
    '127.0.0.1:3434 - "POST /v1/completions HTTP/1.1" 200 OK', "http://127.0.0.1:30000/v1/x@y http://0.0.0.0:8000",
    "git+https://github.com/a/b.git@main ssh://git@github.com/x", "api_key=${API_KEY}", "not of the form key=value",
    "Missing key: model.layers.0", "usage: --max-total-tokens TOKENS --tokenizer-path PATH", "postgresql://me@host/db"])
def test_ordinary_lines_stay_as_they_are(text: str) -> None:
    assert Redactor().text(text) == text


@pytest.mark.parametrize("text", [
    "https://CANARY@host/x", "postgresql://u:CANARY/CANARY@CANARY:CANARY@h/db", "https://u:8/CANARY@h/x",
    "Authorization: Basic CANARY", "curl -H 'Authorization: Basic CANARY' http://x", "cookie: a=CANARY; b=CANARY",
    "API_KEYS=[CANARY,CANARY]", '{"api_keys": ["CANARY", "CANARY"]}', "['--api-key', 'CANARY']", "x --api-key CANARY y",
    r'{\"api_key\": \"CANARY CANARY\"}', r'"{\\\"api_key\\\": \\\"CANARY\\\"}"', r'"password": "a\"CANARY"',
    "engine.args=[--api-key,CANARY]", "engine.args='[--admin-api-key=CANARY]'", "password: 'my CANARY' x",
    "DB_PASS=CANARY",
    "++engine={args:[--api-key,CANARY],env:{HF_TOKEN:CANARY}}", "api_key=&quot;CANARY&quot;", "PGPASSWORD=CANARY",
    "%22api_key%22%3A%22CANARY%22", "[('HF_TOKEN', 'CANARY')]", "(b'authorization', b'Basic CANARY')", "JWT: CANARY",
    "https;AccountName=x;AccountKey=CANARY+/==;", "https://x/y?sv=1&sig=CANARY%3D&se=2",
    "{'credentials': {'a': 'CANARY'}}",
    'Proxy-Authorization: Digest username="CANARY", nonce="CANARY"', "'authorization': 'Digest CANARY'",
    "accessToken=CANARY", "passphrase: correct CANARY battery"])
def test_a_secret_in_any_of_these_shapes_goes(text: str) -> None:
    assert "CANARY" not in Redactor().text(text.replace("CANARY", "CANARYcanary")).replace(HIDDEN, "")


def test_a_password_may_be_a_number_and_a_count_is_none() -> None:
    assert Redactor().text("password=123456 token=123456") == f"password={HIDDEN} token=123456"
    clean = Redactor.from_command(["--api-key", "1234", "--db-password=123456789"], {})
    assert clean.argv(["--api-key", "1234"]) == ["--api-key", HIDDEN]
    assert clean.text("1234 tokens, 123456789 tokens") == f"1234 tokens, {HIDDEN} tokens"


def test_a_variables_secret_may_look_like_a_flag() -> None:
    clean = Redactor.from_command(["--api-key", "--other"], {"DASH_TOKEN": "--canary-secret"})
    assert clean.text("with --canary-secret and --other") == f"with {HIDDEN} and --other"


def test_a_secret_is_hidden_in_keys_too() -> None:
    known = Redactor(["canary-secret"])
    assert known.mapping({"a canary-secret": {"canary-secret": [1]}}) == {f"a {HIDDEN}": {HIDDEN: [1]}}


def test_an_override_keeps_its_name_and_its_secret_is_known_everywhere() -> None:
    argv = ["tune", "+space=local", "+engine.env.HF_TOKEN=a b,c", "+engine.args=[--api-key,wxyz]", "study.launches=4",
            "++engine={args:[--admin-api-key=qrst,--port,80]}", "study.storage=postgresql://u:p/w@h/db"]
    clean = Redactor.from_command(argv)
    assert clean.argv(argv) == [
        "tune", "+space=local", f"+engine.env.HF_TOKEN={HIDDEN}", f"+engine.args=[--api-key,{HIDDEN}]",
        "study.launches=4",
        f"++engine={{args:[--admin-api-key={HIDDEN},--port,80]}}", f"study.storage=postgresql://{HIDDEN}@h/db"]
    assert clean.text("'a b,c' wxyz qrst") == f"'{HIDDEN}' {HIDDEN} {HIDDEN}"


def test_the_parts_of_a_list_in_one_variable_are_known_too() -> None:
    clean = Redactor.from_command((), {"API_KEYS": "firstsecret,secondsecret"})
    assert clean.text("with secondsecret and firstsecret") == f"with {HIDDEN} and {HIDDEN}"


def test_nested_data_is_cleaned() -> None:
    data = {"env": {"API_KEY": "v" * 9, "PORT": "80"}, "list": ["hf_abcdefghijklmnopqrst", 3]}
    assert Redactor().data(data) == {"env": {"API_KEY": HIDDEN, "PORT": "80"}, "list": [HIDDEN, 3]}
    more: dict[str, object] = {
            "api_keys": ["one", {"x": "two"}], "args": ["--api-key", "three", "--port", "80"], "token": None,
            "max_total_tokens": 9, "admin_api_key": "None", "flag": {"api_key": "--api-key"}}
    assert Redactor().data(more) == {**more, "api_keys": [HIDDEN, {"x": HIDDEN}],
                                     "args": ["--api-key", HIDDEN, "--port", "80"]}


VALUE = st.text(alphabet=st.characters(codec="ascii", exclude_characters="=:@"), min_size=8, max_size=40)


@given(VALUE, st.text(), st.text())
def test_a_known_value_never_survives(value: str, before: str, after: str) -> None:
    assert value not in Redactor([value]).text(before + value + after).replace(HIDDEN, "\0")


@given(st.text())
def test_cleaning_twice_changes_nothing_more(text: str) -> None:
    once = Redactor().text(text)
    assert Redactor().text(once) == once


def test_the_counters_in_a_servers_log_are_not_secrets() -> None:
    line = "Decode batch, #running-req: 12, #token: 40960, token usage: 0.31, #queue-req: 0"
    assert Redactor().text(line) == line
    assert "hunter2" not in Redactor().text("#x token: hunter2 password=hunter2")


def test_an_environment_without_a_command_is_enough() -> None:
    assert Redactor.from_command((), {"HF_TOKEN": "tok-12345"}).text("got tok-12345") == f"got {HIDDEN}"


HOSTILE = ["a", "=", ":", "token=", "token='", 'token="', "api_key: {", "\\", '\\"', 'token=\\\\\\"', "--a",
           "--token ", "://",
           "://a:", "http://a@", "-----BEGIN ", "-----BEGIN RSA PRIVATE KEY-----", "eyJ", "eyJaaaaaaaaaaa.", "hf_",
           "&quot;",
           "%22", "authorization: ", "('token', ", "x.y", "aA", "Bearer ", "?sig=", "[", "token:basic ", "auth:'\\\"x"]


@pytest.mark.parametrize("unit", HOSTILE)
def test_a_long_hostile_line_is_over_soon(unit: str) -> None:
    length = 1 << 18  # what takes quadratic time would meet this test's limit of two minutes
    clean = Redactor(["known'value", 'ano"ther'])
    assert len(clean.text((unit * length)[:length])) <= 2 * length


@pytest.mark.parametrize(("begin", "unit"), [
    ('token="', '\\\\\\"'), ("token='", "\\\\\\'"), ('token=\\"', '\\\\\\"'), ("('token', \"", '\\\\\\"'),
    ('--api-key "', '\\\\\\"x'), ("x", "-eyJ"), ("", "-eyJaaaaaaaaaaa"), ("", ".eyJaaaaaaaaaaa"), ("", "_eyJa.eyJ")])
def test_a_line_that_repeats_what_it_never_ends_is_over_soon(begin: str, unit: str) -> None:
    clean = Redactor()
    for length in (100, 1 << 18):  # exponential time would show at once, quadratic time then
        clean.text((begin + unit * length)[:length])


@pytest.mark.parametrize("said", [
    r'''password=\"can ary\\\\\" rest''', r'''password="can\\\"ary" rest''', r'''"{\"token\": \"can\\\"ary\"}" rest''',
    r'''token=\"canary\\\" rest'''])
def test_a_quoted_secret_is_hidden_whatever_is_escaped_in_it(said: str) -> None:
    shown = Redactor().text(said)
    assert "can" not in shown and "ary" not in shown, shown


@pytest.mark.parametrize("said", [
    "x.eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.canary", "-eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.canary.",
    "a.b.eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.canary", "a_eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.canary"])
def test_a_web_token_is_hidden_whatever_stands_before_it(said: str) -> None:
    assert "canary" not in Redactor().text(said) and "eyJzdWIi" not in Redactor().text(said)


def test_names_of_any_length_are_not_kept() -> None:
    tracemalloc.start()
    try:
        for number in range(64):
            Redactor().text(f"{number}{'a' * (1 << 20)}=x\n")
        assert tracemalloc.get_traced_memory()[0] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_mounted_file_of_a_secret_sounding_name_stays_and_what_is_given_to_such_a_name_goes() -> None:
    said = "docker run -v /etc/passwd:/etc/passwd:ro -v /run/secrets/token:/token x"
    assert Redactor().text(said) == said
    assert "canary" not in Redactor().text("/api/token:canary1 a/password=/canary2 passwd:/canary3")
    assert "canary" not in Redactor().text("passwd:/canary4/")


@pytest.mark.parametrize("line", [
    "GET https://bucket.s3.amazonaws.com/m?X-Amz-Credential=a&X-Amz-Signature=canary93canary93",
    "GET https://storage.googleapis.com/m?X-Goog-Signature=canary94canary94", "\x1b[1mapi_key\x1b[0m=canary68x",
    "docker login with dckr_pat_canary75canary75x"])
def test_signed_addresses_coloured_names_and_registry_tokens_are_hidden(line: str) -> None:
    assert "canary" not in Redactor().text(line)


def test_every_value_of_a_flag_that_takes_several_is_hidden() -> None:
    argv = ["serve", "--api-key", "canary1x", "canary2x", "--port", "80", "--auth-token", "canary3x", "./models/m"]
    assert Redactor().argv(argv) == ["serve", "--api-key", "[redacted]", "[redacted]", "--port", "80",
                                     "--auth-token", "[redacted]", "./models/m"]
    assert set(Redactor.from_command(argv).values) == {"canary1x", "canary2x", "canary3x"}


@pytest.mark.parametrize("shown", ["{0!r}", "{0}", '"{0}"', "{0}...", "b'{0}'"])
def test_a_known_value_that_somebody_cut_off_is_hidden_as_far_as_it_goes(shown: str) -> None:
    clean, secret = Redactor(["canary-95/with 'quotes'", "canary-96"]), "canary-95/with 'quotes'"
    for length in range(8, len(secret)):
        said = shown.format(f"HTTP 500: no access with {secret[:length]}")
        assert "canary" not in clean.text(said), said
    assert clean.text("canary-9 is no secret, canary birds neither") == "canary-9 is no secret, canary birds neither"


@pytest.mark.parametrize(("name", "value", "said"), [
    ("DASH_TOKEN", "--canary1A", "env is --canary1A"), ("DASH_TOKEN", "--canary-2", "env is --canary-2"),
    ("SOME_TOKEN", "[redacted]canary3x", "it is canary3x"), ("API_KEYS", "canary4,9zq", "with canary4"),
    ("API_KEYS", "canary5;x1y2", "with canary5"), ("LIST_TOKENS", "a,canary6z", "with canary6z"),
    ("TOKENS", "canary7z", "with canary7z"), ("DB_PSWD", "canary8z", "as canary8z"),
    ("PASSWRD", "canary9", "as canary9"), ("SLACK_WEBHOOK", "https://h.example/canary10", "to https://h.example/canary10")])
def test_values_of_odd_forms_are_known_too(name: str, value: str, said: str) -> None:
    assert "canary" in said and "canary" not in Redactor.from_command((), {name: value}).text(said)
    assert Redactor().mapping({name: value}) == {name: HIDDEN}


def test_the_number_of_a_password_is_hidden_where_it_stands_alone() -> None:
    for password in ("827461", 8274619):
        clean = Redactor.from_command((), {"NUM_PASSWORD": password})
        assert clean.text(f"it is {password}: {password}, {password}0 or 0.{password}") == \
            f"it is {HIDDEN}: {HIDDEN}, {password}0 or 0.{password}"
        assert clean.mapping({"DB_PASSWORD": password, "port": 827461}) == {"DB_PASSWORD": HIDDEN, "port": 827461}
    few = {"DB_PASSWORD": 1234, "MAX_TOKENS": "131072", "CHUNK_TOKENS": "131072", "AUTH_TOKEN": 131072}
    assert Redactor.from_command((), few).text("1234 or 131072") == "1234 or 131072"
    assert Redactor().mapping(few) == {**few, "DB_PASSWORD": HIDDEN}


def test_the_name_of_a_flag_is_no_secret_where_the_secret_is_said_to_go() -> None:
    engine = {"params": {"api_key": "--api-key", "auth": ["--auth-mode {value}", "--auth-token"]}}
    assert Redactor.from_command((), engine).values == () and Redactor().data(engine) == engine
