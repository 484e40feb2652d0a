"""Read the table of a `datasets.Dataset` without decoding its samples."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .planning.rows import offsets_of
from .samples import MASK, NEEDED, TOKEN_COLUMNS, TURNS


def columns_of(dataset: Any) -> dict[str, Any] | None:
    """The columns in the table of a `datasets.Dataset` that its samples have; `None` for any other dataset.

    A column in which all values are missing is left out, but not one whose missing values are an error.
    """
    table = getattr(getattr(dataset, "data", None), "table", None)
    # A transform may change the samples when it runs.
    if table is None or dataset.format["type"] == "custom":
        return None
    columns = {name: table.column(name) for name in table.column_names if name in dataset.format["columns"]}
    return {name: x for name, x in columns.items() if name in NEEDED or not 0 < x.null_count == len(x)}


def table_lengths(dataset: Any) -> np.ndarray | None:
    """The real tokens of each sample, -1 for one that cannot be used; `None` without a table of tokens."""
    columns = columns_of(dataset) or {}
    if "input_ids" not in columns or not is_list(columns["input_ids"]):
        return None
    lengths = list_lengths(columns["input_ids"])
    if not _holds_numbers(columns["input_ids"]) or MASK in columns and not _holds_numbers(columns[MASK]):
        lengths = np.full_like(lengths, -1)
    elif MASK in columns:
        padding = _count_in_lists(columns[MASK], lambda x: _numbers(x) == 0)
        other = _count_in_lists(columns[MASK], lambda x: (_numbers(x) != 0) & (_numbers(x) != 1))
        masked = list_lengths(columns[MASK])
        fits = (masked == lengths) & (other == 0) | (masked < 0)
        lengths = np.where(fits, lengths - padding, -1)
    if TURNS in columns and _holds_turns(columns[TURNS]):
        lengths = np.where(list_lengths(columns[TURNS]) > 0, -1, lengths)
    return _of_samples(dataset, lengths)


def padded_lengths(dataset: Any) -> np.ndarray:
    """The tokens of each sample in a table of tokens, also those that are masked."""
    return _of_samples(dataset, list_lengths((columns_of(dataset) or {})["input_ids"]))


def suspects(dataset: Any) -> list[int]:
    """The numbers of samples in a table that probably cannot be used, none without a table."""
    lengths, columns = table_lengths(dataset), columns_of(dataset) or {}
    if lengths is None:
        return []
    wrong, sizes = lengths < 0, list_lengths(columns["input_ids"])
    for name in TOKEN_COLUMNS:
        if name in columns and is_list(columns[name]):
            holes, found = _count_in_lists(columns[name], _is_null), list_lengths(columns[name])
            absent = (found < 0) & (name not in NEEDED)
            wrong |= _of_samples(dataset, (found != sizes) & ~absent | (holes > 0))
        elif name in columns:
            wrong |= _of_samples(dataset, columns[name].is_null().to_numpy()) | (lengths == 0)
    return np.flatnonzero(wrong).tolist()


def is_list(column: Any) -> bool:
    """Whether the values of a column are lists."""
    import pyarrow as pa

    return isinstance(column.type, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def list_lengths(column: Any) -> np.ndarray:
    """The lengths of the lists in a column, -1 for a missing list."""
    import pyarrow.compute as pc

    return pc.fill_null(pc.list_value_length(column), -1).to_numpy().astype(np.int64)


def _holds_numbers(column: Any) -> bool:
    import pyarrow as pa

    # A list without any values has no type.
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)
    return is_list(column) and any(is_kind(column.type.value_type) for is_kind in kinds)


def with_lists(dataset: Any, column: Any) -> list[int]:
    """The numbers of the samples in a table that have a list of one item or more in this column."""
    return np.flatnonzero(_of_samples(dataset, list_lengths(column)) > 0).tolist() if is_list(column) else []


def _holds_turns(column: Any) -> bool:
    """Whether samples with this column `turns` are trees (`is_tree`)."""
    import pyarrow as pa

    if not is_list(column):
        return False
    kind = column.type.value_type
    return kind.get_field_index("input_ids") >= 0 if pa.types.is_struct(kind) else pa.types.is_list(kind)


def _of_samples(dataset: Any, values: np.ndarray) -> np.ndarray:
    """Values per row of the table as values per sample."""
    return values if dataset._indices is None else values[dataset._indices.column(0).to_numpy()]


def _count_in_lists(column: Any, test: Callable[[Any], np.ndarray]) -> np.ndarray:
    """The number of values in each list of a column for which `test(values)` is true."""
    found, total = [np.empty(0, np.int64)], 0
    for chunk in column.chunks:
        values = chunk.flatten()
        found.append(total + np.flatnonzero(test(values)))
        total += len(values)
    return np.diff(np.searchsorted(np.concatenate(found), offsets_of(np.maximum(list_lengths(column), 0))))


def _numbers(values: Any) -> np.ndarray:
    return values.to_numpy(zero_copy_only=False)


def _is_null(values: Any) -> np.ndarray:
    return values.is_null().to_numpy(zero_copy_only=False) if values.null_count else np.empty(0, bool)
