"""Write patches for Transformers, each with a test and the text of a pull request.

A patch edits a copy of Transformers by structure (`upstream/edits.py`). It finds classes, functions and calls by name,
and adds or replaces code that the patch contains. This repository stores no code of Transformers. If a target changed
or is already fixed, the command reports the patch and fails. The other patches are still written.

Usage: python utils/upstream_patch.py [--transformers PATH] [--output FOLDER] [--prove] [--together] [patches ...]
"""

import argparse
import sys
from pathlib import Path

from upstream import prove, together
from upstream.patch import NAMES
from upstream.source import Source
from upstream.write import Result, make, table, write, write_proof


ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "upstream.md"


def prove_all(source: Source, results: list[Result], output: Path) -> list[str]:
    """Run the tests without patches in one process, then with each patch, and return the problems."""
    found = []
    before = prove.run(source, {}, prove.jobs_of([result.name for result in results]))
    for result in results:
        after = prove.run(source, result.texts, prove.jobs_of([result.name]))[result.name]
        failures = prove.problems(before[result.name], after)
        fixed = sum(not outcome.startswith("passed") for outcome in before[result.name].tests.values())
        found += [f"{result.name}: {problem}" for problem in failures]
        if not failures:
            print(f"{result.name}: {fixed} tests fail without it, all {len(after.tests)} pass with it")
            write_proof(source, result, before[result.name], after, output)
            write(source, result, output)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write patches for Transformers.")
    parser.add_argument("patches", nargs="*", choices=[*NAMES, []], help="patches to write (default: all)")
    parser.add_argument(
        "--transformers", help="a checkout, an unpacked sdist or the package (default: the installed one)"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "upstream")
    parser.add_argument("--prove", action="store_true", help="run the tests of each patch without and with it")
    parser.add_argument(
        "--together",
        action="store_true",
        help="apply all patches and run the tests and the audit of this package on the result",
    )
    arguments = parser.parse_args(argv)

    source = Source(arguments.transformers)
    results = [make(source, name) for name in arguments.patches or NAMES]
    failures = [f"{result.name}: {result.reason}" for result in results if result.texts is None]
    for result in results:
        write(source, result, arguments.output)
        if result.texts is not None:
            print(f"{result.name}: {result.lines} changed lines")
    written = [result for result in results if result.texts is not None]
    if arguments.prove:
        failures += prove_all(source, written, arguments.output)
    if arguments.together:
        failures += together.prove(source, [result.name for result in written])
    # The page documents the installed release only. Its text is written by hand, up to the table.
    if arguments.transformers is None and not arguments.patches:
        introduction = PAGE.read_text(encoding="utf-8").partition("| patch |")[0]
        PAGE.write_text(introduction + table(source, results), encoding="utf-8")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
