"""A small reference server for DDTree speculative decoding (`python -m autotune.ddtree`).

No released server has DDTree (Ringel and Romano, 2026, arXiv 2604.12989), so this one is real, small and readable:

1. The target runs once over the prompt. Hidden states of a few of its layers ("taps") are kept for the draft.
2. The draft gets [last token, MASK, MASK, ...] and those taps, and gives in one pass a distribution for each of the
   next positions, as DFlash does. The positions are treated as independent.
3. So a path's log-probability is a sum, and a heap gives the most probable nodes in order. The tree has
   `--tree-budget` nodes, at most `--tree-topk` choices a position and `--draft-depth` positions.
4. The target verifies all nodes in one pass: every node sees the prefix and its own ancestors only.
5. The walk follows the target's own token at each node until that token is no child; it is emitted as well. So each
   step gives at least one token, and the output is the target's own.
6. Keys and values of the accepted path move together in the cache, and the next draft pass starts.

The model (3M parameters, Python source text) is for measuring servers, not for use.
"""

__version__ = "0.1.0"
