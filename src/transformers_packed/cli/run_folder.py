"""The output folder of the `train` command: the settings of the run, its checkpoints, and finally the model.

All files are first written to `partial` and renamed when they are complete. A full disk or a killed run therefore
leaves no incomplete checkpoint or model, and loses no earlier one. `folder_trainer.py` writes them. This module does not
import torch, so that `train` refuses an occupied folder at once.
"""

import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..errors import input_error
from .lines import shortened


SETTINGS_FILE = "transformers_packed_train.json"
# These files mark a finished run. They are written last.
LAST_FILES = ("config.json", "adapter_config.json")
_TRAINER_STATE = "trainer_state.json"
PARTIAL = "partial"
_PARTIAL_SETTINGS = Path(SETTINGS_FILE).with_suffix(".partial").name
_ANOTHER = "Choose another --output."
# Settings of the length of training, which a resumed run need not share.
_LENGTHS = "epochs", "max_steps"
# Left by a run that ended before its first checkpoint.
_WITHOUT_RESULTS = {SETTINGS_FILE, _PARTIAL_SETTINGS, PARTIAL}


def find_checkpoint(output: Path, resume: bool) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, if any, and the defects of later ones.

    Without `resume`, `output` may hold the settings of a run that ended before its first checkpoint.

    Raises:
        `ValueError`: `output` holds other files or an earlier run, or the run cannot be continued.
        `PermissionError`: `output` is not writable.
    """
    _check_writable(output)
    names = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if not names - {_PARTIAL_SETTINGS}:
        return None, []
    if SETTINGS_FILE not in names:
        expected = "a new or empty directory, or the output of an earlier run of this command"
        got = f"{output}, which holds other files ({shortened(names)})"
        raise input_error(expected, got, _ANOTHER, option="--output")
    if not resume:
        _check_without_results(output, names - _WITHOUT_RESULTS)
        return None, []
    checkpoint, damaged = last_checkpoint(output)
    if checkpoint is None and damaged:
        fix = "Restore it, or delete it to start from the beginning."
        raise input_error("a complete checkpoint", "; ".join(damaged), fix, option="--resume")
    if checkpoint is None and any((output / name).exists() for name in LAST_FILES):
        expected = "an unfinished run, or a run with checkpoints"
        got = f"a finished run without checkpoints in {output}"
        fix = "Choose another --output; to train further, pass it as --model."
        raise input_error(expected, got, fix, option="--resume")
    return checkpoint, damaged


def _check_writable(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise input_error("a directory", f"the file {output}", _ANOTHER, option="--output")
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    try:
        # Permissions say little: the administrator has all of them, also in a file system without files of others.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise PermissionError(f"--output: {existing} is not a writable directory. {_ANOTHER}") from error


def _check_without_results(output: Path, results: set[str]) -> None:
    """Raise a `ValueError` if the folder of an earlier run has results, which a new run would mix with its own."""
    if not results:
        return
    got, fix = f"other files ({shortened(results)})", "Remove them, or choose another --output."
    if any(name.startswith("checkpoint-") for name in results):
        got, fix = "an earlier run", "Add --resume to continue that run."
    elif results.intersection(LAST_FILES):
        got, fix = "a finished run", _ANOTHER
    raise input_error("a new or empty directory", f"{output}, which holds {got}", fix, option="--output")


def last_checkpoint(output: Path) -> tuple[Path | None, list[str]]:
    """The last complete checkpoint in `output`, if any, and the defects of later ones."""
    damaged: list[str] = []
    numbers = (path.name.removeprefix("checkpoint-") for path in output.glob("checkpoint-*"))
    for number in sorted(filter(str.isdecimal, numbers), key=int, reverse=True):
        path = output / f"checkpoint-{number}"
        if (wrong := _damage(path)) is None:
            return path, damaged
        damaged.append(f"{path}, which is incomplete or damaged ({wrong})")
    return None, damaged


def left(output: Path) -> str:
    """The checkpoint that an interrupted run can continue from, in words."""
    last, _ = last_checkpoint(output)
    if last:
        return f"{last} is complete; --resume continues from it"
    return "no checkpoint was written, so the same command starts from the beginning"


def _damage(checkpoint: Path) -> str | None:
    """The first incomplete or damaged file. Checks only the ends of files, where archives have their directory."""
    if not (checkpoint / _TRAINER_STATE).is_file():  # written last
        return f"no {_TRAINER_STATE}"
    if not any(path.name.startswith(("model", "pytorch_model", "adapter_model")) for path in checkpoint.iterdir()):
        return "no weights"
    for path in sorted(checkpoint.rglob("*")):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "np"):
                    pass
            elif path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(path):
                return f"{path.name}: truncated"
        except (OSError, ValueError, SafetensorError) as error:
            return f"{path.name}: {' '.join(str(error).split())}"
    return None


def write_settings(output: Path, kept: dict[str, Any]) -> None:
    """Write the settings that a resumed run must share with this one."""
    path, partial = output / SETTINGS_FILE, output / _PARTIAL_SETTINGS
    try:
        partial.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _said(option: str, now: Any, before: Any) -> str:
    """How an option differs from the one before. A flag has no value."""
    if now is True or before is True:
        return option if now else f"no {option}"
    return f"{option} {now} instead of {before}"


def check_same_settings(output: Path, kept: dict[str, Any], resume: bool) -> str:
    """Return how the length of training differs from the run in `output`, if there is one.

    Raises:
        `ValueError`: other settings differ too. The message names all of them.
    """
    path = output / SETTINGS_FILE
    if not path.is_file():
        return ""
    expected, option = f"the settings of the run in {output}", "--resume" if resume else "--output"
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        # An option that is not set may be left out.
        every = dict.fromkeys([*kept, *before])
        differing = {name: before.get(name) for name in every if before.get(name) != kept.get(name)}
    except (ValueError, AttributeError) as error:
        raise input_error(expected, f"{path} ({error})", _ANOTHER, option=option) from error
    names = {name: f"--{name.replace('_', '-')}" for name in every} | {"processes": "processes"}
    # A run may go on for longer than it was meant to.
    lengths = {x: differing.pop(x) for x in _LENGTHS if x in differing}
    other_length = [_said(names[x], kept.get(x), value) for x, value in lengths.items() if x in before]
    if differing:
        got = [_said(names[name], kept.get(name), x) for name, x in differing.items() if name != "samples"]
        if "samples" in differing:
            got.append("other samples")
        fix = "Use the command of that run, or choose another --output."
        if not resume:
            fix = f"Use the command of that run, choose another --output, or delete {path} to start over."
        raise input_error(expected, "; ".join(got), fix, option=option)
    return "; ".join(other_length)
