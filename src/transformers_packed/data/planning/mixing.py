"""Mix the documents of packed rows without changing the fill of any row.

Best-fit decreasing puts documents of similar length in a row. The mean document length would then vary far more
between steps than for samples in random order. Two rows that both have a document boundary after, for example, 1,000
tokens can swap the documents after it without changing their totals. First, each row is rotated by a random number of
documents. Then, at each position, all rows with a boundary there exchange the documents after it in one step. More
rows share more positions: a few hundred rows hardly mix, and ten thousand rows come close to a random order.
"""

import numpy as np

from .rows import offsets_of


# After two passes, the mean document lengths of the steps vary like those of samples in random order.
_PASSES = 2
# The number of documents in a block that should share a position, and the number of rows per block.
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
    """Mix the documents of rows that are in random order, in place.

    Args:
        documents (`np.ndarray`):
            The documents, row after row, `[documents]`. Reordered in place.
        lengths (`np.ndarray`):
            The length of each document by its number, `[documents]`.
        offsets (`np.ndarray`):
            int64 `[rows + 1]`: the start of each row in `documents`.
        max_length (`int`):
            Maximum number of tokens per row.
        longest (`int`):
            Rows with a longer document are not mixed.
        rng (`np.random.Generator`):
            The random number generator.

    Returns:
        `np.ndarray`: the new offsets. The row totals are the same numbers in another order.
    """
    rows = len(offsets) - 1
    # Neighbouring rows are a random choice of rows, because the rows are in random order. Small blocks are fast.
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
    """The documents in their new order, and the number of documents per row."""
    rows = len(offsets) - 1
    # A block has few enough documents for int32, which halves the memory traffic.
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
    # Among the documents that end at a position, each takes the successor of the next one, and the last one that of
    # the first. The rows are in random order, so the next one is random.
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

    # Walk all rows in parallel, one document per iteration.
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
