"""What commands check before torch is imported, which takes seconds: that the model and the data are there."""

from pathlib import Path

from ..data.records.files import find_file, read_file
from ..errors import input_error


LOCAL_OR_HUB = "a local directory or a model on the Hub"


def check_source(option: str, source: str) -> None:
    """Raise an `OSError` for a path that does not exist. Names on the Hub have at most one slash, and none in front."""
    is_name = source.count("/") < 2 and not source.startswith(("/", ".", "~")) and "\\" not in source
    if not is_name and not Path(source).exists():
        got = f"{source!r}: no such local directory, and the name is not valid on the Hub"
        raise OSError(str(input_error(LOCAL_OR_HUB, got, "Check the path.", option=option)))


def check_data(data: str) -> None:
    """Raise the error of a file that is not there, or whose first record cannot be read. A JSON array is read later."""
    path = find_file(data)
    if path is None:
        return
    with path.open("rb") as file:
        is_array = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not is_array:
        next(read_file(path), None)
