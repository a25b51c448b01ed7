"""Redaction: secrets go, ordinary text stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.redact import HIDDEN, Redactor
from autotune.secretnames import secret_name


@pytest.mark.parametrize("name", ["HF_TOKEN", "--api-key", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "password",
                                  "--admin-api-key", "GITHUB_PAT", "db_passwd", "DB_PWD", "Authorization-Token"])
def test_secret_names_are_known(name: str) -> None:
    assert secret_name(name)


@pytest.mark.parametrize("name", [
    "--max-total-tokens", "max_new_tokens", "tokenizer", "--tokenizer-path", "output_tokens", "token_usage", "keyboard",
    "--speculative-num-draft-tokens", "monkey", "tokens_per_s", "--speculative-token-map", "best_first_tokens",
    "SGLANG_X_NUM_MAX_DISPATCH_TOKENS", "PWD", "OLDPWD"])
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
    "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.abcdef-123"])
def test_values_that_look_secret_are_hidden_without_a_name(secret: str) -> None:
    assert secret not in Redactor().text(f"loading with {secret}, done")


def test_credentials_in_urls_are_hidden_and_the_host_stays() -> None:
    text = Redactor().text("postgresql://anna:s3cret!@db.example/x and https://tok:en@h/")
    assert "s3cret" not in text and "tok:en" not in text and "@db.example/x" in text


def test_assignments_are_hidden_by_their_name() -> None:
    assert Redactor().text("HF_TOKEN=abcdef123 max_tokens=4096 password: hunter22") == \
        f"HF_TOKEN={HIDDEN} max_tokens=4096 password: {HIDDEN}"


def test_nested_data_is_cleaned() -> None:
    data = {"env": {"API_KEY": "v" * 9, "PORT": "80"}, "list": ["hf_abcdefghijklmnopqrst", 3]}
    assert Redactor().data(data) == {"env": {"API_KEY": HIDDEN, "PORT": "80"}, "list": [HIDDEN, 3]}


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
