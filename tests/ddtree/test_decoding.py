"""The engine writes the target's own text with any tree and any batch."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from autotune.ddtree.arguments import PACKAGED_MODEL, Shape

if TYPE_CHECKING:
    import torch

    from autotune.ddtree.engine import Engine, Request
    from autotune.ddtree.executor import Plan
    from autotune.ddtree.model import (
        Draft,
        Target,
        initial,
        load_weights,
        rotations,
        run_draft,
        run_target,
        save_weights,
        shard,
    )
    from tests.ddtree.engines import Model, complete, make_engine, packaged_model, tiny_model

TREES = [(1, 1, 1), (5, 1, 5), (8, 4, 3), (16, 2, 5), (40, 8, 5)]


def asked(count: int, vocab_size: int, temperature: float, tokens: int = 24, seed: int = 0) -> list[Request]:
    """Requests of different prompts and lengths."""
    draw = random.Random(seed)
    return [Request(number, [draw.randrange(vocab_size) for _ in range(draw.randrange(1, 40))], tokens + number % 7,
                    temperature, seed=number, ignore_eos=True) for number in range(count)]


@cache
def plain(temperature: float) -> dict[int, list[int]]:
    """Output of decoding without a tree."""
    return complete(make_engine(tiny_model(), 0), asked(24, 12, temperature))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("tree", TREES)
def test_tree_decoding_gives_the_output_of_plain_decoding(tree: tuple[int, int, int], temperature: float) -> None:
    engine = make_engine(tiny_model(), *tree)
    assert complete(engine, asked(24, 12, temperature)) == plain(temperature)
    assert engine.accepted_tokens > 24, "without accepted tokens the comparison proves nothing"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tree_decoding_of_the_packaged_model_gives_the_output_of_plain_decoding(temperature: float) -> None:
    expected = complete(make_engine(packaged_model(), 0, slots=6), asked(6, 2048, temperature))
    engine = make_engine(packaged_model(), 16, depth=7, slots=6)
    assert complete(engine, asked(6, 2048, temperature)) == expected
    assert engine.accepted_tokens > 5


def test_a_request_gets_the_same_output_in_a_batch_and_alone() -> None:
    together = complete(make_engine(tiny_model(), 8, slots=5), asked(12, 12, 0.7))
    single = make_engine(tiny_model(), 8, slots=1)
    alone = {number: made for request in asked(12, 12, 0.7) for number, made in complete(single, [request]).items()}
    assert together == alone


def exact(model: Model, prompt: list[int], temperature: float, tokens: int) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `tokens` tokens, from whole forward passes."""
    shape, tensors = model
    target, factors = Target(shape, tensors), rotations(shape, 64)
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        rows = torch.tensor([[*prompt, *path] for path in known])
        x, _ = run_target(target, shape, rows, factors)
        after = ((target.finish(x[:, -1]) @ target.embedding.T) / temperature).softmax(-1).tolist()
        known = {(*path, token): weight * p for (path, weight), row in zip(known.items(), after, strict=True)
                 for token, p in enumerate(row)}
    return known


def chi_square(engine: Engine, model: Model, samples: int) -> float:
    """Distance of three sampled tokens from their exact distribution, in standard deviations of the statistic."""
    prompt, temperature = [3, 1, 4, 1, 5], 0.8
    requests = [Request(n, prompt, 3, temperature, seed=n, ignore_eos=True) for n in range(samples)]
    counts = Counter(tuple(made) for made in complete(engine, requests).values())
    statistic = freedom = rare = rare_seen = 0.0
    for path, p in exact(model, prompt, temperature, 3).items():
        if p * samples < 5:
            rare, rare_seen = rare + p * samples, rare_seen + counts[path]
        else:
            statistic += (counts[path] - p * samples) ** 2 / (p * samples)
            freedom += 1
    statistic += (rare_seen - rare) ** 2 / rare
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("corrupt", "low", "high"), [(0.0, -99.0, 4.0), (0.15, 8.0, 1e9)])
def test_sampling_through_trees_keeps_the_targets_distribution(corrupt: float, low: float, high: float) -> None:
    engine = make_engine(tiny_model(), 8, topk=4, depth=3, slots=64, context=32, corrupt=corrupt)
    assert low < chi_square(engine, tiny_model(), 3000) < high
    assert engine.accepted_tokens > 800


