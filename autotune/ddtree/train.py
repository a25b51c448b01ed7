"""Trains a target and its draft on Python source text, and measures acceptance on files held out.

    python -m autotune.ddtree.train --out DIR --minutes 5 --device cuda

Text: every .py file of a standard library; one file in 24, chosen by a hash of its path, is held out for the last
stage. Stages: a BPE tokenizer; the target by next-token loss, then rounded to int8; the rounded target's own
continuations of training text, greedy and sampled; the draft by cross-entropy with those tokens and with the target's
distributions, its taps as input; acceptance lengths on the held-out files.
"""

import argparse
import functools
import hashlib
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from autotune.ddtree.arguments import Shape
from autotune.ddtree.engine import best_first
from autotune.ddtree.executor import continue_text
from autotune.ddtree.model import (
    Draft,
    Target,
    initial,
    load_weights,
    rotations,
    rounded,
    run_draft,
    run_target,
    save_weights,
)

SKIPPED = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}
TREES = [(budget, topk) for budget in (4, 8, 16, 32, 64) for topk in (1, 2, 4, 8)]
DEPTHS = (3, 5, 7)
TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 1.0)  # of the continuations that the draft learns from, in equal shares


class Sizes(NamedTuple):
    """Sizes of a run in tokens, sequences and steps."""

    target_batch: int
    target_length: int
    rollouts: int
    prompts: tuple[int, ...]
    new: int
    draft_batch: int
    anchors: int
    held_out_prompts: int
    evaluation_s: float


FULL = Sizes(48, 1024, 2048, (40, 120, 360, 900), 320, 48, 64, 48, 30)
TINY = Sizes(2, 32, 5, (8, 16), 16, 2, 3, 2, 10)


def read_text(corpus: Path) -> tuple[list[str], list[str]]:
    """(training texts, held-out texts)."""
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
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<|endoftext|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], eos: int) -> Tensor:
    """One stream of tokens; every file starts with the end-of-text token."""
    stream: list[int] = []
    for encoded in tokenizer.encode_batch(texts):
        stream += [eos, *encoded.ids]
    return torch.tensor(stream, dtype=torch.int16)


def optimise(parameters: list[Tensor], loss: Callable[[], Tensor], peak: float, seconds: float, device: torch.device,
             name: str) -> int:
    """AdamW with warm-up and cosine decay over `seconds` of wall time; returns the number of steps."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0}]
    cuda = device.type == "cuda"
    adam = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=cuda)
    start, step, mean = time.monotonic(), 0, torch.zeros((), device=device)
    while (done := (time.monotonic() - start) / seconds) < 1:
        for group in adam.param_groups:
            group["lr"] = peak * min(1.0, (step + 1) / 150) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        adam.zero_grad()
        step += 1
        mean = mean * 0.98 + value.detach() * 0.02
        if step % 10 == 0 and cuda:
            torch.cuda.synchronize()
        if step % 500 == 0:
            say(f"{name}: step {step}, loss {mean.item() / (1 - 0.98**step):.3f}, {done:.0%}")
    for parameter in parameters:
        parameter.requires_grad_(False)
    say(f"{name}: {step} steps, loss {mean.item() / (1 - 0.98**step):.3f}")
    return step


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Continuations(NamedTuple):
    """Sequences of the target's own making, after prompts of one length."""

    prompt: int
    tokens: Tensor  # [batch, prompt + new]
    taps: Tensor  # [batch, prompt + new, taps * width]


class Traces(NamedTuple):
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
            node, steps = 0, steps + 1
            place += 1
            while (node := tree.children.get((node, trace.continuation[place]), -1)) >= 0:
                place += 1
        emitted += place
    return emitted, steps


@torch.inference_mode()
def trace(target: Target, draft: Draft, shape: Shape, tokens: Tensor, prompt: int, factors: Tensor) -> Iterator[Traces]:
    """tokens [batch, prompt + new] of continuations as Traces, one sequence at a time."""
    for row in torch.split(tokens, 1):
        _, taps = run_target(target, shape, row, factors)
        anchors = torch.arange(prompt, row.shape[1] - shape.block, device=row.device)[None]
        logits = run_draft(draft, shape, row, taps, anchors, factors)[0]
        best = logits.float().log_softmax(-1).topk(8)
        yield Traces(row[0, prompt:].tolist(), best.indices.cpu().numpy(), best.values.cpu().numpy())


