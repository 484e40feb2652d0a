"""Count the branches of functions, and the lines of code without docstrings and comments. Generated files are left out.

A branch is an `if`, a conditional expression, a loop, an exception handler, a `case`, a comprehension and each of its
conditions, and each `and` or `or`. Nested functions count in the function around them.

Usage: python utils/count.py [FOLDER ...]

It fails if a function has more than 20 branches, or if more than 10 functions have more than 15.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path


MOST, MANY, FEW = 20, 15, 10
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def branches(function: ast.AST) -> int:
    """Return the number of branches of a function, with those of the functions inside it."""
    number = 0
    for node in ast.walk(function):
        if isinstance(node, _BRANCHES):
            number += 1
        elif isinstance(node, ast.comprehension):
            number += 1 + len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            number += len(node.values) - 1
    return number


def functions(tree: ast.AST, prefix: str = "") -> dict[str, ast.AST]:
    """Return the functions that are not inside another one, by their line and name, such as `12 Class.method`."""
    found = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _FUNCTIONS):
            found[f"{node.lineno} {prefix}{node.name}"] = node
        else:
            found |= functions(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)
    return found


def code_lines(text: str) -> int:
    """Return the number of lines that are not blank, a comment or a part of a docstring."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS))
            and ast.get_docstring(node, clean=False) is not None
        ):
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = [x for x in tokenize.generate_tokens(io.StringIO(text).readline) if x.type not in _NO_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - docstrings)


def main(folders: list[str]) -> int:
    texts = {
        path: path.read_text(encoding="utf-8") for folder in folders for path in sorted(Path(folder).rglob("*.py"))
    }
    texts = {path: text for path, text in texts.items() if not text.startswith("# This file is generated")}
    counted = [
        (branches(function), f"{path}:{name}")
        for path, text in texts.items()
        for name, function in functions(ast.parse(text)).items()
    ]
    many = sorted((each for each in counted if each[0] > MANY), reverse=True)
    for number, name in many:
        print(f"{number:3} branches  {name}")
    total = sum(map(code_lines, texts.values()))
    print(f"{total} lines of code, {len(many)} functions with more than {MANY} branches (at most {FEW})")
    return int(len(many) > FEW or any(number > MOST for number, _ in many))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["src"]))
