"""Read the records of a file: JSON lines, a JSON array, or parquet."""

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
FILE_ENDINGS = (".jsonl", ".json", ".ndjson", ".parquet", *_COMPRESSED)


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
    lines, may_be_array = enumerate(_lines(path), 1), True
    for number, line in lines:
        # Only the first line can begin with a byte order mark.
        text = _decoded(f"{path}, line {number}", line, "utf-8-sig" if number == 1 else "utf-8")
        if may_be_array and text.lstrip().startswith("["):
            array = "".join([text, *(_decoded(f"{path}, line {n}", x) for n, x in lines)])
            for place, record in enumerate(_parsed(str(path), array, "a JSON array"), 1):
                yield f"{path}, record {place}", record
        elif text.strip():
            may_be_array = False
            yield f"{path}, line {number}", _parsed(f"{path}, line {number}", text, "one JSON object per line")


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
        raise input_error(f"a complete {path.suffix} file", described(error), option=str(path)) from error


def _decoded(place: str, line: bytes, encoding: str = "utf-8") -> str:
    try:
        return line.decode(encoding)
    except UnicodeDecodeError as error:
        raise input_error("UTF-8", error, option=place) from None


def _parsed(place: str, text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise input_error(expected, f"invalid JSON ({error})", option=place) from None


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            records = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(1024))
            for number, record in enumerate(records, 1):
                yield f"{path}, row {number}", record
    except ArrowException as error:
        raise input_error("a parquet file", str(error).rstrip("."), option=str(path)) from error