def acceptance(traces: list[Traces], pool: Executor) -> list[dict[str, float]]:
    """Tokens per verify step for each tree of the table."""
    jobs = [(budget, topk, depth) for depth in DEPTHS for budget, topk in TREES]
    counts = pool.map(functools.partial(steps_taken, traces), *zip(*jobs, strict=True))
    return [{"budget": budget, "topk": topk, "depth": depth, "tokens_per_step": round(emitted / steps, 3)}
            for (budget, topk, depth), (emitted, steps) in zip(jobs, counts, strict=True)]


class Training:
    """A target and a draft in the making; each method is one stage."""

    def __init__(self, shape: Shape, corpus: Path, device: torch.device, sizes: Sizes, source: Path | None) -> None:
        """Reads the text. With a source, its tokenizer, target and draft are where the work goes on."""
        self.shape, self.device, self.sizes, self.source = shape, device, sizes, source
        training, held_out = read_text(corpus)
        if source:
            self.tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
            self.tensors = {name: tensor.to(device) for name, tensor in load_weights(source).items()}
            self.report: dict[str, Any] = json.loads((source / "report.json").read_text())
        else:
            self.tokenizer = make_tokenizer(training, shape.vocab_size)
            self.tensors = initial(shape, device)
            self.report = {"continuation_tokens": 0, "draft_steps": 0, "seconds": 0}
        self.stream, self.unseen = (encode(self.tokenizer, texts, shape.eos) for texts in (training, held_out))
        say(f"{len(training)} files, {len(self.stream)} tokens; held out {len(held_out)}, {len(self.unseen)} tokens")
        self.report |= {"training_files": len(training), "training_tokens": len(self.stream),
                        "held_out_tokens": len(self.unseen),
                        "parameters": sum(tensor.numel() for tensor in self.tensors.values())}
        self.factors = rotations(shape, shape.max_position).to(device)
        self.generator = torch.Generator().manual_seed(0)

    def part(self, *, draft: bool) -> list[Tensor]:
        return [tensor for name, tensor in self.tensors.items() if name.startswith("draft.") == draft]

    def windows(self, stream: Tensor, count: int, length: int) -> Tensor:
        """Random pieces of text [count, length]."""
        start = torch.randint(len(stream) - length, (count, 1), generator=self.generator)
        return stream[start + torch.arange(length)].long().to(self.device)

    def target(self, dtype: torch.dtype = torch.float32) -> Target:
        return Target(self.shape, {name: tensor.to(dtype) for name, tensor in self.tensors.items()})

    def train_target(self, seconds: float) -> None:
        target, sizes = self.target(), self.sizes

        def loss(stream: Tensor = self.stream) -> Tensor:
            tokens = self.windows(stream, sizes.target_batch, sizes.target_length + 1)
            x, _ = run_target(target, self.shape, tokens[:, :-1], self.factors)
            logits = F.linear(target.finish(x), target.embedding)
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

        self.report["target_steps"] = optimise(self.part(draft=False), loss, 4e-3, seconds, self.device, "target")
        for name, tensor in self.tensors.items():
            if not name.startswith("draft."):
                tensor.copy_(rounded(tensor))
        with torch.no_grad():
            losses = (sum(loss(stream).item() for _ in range(8)) / 8 for stream in (self.stream, self.unseen))
        self.report["target_loss"], self.report["target_held_out_loss"] = (round(value, 4) for value in losses)
        say(f"rounded: {self.report['target_loss']}, on held-out text {self.report['target_held_out_loss']}")

    def continuations(self, seconds: float) -> list[Continuations]:
        """The target's own continuations of training text, for about so long, at least one for each prompt length."""
        sizes, shape, found = self.sizes, self.shape, list[Continuations]()
        target = self.target(torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or len(found) < len(sizes.prompts):
            prompt = sizes.prompts[len(found) % len(sizes.prompts)]
            text = self.windows(self.stream, sizes.rollouts, prompt)
            tokens = continue_text(target, shape, text, sizes.new, TEMPERATURES)
            with torch.no_grad():
                pieces = torch.split(tokens, 64)
                taps = torch.cat([run_target(target, shape, piece, self.factors)[1] for piece in pieces])
            found.append(Continuations(prompt, tokens, taps))
            self.report["continuation_tokens"] += len(tokens) * sizes.new
        say(f"continuations: {self.report['continuation_tokens']} tokens")
        return found

    def train_draft(self, continuations: list[Continuations], seconds: float) -> None:
        sizes, shape, device = self.sizes, self.shape, self.device
        target, draft = self.target(), Draft(shape, self.tensors)
        weight = (-torch.arange(shape.block - 1, device=device) / 5.0).softmax(0)

        def loss() -> Tensor:
            some = continuations[int(torch.randint(len(continuations), (), generator=self.generator))]
            index = torch.randint(len(some.tokens), (sizes.draft_batch,), generator=self.generator).to(device)
            tokens, taps = some.tokens[index], some.taps[index].float()
            places = torch.rand((len(tokens), tokens.shape[1] - shape.block - some.prompt), device=device)
            anchors = some.prompt + places.argsort(1)[:, : sizes.anchors]
            logits = run_draft(draft, shape, tokens, taps, anchors, self.factors)
            block = (anchors[..., None] + torch.arange(shape.block, device=device)).flatten(1)
            wanted = tokens.gather(1, block).view(len(tokens), -1, shape.block)[..., 1:]
            with torch.no_grad():  # the last tap is the residual stream that gives the target's logits
                final = taps[..., -shape.width :].gather(1, block[..., None].expand(-1, -1, shape.width))
                taught = F.linear(target.finish(final), target.embedding).float().softmax(-1)
            taught = taught.view(len(tokens), -1, shape.block, shape.vocab_size)[:, :, :-1]
            guesses = logits.float().log_softmax(-1)
            hard = guesses.gather(-1, wanted[..., None])[..., 0]
            return -(((taught * guesses).sum(-1) + hard) * 0.5 * weight).sum(-1).mean()

        self.report["draft_steps"] += optimise(self.part(draft=True), loss, 2e-3, seconds, device, "draft")

    def save(self, out: Path) -> None:
        """Writes the model directory, and goes on with what was written."""
        out.mkdir(parents=True, exist_ok=True)
        self.shape.save(out)
        (out / "tokenizer.json").write_text(self.tokenizer.to_str(pretty=False))
        save_weights(self.tensors, out)
        self.tensors = {name: tensor.to(self.device) for name, tensor in load_weights(out).items()}

    def evaluate(self, workers: int) -> None:
        """Acceptance tables on held-out text."""
        sizes, target, draft = self.sizes, self.target(), Draft(self.shape, self.tensors)
        tables = self.report["acceptance"] = {}
        self.generator.manual_seed(1)
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            for name, temperature in (("greedy", 0.0), ("temperature 0.7", 0.7), ("temperature 1", 1.0)):
                traces: list[Traces] = []
                for prompt in sizes.prompts[::2]:
                    text = self.windows(self.unseen, sizes.held_out_prompts, prompt)
                    tokens = continue_text(target, self.shape, text, sizes.new, [temperature])
                    say(f"{name}: " + repr(self.tokenizer.decode(tokens[0].tolist()))[-300:])
                    traces += trace(target, draft, self.shape, tokens, prompt, self.factors)
                tables[name] = acceptance(traces, pool)
                cells = [f"{r['budget']}/{r['topk']} {r['tokens_per_step']}" for r in tables[name] if r["depth"] == 7]
                say(f"{name}: " + ", ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m autotune.ddtree.train", description=__doc__)
    flag = parser.add_argument
    flag("--out", type=Path, required=True, help="directory for config, tokenizer, weights and report")
    flag("--minutes", type=float, required=True, help="wall time for everything")
    flag("--from", type=Path, dest="source", help="model directory: keep its tokenizer and target, train its draft on")
    flag("--corpus", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="directory of .py files")
    flag("--device", default="cuda")
    flag("--width", type=int, default=128)
    flag("--hidden", type=int, default=320)
    flag("--layers", type=int, default=12)
    flag("--taps", type=int, nargs="+", default=[4, 8, 12], help="target layers that the draft reads")
    flag("--draft-layers", type=int, default=2)
    flag("--draft-hidden", type=int, default=384)
    flag("--tiny", action="store_true", help="smallest sizes, to try every stage on a CPU")
    options = parser.parse_args()
    start = time.monotonic()
    sizes = TINY if options.tiny else FULL
    shape = Shape.load(options.source) if options.source else Shape(
        vocab_size=2048, width=options.width, heads=4, hidden=options.hidden, layers=options.layers,
        taps=tuple(options.taps), draft_layers=options.draft_layers, draft_hidden=options.draft_hidden,
        block=8, max_position=2048, rope_base=10000.0, eos=0)
    training = Training(shape, options.corpus, torch.device(options.device), sizes, options.source)

    def left(share: float) -> float:
        minutes: float = options.minutes
        return max(5.0, share * (minutes * 60 - (time.monotonic() - start) - sizes.evaluation_s))

    if not options.source:
        training.train_target(left(0.33))
    training.train_draft(training.continuations(left(0.2)), left(1.0))
    training.save(options.out)
    training.evaluate(max(1, (os.cpu_count() or 2) - 4))
    training.report["seconds"] = round(training.report["seconds"] + time.monotonic() - start, 1)
    (options.out / "report.json").write_text(json.dumps(training.report, indent=1) + "\n")
    say(f"done in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
