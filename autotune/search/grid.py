"""A space as integer arrays: one column per parameter, one row per configuration.

    grid = Grid(space)
    rows = grid.servers(rng, around)        # (n, P) codes of allowed server parts
    grid.allowed(rows)                      # (n, L) which of the load parts each may be measured under

A code is the index of a choice; an absent parameter has the code len(choices).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.records import Config, Value, exact
from autotune.space.constraints import Rule
from autotune.space.space import Param, Space

Codes = NDArray[np.int16]
Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]

ENUMERATED = 3000  # most server parts to enumerate; a larger space is sampled with this size


class Grid:
    """Encodes configurations of `space` and lists candidates."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.server_params = tuple(_ordered(p) for p in space.server_params)
        self.load_params = tuple(_ordered(p) for p in space.load_params)
        self.params = self.server_params + self.load_params
        self._column = {p.name: i for i, p in enumerate(self.params)}
        self._code = [{exact(c): i for i, c in enumerate(p.choices)} for p in self.params]
        self.width = len(self.server_params)
        sizes = np.array([len(p.choices) + 1 for p in self.server_params], dtype=np.intp)
        self._pair_left, self._pair_right = np.triu_indices(self.width, 1)
        self._pair_size = sizes[self._pair_right]
        counts = sizes[self._pair_left] * self._pair_size
        self._pair_offset, self.pair_count = np.cumsum(counts) - counts, int(counts.sum())
        self.load_rows = self._walk(self.load_params, self.width)
        self._load_index = {tuple(row): i for i, row in enumerate(self.load_rows.tolist())}
        self._whole_pairs: NDArray[np.intp] | None = None
        self.whole = self._filtered(self._walk(self.server_params, 0)) if space.size() <= ENUMERATED else None
        if self.whole is not None:
            self._whole_pairs = self.pair_codes(self.whole)

    def encode(self, config: Config, params: Sequence[Param]) -> Codes:
        """Codes of `params` in a configuration. Raises KeyError for a value that is not a choice."""
        row = [self._code[self._column[p.name]][exact(config[p.name])] if p.name in config else len(p.choices)
               for p in params]
        return np.array(row, dtype=np.int16)

    def server_row(self, server: Config) -> Codes:
        return self.encode(server, self.server_params)

    def load_index(self, load: Config) -> int:
        """Row of a load part in `load_rows`. Raises KeyError for a load part outside the space."""
        return self._load_index[tuple(self.encode(load, self.load_params).tolist())]

    def pair_codes(self, servers: Codes) -> NDArray[np.intp]:
        """(n, pairs) an index below `pair_count` for each pair of choices."""
        if servers is self.whole and self._whole_pairs is not None:
            return self._whole_pairs
        left, right = servers[:, self._pair_left], servers[:, self._pair_right]
        return np.asarray(self._pair_offset + left.astype(np.intp) * self._pair_size + right)

    def with_neighbours(self, pairs: Mask) -> Mask:
        """(pair_count,) the pairs and those that differ from one by one step of long numeric parameters."""
        out = pairs.copy()
        blocks = zip(self._pair_left, self._pair_right, self._pair_offset, strict=True)
        for left, right, at in blocks:
            params = self.server_params[left], self.server_params[right]
            rows, columns = len(params[0].choices) + 1, len(params[1].choices) + 1
            block = out[at:at + rows * columns].reshape(rows, columns)
            for param, view in zip(params, (block[:-1], block.T[:-1]), strict=True):
                if param.numeric and len(param.choices) > 3:
                    seen = view.copy()
                    view[1:] |= seen[:-1]
                    view[:-1] |= seen[1:]
        return out

    def decode(self, row: Codes, params: Sequence[Param]) -> dict[str, Value]:
        return {p.name: p.choices[int(c)] for p, c in zip(params, row, strict=True) if int(c) < len(p.choices)}

    def server(self, row: Codes) -> dict[str, Value]:
        return self.decode(row, self.server_params)

    def load(self, index: int) -> dict[str, Value]:
        return self.decode(self.load_rows[index], self.load_params)

    def servers(self, rng: np.random.Generator, around: Iterable[Codes] = ()) -> Codes:
        """(n, P) candidate server parts: a whole small space, else neighbours of `around` and random ones."""
        if self.whole is not None:
            return self.whole
        sizes = np.array([len(p.choices) for p in self.server_params])
        blocks = [rng.integers(0, sizes, size=(ENUMERATED // 2, self.width)).astype(np.int16)]
        centres = list(around)
        for centre in centres:
            near = np.repeat(centre[None, :], ENUMERATED // (2 * len(centres)), axis=0)
            near = np.concatenate([near, self._steps(centre)])
            fresh = rng.integers(0, sizes, size=near.shape).astype(np.int16)
            change = rng.random(near.shape) < rng.choice([1.0, 2.0, 4.0], size=(len(near), 1)) / self.width
            change[-len(self._steps(centre)):] = False
            blocks.append(np.where(change | (near == sizes), fresh, near))
        rows = self._settle(np.concatenate(blocks))
        flat = rows.astype(np.int64) @ rng.integers(1, 2 ** 40, size=self.width)  # equal for equal rows
        return self._filtered(rows[np.unique(flat, return_index=True)[1]])

    def allowed(self, rows: Codes) -> Mask:
        """(n, L): whether each load part exists and is not forbidden on each server part."""
        out = np.ones((len(rows), len(self.load_rows)), dtype=bool)
        linked = any(p.when for p in self.load_params)
        for j, load in enumerate(self.load_rows):
            full = np.concatenate([rows, np.tile(load, (len(rows), 1))], axis=1)
            if linked:
                out[:, j] = self._exist(full)
            out[:, j] &= ~self._forbidden(full, self.space.rules)
        return out

    def _steps(self, centre: Codes) -> Codes:
        """Every change of one parameter."""
        rows = [np.where(np.arange(self.width) == i, code, centre) for i, param in enumerate(self.server_params)
                for code in range(len(param.choices))]
        return np.array(rows, dtype=np.int16)

    def _walk(self, params: Sequence[Param], offset: int) -> Codes:
        """Every existing combination of the choices of `params`."""
        shape = [len(p.choices) + bool(p.when) for p in params]
        rows = np.ascontiguousarray(np.indices(shape, dtype=np.int16).reshape(len(shape), math.prod(shape)).T)
        return rows if offset else rows[self._exist(rows)]

    def _settle(self, rows: Codes) -> Codes:
        """The rows with the parameters whose `when` does not hold set to absent."""
        rows = rows.copy()
        for i, param in enumerate(self.params[:rows.shape[1]]):
            if param.when:
                rows[~self._matches(param.when, rows), i] = len(param.choices)
        return rows

    def _exist(self, rows: Codes) -> Mask:
        """(n,) True where exactly the parameters whose `when` holds have a choice."""
        good = np.ones(len(rows), dtype=bool)
        for i, param in enumerate(self.params[:rows.shape[1]]):
            if param.when:
                good &= (rows[:, i] < len(param.choices)) == self._matches(param.when, rows)
        return good

    def _filtered(self, rows: Codes) -> Codes:
        """The server parts that no rule forbids under every load."""
        loads = {p.name for p in self.load_params}
        return rows[~self._forbidden(rows, [rule for rule in self.space.rules if not loads & set(rule.when)])]

    def _forbidden(self, rows: Codes, rules: Sequence[Rule]) -> Mask:
        bad = np.zeros(len(rows), dtype=bool)
        for rule in rules:
            bad |= self._matches(rule.when, rows)
        return bad

    def _matches(self, when: Mapping[str, Sequence[Value]], rows: Codes) -> Mask:
        hit = np.ones(len(rows), dtype=bool)
        for name, values in when.items():
            i = self._column[name]
            hit &= np.isin(rows[:, i], [self._code[i][exact(v)] for v in values])
        return hit


def _ordered(param: Param) -> Param:
    """The parameter with numbers in ascending order: neighbours are alike whatever the order they are written in."""
    return dataclasses.replace(param, choices=tuple(sorted(param.choices))) if param.numeric else param
