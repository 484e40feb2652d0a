"""The layout of a row in which documents continue others: a tree of documents for each one that starts on its own.

Answers to one prompt, as in GRPO and DPO, repeat its tokens. A row can hold the prompt once, before its answers:

    | prompt 0 | prompt 1 | answer to 0 | answer to 0 | answer to 1 |

Further documents may continue an answer, as the turns of a conversation do. `ops/prompts.py` has the ops for such rows.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from numbers import Integral
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from .boundaries import SequenceBoundaries, derived_property
from .errors import input_error


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class SharedPrompts(SequenceBoundaries):
    """The boundaries of a row in which documents continue earlier ones, their parents.

    Each document stands for the tokens of its ancestors and its own, and depends on nothing else.

    Args:
        cu_seqlens (`torch.IntTensor` of shape `[N+1]`):
            Cumulative lengths of the documents, without their ancestors.
        host (`torch.IntTensor` of shape `[N+1]`):
            The same values on the host.
        parent_of (`tuple[int, ...]`):
            For each document, the index of an earlier document whose end it continues, or -1 for a document that starts
            on its own. In the order of [`level_order`], ops with a state do not have to move tokens.

    Example:

    ```python
    >>> from transformers_packed import SequenceBoundaries
    >>> from transformers_packed.shared_prompts import SharedPrompts
    >>> row = SharedPrompts.of(SequenceBoundaries.from_lengths([3, 2, 1, 1]), [-1, 0, 0, 1])
    >>> row.position_ids.tolist()
    [[0, 1, 2, 3, 4, 3, 5]]

    ```
    """

    parent_of: tuple[int, ...] = ()
    kind: ClassVar[str] = "a row with shared prompts"
    instead: ClassVar[str] = "Train without shared prompts (parent_of)."

    @classmethod
    def of(cls, boundaries: SequenceBoundaries, parent_of: Sequence[int] | torch.Tensor) -> "SharedPrompts":
        """Create it from the boundaries of all documents. Raises a `ValueError` if `parent_of` does not fit them."""
        given = parent_of.tolist() if isinstance(parent_of, torch.Tensor) else list(parent_of)
        if not all(isinstance(parent, Integral) for parent in given):
            raise input_error("parent_of as one integer for each document", given)
        parent_of = tuple(map(int, given))
        number, padding = boundaries.num_documents, boundaries.padding_tokens
        earlier = all(-1 <= parent < document for document, parent in enumerate(parent_of))
        if len(parent_of) != number or not earlier or max(parent_of) < 0 or padding:
            expected = f"parent_of for {number} documents without padding: -1, or an earlier document for at least one"
            raise input_error(expected, f"{list(parent_of)} and {padding} tokens of padding")
        return cls(boundaries.cu_seqlens, boundaries.cu_seqlens_cpu, parent_of=parent_of)

    @derived_property
    def position_ids(self) -> torch.Tensor:
        """int64 `[1, T]`: the position of each token in its document, counted on from its parent."""
        before: list[int] = []
        for parent in self.parent_of:
            before.append(0 if parent < 0 else before[parent] + self.lengths[parent])
        starts = (self.cu_seqlens_cpu[:-1] - torch.tensor(before)).to(self.cu_seqlens.device, non_blocking=True)
        tokens = torch.arange(self.total_length, device=self.cu_seqlens.device)
        return tokens[None] - starts[self.seq_idx.long()]

    @derived_property
    def tree_lengths(self) -> list[int]:
        """The tokens of each tree. A document that starts on its own, and that none continues, is one."""
        found: dict[int, int] = {}
        root: list[int] = []
        for document, (parent, length) in enumerate(zip(self.parent_of, self.lengths, strict=True)):
            root.append(document if parent < 0 else root[parent])
            found[root[-1]] = found.get(root[-1], 0) + length
        return list(found.values())

    @derived_property
    def tokens(self) -> list[torch.Tensor]:
        """For each document, the int64 indices of its ancestors' tokens and its own."""
        found: list[torch.Tensor] = []
        for own, parent in zip(torch.arange(self.total_length).split(self.lengths), self.parent_of, strict=True):
            found.append(torch.cat([found[parent], own]) if parent >= 0 else own)
        return found

    @derived_property
    def final_tokens(self) -> torch.Tensor:
        """int64: the index of the last token of each document that no other one continues."""
        parents = set(self.parent_of)
        last = [document for document in range(self.num_documents) if document not in parents]
        return (self.cu_seqlens_cpu[1:].long() - 1)[last].to(self.cu_seqlens.device, non_blocking=True)

    @derived_property
    def successors(self) -> "Successors":
        """The row of all tokens that follow another one in their document, which the first one of a tree does not."""
        device = self.cu_seqlens.device
        before: list[torch.Tensor] = []
        lengths: list[int] = []
        numbers: list[int] = []
        parents: list[int] = []
        for path, length, parent in zip(self.tokens, self.lengths, self.parent_of, strict=True):
            # The token before the first one is in the parent. A tree of one token has none with a token before.
            before.append(path[max(len(path) - length - 1, 0) : -1])
            numbers.append(len(lengths) if len(before[-1]) else -1)
            if len(before[-1]):
                lengths.append(len(before[-1]))
                parents.append(numbers[parent] if parent >= 0 else -1)
        boundaries = SequenceBoundaries.from_lengths(lengths, device=device)
        if max(parents) >= 0:
            boundaries = SharedPrompts.of(boundaries, parents)
        follows = [path[len(path) - len(x) :] for path, x in zip(self.tokens, before, strict=True)]
        tokens = torch.cat(follows).to(device, non_blocking=True)
        return Successors(boundaries, Copies.of(torch.cat(before).numpy(), device), tokens)

    @derived_property
    def first_tokens(self) -> torch.Tensor:
        """int64: the index of the first token of each document that starts on its own."""
        starts = self.cu_seqlens[:-1].long()
        return starts[[parent < 0 for parent in self.parent_of]]

    @derived_property
    def layout(self) -> "Layout":
        """What the ops read of this row."""
        return Layout(self.lengths, self.parent_of, self.cu_seqlens.device)


