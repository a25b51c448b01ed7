"""Continuous batching with draft trees: prompts and trees of all running requests, one pass of the target a step."""

import functools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autotune.ddtree.executor import Bools, Cache, Executor, Plan, Ranks
from autotune.ddtree.model import Draft


class Tree(NamedTuple):
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


@dataclass(slots=True, eq=False)
class Request:
    """One completion being made. The i-th output token is drawn with the i-th number of its own random stream, so a
    seed gives the same text whatever the batch and the tree."""

    id: int
    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    length: int = 0  # tokens in the cache
    last: int = 0  # the newest output token, not yet in the cache
    emitted: int = 0
    verify_steps: int = 0
    stream: random.Random = field(init=False)
    draws: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = random.Random(self.seed)

    def draw(self, ahead: int) -> float:
        """The random number of the output token `ahead` places after the next one."""
        while len(self.draws) <= self.emitted + ahead:
            self.draws.append(self.stream.random())
        return self.draws[self.emitted + ahead]


class Output(NamedTuple):
    """Result of one step for a request; finish is "length", "stop" or None; verify_steps counts from its start."""

    id: int
    tokens: list[int]
    finish: str | None
    verify_steps: int


class Drafter:
    """The draft with its cache and, for each slot, the joined taps of the last verified position."""

    def __init__(self, draft: Draft, cache: Cache, depth: int, topk: int) -> None:
        self.draft, self.cache, self.depth, self.topk = draft, cache, depth, topk
        shape = (cache.slots, cache.heads * cache.head_width)
        self.joined = torch.zeros(shape, dtype=cache.rows.dtype, device=cache.rows.device)
        self.sees = torch.ones((1, depth + 1, depth + 1), dtype=torch.bool).tril()
        self.depths = [list(range(depth + 1))]

    def learn(self, first: int, lengths: list[int], taps: Tensor, counts: list[int]) -> None:
        """Stores taps [slots, n, taps * width] of the tokens after `lengths`; counts[i] of slot i's n are real."""
        slots, width, _ = taps.shape
        device, cache = self.joined.device, self.cache
        position = torch.tensor(lengths, device=device)[:, None] + cache.columns[:width]
        rows = position + cache.starts[first : first + slots]
        factors = cache.factors[position.flatten()][:, None]
        joined, layers = self.draft.context(taps.flatten(0, 1))
        for index, keys_values in enumerate(layers):
            cache.write(index, keys_values, rows.flatten(), factors)
        last = torch.tensor(counts, device=device) - 1
        self.joined[first : first + slots] = joined.view(slots, width, -1)[torch.arange(slots, device=device), last]

    def propose(self, last: list[int], lengths: list[int]) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
        """For each slot and position the topk tokens and their log-probabilities, best first."""
        slots, cache = len(last), self.cache
        view = cache.view(0, lengths, self.depths * slots, self.sees.expand(slots, -1, -1))
        tokens = torch.tensor(last, device=self.joined.device)
        attend = functools.partial(cache.attend, view=view)
        logits = self.draft(tokens, self.joined[:slots], self.depth, attend, Ranks().add)
        best = logits.log_softmax(-1, torch.float32).topk(self.topk)
        shape = (slots, self.depth, self.topk)
        return best.indices.view(shape).tolist(), best.values.view(shape).tolist()

    def move(self, source: int, destination: int, length: int) -> None:
        self.cache.move(source, destination, length)
        self.joined[destination] = self.joined[source]


