"""One file with all compiled kernels of a machine, for machines like it.

Triton and TileLang keep compiled kernels in directories. A copy of Triton's is of no use elsewhere, because its index files
have absolute paths. An archive has names instead, and says for which GPU, driver and packages its kernels are. Kernels are
code: import an archive only from someone whose packages you would install.
"""

import io
import json
import os
import platform
import re
import shutil
import tarfile
import tempfile
from collections import defaultdict
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ..errors import input_error
from .compilations import caches


_PACKAGES = "transformers_packed torch triton tilelang flash-qla flash-linear-attention".split()
_MACHINE = "machine.json"
# What only a developer of kernels reads.
_SOURCES = {".source", ".ttir", ".ttgir", ".llir", ".ptx"}
_DRIVER = Path("/proc/driver/nvidia/version")


def machine() -> dict[str, str]:
    """Return what the kernels of this machine depend on. Without a GPU, this is Python and the packages."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.get_device_name()
        text = _DRIVER.read_text(encoding="utf-8") if _DRIVER.exists() else ""
        version = re.search(r"\d+\.\d+(\.\d+)?", text)
        found["driver"] = version[0] if version else "unknown"
    return found


def export_kernels(file: str | Path) -> int:
    """Write all kernels in the caches on disk to a file, and return their number.

    Args:
        file (`str` or `Path`):
            The file, a tar archive with gzip. An existing file is replaced once the new one is complete.
    """
    file, number = Path(file), 0
    handle, unfinished = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as stream, tarfile.open(fileobj=stream, mode="w:gz") as archive:
            _add(archive, _MACHINE, json.dumps(machine(), indent=1).encode())
            for package, (root, _) in caches().items():
                for folder, names in _kernels(Path(root)):
                    number += 1
                    for name in names:
                        content = (folder / name).read_bytes()
                        at = f"{package}/{folder.relative_to(root).as_posix()}/{name}"
                        _add(archive, at, _renamed(content, None) if _is_index(name) else content)
        os.replace(unfinished, file)
    except BaseException:
        os.unlink(unfinished)
        raise
    return number


def import_kernels(file: str | Path) -> tuple[int, int]:
    """Add the kernels of a file to the caches on disk.

    Args:
        file (`str` or `Path`):
            A file of [`export_kernels`]. Without a GPU, as in the build of an image, its GPU and driver are not compared.

    Returns:
        `tuple[int, int]`: how many kernels were added, and how many were there.

    Raises:
        `ValueError`: the file is no such archive, or its kernels are for another GPU, driver or package.
    """
    try:
        with tarfile.open(file) as archive:
            members = archive.getmembers()
            contents = {m.name: archive.extractfile(m).read() for m in members if m.isfile()}  # type: ignore[union-attr]
        theirs = json.loads(contents.pop(_MACHINE))
    except (tarfile.TarError, KeyError, ValueError, EOFError) as error:
        raise input_error("a file that warmup --export wrote", f"{file}: {error!r}") from error
    ours = machine()
    others = [
        f"{name} {theirs.get(name, 'missing')} (here {here})"
        for name, here in ours.items()
        if theirs.get(name) != here
    ]
    if others:
        raise input_error(
            "kernels for this machine", f"those for {', '.join(others)}", "Export them on a machine like this one."
        )
    kernels: dict[PurePosixPath, dict[str, bytes]] = defaultdict(dict)
    for name, content in contents.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or path.parts[0] not in caches():
            raise input_error("a file that warmup --export wrote", f"{file} with {name}")
        kernels[path.parent][path.name] = content
    roots = {package: Path(root) for package, (root, _) in caches().items()}
    added = sum(_place(roots[path.parts[0]].joinpath(*path.parts[1:]), files) for path, files in kernels.items())
    return added, len(kernels) - added


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def _kernels(root: Path) -> list[tuple[Path, list[str]]]:
    """Return the directories with files of a kernel. Those that another process is writing are left out."""
    found = []
    for folder, _, names in os.walk(root):
        kept = sorted(name for name in names if Path(name).suffix not in _SOURCES and not name.startswith("."))
        inner = Path(folder).relative_to(root).parts
        if inner and kept and not any(part.startswith((".", "tmp")) for part in inner):
            found.append((Path(folder), kept))
    return sorted(found)


def _is_index(name: str) -> bool:
    return name.startswith("__grp__")


def _renamed(index: bytes, folder: Path | None) -> bytes:
    """Return one of Triton's indices with the paths of its files in a folder, or with their names."""
    found: dict[str, Any] = json.loads(index)
    paths = {key: PurePosixPath(path).name for key, path in found["child_paths"].items()}
    kept = {key: name for key, name in paths.items() if Path(name).suffix not in _SOURCES}
    found["child_paths"] = kept if folder is None else {key: str(folder / name) for key, name in kept.items()}
    return json.dumps(found).encode()


def _place(folder: Path, files: dict[str, bytes]) -> bool:
    """Write a kernel to a folder in one step, unless it is there."""
    if folder.exists():
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".import-"))
    try:
        for name, content in files.items():
            (unfinished / name).write_bytes(_renamed(content, folder) if _is_index(name) else content)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not folder.exists():
            raise
        # Another process was faster.
        return False
    return True
