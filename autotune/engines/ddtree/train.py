"""Trains a target and its draft on Python source text, and measures acceptance on files held out.

    python -m autotune.engines.ddtree.train --out DIR --minutes 5 --device cuda

Text: every .py file of a standard library; one file in 24, chosen by a hash of its path, is held out and seen by no
stage but the last. Stages: a BPE tokenizer; the target by next-token loss, then rounded to what int8 will hold; the
rounded target's own continuations of training text, greedy and sampled; the draft by cross-entropy with those
tokens and with the target's distributions, its taps as input; acceptance lengths on the held-out files.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from autotune.engines.ddtree import weights
from autotune.engines.ddtree.cache import Cache, View
from autotune.engines.ddtree.model import Draft, Target, rotate, rotations
from autotune.engines.ddtree.shape import Shape
from autotune.engines.ddtree.tree import best_first

SKIPPED = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}
TREES = [(budget, topk) for budget in (4, 8, 16, 32, 64) for topk in (1, 2, 4, 8)]
DEPTHS = (3, 5, 7)
TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 1.0)  # of the continuations that the draft learns from, in equal shares


@dataclass(frozen=True)
class Sizes:
    """How much of everything a run uses: tokens, sequences, steps."""

    target_batch: int
    target_length: int
    rollouts: int
    prompts: tuple[int, ...]
    new: int
    draft_batch: int
    anchors: int
    held_out_prompts: int


FULL = Sizes(48, 1024, 4096, (40, 120, 360, 900), 320, 48, 64, 48)
TINY = Sizes(2, 32, 5, (8, 16), 16, 2, 3, 2)


def read_text(corpus: Path) -> tuple[list[str], list[str]]:
    """The texts for training and those held out."""
    parts: tuple[list[str], list[str]] = ([], [])
    for path in sorted(corpus.rglob("*.py")):
        relative = path.relative_to(corpus)
        if SKIPPED.isdisjoint(relative.parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            held = int(hashlib.sha256(str(relative).encode()).hexdigest(), 16) % 24 == 0
            if len(text) > 200:
                parts[held].append(text)
    return parts


def make_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], eos: int) -> Tensor:
    """One stream of tokens; every file starts with the end-of-text token."""
    stream: list[int] = []
    for encoded in tokenizer.encode_batch(texts):
        stream += [eos, *encoded.ids]
    return torch.tensor(stream, dtype=torch.int16)


def windows(stream: Tensor, count: int, length: int, device: torch.device, generator: torch.Generator) -> Tensor:
    start = torch.randint(len(stream) - length, (count, 1), generator=generator)
    return stream[start + torch.arange(length)].long().to(device)


def initial(shape: Shape, device: torch.device) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors = {}
    for name, size in weights.parameter_shapes(shape).items():
        if len(size) == 1:
            tensor = torch.ones(size)
        else:
            deep = (2 * shape.layers) ** -0.5 if name.endswith((".out", ".down")) else 1.0
            spread = 0.04 if name in ("embedding", "draft.masks") else 0.8 * deep / size[1] ** 0.5
            tensor = torch.randn(size) * spread
        tensors[name] = tensor.to(device)
    return tensors


def add(residual: Tensor, activations: Tensor, weight: Tensor) -> Tensor:
    return residual + F.linear(activations, weight)


def heads(qkv: Tensor, shape: Shape, parts: int) -> Tensor:
    """[batch, n, parts * width] as [parts, batch, n, heads, head width]."""
    return qkv.unflatten(-1, (parts, shape.heads, shape.head_width)).movedim(2, 0)


def run_target(target: Target, shape: Shape, tokens: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Whole sequences [batch, n] at once: the last residual stream and the taps."""

    def attend(_: int, qkv: Tensor) -> Tensor:
        query, key, value = heads(qkv, shape, 3)
        turn = factors[: tokens.shape[1], None]
        mixed = F.scaled_dot_product_attention(
            rotate(query, turn).transpose(1, 2),
            rotate(key, turn).transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
        )
        return mixed.transpose(1, 2).flatten(2)

    return target(tokens, attend, add)


