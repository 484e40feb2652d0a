"""Write the pages of measurements: `docs/measured/*.md` from `benchmarks/pages/*.md` and `benchmarks/results/*.json`.

The pages are written by hand, as Jinja templates. They fill their tables and figures from the JSON: `step.json` is the
variable `step`. A name that the JSON does not have is an error. The few figures that no JSON holds are named so on the
page. `--check` writes nothing and fails when a page differs from its template and its JSON.

Usage: python utils/measured/write.py [--check] [--results FOLDER] [--templates FOLDER] [--output FOLDER]
"""

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path

import figures
import jinja2


ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "benchmarks" / "pages"


def pages(results: dict[str, dict], templates: Path = TEMPLATES, only: str = "*") -> dict[str, str]:
    """Return the text of each page by its file name. `results` has the JSON files by their names without `.json`."""
    loader = jinja2.FileSystemLoader(templates)
    options = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(loader=loader, **options)
    environment.tests |= figures.TESTS
    environment.filters |= figures.FORMATS
    environment.globals |= figures.SELECTIONS | results
    made, summaries = {}, {}
    for path in sorted(templates.glob(f"{only}.md")):
        if path.stem != "index" and path.name[0] != "_":
            # A template also sets `number` for the index.
            page = environment.get_template(path.name).make_module()
            made[path.name] = wrapped(str(page))
            title = made[path.name].partition("\n")[0].removeprefix("# ")
            summaries[path.stem] = {"title": title, "number": page.number}
    if only == "*":
        made["index.md"] = wrapped(environment.get_template("index.md").render(pages=summaries))
    return made


def wrapped(text: str) -> str:
    """Return the text with paragraphs and items of lists in lines of equal length.

    Headings, tables, pictures, code, and tags such as those of a folded part stay as they are.
    """
    parts = re.split(r"\n{2,}", text.strip())
    return "\n\n".join(part if part.startswith(("#", "|", "!", "```", "<")) else filled(part) for part in parts) + "\n"


def filled(part: str) -> str:
    options = {"width": 119, "break_long_words": False, "break_on_hyphens": False}
    if part.startswith("- "):
        items = re.split(r"^(?=- )", part, flags=re.MULTILINE)[1:]
        return "\n".join(textwrap.fill(" ".join(x.split()), subsequent_indent="  ", **options) for x in items)
    return textwrap.fill(" ".join(part.split()), **options)


def load(folder: Path) -> dict[str, dict]:
    """Return the contents of the JSON files of a folder by their names without `.json`."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail when a page differs, and write nothing")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--templates", type=Path, default=TEMPLATES)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "measured")
    args = parser.parse_args()
    made = pages(load(args.results), args.templates)
    if args.check:
        there = {path.name: path.read_text(encoding="utf-8") for path in args.output.glob("*.md")}
        stale = sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))
        if stale:
            sys.exit(f"{', '.join(stale)}: differs from benchmarks/. Run python utils/measured/write.py")
        return
    args.output.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        (args.output / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
