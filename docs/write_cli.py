"""Write `reference/cli.md` from the parsers of the command line: `python docs/write_cli.py`."""

import argparse
import re
from pathlib import Path

from transformers_packed.cli.options import Parser, parsers


PAGE = Path(__file__).parent / "reference" / "cli.md"
INTRODUCTION = """\
# Command line

`transformers-packed COMMAND --help` prints the options below. `python -m transformers_packed.cli` runs the same program.
[Fine-tune from the command line](../how_to/command_line.md) shows how to use it.

The exit status is 0 on success, 1 after a failure, 2 after wrong arguments, 130 after Ctrl-C and 141 if the output is no
longer read. `audit` has [its own](#transformers-packed-audit).

| command | purpose |
|---|---|
"""


def page() -> str:
    """The text of the page."""
    parser, commands = parsers()
    helps = {action.dest: action.help for action in parser._subparsers._group_actions[0]._choices_actions}
    rows = [f"| [`{name}`](#transformers-packed-{name}) | {helps[name]} |" for name in commands]
    return INTRODUCTION + "\n".join(rows) + "\n" + "".join(map(section, commands.values()))


def section(parser: argparse.ArgumentParser) -> str:
    """A command: its purpose and its options."""
    rows = [row(action) for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    table = ["| option | value | meaning |", "|---|---|---|", *rows] if rows else ["It has no options."]
    examples = ["```bash", *parser.examples, "```", ""] if parser.examples else []
    return "\n".join(["", f"## {parser.prog}", "", with_code(parser.description), "", *examples, *table, ""])


def row(action: argparse.Action) -> str:
    """One option as a row of the table."""
    name = ", ".join(action.option_strings) or action.metavar
    values = [] if action.nargs == 0 or not action.option_strings else action.choices or action.metavar.split("|")
    value = " ".join(f"`{value}`" for value in values) + (" ..." if action.nargs == "+" else "")
    text = with_code(Parser().formatter_class(prog="")._expand_help(action))
    return f"| `{name}` | {value} | {'**Required.** ' * action.required}{text} |"


def with_code(text: str) -> str:
    """Help with the options that it mentions as code."""
    return re.sub(r"(?<![\w`-])--\w[\w-]*", r"`\g<0>`", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