def run_draft(draft: Draft, shape: Shape, tokens: Tensor, taps: Tensor, anchors: Tensor, factors: Tensor) -> Tensor:
    """Logits [batch, anchors, block - 1, vocabulary] of blocks that start at positions anchors [batch, count]."""
    batch, count = anchors.shape
    positions = anchors[..., None] + torch.arange(shape.block, device=tokens.device)
    joined, context = draft.context(taps)
    before = joined.gather(1, (anchors - 1)[..., None].expand(-1, -1, joined.shape[2])).flatten(0, 1)
    length = taps.shape[1]
    flat = positions.flatten(1)
    order = torch.arange(count * shape.block, device=tokens.device)
    block, place = order // shape.block, order % shape.block
    inside = (block[:, None] == block) & (place[:, None] >= place)
    seen = torch.arange(length, device=tokens.device) < anchors.repeat_interleave(shape.block, 1)[..., None]
    mask = torch.cat([seen, inside.expand(batch, -1, -1)], 2)[:, None]
    turn = factors[flat][..., None, :]

    def attend(index: int, qkv: Tensor) -> Tensor:
        query, key, value = heads(qkv.unflatten(0, (batch, -1)), shape, 3)
        old_key, old_value = heads(context[index], shape, 2)
        keys = torch.cat([rotate(old_key, factors[:length, None]), rotate(key, turn)], 1)
        values = torch.cat([old_value, value], 1)
        mixed = F.scaled_dot_product_attention(
            rotate(query, turn).transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask
        )
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)

    last = tokens.gather(1, anchors).flatten()
    return draft(last, before, shape.block - 1, attend, add).unflatten(0, (batch, count, -1))


def optimise(
    parameters: list[Tensor], loss: Callable[[], Tensor], peak: float, seconds: float, device: torch.device, name: str
) -> int:
    """AdamW with warm-up and cosine decay over `seconds` of wall time; returns the number of steps."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=device.type == "cuda")
    start, step, mean = time.monotonic(), 0, torch.zeros((), device=device)
    while (done := (time.monotonic() - start) / seconds) < 1:
        for group in adam.param_groups:
            group["lr"] = peak * min(1.0, (step + 1) / 150) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        adam.zero_grad()
        step += 1
        mean = mean * 0.98 + value.detach() * 0.02
        if step % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize()
        if step % 500 == 0:
            say(f"{name}: step {step}, loss {mean.item() / (1 - 0.98**step):.3f}, {done:.0%}")
    for parameter in parameters:
        parameter.requires_grad_(False)
    say(f"{name}: {step} steps, loss {mean.item() / (1 - 0.98**step):.3f}")
    return step


def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What will come back from the file that `weights.save` writes."""
    return {
        name: weights.dequantise(*weights.quantise(tensor)) if tensor.dim() == 2 else tensor.half().float()
        for name, tensor in tensors.items()
    }


@torch.inference_mode()
def continue_text(target: Target, shape: Shape, prompts: Tensor, new: int, temperature: float) -> Tensor:
    """The target's own `new` tokens after prompts [batch, n], all in one batch: [batch, n + new]."""
    batch, length = prompts.shape
    capacity = length + new
    device = prompts.device
    factors = rotations(shape, capacity).to(device)
    cache = Cache(shape.layers, batch, capacity, shape.heads, factors, target.embedding.dtype)
    tokens = torch.empty((batch, capacity), dtype=torch.long, device=device)
    tokens[:, :length] = prompts
    start = torch.arange(batch, device=device)[:, None] * capacity
    begin, end = 0, length
    while end < capacity + 1:
        turn = factors[begin:end].repeat(batch, 1)[:, None, None]
        rows = (start + torch.arange(begin, end, device=device)).flatten()
        view = View(0, batch, end - begin, end, rows, turn, None, causal=begin == 0)

        def attend(layer: int, qkv: Tensor, view: View = view) -> Tensor:
            return cache.attend(layer, qkv, view)

        x, _ = target(tokens[:, begin:end].flatten(), attend, add)
        logits = F.linear(target.finish(x.unflatten(0, (batch, -1))[:, -1]), target.embedding).float()
        if end < capacity:
            chosen = (logits / temperature).softmax(-1).multinomial(1)[:, 0] if temperature else logits.argmax(-1)
            tokens[:, end] = chosen
        begin, end = end, end + 1
    return tokens


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Traces:
    """For evaluation: the tokens of one continuation, and the draft's best choices at each of its positions."""

    continuation: list[int]  # first the token that the prompt's pass gave
    tokens: NDArray[np.int64]  # [position, block - 1, 8]
    scores: NDArray[np.float32]


