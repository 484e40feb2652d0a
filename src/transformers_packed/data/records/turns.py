"""A conversation whose turns each follow another rendering of the earlier ones, as a tree of samples.

Templates such as Qwen3.5's omit the reasoning of earlier turns. The model then writes a turn after the short form of the
earlier ones, and no rendering of the whole conversation has all turns as the model writes them. The renderings up to
each turn share their beginnings, so together they are a tree ([`prefix_pieces`]).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ...prefix_tree import prefix_pieces
from ..samples import IGNORED_LABEL
from ..trees import tokens_in


# Tokens and labels, int32 `[tokens]`.
Rendering = tuple[np.ndarray, np.ndarray]


def samples_of(renderings: Iterable[Rendering]) -> list[dict[str, Any]]:
    """Make samples of renderings, each with `input_ids` and `labels`. Those that continue a sample are its `turns`.

    A token that several renderings share has a label if it has one in any of them.

    Example:

    ```python
    >>> import numpy as np
    >>> from transformers_packed.data.records.turns import samples_of
    >>> start = np.arange(100)
    >>> turns = [np.append(start, end) for end in ([107, 108], [109])]
    >>> (sample,) = samples_of((turn, np.where(turn < 100, -100, turn)) for turn in turns)
    >>> len(sample["input_ids"]), [turn["input_ids"].tolist() for turn in sample["turns"]]
    (100, [[107, 108], [109]])

    ```
    """
    renderings = _joined(renderings)
    pieces = prefix_pieces([tokens for tokens, _ in renderings])
    samples: list[dict[str, Any]] = []
    for document, begin, end, parent in pieces:
        tokens, labels = (column[begin:end] for column in renderings[document])
        samples.append({"input_ids": tokens, "labels": labels.copy()})
        if parent >= 0:
            samples[parent].setdefault("turns", []).append(samples[-1])
    for number, piece in enumerate(pieces):
        tokens, labels = renderings[piece.document]
        if piece.end == len(tokens):
            # The pieces of this rendering.
            while number >= 0:
                _, begin, end, parent = pieces[number]
                _fill(samples[number]["labels"], labels[begin:end])
                number = parent
    return [sample for sample, piece in zip(samples, pieces, strict=True) if piece.parent < 0]


def samples_within(renderings: list[Rendering], longest: int | None) -> list[dict[str, Any]]:
    """Make samples as [`samples_of`] does, of at most `longest` tokens in a row. Each rendering alone has no more.

    If a tree would have more, each half of the renderings becomes samples of its own.
    """
    samples = samples_of(renderings)
    if longest is None or len(renderings) == 1 or max(map(tokens_in, samples)) <= longest:
        return samples
    half = len(renderings) // 2
    return samples_within(renderings[:half], longest) + samples_within(renderings[half:], longest)


def _joined(renderings: Iterable[Rendering]) -> list[Rendering]:
    """Replace each rendering that the next one only continues by that one, with the labels of both."""
    found: list[Rendering] = []
    for tokens, labels in renderings:
        if found and np.array_equal(found[-1][0], tokens[: len(found[-1][0])]):
            earlier, labels = found.pop()[1], labels.copy()
            _fill(labels[: len(earlier)], earlier)
        found.append((tokens, labels))
    return found


def _fill(labels: np.ndarray, others: np.ndarray) -> None:
    np.copyto(labels, others, where=others != IGNORED_LABEL)
