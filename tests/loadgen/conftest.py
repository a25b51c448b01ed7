"""A stub server for all tests that need no behaviour of its own and do not ask for its truth."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.stub import Stub


@pytest.fixture(scope="session")
def plain_stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    with Stub(tmp_path_factory.mktemp("stub"), "--ttft-ms", "2", "--itl-ms", "2") as stub:
        yield stub
