"""Read the records of a file: JSON lines, a JSON array, CSV, or parquet. This module does not import torch."""

import csv
import io
import json
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from ...errors import described, input_error


# Compressed JSON, by the endings that pyarrow knows.
_COMPRESSED = (".gz", ".zst", ".bz2")
# The separators of tables.
_TABLES = {".csv": ",", ".tsv": "\t"}
FILE_ENDINGS = (".jsonl", ".json", ".ndjson", ".parquet", *_TABLES, *_COMPRESSED)
_LONGEST_FIELD = 2**31 - 1
_FORMATS = "one JSON object per line, a JSON array, CSV or parquet"
_MEND = "Correct the file there."


def find_file(data: str) -> Path | None:
    """Return the path of a file, or `None` for the name or the directory of a dataset.

    Raises:
        `FileNotFoundError`: the name has the ending of a file, and there is none.
    """
    path = Path(data)
    if not path.is_file() and path.suffix in FILE_ENDINGS:
        raise FileNotFoundError(f"--data: file {data} not found")
    return path if path.is_file() else None


def read_file(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place of each record in a file, and the record.

    Raises:
        `ImportError`: pyarrow is missing, for a parquet file or a compressed one.
        `OSError`: the file cannot be read.
        `ValueError`: the file is not JSON, not parquet, or not compressed as its name says.
    """
    if path.suffix in (".parquet", *_COMPRESSED) and find_spec("pyarrow") is None:
        raise ImportError(f"--data {path} needs pyarrow: pip install pyarrow")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    if path.suffix in _TABLES:
        yield from _read_table(path)
        return
    lines, may_be_array = enumerate(_lines(path), 1), True
    expected = "one JSON object per line" if path.suffix in FILE_ENDINGS else _FORMATS
    for number, line in lines:
        # Only the first line can begin with a byte order mark.
        text = _decoded(f"{path}, line {number}", line, "utf-8-sig" if number == 1 else "utf-8")
        if may_be_array and text.lstrip().startswith("["):
            array = "".join([text, *(_decoded(f"{path}, line {n}", x) for n, x in lines)])
            for place, record in enumerate(_parsed(str(path), array, "a JSON array"), 1):
                yield f"{path}, record {place}", record
        elif text.strip():
            may_be_array = False
            yield f"{path}, line {number}", _parsed(f"{path}, line {number}", text, expected)


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, which its ending may say is compressed."""
    if path.suffix not in _COMPRESSED:
        with path.open("rb") as file:
            yield from file
        return
    import pyarrow

    try:
        with io.BufferedReader(pyarrow.input_stream(path)) as file:
            yield from file
    except (OSError, pyarrow.ArrowException) as error:
        raise input_error(
            f"a complete {path.suffix} file", described(error), "Copy it again.", option=str(path)
        ) from error


def _decoded(place: str, line: bytes, encoding: str = "utf-8") -> str:
    try:
        return line.decode(encoding)
    except UnicodeDecodeError as error:
        raise input_error("UTF-8", error, "Save the file in UTF-8.", option=place) from None


def _parsed(place: str, text: str, expected: str) -> Any:
    # What JSON takes for white space.
    text = text.rstrip(" \t\r\n")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        # The place names the line of a record, and only the file of an array.
        line = f"line {error.lineno}, " if "\n" in text else ""
        got = f"invalid JSON ({error.msg}: {line}column {error.colno})"
        raise input_error(expected, got, _MEND, option=place) from None
    except RecursionError as error:
        raise input_error(expected, f"invalid JSON ({error})", _MEND, option=place) from None


def _read_table(path: Path) -> Iterator[tuple[str, Any]]:
    # A column may have a whole document.
    limit = csv.field_size_limit(_LONGEST_FIELD)
    try:
        # The first line has the names of the columns.
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter=_TABLES[path.suffix], strict=True)
            for row in rows:
                if None in row or None in row.values():
                    expected, got = f"{len(rows.fieldnames or ())} values, as the first line names", "another number"
                    fix = "Put quotes around values with separators."
                    raise input_error(expected, got, fix, option=f"{path}, line {rows.line_num}")
                yield f"{path}, line {rows.line_num}", row
    except (csv.Error, UnicodeDecodeError) as error:
        raise input_error("CSV in UTF-8", error, "Export the table again.", option=str(path)) from error
    finally:
        csv.field_size_limit(limit)


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            records = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(1024))
            for number, record in enumerate(records, 1):
                yield f"{path}, row {number}", record
    except ArrowException as error:
        raise input_error("a parquet file", str(error).rstrip("."), "Copy it again.", option=str(path)) from error
