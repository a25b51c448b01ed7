"""Joules from sampled watts."""

from __future__ import annotations

from collections.abc import Sequence


def integrate(points: Sequence[tuple[float, float]], start: float, end: float, max_gap: float) -> float | None:
    """Integral of samples (t in s, W) over [start, end] in J, linear in between and level for up to `max_gap`
    beyond the first and last; None when neighbouring samples, or the ends, are further apart than that."""
    inside = [p for p in points if start < p[0] < end]
    before = [p for p in points if p[0] <= start][-1:]
    after = [p for p in points if p[0] >= end][:1]
    if not inside and not (before and after):
        return None
    nodes = before + inside + after
    if nodes[0][0] - start > max_gap or end - nodes[-1][0] > max_gap:
        return None
    if any(b[0] - a[0] > max_gap for a, b in zip(nodes, nodes[1:], strict=False)):
        return None
    total = 0.0
    if nodes[0][0] > start:
        total += nodes[0][1] * (nodes[0][0] - start)
    if nodes[-1][0] < end:
        total += nodes[-1][1] * (end - nodes[-1][0])
    for (t0, w0), (t1, w1) in zip(nodes, nodes[1:], strict=False):
        a, b = max(t0, start), min(t1, end)
        slope = (w1 - w0) / (t1 - t0) if t1 > t0 else 0.0
        total += (b - a) * (w0 + slope * ((a + b) / 2 - t0))
    return total
