"""The written output: a diff, a test and a text for each patch, and the table of all patches."""

import hashlib
import json
import shutil
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from .edits import AlreadyFixed, TargetChanged
from .patch import file_of_tests, load
from .prove import Run, apply_diff
from .source import LINE_LENGTH, Edited, Source, changed_lines


MOST_LINES = 150

BEFORE = """\
---

Before you submit it: read and understand every line, because you are responsible for all of them. Look for open work
on the issues above, and announce your plan there. In a checkout run `make fix-repo` and the tests of the changed
models, on a GPU as well, and add the results here. Then delete this section."""


@dataclass(frozen=True)
class Result:
    """The result of applying a patch: its diff and the new files, or the reason for their absence."""

    name: str
    diff: str = ""
    texts: dict[str, str] | None = None
    reason: str = ""

    @property
    def lines(self) -> int:
        return len(changed_lines(self.diff))


def make(source: Source, name: str) -> Result:
    """Apply a patch, and check its diff."""
    tree = Edited(source)
    try:
        load(name).apply(tree)
    except AlreadyFixed as error:
        return Result(name, reason=f"fixed in {source.version}: {error}")
    except TargetChanged as error:
        return Result(name, reason=f"target changed in {source.version}: {error}")
    tree.format()
    result = Result(name, tree.diff(), tree.texts)
    too_long = [line for line in changed_lines(result.diff) if line[0] == "+" and len(line) - 1 > LINE_LENGTH]
    if too_long:
        raise RuntimeError(f"{name}: lines longer than {LINE_LENGTH}: {too_long}")
    if result.lines > MOST_LINES:
        raise RuntimeError(f"{name}: {result.lines} changed lines, more than {MOST_LINES}")
    if apply_diff(source, result.diff, list(tree.texts)) != tree.texts:
        raise RuntimeError(f"{name}: git applies the diff to something else than the edited files")
    return result


def write(source: Source, result: Result, output: Path) -> None:
    """Write the folder of a patch, or remove it if the patch has no diff."""
    folder = output / result.name
    if result.texts is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result.name}.patch").write_text(result.diff, encoding="utf-8")
    shutil.copyfile(file_of_tests(result.name), folder / file_of_tests(result.name).name)
    (folder / "README.md").write_text(text(source, result, read_proof(source, result, output)), encoding="utf-8")


def _fingerprint(source: Source, result: Result) -> str:
    parts = (source.version, result.diff, file_of_tests(result.name).read_text(encoding="utf-8"))
    return hashlib.sha256("\0".join((*parts, load(result.name).reproduction)).encode()).hexdigest()


def write_proof(source: Source, result: Result, before: Run, after: Run, output: Path) -> None:
    """Save a proof beside the patch. The text of the patch reports it."""
    proof = {"of": _fingerprint(source, result), "before": asdict(before), "after": asdict(after)}
    (output / result.name / "proof.json").write_text(json.dumps(proof, indent=1) + "\n", encoding="utf-8")


def read_proof(source: Source, result: Result, output: Path) -> tuple[Run, Run] | None:
    """Load the proof of exactly this patch, if one exists."""
    path = output / result.name / "proof.json"
    proof = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if proof.get("of") != _fingerprint(source, result):
        return None
    return Run(**proof["before"]), Run(**proof["after"])


def text(source: Source, result: Result, proof: tuple[Run, Run] | None) -> str:
    """Write the text for a pull request, with the steps to take before submission."""
    patch, test = load(result.name), file_of_tests(result.name).name
    parts = [
        f"# {patch.title}",
        f"## Problem\n\n{patch.problem}",
        f"Models: {patch.families}. Upstream: {', '.join(patch.issues) or 'none known'}.",
        f"## Reproduction\n\n```python\n{patch.reproduction.strip()}\n```",
    ]
    if proof:
        before, after = proof
        parts += [
            f"On a CPU it prints or raises, without the patch,\n\n```\n{before.reproduction}\n```",
            f"and with it\n\n```\n{after.reproduction}\n```",
        ]
    parts += [f"## Change\n\n{patch.change}\n\n{result.lines} lines are added or removed."]
    if any("/modular_" in path for path in result.texts or ()):
        parts += [
            "Modular files and the files generated from them have the same edits. The converter, "
            "`utils/modular_model_converter.py` in a checkout, was not run."
        ]
    parts += [f"## Tests\n\n`{test}`, for {patch.beside}."]
    if proof:
        failed, passed = (
            Counter(o.split(":")[0] for o in before.tests.values())[what] for what in ("failed", "passed")
        )
        parts += [
            f"Run with transformers {source.version} on a CPU, with flash-linear-attention, causal-conv1d and "
            f"mamba-ssm hidden: without the patch {failed} tests fail and {passed} pass, with it all {len(after.tests)} pass. "
            "No kernel ran: tests that need one use a stand-in with its signature."
        ]
    else:
        parts += ["Not run yet; `make test-upstream` runs it without and with the patch."]
    parts += [
        "## Disclosure\n\nThis patch, its test and this text were made with the help of code-generating tools.",
        BEFORE,
    ]
    return "\n\n".join(parts) + "\n"


def table(source: Source, results: list[Result]) -> str:
    """Format the table of all patches."""
    lines = ["| patch | problem | models | changed lines | upstream | state |", "|---|---|---|---:|---|---|"]
    for result in results:
        patch, state = load(result.name), result.reason or f"applies to {source.version}"
        issues = ", ".join(patch.issues)
        cells = (f"`{result.name}`", patch.summary, patch.families, str(result.lines or ""), issues, state)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
