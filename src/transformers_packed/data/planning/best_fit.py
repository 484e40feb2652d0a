"""Best-fit decreasing over a histogram of lengths.

Best-fit decreasing takes the documents from the longest to the shortest and puts each into the row with the least room
that still holds it. Documents of one length are interchangeable, and so are rows of the same content. So one step per
group of equal rows places all documents of a length, with the result of placing them one by one. The work grows with the
number of distinct lengths, not with the number of documents.

Rows can also be limited in cost. Room and remaining cost then together say which document is the longest that still
fits, and that number takes the place of the room.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass


@dataclass(frozen=True)
class Patterns:
    """Rows as patterns of lengths, each with how many rows have it.

    Args:
        documents (`list[list[int]]`):
            The lengths in a row of each pattern, from long to short.
        rows (`list[int]`):
            How many rows have it.
    """

    documents: list[list[int]]
    rows: list[int]

    def __len__(self) -> int:
        return sum(self.rows)


def best_fit(
    lengths: list[int], counts: list[int], max_length: int, cost: list[float] | None = None, max_cost: float = 0.0
) -> Patterns:
    """Pack documents into as many rows as best-fit decreasing needs.

    Args:
        lengths (`list[int]`):
            The distinct lengths, ascending, at most `max_length`.
        counts (`list[int]`):
            How many documents have each.
        max_length (`int`):
            The most tokens of a row.
        cost (`list[float]`, *optional*):
            The cost of a document of 0, 1, ... tokens, strictly increasing.
        max_cost (`float`, *optional*, defaults to 0.0):
            With `cost`, the most that a row may cost unless it is one document that costs more alone.
    """
    shortest = lengths[0]
    # A node `(parent, length, times)` adds so many documents to the rows of its parent; node 0 is the empty row.
    nodes = [(0, 0, 0)]
    groups: dict[int, list[tuple[int, int, int, float]]] = {}  # the longest that fits: (node, rows, room, cost left)
    fits: list[int] = []  # the keys of `groups`, ascending
    closed: list[tuple[int, int]] = []

    def put(node: int, rows: int, room: int, left: float) -> None:
        longest = room if cost is None else min(room, bisect_right(cost, left) - 1)
        if longest < shortest:
            closed.append((node, rows))
            return
        if longest not in groups:
            insort(fits, longest)
        groups.setdefault(longest, []).append((node, rows, room, left))

    def extend(node: int, length: int, number: int) -> int:
        nodes.append((node, length, number))
        return len(nodes) - 1

    for length, remaining in zip(reversed(lengths), reversed(counts), strict=True):
        each = 0.0 if cost is None else cost[length]
        while remaining:
            place = bisect_left(fits, length)
            new = place == len(fits)
            if new:
                node, rows, room, left = 0, remaining, max_length, max_cost
            else:
                group = groups[fits[place]]
                node, rows, room, left = group.pop()
                if not group:
                    del groups[fits[place]], fits[place]
            # A row that was the best fit stays it until no further document of this length fits.
            number = room // length if cost is None else max(1, min(room // length, int(left / each)))
            full = min(rows, remaining // number)
            if full:
                put(extend(node, length, number), full, room - number * length, left - number * each)
            remaining -= full * number
            rows -= full
            if rows and 0 < remaining < number:
                put(extend(node, length, remaining), 1, room - remaining * length, left - remaining * each)
                rows, remaining = rows - 1, 0
            if rows and not new:
                put(node, rows, room, left)
    closed.extend((node, rows) for group in groups.values() for node, rows, _, _ in group)

    documents = []
    for node, _ in closed:
        row: list[int] = []
        while node:
            node, length, number = nodes[node]
            row += [length] * number
        documents.append(row[::-1])
    return Patterns(documents, [rows for _, rows in closed])


def even_out(
    lengths: list[int],
    counts: list[int],
    max_length: int,
    cost: list[float],
    densest: Patterns,
    fewest: int,
    most: int,
) -> Patterns:
    """Pack with the lowest limit on a row's cost that needs at most `most` rows.

    The limit is not set below the mean cost of `fewest` rows: that would make more rows, hardly more alike ones.

    Args:
        lengths, counts, max_length, cost:
            As in [`best_fit`].
        densest (`Patterns`):
            The packing without a limit; it is returned when no limit does better.
        fewest, most (`int`):
            The least and the most rows.
    """
    low = sum(number * cost[length] for length, number in zip(lengths, counts, strict=True)) / fewest
    high = max(sum(cost[length] for length in row) for row in densest.documents)
    best, limit = densest, low
    # Down to 0.1 % of a row's cost.
    while high > low * 1.001:
        found = best_fit(lengths, counts, max_length, cost, limit)
        if len(found) <= most:
            best, high = found, limit
        else:
            low = limit
        limit = (low + high) / 2
    return best


def open_rows(patterns: Patterns, cost: list[float], rows: int) -> Patterns:
    """Halve the costliest rows of several documents until there are `rows` rows.

    The documents must be at least as many as `rows`.
    """
    missing = rows - len(patterns)
    whole: list[tuple[list[int], int]] = []
    heap: list[tuple[float, list[int], int]] = []

    def put(row: list[int], number: int) -> None:
        if len(row) == 1:
            whole.append((row, number))
        else:
            heapq.heappush(heap, (-sum(cost[length] for length in row), row, number))

    if missing:
        for row, number in zip(patterns.documents, patterns.rows, strict=True):
            put(row, number)
        while missing:
            _, row, number = heapq.heappop(heap)
            halved = min(number, missing)
            missing -= halved
            put(row[0::2], halved)
            put(row[1::2], halved)
            if number > halved:
                put(row, number - halved)
        whole += [(row, number) for _, row, number in heap]
        patterns = Patterns([row for row, _ in whole], [number for _, number in whole])
    return patterns
