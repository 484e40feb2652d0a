"""Generate `modeling_<family>.py` from `modular_<family>.py`.

A modular file contains only the differences from its base classes. It uses two kinds of base classes:

* A class of the installed Transformers, written `builtin.Name` after
  `from transformers.models.<family> import modeling_<family> as builtin`. It stays an imported base class.
* A class of another modular file of this package (a sibling). The converter unfolds it: it copies the body under the
  child's name, and replaces the sibling's prefix in names by the child's. Methods and attributes of the child replace
  those of the same name. `builtin.<SiblingName>` becomes `builtin.<ChildName>`, which has to exist.

A family lists the classes that it only takes over, without one of its own to write:
`SAME = [("alpha", "Alpha", "Beta", "Net Block")]` stands for `class BetaNet(AlphaNet): pass` of `modular_alpha.py`, and
the same for `Block`.

In a generated file, `super()` therefore always means the stock class. A call through `super()` in a child to a method
that the sibling defines is an error, because it would mean different methods in the two files.

Usage: python utils/modular_model_converter.py [--check] [modular files ...]
"""

import argparse
import ast
import difflib
import importlib.util
import re
import subprocess
import sys
from functools import cached_property
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from upstream.edits import code_of, names_in


ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "src" / "transformers_packed" / "models"
HEADER = """\
# This file is generated from {modular} by utils/modular_model_converter.py.
# Do not edit it: change the modular file and run `make modular`.
"""


class ConversionError(Exception):
    """A modular file cannot be unfolded. The message gives the reason."""


def member_name(statement: cst.BaseStatement) -> str | None:
    """Return the name of the function, class, attribute or variable that a statement defines."""
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        return statement.name.value
    if m.matches(statement, m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(target=m.Name())])])):
        return statement.body[0].targets[0].target.value
    if m.matches(statement, m.SimpleStatementLine(body=[m.AnnAssign(target=m.Name())])):
        return statement.body[0].target.value
    return None


def is_docstring(statement: cst.BaseStatement) -> bool:
    return m.matches(statement, m.SimpleStatementLine(body=[m.Expr(value=m.SimpleString())]))


def is_pass(statement: cst.BaseStatement) -> bool:
    return m.matches(statement, m.SimpleStatementLine(body=[m.Pass()]))


