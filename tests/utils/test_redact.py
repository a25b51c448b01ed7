"""Redaction: secrets go, ordinary text stays."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from autotune.utils.redact import HIDDEN, Redactor, secret_name

KNOWN = Redactor(["canary known", "canary'known\"2\" <é>&"])


SECRET_NAMES = """
    HF_TOKEN --api-key OPENAI_API_KEY AWS_SECRET_ACCESS_KEY password --admin-api-key GITHUB_PAT db_passwd DB_PWD
    Authorization-Token PGPASSWORD DB_PASS API_KEYS API_TOKENS SECRETS HF_TOKEN2 JWT AUTHORIZATION accessToken authToken
    clientSecret apiKey APIKey GitHubToken CACHE_TOKEN MASK_TOKEN_SECRET INPUT_API_TOKEN MYSQL_PWD x-api-key Set-Cookie
    AccountKey +engine.env.HF_TOKEN SSH_PRIVATE_KEY TOKENS LIST_TOKENS DB_PSWD PASSWRD SLACK_WEBHOOK"""
OTHER_NAMES = """
    --max-total-tokens max_new_tokens tokenizer --tokenizer-path output_tokens token_usage keyboard monkey tokens_per_s
    --speculative-num-draft-tokens --speculative-token-map best_first_tokens SGLANG_X_NUM_MAX_DISPATCH_TOKENS PWD OLDPWD
    tokens_per_joule num_draft_tokens key_cache_dtype TOKENIZERS_PARALLELISM bos_token_id pad_token num_tokens author
    max_prefill_tokens compass num_key_value_heads tokenizer_mode SSH_AUTH_SOCK first_token_timeout_s image_token_id
    missing_keys post_grad_custom_post_pass secretary bypass cookbook path cached_tokens HF_TOKEN_PATH"""


@pytest.mark.parametrize(("names", "secret"), [(SECRET_NAMES, True), (OTHER_NAMES, False)])
def test_names_of_secrets_are_told_from_names_of_counts_and_paths(names: str, secret: bool) -> None:
    assert [name for name in names.split() if secret_name(name) is not secret] == []


def test_a_secret_flag_hides_its_value_everywhere() -> None:
    argv = ["serve", "--api-key", "open-sesame", "--port", "1"]
    clean = Redactor.from_command(argv, {"HF_TOKEN": "tok-12345"})
    assert clean.argv([*argv, "--api-key=x"]) == ["serve", "--api-key", HIDDEN, "--port", "1", f"--api-key={HIDDEN}"]
    assert clean.text("got open-sesame and tok-12345") == f"got {HIDDEN} and {HIDDEN}"


def test_every_value_of_a_flag_that_takes_several_is_hidden() -> None:
    argv = ["serve", "--api-key", "canary1x", "canary2x", "--port", "80", "--auth-token", "canary3x", "./models/m"]
    assert Redactor().argv(argv) == ["serve", "--api-key", HIDDEN, HIDDEN, "--port", "80", "--auth-token", HIDDEN,
                                     "./models/m"]
    assert set(Redactor.from_command(argv).values) == {"canary1x", "canary2x", "canary3x"}


@pytest.mark.parametrize("secret", [
    "hf_abcdefghijklmnopqrst", "sk-abcdefghijklmnop1234", "ghp_abcdefghijklmnopqrstuvwx", "AKIAABCDEFGHIJKLMNOP",
    "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.abcdef-123", "github_pat_11ABCDEFG0abcdeabcdeabcde", "ASIAABCDEFGHIJKLMNOP",
    "AIzaSyA-abcdefghijklmnopqrstuvwxyz12345", "npm_abcdefghijklmnopqrstuvwxyz0123456789", "xapp-1-A0123456789-abcdef",
    "ya29.a0AfH6SMBabcdefghijkl", "glpat-abcdefghijklmnopqrst", "xoxb-1234567890-abcdef", "sk_live_abcdefghijklmnop",
    "gsk_abcdefghijklmnopqrstu", "r8_abcdefghijklmnopqrstuv", "dckr_pat_abcdefghijklmnopq", "nvapi-abcdefghijklmnopq",
    "pypi-abcdefghijklmnopqrst"])
def test_values_that_look_secret_are_hidden_without_a_name(secret: str) -> None:
    for text in (f"loading with {secret}, done", f"-{secret}", f"'{secret}'", f"a={secret}"):
        assert secret not in Redactor().text(text)


@pytest.mark.parametrize("text", [
    "https://CANARY@host/x", "postgresql://u:CANARY/CANARY@CANARY:CANARY@h/db", "https://u:8/CANARY@h/x",
    "Authorization: Basic CANARY", "curl -H 'Authorization: Bearer CANARY' http://x", "x --api-key CANARY y",
    "['--api-key', 'CANARY']", r'{\"api_key\": \"CANARY CANARY\"}', r'"password": "a\"CANARY"', "DB_PASS=CANARY",
    "engine.args=[--api-key,CANARY]", "engine.args='[--admin-api-key=CANARY]'", "password: 'my CANARY' x",
    "++engine={args:[--api-key,CANARY],env:{HF_TOKEN:CANARY}}", "api_key=&quot;CANARY&quot;", "PGPASSWORD=CANARY",
    "%22api_key%22%3A%22CANARY%22", "JWT: CANARY", "accessToken=CANARY", "x.eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.CANARY",
    "https;AccountName=x;AccountKey=CANARY+/==;", "https://x/y?sv=1&sig=CANARY%3D&se=2", "passwd:/CANARY/",
    "https://s3.example/m?X-Amz-Credential=a&X-Amz-Signature=CANARY", "/api/token:CANARY a/password=/CANARY",
    "https://storage.example/m?X-Goog-Signature=CANARY", "\x1b[1mapi_key\x1b[0m=CANARY", "#x token: CANARY",
    "-----BEGIN RSA PRIVATE KEY-----\nCANARY\n-----END RSA PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\\nCANARY",
    r'password="CAN\\\"ary CANARY" rest', r'token=\"CANARY\\\" rest'])
def test_a_secret_in_any_of_these_shapes_goes(text: str) -> None:
    assert "CANARY" not in Redactor().text(text.replace("CANARY", "CANARYcanary")).replace(HIDDEN, "")


@pytest.mark.parametrize("text", [
    "ServerArgs(model_path='x', admin_api_key=None, api_key='', token=None, hf_token: null, key_cache_dtype='auto')",
    "ServerArgs(tokenizer_path='/m/x', max_prefill_tokens=16384, mask_token='<mask>', eos_token_id=[1, 2, 3])",
    "[2026-01-01 12:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 8, #cached-token: 0, token usage: 0.01, #q: 0",
    "Decode batch, #running-req: 12, #token: 40960, token usage: 0.31, gen throughput (token/s): 123.4, cuda: True",
    "prompt tokens: 12, generated tokens: 88, pass@1: 0.3 author: Anna, compass=north", "crash signature=0123456789ab",
    "Avg prompt throughput: 12.0 tokens/s, Running: 1 reqs, GPU KV cache usage: 0.4%, Prefix cache hit rate: 0.0%",
    '127.0.0.1:3434 - "POST /v1/completions HTTP/1.1" 200 OK', "http://127.0.0.1:30000/v1/x@y http://0.0.0.0:8000",
    "git+https://github.com/a/b.git@main ssh://git@github.com/x", "api_key=${API_KEY}", "not of the form key=value",
    "Missing key: model.layers.0", "usage: --max-total-tokens TOKENS --tokenizer-path PATH", "postgresql://me@host/db",
    "docker run -v /etc/passwd:/etc/passwd:ro -v /run/secrets/token:/token x", "canary birds, canary kno"])
def test_ordinary_lines_stay_as_they_are(text: str) -> None:
    assert KNOWN.text(text) == text


def test_hosts_and_names_stay_where_a_value_is_hidden() -> None:
    text = Redactor().text("postgresql://anna:s3cret!@db.example/x and https://tok:en@h/")
    assert text == f"postgresql://{HIDDEN}@db.example/x and https://{HIDDEN}@h/"
    assert Redactor().text("HF_TOKEN=abcdef123 max_tokens=4096 password: hunter22") == \
        f"HF_TOKEN={HIDDEN} max_tokens=4096 password: {HIDDEN}"


def test_a_number_is_hidden_beside_a_secret_name_and_everywhere_when_it_is_long() -> None:
    assert Redactor().text("password=123456 token=123456") == f"password={HIDDEN} token=123456"
    clean = Redactor.from_command(["--api-key", "1234", "--db-password=123456789"], {"DB_PASSWORD": 87654321})
    assert clean.argv(["--api-key", "1234"]) == ["--api-key", HIDDEN]
    assert clean.text("1234 tokens, 123456789, 87654321") == f"1234 tokens, {HIDDEN}, {HIDDEN}"
    few = {"DB_PASSWORD": 1234, "MAX_TOKENS": "131072", "CHUNK_TOKENS": "131072", "AUTH_TOKEN": 131072}
    assert Redactor.from_command((), few).text("1234 or 131072") == "1234 or 131072"
    assert Redactor().mapping(few) == {**few, "DB_PASSWORD": HIDDEN}
    assert clean.mapping({"port": 87654321}) == {"port": HIDDEN}


@pytest.mark.parametrize(("name", "value", "said"), [
    ("SOME_TOKEN", "[redacted]canary3x", "it is canary3x"), ("API_KEYS", "canary4,9zq", "with canary4"),
    ("API_KEYS", "canary5;x1y2", "with canary5"), ("LIST_TOKENS", "a,canary6z", "with canary6z"),
    ("API_KEYS", "canaryfirst,canarysecond", "canarysecond and canaryfirst"), ("TOKENS", "[canary7z]", "with canary7z"),
    ("SLACK_WEBHOOK", "https://h.example/canary10", "to https://h.example/canary10")])
def test_values_of_odd_forms_are_known_too(name: str, value: str, said: str) -> None:
    assert "canary" in said and "canary" not in Redactor.from_command((), {name: value}).text(said)
    assert Redactor().mapping({name: value}) == {name: HIDDEN}


def test_passwords_in_urls_of_innocent_variables_are_known() -> None:
    clean = Redactor.from_command((), {"HTTPS_PROXY": "http://me:canary%2Fpass@h:9"})
    assert "canary" not in clean.text("proxy password canary%2Fpass, or canary/pass")


def test_an_override_keeps_its_name_and_its_secret_is_known_everywhere() -> None:
    argv = ["tune", "+space=local", "+engine.env.HF_TOKEN=a b,c", "+engine.args=[--api-key,wxyz]", "study.launches=4",
            "++engine={args:[--admin-api-key=qrst,--port,80]}", "study.storage=postgresql://u:p/w@h/db"]
    clean = Redactor.from_command(argv)
    assert clean.argv(argv) == [
        "tune", "+space=local", f"+engine.env.HF_TOKEN={HIDDEN}", f"+engine.args=[--api-key,{HIDDEN}]",
        "study.launches=4",
        f"++engine={{args:[--admin-api-key={HIDDEN},--port,80]}}", f"study.storage=postgresql://{HIDDEN}@h/db"]
    assert clean.text("'a b,c' wxyz qrst") == f"'{HIDDEN}' {HIDDEN} {HIDDEN}"


def test_nested_data_is_cleaned() -> None:
    data = {"env": {"API_KEY": "v" * 9, "PORT": "80"}, "list": ["hf_abcdefghijklmnopqrst", 3]}
    assert Redactor().data(data) == {"env": {"API_KEY": HIDDEN, "PORT": "80"}, "list": [HIDDEN, 3]}
    more: dict[str, object] = {
            "api_keys": ["one", {"x": "two"}], "args": ["--api-key", "three", "--port", "80"], "token": None,
            "max_total_tokens": 9, "admin_api_key": "None", "flag": {"api_key": "--api-key"}}
    assert Redactor().data(more) == {**more, "api_keys": [HIDDEN, {"x": HIDDEN}],
                                     "args": ["--api-key", HIDDEN, "--port", "80"]}
    assert Redactor(["canary-secret"]).mapping({"a canary-secret": {"canary-secret": [1]}}) == \
        {f"a {HIDDEN}": {HIDDEN: [1]}}


def test_the_name_of_a_flag_is_no_secret_where_an_engine_file_says_where_the_secret_goes() -> None:
    engine = {"params": {"api_key": "--api-key", "auth": ["--auth-mode {value}", "--auth-token"]}}
    assert Redactor.from_command((), engine).values == () and Redactor().data(engine) == engine


HOSTILE = ["a", "=", ":", "token=", "token='", 'token="', "api_key: {", "\\", '\\"', 'token=\\\\\\"', "--a",
           "--token ", "://", "://a:", "http://a@", "-----BEGIN ", "-----BEGIN RSA PRIVATE KEY-----", "eyJ",
           "eyJaaaaaaaaaaa.", "hf_", "&quot;", "%22", "authorization: ", "x.y", "aA", "Bearer ", "?sig=", "[", ")",
           "token:basic ", "auth:'\\\"x", "-eyJ", "-eyJaaaaaaaaaaa", ".eyJaaaaaaaaaaa", "_eyJa.eyJ", '\\\\\\"x']


@pytest.mark.parametrize("begin", ["", 'token="', "token='", 'token=\\"', '--api-key "', "token="])
def test_a_long_hostile_line_takes_linear_time(begin: str) -> None:
    clean = Redactor(["known'value", 'ano"ther'])
    for unit in HOSTILE:
        line = (begin + unit * (1 << 15))[:1 << 15]
        began = time.process_time()
        assert len(clean.text(line)) <= 2 * len(line)
        assert time.process_time() - began < 3, unit  # linear: below 0.1 s


def test_names_of_any_length_are_not_kept() -> None:
    tracemalloc.start()
    try:
        for number in range(8):
            Redactor().text(f"{number}{'a' * (1 << 18)}=x\n")
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
