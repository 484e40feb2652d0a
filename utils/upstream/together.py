"""All patches together: their tests, and this package's model tests and audit on the patched stock classes."""

import os
from collections import Counter
from pathlib import Path

from .patch import load
from .prove import jobs_of, run
from .source import Edited, Source


ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "scripts" / "patched_builtins.py"


def apply_all(source: Source, names: list[str]) -> Edited:
    tree = Edited(source)
    for name in names:
        load(name).apply(tree)
    tree.format()
    return tree


def prove(source: Source, names: list[str]) -> list[str]:
    """Run all tests in a copy of the source with all patches and list those that do not pass."""
    tree = apply_all(source, names)
    jobs = jobs_of(names) | {"patched-builtins": (TESTS, "")}
    path = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests"))
    found = []
    for name, done in run(source, tree.texts, jobs, path).items():
        outcomes = Counter(outcome.split(":")[0] for outcome in done.tests.values())
        print(f"all together, {name}: {', '.join(f'{count} {what}' for what, count in outcomes.items())}")
        found += [f"all together: {t}: {outcome}" for t, outcome in done.tests.items() if outcome != "passed"]
    return found
