"""Best-fit decreasing over a histogram of lengths.

Best-fit decreasing takes the documents from the longest to the shortest and puts each into the fullest row that has
room for it. Documents of one length are interchangeable, and so are rows with equal content. One step per group of
equal rows therefore places all documents of a length, with the same result as placing them one by one. The work grows
with the number of distinct lengths, not with the number of documents.

Rows can also have a maximum cost. The search then uses the length of the longest document that fits both the remaining
room and the remaining cost, instead of the remaining room.
"""

import heapq
from bisect import bisect_left, bisect_right, insort


# The document lengths of a row, from long to short, and the number of rows with these documents.
Patterns = list[tuple[list[int], int]]


def number_of_rows(patterns: Patterns) -> int:
    """The rows of all patterns."""
    return sum(rows for _, rows in patterns)


def best_fit(
    lengths: list[int], counts: list[int], max_length: int, cost: list[float] | None = None, max_cost: float = 0.0
) -> Patterns:
    """Pack documents with best-fit decreasing.

    Args:
        lengths (`list[int]`):
            The distinct lengths, ascending, at most `max_length`.
        counts (`list[int]`):
            The number of documents of each length.
        max_length (`int`):
            Maximum number of tokens per row.
        cost (`list[float]`, *optional*):
            The cost of a document of 0, 1, ... tokens, strictly increasing.
        max_cost (`float`, *optional*, defaults to 0.0):
            With `cost`, the maximum cost of a row. A document that costs more has a row of its own.
    """
    shortest = lengths[0]
    # A node `(parent, length, times)` adds `times` documents to the rows of its parent. Node 0 is the empty row.
    nodes = [(0, 0, 0)]
    groups: dict[int, list[tuple[int, int, int, float]]] = {}  # longest fitting length: (node, rows, room, cost left)
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
            # The best-fitting row remains the best fit until no further document of this length fits.
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
    return [(_lengths_up_to(node, nodes), rows) for node, rows in closed]


def _lengths_up_to(node: int, nodes: list[tuple[int, int, int]]) -> list[int]:
    row: list[int] = []
    while node:
        node, length, number = nodes[node]
        row += [length] * number
    return row[::-1]


def even_out(
    lengths: list[int],
    counts: list[int],
    max_length: int,
    cost: list[float],
    densest: Patterns,
    fewest: int,
    most: int,
) -> Patterns:
    """Pack with the lowest cost limit per row that needs at most `most` rows.

    The limit is never below the mean cost of `fewest` rows. A lower limit would add rows and barely even out their
    costs.

    Args:
        lengths (`list[int]`):
            The distinct lengths, ascending, at most `max_length`.
        counts (`list[int]`):
            The number of documents of each length.
        max_length (`int`):
            Maximum number of tokens per row.
        cost (`list[float]`):
            The cost of a document of 0, 1, ... tokens, strictly increasing.
        densest (`Patterns`):
            The packing without a limit. It is returned if no limit improves on it.
        fewest (`int`):
            The minimum number of rows.
        most (`int`):
            The maximum number of rows.
    """
    low = sum(number * cost[length] for length, number in zip(lengths, counts, strict=True)) / fewest
    high = max(sum(cost[length] for length in row) for row, _ in densest)
    best, limit = densest, low
    # Stop at 0.1 % of a row's cost.
    while high > low * 1.001:
        found = best_fit(lengths, counts, max_length, cost, limit)
        if number_of_rows(found) <= most:
            best, high = found, limit
        else:
            low = limit
        limit = (low + high) / 2
    return best


def open_rows(patterns: Patterns, cost: list[float], rows: int) -> Patterns:
    """Split the most expensive rows in half until there are `rows` rows.

    There must be at least `rows` documents.
    """
    missing = rows - number_of_rows(patterns)
    if not missing:
        return patterns
    whole: Patterns = []
    heap: list[tuple[float, list[int], int]] = []

    def put(row: list[int], number: int) -> None:
        if len(row) == 1:
            whole.append((row, number))
        else:
            heapq.heappush(heap, (-sum(cost[length] for length in row), row, number))

    for pattern in patterns:
        put(*pattern)
    while missing:
        _, row, number = heapq.heappop(heap)
        halved = min(number, missing)
        missing -= halved
        put(row[0::2], halved)
        put(row[1::2], halved)
        if number > halved:
            put(row, number - halved)
    return whole + [(row, number) for _, row, number in heap]