def _once(make: Callable[["Layout", int], T]) -> Callable[["Layout", int], T]:
    """Compute a method of a layout once for each number."""

    @wraps(make)
    def find(layout: "Layout", number: int) -> T:
        key = make.__name__, number
        if key not in layout._found:
            layout._found[key] = make(layout, number)
        return layout._found[key]

    return find


class Layout:
    """The runs of a row with shared prompts, from which its ops make other rows. Each is made once.

    A run consists of documents that directly follow their parents.

    Args:
        lengths (`list[int]`):
            The lengths of the documents.
        parent_of (`Sequence[int]`):
            Their parents.
        device (`torch.device`):
            Where the ops run.
    """

    def __init__(self, lengths: list[int], parent_of: Sequence[int], device: torch.device):
        self._lengths, self._parent_of, self._device = lengths, parent_of, device
        self._found: dict[tuple[str, int], Any] = {}
        starts = np.cumsum([0, *lengths]).tolist()
        # The first token of each run, and the token that it continues, or -1.
        self._runs = [
            (starts[document], starts[parent + 1] - 1)
            for document, parent in enumerate(parent_of)
            if parent != document - 1 or parent < 0
        ]
        self._run_lengths = np.diff([*(start for start, _ in self._runs), starts[-1]]).tolist()
        # The runs that continue another one.
        self.continued = [run for run, (_, after) in enumerate(self._runs) if after >= 0]
        # The first run that continues another one.
        self._first = self.continued[0] if self.continued else len(self._runs)

    @cached_property
    def runs(self) -> SequenceBoundaries:
        """The boundaries of the runs."""
        return self._boundaries(self._run_lengths)

    def _boundaries(self, lengths: list[int]) -> SequenceBoundaries:
        return SequenceBoundaries.from_lengths(lengths, device=self._device)

    def _before(self, run: int, limit: int) -> np.ndarray:
        """The tokens that a run continues, from the first one of its tree, or the last `limit` of them."""
        pieces, (_, token) = [np.arange(0)], self._runs[run]
        while token >= 0 and limit > 0:
            run = bisect_right(self._runs, token, key=lambda run: run[0]) - 1
            start, after = self._runs[run]
            pieces.append(np.arange(max(start, token + 1 - limit), token + 1))
            limit -= len(pieces[-1])
            token = after
        return np.concatenate(pieces[::-1])

    @cached_property
    def keys(self) -> tuple[SequenceBoundaries, "Copies"]:
        """The row in which all that it continues precedes each run: its boundaries, and the tokens it consists of."""
        return self._keys(0)

    def _keys(self, first: int) -> tuple[SequenceBoundaries, "Copies"]:
        runs = range(first, len(self._runs))
        total = sum(self._lengths)
        lengths, index, _ = self._row_of(runs, total, total)
        return self._boundaries(lengths), Copies.of(index, self._device)

    @cached_property
    def alone(self) -> SequenceBoundaries:
        """The boundaries of the runs before the first one that continues another."""
        return self._boundaries(self._run_lengths[: self._first])

    @cached_property
    def rest(self) -> tuple[SequenceBoundaries, SequenceBoundaries, "Copies"]:
        """The boundaries of the other runs, and the row in which all that it continues precedes each of these."""
        return self._boundaries(self._run_lengths[self._first :]), *self._keys(self._first)

    @_once
    def tails(self, width: int) -> "Copies":
        """The `width` tokens before each run that continues another. The first token is repeated in front of fewer."""
        tails = [self._before(run, width) for run in self.continued]
        index = [np.pad(tail, (width - len(tail), 0), mode="edge") for tail in tails]
        return Copies.of(np.concatenate([*index, np.arange(0)]), self._device)

    @_once
    def windows(self, width: int) -> tuple[SequenceBoundaries, "Copies", torch.Tensor, torch.Tensor]:
        """Describe the row of the first `width` tokens of each run that continues another, after the `width` before.

        Returns its boundaries, the tokens it consists of, and the indices of the runs' tokens in it and in this row.
        """
        lengths, index, own = self._row_of(self.continued, width, width)
        in_window, in_row = (torch.from_numpy(x).to(self._device, non_blocking=True) for x in (own, index[own]))
        return self._boundaries(lengths), Copies.of(index, self._device), in_window, in_row

    def _row_of(self, runs: Sequence[int], earlier: int, own: int) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Return the lengths of a row's documents, its tokens, and which of these are not from another run.

        It consists of the first `own` tokens of each of the runs, after the last `earlier` ones that it continues.
        """
        index, is_own, lengths = [], [], []
        for run in runs:
            before, (start, _), length = self._before(run, earlier), self._runs[run], self._run_lengths[run]
            index += [before, np.arange(start, start + min(own, length))]
            is_own += [np.zeros(len(before), dtype=bool), np.ones(len(index[-1]), dtype=bool)]
            lengths.append(len(before) + len(index[-1]))
        return lengths, np.concatenate(index), np.flatnonzero(np.concatenate(is_own))

    @_once
    def levels(self, reads: int) -> "Levels":
        """The calls of an op with a state, in which `reads` tokens read a state that is needed inside a path."""
        device, lengths, levels = self._device, self._lengths, paths_of(self._parent_of)
        tokens = np.split(np.arange(sum(lengths)), np.cumsum(lengths[:-1]))
        in_levels: list[np.ndarray] = []
        found: list[Level] = []
        states: Copies | None = None
        for paths, next_paths in zip(levels, [*levels[1:], []], strict=True):
            parents = [self._parent_of[path[0]] for path in next_paths]
            needed = set(parents)
            slots = {path[-1]: slot for slot, path in enumerate(paths)}
            own: list[np.ndarray] = []
            inserted: list[np.ndarray] = []
            cu_seqlens, end = [0], 0
            for path in paths:
                for document in path:
                    in_levels.append(tokens[document])
                    own.append(np.arange(end, end := end + lengths[document]))
                    if document in needed and document not in slots:
                        slots[document] = len(paths) + len(inserted)
                        inserted.append(np.arange(end, end := end + reads))
                cu_seqlens.append(end)
            boundaries = SequenceBoundaries.from_cu_seqlens(torch.tensor(cu_seqlens)).to(device, non_blocking=True)
            own_places, reads_at = (
                torch.from_numpy(np.concatenate([np.arange(0), *x])).to(device, non_blocking=True)
                for x in (own, inserted)
            )
            places = (own_places, reads_at) if inserted else None
            found.append(Level(boundaries, sum(map(len, own)), places, states, bool(parents)))
            states = Copies.of([slots[parent] for parent in parents], device)
        order = np.concatenate(in_levels)
        if bool((np.diff(order) == 1).all()):
            return Levels(found, None, None)
        return Levels(found, Copies.of(order, device), Copies.of(np.argsort(order), device))


class Copies(NamedTuple):
    """Rows to repeat: copy `i` is row `rows[i]`.

    `copies_of` is the inverse: pairs of rows `[R]` with the same number of copies, and their copies `[R, copies]`.
    """

    rows: torch.Tensor
    copies_of: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, rows: Sequence[int] | np.ndarray, device: torch.device) -> "Copies":
        index = np.asarray(rows, dtype=np.int64)
        order = np.argsort(index, kind="stable")
        ordered = index[order]
        first = np.flatnonzero(np.diff(ordered, prepend=-1))
        counts = np.diff(first, append=len(ordered))
        move = [index]
        for count in np.flatnonzero(np.bincount(counts)):
            of_row = first[counts == count]
            move += [ordered[of_row], order[of_row[:, None] + np.arange(count)]]
        source, *pairs = (torch.from_numpy(x).to(device, non_blocking=True) for x in move)
        return cls(source, list(zip(pairs[::2], pairs[1::2], strict=True)))


class Successors(NamedTuple):
    """A row of tokens that follow others: its boundaries, the tokens before them, and the tokens `[T']` themselves."""

    boundaries: SequenceBoundaries
    before: Copies
    tokens: torch.Tensor


class Level(NamedTuple):
    """A call of an op with a state: paths of documents that start from states of the previous level.

    Args:
        boundaries ([`SequenceBoundaries`]):
            The paths, with the tokens that read states.
        length (`int`):
            Number of tokens of the row.
        places (`tuple`, *optional*):
            If states are read, the places of these tokens, and those of the tokens that read, in the order of states.
        states ([`Copies`], *optional*):
            The states of the previous level that the paths start from: final ones, then those that were read.
        continued (`bool`):
            Whether a level follows.
    """

    boundaries: SequenceBoundaries
    length: int
    places: tuple[torch.Tensor, torch.Tensor] | None
    states: Copies | None
    continued: bool


class Levels(NamedTuple):
    """The levels of a row, and the order of its tokens in them: `sources` of the tokens, and the inverse of this order.

    Both are `None` if the row has this order.
    """

    levels: list[Level]
    sources: Copies | None
    places: Copies | None


def level_order(parent_of: Sequence[int]) -> list[int]:
    """Return the order of documents in which ops with a state find each level's tokens side by side.

    Example:

    ```python
    >>> from transformers_packed.shared_prompts import level_order
    >>> level_order([-1, 0, 0, -1, 3, 3])  # two prompts with two answers each
    [0, 3, 1, 2, 4, 5]

    ```
    """
    return [document for paths in paths_of(parent_of) for path in paths for document in path]


def to_level_order(parent_of: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the order of [`level_order`], and the `parent_of` of documents in this order.

    Example:

    ```python
    >>> from transformers_packed.shared_prompts import to_level_order
    >>> to_level_order([-1, 0, 0, -1, 3, 3])  # two prompts with two answers each
    ([0, 3, 1, 2, 4, 5], [-1, -1, 0, 0, 1, 1])

    ```
    """
    order = level_order(parent_of)
    places = {document: place for place, document in enumerate(order)} | {-1: -1}
    return order, [places[parent_of[document]] for document in order]