def steps_taken(traces: list[Traces], budget: int, topk: int, depth: int) -> tuple[int, int]:
    """Output tokens and verify steps of a walk through the continuations with trees of this kind."""
    emitted = steps = 0
    for trace in traces:
        place = 0
        while place < len(trace.tokens):
            tokens, scores = (part[place, :depth, :topk].tolist() for part in (trace.tokens, trace.scores))
            tree = best_first(trace.continuation[place], tokens, scores, budget)
            node, ahead = 0, 1
            while (node := tree.children.get((node, trace.continuation[place + ahead]), -1)) >= 0:
                ahead += 1
            place += ahead
            emitted += ahead
            steps += 1
    return emitted, steps


@torch.inference_mode()
def trace(target: Target, draft: Draft, shape: Shape, tokens: Tensor, prompt: int, factors: Tensor) -> Iterator[Traces]:
    """tokens [batch, prompt + new] of continuations as Traces, one sequence at a time."""
    for row in tokens.split(1):
        _, taps = run_target(target, shape, row, factors)
        anchors = torch.arange(prompt, row.shape[1] - shape.block, device=row.device)[None]
        logits = run_draft(draft, shape, row, taps, anchors, factors)[0]
        best = logits.float().log_softmax(-1).topk(8)
        yield Traces(row[0, prompt:].tolist(), best.indices.cpu().numpy(), best.values.cpu().numpy())


def acceptance(traces: list[Traces], pool: Executor) -> list[dict[str, float]]:
    """Tokens per verify step for each tree of the table."""
    jobs = [(budget, topk, depth) for depth in DEPTHS for budget, topk in TREES]
    futures = [pool.submit(steps_taken, traces, *job) for job in jobs]
    counts = [future.result() for future in futures]
    return [
        {"budget": budget, "topk": topk, "depth": depth, "tokens_per_step": round(emitted / steps, 3)}
        for (budget, topk, depth), (emitted, steps) in zip(jobs, counts, strict=True)
    ]