def expanded(text: str) -> str:
    """Write out the classes of the list `SAME` in the text of a modular file."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SAME":
            code = []
            for family, theirs, ours, names in ast.literal_eval(node.value):
                code += [f"from ..{family}.modular_{family} import {theirs}{name}" for name in names.split()]
                code += [f"class {ours}{name}({theirs}{name}):\n    pass" for name in names.split()]
            lines = text.splitlines()
            return "\n".join([*lines[: node.lineno - 1], *code, *lines[node.end_lineno :], ""])
    return text


def bound(alias: cst.ImportAlias) -> str:
    """Return the name that an import defines."""
    return alias.evaluated_alias or alias.evaluated_name


class Module:
    """A parsed modular file."""

    def __init__(self, path: Path):
        self.path = path
        self.tree = cst.parse_module(expanded(path.read_text()))
        self.imports = [s for s in self.tree.body if m.matches(s, m.SimpleStatementLine(body=[m.ImportFrom()]))]
        self.imports += [s for s in self.tree.body if m.matches(s, m.SimpleStatementLine(body=[m.Import()]))]
        self.definitions = {name: s for s in self.tree.body if (name := member_name(s)) is not None}
        self.classes = {name: s for name, s in self.definitions.items() if isinstance(s, cst.ClassDef)}

    def error(self, message: str) -> ConversionError:
        return ConversionError(f"{self.path.name}: {message}")

    @cached_property
    def siblings(self) -> dict[str, "Module"]:
        """The modular files that this one imports classes from, by imported name."""
        found = {}
        for statement in self.imports:
            node = statement.body[0]
            module = getattr(node, "module", None)
            source = "" if module is None else code_of(module)
            if not source.rpartition(".")[2].startswith("modular_"):
                continue
            path = self.path.parent
            for _ in node.relative[1:]:
                path = path.parent
            sibling = load(path.joinpath(*source.split(".")).with_suffix(".py"))
            for alias in node.names:
                if alias.name.value not in sibling.classes:
                    raise self.error(f"{sibling.path.name} defines no class {alias.name.value}")
                found[alias.name.value] = sibling
        return found

    @cached_property
    def builtin_classes(self) -> set[str]:
        """The classes of the stock modeling file that this module imports as `builtin`, parsed without an import."""
        for statement in self.imports:
            node = statement.body[0]
            if isinstance(node, cst.ImportFrom) and not node.relative:
                for alias in node.names:
                    if alias.evaluated_alias == "builtin":
                        spec = importlib.util.find_spec(f"{code_of(node.module)}.{alias.name.value}")
                        tree = ast.parse(Path(spec.origin).read_text())
                        return {n.name for n in tree.body if isinstance(n, ast.ClassDef)}
        raise self.error("no `from transformers.models.<family> import modeling_<family> as builtin`")

    def bases(self, class_name: str) -> list[str]:
        return [code_of(base.value) for base in self.classes[class_name].bases]

    def sibling_base(self, class_name: str) -> str | None:
        found = [base for base in self.bases(class_name) if base in self.siblings]
        if found and len(self.bases(class_name)) > 1:
            raise self.error(f"{class_name} derives from {found[0]} and something else: unfolding needs a single base")
        return found[0] if found else None

    @cached_property
    def renames(self) -> tuple[dict[str, str], dict[str, str]]:
        """The mappings from sibling classes to child classes, and from sibling prefixes to child prefixes."""
        pairs = {base: name for name in self.classes if (base := self.sibling_base(name)) is not None}
        prefixes: dict[str, str] = {}
        without = []
        for sibling, child in pairs.items():
            suffix_length = 0
            while sibling[-1 - suffix_length :] == child[-1 - suffix_length :] and suffix_length < len(child):
                suffix_length += 1
            # A suffix consists of whole words, so it starts with a capital letter.
            suffix = re.search(r"[A-Z].*$", sibling[len(sibling) - suffix_length :])
            if suffix is None:
                without.append((sibling, child))
                continue
            old, new = (name.removesuffix(suffix[0]) for name in (sibling, child))
            if old not in prefixes or len(new) < len(prefixes[old]):
                prefixes[old] = new
        for sibling, child in without:
            # Other classes of the two families have to tell the prefixes.
            if not any(sibling.startswith(old) and child.startswith(new) for old, new in prefixes.items()):
                raise self.error(f"{child} and {sibling} have no common ending, so no prefix to rename")
        return pairs, prefixes


_loaded: dict[Path, Module] = {}


def load(path: Path) -> Module:
    if path not in _loaded:
        _loaded[path] = Module(path)
    return _loaded[path]


class Rename(cst.CSTTransformer):
    """Rename whole names first, then prefixes, in code, strings and comments."""

    def __init__(self, classes: dict[str, str], prefixes: dict[str, str]):
        self.renames = classes | prefixes
        keys = [rf"{re.escape(name)}\b" for name in classes]
        # Longest first, because one prefix may be the start of another.
        keys += [re.escape(prefix) for prefix in sorted(prefixes, key=len, reverse=True)]
        self.pattern = re.compile(rf"\b(?:{'|'.join(keys)})")

    def _text(self, text: str) -> str:
        return self.pattern.sub(lambda match: self.renames[match[0]], text)

    def leave_Name(self, original_node, updated_node):
        return updated_node.with_changes(value=self._text(updated_node.value))

    def leave_SimpleString(self, original_node, updated_node):
        return updated_node.with_changes(value=self._text(updated_node.value))

    def leave_FormattedStringText(self, original_node, updated_node):
        return updated_node.with_changes(value=self._text(updated_node.value))

    def leave_Comment(self, original_node, updated_node):
        return updated_node.with_changes(value=self._text(updated_node.value))


def unfold(module: Module, class_name: str) -> tuple[cst.ClassDef, list[Module]]:
    """Replace sibling bases of a class by their code. Return the class and the modules that contribute code."""
    node = module.classes[class_name]
    sibling_name = module.sibling_base(class_name)
    if sibling_name is None:
        return node, [module]
    sibling = module.siblings[sibling_name]
    parent, sources = unfold(sibling, sibling_name)
    parent_members = {name for s in parent.body.body if (name := member_name(s)) is not None}
    for call in m.findall(node, m.Attribute(value=m.Call(func=m.Name("super")))):
        if call.attr.value in parent_members:
            raise module.error(
                f"{class_name} calls super().{call.attr.value}, which {sibling_name} defines: in the generated file "
                "super() is the built-in class"
            )
    if class_name not in module.builtin_classes:
        raise module.error(f"{class_name} is unfolded from {sibling_name}, but there is no builtin.{class_name}")

    parent = parent.visit(Rename(*module.renames))
    rebased = [
        base.with_changes(value=cst.parse_expression(f"builtin.{class_name}"))
        if m.matches(base.value, m.Attribute(value=m.Name("builtin")))
        else base
        for base in parent.bases
    ]
    own = [s for s in node.body.body if not is_pass(s)]
    inherited = [s for s in parent.body.body if not is_pass(s)]
    docstrings = [s for s in own if is_docstring(s)] or [s for s in inherited if is_docstring(s)]
    replaced = {name: s for s in own if (name := member_name(s)) is not None}
    body = docstrings[:1]
    body += [replaced.get(member_name(s), s) for s in inherited if not is_docstring(s)]
    body += [s for s in own if member_name(s) not in parent_members and not is_docstring(s)]
    assert replaced.keys() <= {member_name(s) for s in body}
    return (
        node.with_changes(
            bases=rebased,
            decorators=node.decorators or parent.decorators,
            body=node.body.with_changes(body=body or [cst.parse_statement("pass")]),
        ),
        [*sources, module],
    )


def convert(path: Path) -> str:
    """Generate the text of the modeling file for a modular file."""
    module = load(path)
    unfolded = {name: unfold(module, name) for name in module.classes}
    sources = list(dict.fromkeys([module, *(s for _, used in unfolded.values() for s in reversed(used))]))

    body: list[cst.BaseStatement] = []
    for statement in module.tree.body:
        name = member_name(statement)
        if name in unfolded:
            body.append(unfolded[name][0].with_changes(leading_lines=[cst.EmptyLine(), cst.EmptyLine()]))
        elif statement not in module.imports and not is_docstring(statement):
            body.append(statement)

    # Copy the functions and constants that unfolded code uses from its own module. The closest definition wins.
    needed = set().union(*(names_in(s) for s in body)) - {"builtin"}
    defined = {member_name(s) for s in body}
    for source in sources[1:]:
        carried = set()
        while found := {n for n in source.definitions if n in needed - defined and n not in source.classes}:
            carried |= found
            defined |= found
            needed = needed.union(*(names_in(source.definitions[name]) for name in found))
        # Keep their order, because one definition may use another.
        body[:0] = [statement for name, statement in source.definitions.items() if name in carried]

    imports = []
    seen: set[str] = set()
    for source in sources:
        for statement in source.imports:
            node = statement.body[0]
            names = [a for a in node.names if bound(a) not in seen and bound(a) not in module.siblings]
            if source is not module:
                names = [a for a in names if bound(a) in needed and bound(a) != "builtin"]
            if names:
                seen |= set(map(bound, names))
                kept = [a.with_changes(comma=cst.MaybeSentinel.DEFAULT) for a in names]
                imports.append(cst.SimpleStatementLine([node.with_changes(names=kept)]))
    docstring = [s for s in module.tree.body[:1] if is_docstring(s)]
    tree = cst.Module(body=[*docstring, *imports, *body])
    header = HEADER.format(modular=path.name)
    return tidy(header + tree.code, path)


def tidy(code: str, path: Path) -> str:
    """Sort and prune the imports and format the code, with the ruff settings of the repository."""
    name = str(path.with_name(path.name.replace("modular_", "modeling_")))
    ruff = [sys.executable, "-m", "ruff"]
    for command in (
        [*ruff, "check", "--quiet", "--fix-only", "--select", "I,F401", "--stdin-filename", name, "-"],
        [*ruff, "format", "--quiet", "--stdin-filename", name, "-"],
    ):
        result = subprocess.run(command, input=code, capture_output=True, text=True, cwd=ROOT)
        if result.returncode:
            raise ConversionError(f"{path.name}: {' '.join(command[2:4])} failed:\n{result.stderr}")
        code = result.stdout
    return code


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Generate modeling files from modular files.")
    parser.add_argument("files", nargs="*", type=Path, help="modular files (default: all of the package)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a modeling file is stale")
    arguments = parser.parse_args(argv)
    stale = 0
    for path in arguments.files or sorted(MODELS.glob("*/modular_*.py")):
        target = path.with_name(path.name.replace("modular_", "modeling_"))
        try:
            code = convert(path.resolve())
        except ConversionError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        current = target.read_text() if target.exists() else ""
        if code == current:
            continue
        if arguments.check:
            stale += 1
            diff = difflib.unified_diff(current.splitlines(), code.splitlines(), str(target), "generated", lineterm="")
            print(f"{target} is stale; run `make modular`:\n" + "\n".join(diff))
        else:
            target.write_text(code)
            print(f"wrote {target}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