def paths_of(parent_of: Sequence[int]) -> list[list[list[int]]]:
    """Join the documents of a row to paths, and return the paths of each level.

    A document continues the path of its parent if it is the only child. If this at least halves the levels of a tree,
    the child with the most levels below it also does, wherever a document has several children: a long conversation
    with a branch at each turn then has two levels. A level costs the launches of a call, and its longest path.
    """
    children: list[list[int]] = [[] for _ in parent_of]
    for document, parent in enumerate(parent_of):
        if parent >= 0:
            children[parent].append(document)
    # Levels below each document if all of several children start a path, and if one of them continues.
    all_start, one_continues = ([0] * len(parent_of) for _ in range(2))
    deepest: list[int] = [-1] * len(parent_of)
    for document in reversed(range(len(parent_of))):
        below = children[document]
        if below:
            all_start[document] = max(all_start[child] for child in below) + (len(below) > 1)
            deepest[document] = max(below, key=one_continues.__getitem__)
            one_continues[document] = max(one_continues[c] + (c != deepest[document]) for c in below)
    levels: list[list[list[int]]] = []
    place: list[tuple[int, list[int]]] = []
    joins: list[bool] = []
    for document, parent in enumerate(parent_of):
        if parent < 0:
            joins.append(2 * (one_continues[document] + 1) <= all_start[document] + 1)
            level = 0
        else:
            joins.append(joins[parent])
            level, path = place[parent]
            if len(children[parent]) == 1 or (joins[parent] and deepest[parent] == document):
                path.append(document)
                place.append((level, path))
                continue
            level += 1
        if level == len(levels):
            levels.append([])
        levels[level].append([document])
        place.append((level, levels[level][-1]))
    return levels
