"""The counter of branches and of lines of code: each construct counts, and the limits hold."""

import ast
import io
import tempfile
import unittest
from contextlib import redirect_stdout
from pathlib import Path

import count
from parameterized import parameterized


TEXT = '''
"""A docstring
of two lines."""

# A comment.
LIMIT = 3


class Class:
    """Another one."""

    @property
    def method(self):
        """And one
        more."""
        text = """no
        docstring"""

        def inner():
            return 1 if self else 2

        return inner, text  # a comment behind code

    if LIMIT:

        async def other(self): ...
'''


class CountTest(unittest.TestCase):
    def test_functions_and_lines(self):
        found = count.functions(ast.parse(TEXT))
        self.assertEqual(list(found), ["13 Class.method", "26 Class.other"])
        self.assertEqual([count.branches(function) for function in found.values()], [1, 0])
        # The assignment, the class, the method with its decorator, the text of two lines, and what follows.
        self.assertEqual(count.code_lines(TEXT), 11)

    @parameterized.expand([(20, 1, 0), (21, 1, 1), (15, 11, 0), (16, 10, 0), (16, 11, 1)])
    def test_limits(self, branches, functions, status):
        names = range(functions)
        code = "\n".join(f"def f{n}():\n" + "    if a: pass\n" * branches for n in names)
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as printed:
            Path(folder, "code.py").write_text(code, encoding="utf-8")
            Path(folder, "generated.py").write_text(f"# This file is generated\n{code}", encoding="utf-8")
            self.assertEqual(count.main([folder]), status)
        self.assertEqual(printed.getvalue().count(" branches  "), functions if branches > 15 else 0)
        self.assertIn(f"{functions * (branches + 1)} lines of code", printed.getvalue())
