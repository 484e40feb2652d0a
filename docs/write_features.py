"""Write the table of `how_to/quantized_checkpoints.md` from the tests: `python docs/write_features.py`.

Its entries are those of the tests that `tests/common/shown.py` describes. A cell is empty where no test shows it.
"""

import sys
from importlib import import_module
from pathlib import Path


ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "how_to" / "quantized_checkpoints.md"
TITLE = "\n## What works\n\n"


def page() -> str:
    """The text of the page, with the first table below the title anew."""
    before, after = PAGE.read_text(encoding="utf-8").split(TITLE)
    start = after.index("|")
    end = after.index("\n\n", start)
    return before + TITLE + after[:start] + table() + after[end:]


def table() -> str:
    """A row for each feature, and a column for each kind."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.insert(0, str(ROOT / "tests"))
    from common import shown

    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "common.shown" in path.read_text(encoding="utf-8"):
            import_module(".".join(path.relative_to(ROOT / "tests").with_suffix("").parts))
    rows = [["", *shown.KINDS], ["---"] * (1 + len(shown.KINDS))]
    rows += [[feature, *(shown.SHOWN.get((kind, feature), "") for kind in shown.KINDS)] for feature in shown.FEATURES]
    return "\n".join("|" + "|".join(f" {cell} ".replace("  ", " ") for cell in row) + "|" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