def test_an_aborted_request_frees_its_slot_and_does_not_change_the_others() -> None:
    expected = complete(make_engine(tiny_model(), 8, slots=3), asked(3, 12, 0.0))
    engine = make_engine(tiny_model(), 8, slots=3)
    for request in asked(3, 12, 0.0):
        engine.submit(request)
    begun = [output for _ in range(5) for output in engine.step()]
    engine.abort(0)
    assert [request.id for request in engine.running] == [2, 1]
    made = complete(engine, [])
    for number in (1, 2):
        assert [t for o in begun if o.id == number for t in o.tokens] + made[number] == expected[number]


def test_output_ends_at_the_end_of_text_unless_it_is_ignored() -> None:
    model = tiny_model()
    ignoring = complete(make_engine(model, 8), asked(20, 12, 0.0))
    number = next(number for number, made in ignoring.items() if 0 in made[:-1])
    request = asked(20, 12, 0.0)[number]
    request.ignore_eos = False
    assert complete(make_engine(model, 8), [request])[number] == ignoring[number][: ignoring[number].index(0) + 1]


def test_the_draft_in_the_server_is_the_draft_that_was_trained() -> None:
    shape, tensors = tiny_model()
    tokens = torch.randint(12, (1, 30), generator=torch.Generator().manual_seed(1))
    factors = rotations(shape, 64)
    _, taps = run_target(Target(shape, tensors), shape, tokens, factors)
    logits = run_draft(Draft(shape, tensors), shape, tokens, taps, torch.tensor([[23]]), factors)
    expected = logits[0, 0].log_softmax(-1).sort(descending=True).values
    engine = make_engine((shape, tensors), 4, topk=12)
    drafter = engine.drafter
    assert drafter
    rows = tokens[0].tolist()
    with torch.inference_mode():
        _, prompt_taps = engine.executor.run(Plan(0, [rows[:20]], [0], [], None))
        drafter.learn(0, [0], prompt_taps, [20])
        chain = np.tril(np.ones((1, 4, 4), np.bool_))
        _, more_taps = engine.executor.run(Plan(0, [rows[20:24]], [20], [[0, 1, 2, 3]], chain))
        drafter.learn(0, [20], more_taps[:, :3], [3])
        _, scores = drafter.propose([rows[23]], [23])
    assert torch.allclose(torch.tensor(scores[0]), expected, atol=1e-4)


def test_weights_are_rounded_to_int8_once(tmp_path: Path) -> None:
    _, tensors = tiny_model()
    save_weights(tensors, tmp_path)
    once = load_weights(tmp_path)
    save_weights(once, tmp_path)
    twice = load_weights(tmp_path)
    for name, tensor in tensors.items():
        assert (once[name] - tensor).abs().max() <= tensor.abs().max() / 200
        assert torch.equal(once[name], twice[name])


def test_shards_of_two_ranks_add_up_to_the_whole() -> None:
    shape, tensors = packaged_model()
    left, right = (shard(tensors, shape, rank, 2) for rank in range(2))
    x = torch.randn(3, shape.hidden)
    half = shape.hidden // 2
    whole = x @ tensors["target.0.down"].T
    parts = x[:, :half] @ left["target.0.down"].T + x[:, half:] @ right["target.0.down"].T
    assert torch.allclose(whole, parts, atol=1e-5)
    assert left["target.0.qkv"].shape == (3 * shape.width // 2, shape.width)
    assert torch.equal(left["draft.0.qkv"], tensors["draft.0.qkv"])
    with pytest.raises(ValueError, match="must be divisible by --tp-size"):
        shard(tensors, shape, 0, 3)


def test_the_packaged_model_is_small_and_complete() -> None:
    directory = PACKAGED_MODEL
    assert sum(path.stat().st_size for path in directory.iterdir()) < 3_500_000
    shape = Shape.load(directory)
    sizes = {name: tensor.shape for name, tensor in initial(shape, torch.device("cpu")).items()}
    assert {name: tensor.shape for name, tensor in packaged_model()[1].items()} == sizes
