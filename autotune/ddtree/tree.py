"""The draft tree: best-first construction, visibility of ancestors, and the walk along the target's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Tree:
    """Node 0 is the last token, already known; the others are the draft's, the likeliest first, parents first."""

    tokens: list[int]
    depths: list[int]
    lineages: list[int]  # bit n: node n is this node or an ancestor of it
    children: dict[tuple[int, int], int]  # (node, token) -> child

    @classmethod
    def root(cls, token: int) -> "Tree":
        return cls([token], [0], [1], {})


def capacity(budget: int, topk: int, depth: int) -> int:
    """Draft nodes per tree: the budget, or fewer if topk choices at depth positions give fewer paths."""
    paths = 0
    for level in range(1, depth + 1):
        paths += topk**level
        if paths >= budget:
            return budget
    return paths


def best_first(root: int, tokens: Sequence[Sequence[int]], scores: Sequence[Sequence[float]], budget: int) -> Tree:
    """The `budget` most probable non-empty prefixes, positions taken as independent (arXiv 2604.12989).

    tokens[i][j] and scores[i][j] are the j-th best token at the i-th position and its log-probability, each row from
    the best to the worst. Rows are of one length. Ties go to the older parent.
    """
    last_rank, last_level = len(tokens[0]) - 1, len(tokens) - 1
    tree = Tree.root(root)
    heap = [(-scores[0][0], 0, 0, 0)]  # (minus log-probability of the prefix, parent, level, rank)
    for node in range(1, budget + 1):
        if not heap:
            break
        cost, parent, level, rank = heap[0]
        if rank < last_rank:
            sibling = cost + scores[level][rank] - scores[level][rank + 1]
            heapreplace(heap, (sibling, parent, level, rank + 1))
        else:
            heappop(heap)
        if level < last_level:
            heappush(heap, (cost - scores[level + 1][0], node, level + 1, 0))
        token = tokens[level][rank]
        tree.tokens.append(token)
        tree.depths.append(level + 1)
        tree.lineages.append(tree.lineages[parent] | 1 << node)
        tree.children[parent, token] = node
    return tree


def sight(trees: Sequence[Tree]) -> Bools:
    """[trees, nodes, nodes] visibility: each node sees itself and its ancestors; all trees have one size."""
    nodes = len(trees[0].lineages)
    size = (nodes + 7) // 8
    packed = b"".join(lineage.to_bytes(size, "little") for tree in trees for lineage in tree.lineages)
    bits = np.unpackbits(np.frombuffer(packed, np.uint8).reshape(-1, size), axis=1, count=nodes, bitorder="little")
    return bits.view(np.bool_).reshape(len(trees), nodes, nodes)


def walk(tree: Tree, chosen: Sequence[int]) -> list[int]:
    """The accepted path from the root: chosen[n] is the target's own token after node n. The walk ends where that
    token is no child; what the step emits is chosen[n] for each node n of the path.
    """
    path = [0]
    while (node := tree.children.get((path[-1], chosen[path[-1]]))) is not None:
        path.append(node)
    return path