def train(shape: Shape, corpus: Path, out: Path, minutes: float, device: torch.device, sizes: Sizes) -> None:
    """All stages, in about `minutes` of wall time, the evaluation's half minute included."""
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    training, held_out = read_text(corpus)
    tokenizer = make_tokenizer(training, shape.vocab_size)
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=False))
    shape.save(out)
    stream, unseen = encode(tokenizer, training, shape.eos), encode(tokenizer, held_out, shape.eos)
    say(f"text: {len(training)} files, {len(stream)} tokens; held out {len(held_out)} files, {len(unseen)} tokens")
    generator = torch.Generator().manual_seed(0)
    tensors = initial(shape, device)
    factors = rotations(shape, shape.max_position).to(device)
    left = minutes * 60 - (time.monotonic() - start) - 30

    target = Target(shape, tensors)

    def target_loss(source: Tensor = stream) -> Tensor:
        tokens = windows(source, sizes.target_batch, sizes.target_length + 1, device, generator)
        x, _ = run_target(target, shape, tokens[:, :-1], factors)
        logits = F.linear(target.finish(x), target.embedding)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    parameters = [tensor for name, tensor in tensors.items() if not name.startswith("draft.")]
    target_steps = optimise(parameters, target_loss, 4e-3, left * 0.33, device, "target")
    tensors = {
        name: tensor if name.startswith("draft.") else rounded({name: tensor})[name] for name, tensor in tensors.items()
    }
    target = Target(shape, tensors)
    with torch.no_grad():
        seen_loss, unseen_loss = (sum(target_loss(s).item() for _ in range(8)) / 8 for s in (stream, unseen))
    say(f"target, rounded: loss {seen_loss:.3f} on training text, {unseen_loss:.3f} on held-out text")

    low = torch.bfloat16 if device.type == "cuda" else torch.float32
    quick = Target(shape, {name: tensor.to(low) for name, tensor in tensors.items()})
    made_text: list[tuple[int, Tensor, Tensor]] = []  # (prompt length, tokens, taps)
    deadline = time.monotonic() + left * 0.16
    while time.monotonic() < deadline or len(made_text) < len(sizes.prompts):
        prompt = sizes.prompts[len(made_text) % len(sizes.prompts)]
        text = windows(stream, sizes.rollouts, prompt, device, generator)
        parts = text.split(-(-len(text) // len(TEMPERATURES)))
        tokens = torch.cat(
            [continue_text(quick, shape, part, sizes.new, t) for part, t in zip(parts, TEMPERATURES, strict=False)]
        )
        with torch.no_grad():
            taps = torch.cat([run_target(quick, shape, part, factors)[1] for part in tokens.split(64)])
        made_text.append((prompt, tokens, taps))
    made = sum(len(tokens) for _, tokens, _ in made_text) * sizes.new
    say(f"continuations: {made} tokens")

    draft = Draft(shape, tensors)
    weight = torch.exp(-torch.arange(shape.block - 1, device=device) / 5.0)
    weight = weight / weight.sum()

    def draft_loss() -> Tensor:
        prompt, tokens, taps = made_text[int(torch.randint(len(made_text), (), generator=generator))]
        index = torch.randint(len(tokens), (sizes.draft_batch,), generator=generator).to(device)
        tokens, taps = tokens[index], taps[index].to(tensors["draft.join"].dtype)
        last = tokens.shape[1] - shape.block
        anchors = prompt + torch.rand((len(tokens), last - prompt), device=device).argsort(1)[:, : sizes.anchors]
        logits = run_draft(draft, shape, tokens, taps, anchors, factors)
        places = (anchors[..., None] + torch.arange(shape.block, device=device)).flatten(1)
        wanted = tokens.gather(1, places).unflatten(1, (-1, shape.block))[..., 1:]
        with torch.no_grad():  # the last tap is the residual stream that gives the target's logits
            final = taps[..., -shape.width :].gather(1, places[..., None].expand(-1, -1, shape.width))
            taught = F.linear(target.finish(final), target.embedding).float().softmax(-1)
        taught = taught.unflatten(1, (-1, shape.block))[:, :, :-1]
        guesses = logits.float().log_softmax(-1)
        soft = (taught * guesses).sum(-1)
        hard = guesses.gather(-1, wanted[..., None])[..., 0]
        return -((soft + hard) * 0.5 * weight).sum(-1).mean()

    parameters = [tensor for name, tensor in tensors.items() if name.startswith("draft.")]
    seconds = max(5.0, minutes * 60 - (time.monotonic() - start) - 30)
    draft_steps = optimise(parameters, draft_loss, 2e-3, seconds, device, "draft")
    made_text.clear()
    weights.save(tensors, out)
    tensors = {name: tensor.to(device) for name, tensor in weights.load(out).items()}
    target, draft = Target(shape, tensors), Draft(shape, tensors)

    tables = {}
    generator.manual_seed(1)
    pool = ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 4), get_context("spawn"))
    for name, temperature in (("greedy", 0.0), ("temperature 0.7", 0.7), ("temperature 1", 1.0)):
        traces: list[Traces] = []
        for prompt in sizes.prompts[::2]:
            text = windows(unseen, sizes.held_out_prompts, prompt, device, generator)
            tokens = continue_text(target, shape, text, sizes.new, temperature)
            if name == "greedy":
                say("example: " + repr(tokenizer.decode(tokens[0].tolist()))[-500:])
            traces += trace(target, draft, shape, tokens, prompt, factors)
        tables[name] = acceptance(traces, pool)
        say(
            f"{name}: "
            + ", ".join(f"{r['budget']}/{r['topk']} {r['tokens_per_step']}" for r in tables[name] if r["depth"] == 7)
        )
    pool.shutdown()
    report = {
        "training_files": len(training),
        "training_tokens": len(stream),
        "held_out_tokens": len(unseen),
        "target_steps": target_steps,
        "target_loss": round(seen_loss, 4),
        "target_held_out_loss": round(unseen_loss, 4),
        "continuation_tokens": made,
        "draft_steps": draft_steps,
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "seconds": round(time.monotonic() - start, 1),
        "acceptance": tables,
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    say(f"done in {report['seconds']} s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m autotune.engines.ddtree.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for config, tokenizer, weights and report")
    parser.add_argument("--minutes", type=float, required=True, help="wall time for everything")
    parser.add_argument(
        "--corpus", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="directory of .py files"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--taps", default="4,8,12", help="target layers that the draft reads")
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--draft-hidden", type=int, default=384)
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, to try every stage on a CPU")
    options = parser.parse_args()
    shape = Shape(
        vocab_size=2048,
        width=options.width,
        heads=4,
        hidden=options.hidden,
        layers=options.layers,
        taps=tuple(int(tap) for tap in options.taps.split(",")),
        draft_layers=options.draft_layers,
        draft_hidden=options.draft_hidden,
        block=8,
        max_position=2048,
        rope_base=10000.0,
        eos=0,
    )
    sizes = TINY if options.tiny else FULL
    train(shape, options.corpus, options.out, options.minutes, torch.device(options.device), sizes)


if __name__ == "__main__":
    main()
