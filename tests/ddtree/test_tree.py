"""The draft tree against brute force."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from autotune.ddtree.engine import Tree, best_first, capacity, sight, walk

Guess = tuple[list[list[int]], list[list[float]]]


@st.composite
def guesses(draw: st.DrawFn) -> Guess:
    depth, topk = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    score = st.floats(-8, 0, allow_nan=False)
    scores = [sorted(draw(st.lists(score, min_size=topk, max_size=topk)), reverse=True) for _ in range(depth)]
    tokens = [draw(st.permutations(range(10)))[:topk] for _ in range(depth)]
    return tokens, scores


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """Tokens on the path to each node, without the root's."""
    return [tuple(tree.tokens[node] for node in range(1, len(tree.tokens)) if lineage >> node & 1)
            for lineage in tree.lineages]


@given(guesses(), st.integers(1, 40))
def test_a_tree_holds_exactly_the_most_probable_prefixes(guess: Guess, budget: int) -> None:
    tokens, scores = guess
    tree = best_first(99, tokens, scores, budget)
    assert len(tree.tokens) == 1 + capacity(budget, len(tokens[0]), len(tokens))

    def along(rows: Iterable[Sequence[Any]], ranks: tuple[int, ...]) -> list[Any]:
        return [row[rank] for row, rank in zip(rows, ranks, strict=False)]

    every = {tuple(along(tokens, ranks)): sum(along(scores, ranks)) for level in range(1, len(tokens) + 1)
             for ranks in product(range(len(tokens[0])), repeat=level)}
    best = sorted(every.values(), reverse=True)[:budget]
    found = [every[path] for path in paths(tree)[1:]]
    assert np.allclose(sorted(found, reverse=True), best)
    assert np.allclose(found, best), "nodes come in order of probability"
    assert len(set(paths(tree))) == len(tree.tokens)


@given(guesses(), st.integers(1, 40))
def test_a_node_sees_itself_and_its_ancestors_only(guess: Guess, budget: int) -> None:
    tree = best_first(99, *guess, budget)
    sees = sight([tree, tree])
    assert sees.shape == (2, len(tree.tokens), len(tree.tokens))
    for node, path in enumerate(paths(tree)):
        seen = [other for other, there in enumerate(paths(tree)) if path[: len(there)] == there]
        assert np.flatnonzero(sees[1, node]).tolist() == seen
        assert tree.depths[node] == len(path) == len(seen) - 1


def test_the_walk_ends_at_the_first_token_without_a_child() -> None:
    tree = best_first(9, [[1, 2], [3, 4]], [[-0.1, -0.2], [-0.1, -0.2]], 6)
    where = {path: node for node, path in enumerate(paths(tree))}
    chosen = [0] * len(tree.tokens)
    chosen[where[()]] = 2
    chosen[where[(2,)]] = 4
    chosen[where[(2, 4)]] = 7
    assert walk(tree, chosen) == [0, where[(2,)], where[(2, 4)]]
    chosen[0] = 5
    assert walk(tree, chosen) == [0]
