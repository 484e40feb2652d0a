"""Mix the documents of packed rows without changing how full any row is.

Best-fit decreasing puts documents of about the same length in a row. Steps would then differ in their mean document
length far more than steps of samples in random order. Two rows that both have a document boundary after, say, 1,000
tokens can swap what follows it, and neither total changes. Here each row is first rotated by a random number of
documents. At every position, all rows with a boundary there then pass on what follows it, in one step. The more rows
there are, the more meet at a position: a few hundred rows hardly mix, ten thousand come close to a random order.
"""

import numpy as np

from .rows import offsets_of


# With two, the steps' mean document lengths vary as those of samples in random order.
_PASSES = 2
# How many documents of a block of rows should meet at a position, and the rows of a block.
_MEETING = 32
_FEWEST_ROWS, _MOST_ROWS = 1 << 14, 1 << 17


def mix_rows(
    documents: np.ndarray,
    lengths: np.ndarray,
    offsets: np.ndarray,
    max_length: int,
    longest: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Mix the documents of rows that stand in random order, in place.

    Args:
        documents (`np.ndarray`):
            The documents, row after row, `[documents]`; reordered.
        lengths (`np.ndarray`):
            The length of each document by its number, `[documents]`.
        offsets (`np.ndarray`):
            int64 `[rows + 1]`: where each row begins in `documents`.
        max_length (`int`):
            The most tokens of a row.
        longest (`int`):
            Rows with a longer document keep theirs.
        rng (`np.random.Generator`):
            The source of chance.

    Returns:
        `np.ndarray`: the new offsets. The rows' totals are the same numbers as before, in another order.
    """
    rows = len(offsets) - 1
    # A block of neighbours is a random choice of rows, and small enough to stay fast.
    block = int(np.clip(_MEETING * max_length * rows // len(documents), _FEWEST_ROWS, _MOST_ROWS))
    for _ in range(_PASSES):
        sizes = np.empty(rows, np.int64)
        for first in range(0, rows, block):
            part = offsets[first : first + block + 1]
            inside = documents[part[0] : part[-1]]
            order, sizes[first : first + block] = _mix_block(lengths[inside], part - part[0], longest, rng)
            documents[part[0] : part[-1]] = inside[order]
        offsets = offsets_of(sizes)
    return offsets


def _mix_block(
    lengths: np.ndarray, offsets: np.ndarray, longest: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The documents in their new order, and how many each row has."""
    rows = len(offsets) - 1
    # A block's documents are few enough for int32, which moves half as many bytes.
    offsets = offsets.astype(np.int32)
    sizes = np.diff(offsets)
    first = np.repeat(offsets[:-1], sizes)
    turned = np.arange(len(lengths), dtype=np.int32)
    turned += np.repeat(rng.integers(sizes).astype(np.int32), sizes)
    past = turned - first >= np.repeat(sizes, sizes)
    turned -= np.repeat(sizes, sizes) * past
    lengths = lengths[turned]
    end = np.cumsum(lengths, dtype=np.int64)
    before = np.concatenate([[0], end[offsets[1:-1] - 1]])
    end = (end - np.repeat(before, sizes)).astype(np.int32)

    following = np.arange(1, len(lengths) + 1, dtype=np.int32)
    following[offsets[1:] - 1] = -1
    # All documents that end at a position: each takes what follows the next one, the last what follows the first. Rows
    # are in random order, so the next one is any.
    stays = np.maximum.reduceat(lengths, offsets[:-1]) > longest
    meeting = np.flatnonzero(~np.repeat(stays, sizes))
    keys = end[meeting]
    keys = keys.astype(np.uint16) if end.max() < 1 << 16 else keys
    by_end = np.argsort(keys, kind="stable")
    meeting, keys = meeting[by_end], keys[by_end]
    if len(meeting):
        begins = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        partner = np.roll(meeting, -1)
        partner[np.append(begins[1:], len(meeting)) - 1] = meeting[begins]
        following[meeting] = following[partner]

    # Follow all rows at once, one document further each time.
    document, row = offsets[:-1], np.arange(rows, dtype=np.int32)
    found = []
    while len(document):
        found.append((document, row))
        document = following[document]
        more = document >= 0
        document, row = document[more], row[more]
    number = np.repeat(np.arange(len(found)), [len(documents) for documents, _ in found])
    document, row = (np.concatenate(part) for part in zip(*found, strict=True))
    sizes = np.bincount(row, minlength=rows)
    order = np.empty(len(lengths), np.int32)
    order[offsets_of(sizes)[row] + number] = document
    return turned[order], sizes
