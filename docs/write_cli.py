"""Write `reference/cli.md` from the parsers of the command line: `python docs/write_cli.py`."""

import argparse
import re
from pathlib import Path

from transformers_packed import cli
from transformers_packed.cli.options import Parser


PAGE = Path(__file__).parent / "reference" / "cli.md"
# In the order of a first use.
COMMANDS = ("demo", "train", "bench", "warmup", "plan", "memory", "audit", "doctor", "env")
INTRODUCTION = """\
# Command line

`transformers-packed` is installed with the package; `python -m transformers_packed.cli` runs the same program.
`transformers-packed COMMAND --help` prints the options below. [The command line](../how_to/command_line.md) shows how to
use the commands.

A command exits with status 0 on success, 1 after a failure, 2 after wrong arguments, 130 after Ctrl-C and 141 if its
output is no longer read. `audit` has its own [exit statuses](#transformers-packed-audit).

| command | purpose |
|---|---|
"""


def page() -> str:
    """The text of the page."""
    subparsers = Parser(prog="transformers-packed").add_subparsers()
    commands = {name: getattr(cli, name).add_parser(subparsers) for name in COMMANDS}
    helps = {action.dest: action.help for action in subparsers._choices_actions}
    rows = [f"| [`{name}`](#transformers-packed-{name}) | {helps[name]} |" for name in commands]
    return INTRODUCTION + "\n".join(rows) + "\n" + "".join(map(section, commands.values()))


def section(parser: argparse.ArgumentParser) -> str:
    """A command: its purpose and its options."""
    rows = [row(action) for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    table = ["| option | value | meaning |", "|---|---|---|", *rows] if rows else ["It has no options."]
    return "\n".join(["", f"## {parser.prog}", "", with_code(parser.description), "", *table, ""])


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
