"""The layers to checkpoint, and the segments in which they compute a long row, chosen from the memory of a GPU."""

from collections.abc import Callable


# A layer reads its weights again for each segment. An H200 computes 989e12 operations per second and reads 4.8e12 bytes, so a
# product of a bfloat16 weight with this many tokens takes 20 times as long as reading the weight.
SMALLEST = 4096


def choose_layers(need: Callable[[int], float], layers: int, available: float) -> int | None:
    """Return `every_n_layers` with the fewest checkpointed layers that fit the memory, or `None` if all do not suffice.

    `need` returns the bytes of a step with this option, and `available` is how many it may need.
    """
    return next((n for n in range(layers, 0, -1) if need(n) <= available), None)


def choose_segment(need: Callable[[int | None], float], length: int, available: float) -> tuple[int | None, bool]:
    """Choose the longest segments, powers of two from `SMALLEST` tokens on, that fit the memory.

    Args:
        need (`Callable`):
            Returns the bytes that a step needs with segments of so many tokens, or with whole rows for `None`.
        length (`int`):
            Tokens of the row.
        available (`float`):
            Bytes that a step may need.

    Returns:
        `tuple[int | None, bool]`: the tokens of a segment, `None` for whole rows, and whether a step fits. If it never does,
        the segments are those that need least.

    Example:

    ```python
    >>> from transformers_packed.data.planning.segments import choose_segment
    >>> choose_segment(lambda tokens: 3.0 * (tokens or 65536), 65536, available=30_000)
    (8192, True)

    ```
    """
    sizes: list[int | None] = [2**n for n in range(length.bit_length(), 0, -1) if SMALLEST <= 2**n < length]
    found = [(need(size), size) for size in [None, *sizes]]
    fitting = [size for bytes_needed, size in found if bytes_needed <= available]
    return (fitting[0], True) if fitting else (min(found, key=lambda x: x[0])[1], False)
