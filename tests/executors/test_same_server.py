"""Two launches count as the same server only when settings and environment agree, whichever executor started them."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from autotune.executors.local import resolved_key
from autotune.executors.ray import RayServer


def on_ray(resolved: dict[str, Any], env: dict[str, str]) -> str | None:
    told: dict[str, Any] = {"crash": None, "launch_s": 1.0, "argv": [], "env": env, "resolved": resolved, "alive": True}
    hosts: Any = None  # the key needs no cluster
    return RayServer(hosts, None, pathlib.Path(), told).resolved_key


@pytest.mark.parametrize("key", [resolved_key, on_ray])
def test_servers_that_differ_in_an_environment_variable_are_two_servers(key: Any) -> None:
    settings = {"tp_size": 2, "max_running_requests": 64}
    assert key(settings, {"SGLANG_FLAG": "0"}) != key(settings, {"SGLANG_FLAG": "1"})
    assert key(settings, {"A": "1", "B": "2"}) == key(dict(reversed(settings.items())), {"B": "2", "A": "1"})


@pytest.mark.parametrize("key", [resolved_key, on_ray])
def test_a_server_that_reports_nothing_equals_no_other(key: Any) -> None:
    assert key({}, {"A": "1"}) is None


def test_ray_and_local_launches_have_one_key() -> None:
    assert on_ray({"tp_size": 2}, {"A": "1"}) == resolved_key({"tp_size": 2}, {"A": "1"})