class Engine:
    """Continuous batching. A request's slot is its index in `running`."""

    def __init__(self, executor: Executor, drafter: Drafter | None, budget: int, eos: int,
                 corrupt_rate: float = 0.0) -> None:
        self.executor, self.drafter, self.eos, self.corrupt_rate = executor, drafter, eos, corrupt_rate
        self.nodes = capacity(budget, drafter.topk, drafter.depth) if drafter else 0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.keep: tuple[list[int], list[int]] = ([], [])
        self.moves: list[tuple[int, int, int]] = []
        self.verify_steps = self.accepted_tokens = 0
        self.noise = random.Random(0)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request_id: int) -> None:
        """Drop a running or waiting request and free its slot. Unknown ids are ignored."""
        self.waiting = deque(request for request in self.waiting if request.id != request_id)
        slot = next((slot for slot, request in enumerate(self.running) if request.id == request_id), None)
        if slot is not None:
            self._release(slot)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """One pass of the target: the prompt of a waiting request if there is a free slot, else all running ones."""
        if self.waiting and len(self.running) < self.executor.cache.slots:
            return [self._prefill(self.waiting.popleft())]
        return self._decode() if self.running else []

    def _run(self, plan: Plan) -> tuple[Tensor, Tensor]:
        plan.keep, plan.moves = self.keep, self.moves
        self.keep, self.moves = ([], []), []
        return self.executor.run(plan)

    def _prefill(self, request: Request) -> Output:
        slot, count = len(self.running), len(request.prompt)
        logits, taps = self._run(Plan(slot, [request.prompt], [0], [], None))
        if self.drafter:
            self.drafter.learn(slot, [0], taps, [count])
        chosen = self._choose(logits, [request], [[0]])[0]
        self.running.append(request)
        request.length = count
        output = self._emit(request, chosen)
        if output.finish:
            self._release(slot)
        return output

    def _decode(self) -> list[Output]:
        requests = list(self.running)
        lengths, last = [request.length for request in requests], [request.last for request in requests]
        if self.drafter:
            tokens, scores = self.drafter.propose(last, lengths)
            trees = [best_first(*parts, self.nodes) for parts in zip(last, tokens, scores, strict=True)]
        else:
            trees = [Tree.root(token) for token in last]
        depths = [tree.depths for tree in trees]
        logits, taps = self._run(Plan(0, [tree.tokens for tree in trees], lengths, depths, sight(trees)))
        chosen = self._choose(logits, requests, depths)
        paths = [walk(tree, self._corrupt(tree, row)) for tree, row in zip(trees, chosen, strict=True)]
        if self.drafter:
            self.verify_steps += len(requests)
            self._learn(lengths, taps, paths)
        outputs = []
        for slot, (request, path, row) in enumerate(zip(requests, paths, chosen, strict=True)):
            start = slot * self.executor.cache.capacity + request.length
            moved = [(node, place) for place, node in enumerate(path) if node != place]
            self.keep[0].extend(start + node for node, _ in moved)
            self.keep[1].extend(start + place for _, place in moved)
            request.length += len(path)
            request.verify_steps += 1
            self.accepted_tokens += len(path) - 1
            outputs.append(self._emit(request, [row[node] for node in path]))
        for slot in reversed(range(len(requests))):
            if outputs[slot].finish:
                self._release(slot)
        return outputs

    def _learn(self, lengths: list[int], taps: Tensor, paths: list[list[int]]) -> None:
        assert self.drafter
        width = max(map(len, paths))
        index = torch.tensor([path + path[-1:] * (width - len(path)) for path in paths], device=taps.device)
        taken = taps.gather(1, index.unsqueeze(2).expand(-1, -1, taps.shape[2]))
        self.drafter.learn(0, lengths, taken, [len(path) for path in paths])

    def _choose(self, logits: Tensor, requests: list[Request], depths: list[list[int]]) -> list[list[int]]:
        """The target's own token after each node: logits [requests, nodes, vocabulary], depths [requests][nodes]."""
        chosen = logits.argmax(-1)
        warm = [index for index, request in enumerate(requests) if request.temperature > 0]
        if warm:
            heat = [requests[index].temperature for index in warm]
            draws = [[requests[index].draw(depth) for depth in depths[index]] for index in warm]
            scaled = logits[warm].float() / torch.tensor(heat, device=logits.device)[:, None, None]
            total = scaled.softmax(-1).cumsum(-1)
            sought = torch.tensor(draws, device=logits.device).unsqueeze(-1) * total[..., -1:]
            sampled = torch.searchsorted(total, sought, right=True).squeeze(-1)
            chosen[warm] = sampled.clamp_(max=logits.shape[-1] - 1)
        return list(chosen.tolist())

    def _corrupt(self, tree: Tree, chosen: list[int]) -> list[int]:
        """For tests: at each node, with the given probability, takes the draft's best child for the target's token."""
        if self.corrupt_rate:
            best: dict[int, int] = {}
            for node, token in tree.children:
                best.setdefault(node, token)
            for node, token in best.items():
                if self.noise.random() < self.corrupt_rate:
                    chosen[node] = token
        return chosen

    def _emit(self, request: Request, tokens: list[int]) -> Output:
        tokens = tokens[: request.max_tokens - request.emitted]
        finish = None
        if not request.ignore_eos and self.eos in tokens:
            tokens, finish = tokens[: tokens.index(self.eos) + 1], "stop"
        request.emitted += len(tokens)
        request.last = tokens[-1]
        if finish is None and request.emitted >= request.max_tokens:
            finish = "length"
        return Output(request.id, tokens, finish, request.verify_steps)

    def _release(self, slot: int) -> None:
        request = self.running.pop()
        if slot < len(self.running):
            self.running[slot] = request
            self.moves.append((len(self.running), slot, request.length))
            if self.drafter:
                self.drafter.move(len(self.running), slot, request.length)
