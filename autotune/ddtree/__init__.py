"""A small reference server for DDTree speculative decoding (`python -m autotune.ddtree`).

No released server has DDTree (Ringel and Romano, "Accelerating Speculative Decoding with Block Diffusion Draft
Trees", 2026, arXiv 2604.12989), so this package brings one that is real, small and readable:

1. The target runs once over the prompt. Hidden states of a few of its layers ("taps") are kept for the draft.
2. The draft gets [last token, MASK, MASK, ...] and those taps, and gives in one parallel pass a distribution for
   each of the next positions, as DFlash does. The positions are treated as independent.
3. So a path's log-probability is a sum, and a heap gives the most probable nodes in order: a popped node pushes
   its next sibling and its first child. `--tree-budget` nodes, at most `--tree-topk` choices a position and
   `--draft-depth` positions make the tree.
4. The target verifies all nodes in one pass: every node sees the prefix and its own ancestors only, and stands at
   the position of its depth.
5. The target's own token at each node says where to go on. The walk ends where that token is no child; that token
   is emitted as well, so each step gives at least one token and the output is the target's own.
6. Keys and values of the accepted path move together in the cache, and the next draft pass starts.

What it is not: it has no paged attention, prefix cache, chunked prefill, CUDA graphs, top-p sampling, stop strings,
chat templates or structured output; its model (3M parameters, Python source text) is for measuring servers, not for
use. With tensor parallelism the draft runs on rank 0 alone.
"""

__version__ = "0.1.0"
