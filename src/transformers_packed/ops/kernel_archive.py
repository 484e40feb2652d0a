"""One file with all compiled kernels of a machine, for machines like it.

Triton and TileLang keep compiled kernels in directories. A copy of Triton's is of no use elsewhere, because its index
files have absolute paths. An archive has names instead, and says for which GPU, driver and packages its kernels are.
Kernels are code: import an archive only from someone whose packages you would install.
"""

import gzip
import io
import json
import os
import platform
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ..errors import input_error
from .backends.caches import caches, version_of


_PACKAGES = "transformers_packed torch triton tilelang flash-qla flash-linear-attention".split()
_MACHINE = "machine.json"
# What only a developer of kernels reads.
_SOURCES = {".source", ".ttir", ".ttgir", ".llir", ".ptx"}
_INDEX = "__grp__"
_DRIVER = Path("/proc/driver/nvidia/version")
_EXPECTED = "a file that warmup --export wrote"


def machine() -> dict[str, str]:
    """Return what the kernels of this machine depend on: without a GPU, the processor, Python and the packages."""
    found = {"processor": platform.machine(), "Python": ".".join(platform.python_version_tuple()[:2])}
    found |= {package: version_of(package) for package in _PACKAGES}
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        found["GPU"] = ", ".join(sorted(names))
        version = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text(encoding="utf-8") if _DRIVER.exists() else "")
        found["driver"] = version[0] if version else "unknown"
    return found


def export_kernels(file: str | Path) -> int:
    """Write the kernels in the caches on disk to a file, and return their number.

    Kernels that another process is writing, and those whose files are not all there, are left out.

    Args:
        file (`str` or `Path`):
            The file, a tar archive with gzip. An existing file is replaced once the new one is complete.
    """
    file, number = Path(file), 0
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with tarfile.open(unfinished, mode="w:gz", compresslevel=6) as archive:
            _add(archive, _MACHINE, json.dumps(machine(), indent=1).encode())
            for package, (root, _) in caches().items():
                for folder in _folders(Path(root)):
                    at = f"{package}/{folder.relative_to(root).as_posix()}"
                    files = _complete_kernel(folder)
                    number += bool(files)
                    for name, content in files.items():
                        _add(archive, f"{at}/{name}", content)
        unfinished.replace(file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return number


def import_kernels(file: str | Path) -> tuple[int, int]:
    """Add the kernels of a file to the caches on disk.

    Args:
        file (`str` or `Path`):
            A file of [`export_kernels`]. Without a GPU, as when an image is built, its GPU and driver are not compared.

    Returns:
        `tuple[int, int]`: how many kernels were added, and how many were there.

    Raises:
        `ValueError`: the file is no such archive or is damaged, or its kernels are for another GPU, driver or package.
    """
    counts = [0, 0]
    try:
        # Reads to the end, where gzip has the checksum. `tarfile` stops before it.
        with gzip.open(file) as stream:
            while stream.read(1 << 20):
                pass
        with tarfile.open(file) as archive:
            files = ((x, archive.extractfile(x)) for x in archive)
            entries = ((PurePosixPath(x.name), file.read()) for x, file in files if file is not None)
            name, content = next(entries, (None, b""))
            theirs = json.loads(content) if name == PurePosixPath(_MACHINE) else None
            if not isinstance(theirs, dict):
                raise input_error(_EXPECTED, f"{file} without {_MACHINE} at its start")
            _check_machine(theirs)
            roots = {package: Path(root) for package, (root, _) in caches().items()}
            for path, group in groupby(entries, lambda entry: entry[0].parent):
                if path.is_absolute() or ".." in path.parts or len(path.parts) < 2 or path.parts[0] not in roots:
                    raise input_error(_EXPECTED, f"{file} with {path}")
                folder = roots[path.parts[0]].joinpath(*path.parts[1:])
                counts[not _place(folder, {name.name: content for name, content in group})] += 1
    except (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, json.JSONDecodeError) as error:
        raise input_error(_EXPECTED, f"{file}: {error!r}", "Copy it again.") from error
    return counts[0], counts[1]


def _check_machine(theirs: dict[str, Any]) -> None:
    ours = machine()
    names = [name for name, here in ours.items() if theirs.get(name) != here]
    if names:
        others = ", ".join(f"{name} {theirs.get(name, 'missing')} (here {ours[name]})" for name in names)
        raise input_error("kernels for this machine", f"those for {others}", "Export them on a machine like this one.")


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def _folders(root: Path) -> Iterator[Path]:
    """Yield the directories in a cache but those in which other processes are writing."""
    for folder, inner, _ in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith((".", "tmp.pid_")))
        if Path(folder) != root:
            yield Path(folder)


def _complete_kernel(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files of a directory, with names in Triton's index, or none if a file is missing."""
    try:
        names = sorted(x.name for x in folder.iterdir() if x.is_file())
        names = [name for name in names if Path(name).suffix not in _SOURCES and not name.startswith(".")]
        found = {name: (folder / name).read_bytes() for name in names}
        for name in filter(_is_index, names):
            children = _children(found[name])
            if not set(children.values()) <= found.keys():
                return {}
            found[name] = json.dumps({"child_paths": children}).encode()
    except (FileNotFoundError, ValueError):
        # It has just been deleted, or its index is broken.
        return {}
    # Triton writes the index of a kernel last.
    is_whole = any(map(_is_index, names)) or not any(name.endswith(".cubin") for name in names)
    return found if is_whole else {}


def _is_index(name: str) -> bool:
    return name.startswith(_INDEX)


def _children(index: bytes) -> dict[str, str]:
    """Return the names of the files that an index of Triton lists."""
    return {key: path.name for key, path in _paths(index).items() if path.suffix not in _SOURCES}


def _paths(index: bytes) -> dict[str, Path]:
    found = json.loads(index)
    if not isinstance(found, dict) or not isinstance(found.get("child_paths"), dict):
        raise json.JSONDecodeError("no child_paths", "", 0)
    return {key: Path(path) for key, path in found["child_paths"].items()}


def _place(folder: Path, files: dict[str, bytes]) -> bool:
    """Write a kernel to a directory, and return whether it was missing or incomplete there."""
    for name in filter(_is_index, files):
        paths = {key: str(folder / child) for key, child in _children(files[name]).items()}
        files[name] = json.dumps({"child_paths": paths}).encode()
    if _is_there(folder, files):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".import-{os.getpid()}-{folder.name}")
    unfinished.mkdir()
    try:
        # The index comes last, since it makes the kernel valid.
        names = sorted(files, key=_is_index)
        for name in names:
            (unfinished / name).write_bytes(files[name])
        # Whole in one step, unless the directory has files.
        with suppress(OSError):
            unfinished.rename(folder)
            return True
        for name in names:
            (unfinished / name).replace(folder / name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return True


def _is_there(folder: Path, files: dict[str, bytes]) -> bool:
    """Whether a directory has all files of a kernel, and its index lists files that exist."""
    if not all((folder / name).is_file() for name in files):
        return False
    try:
        listed = [path for name in filter(_is_index, files) for path in _paths((folder / name).read_bytes()).values()]
    except ValueError:
        return False
    return all(path.exists() for path in listed if path.suffix not in _SOURCES)
