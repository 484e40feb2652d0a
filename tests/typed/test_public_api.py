import ast
import inspect
import typing
import unittest
from pathlib import Path

from parameterized import parameterized

import transformers_packed


PROGRAM = Path(__file__).with_name("public_api.py")
FUNCTIONS = [name for name in transformers_packed.__all__ if not isinstance(getattr(transformers_packed, name), type)]


class PublicApiTest(unittest.TestCase):
    def test_mypy_checks_every_public_name(self):
        names = {node.id for node in ast.walk(ast.parse(PROGRAM.read_text("utf-8"))) if isinstance(node, ast.Name)}
        self.assertEqual(set(transformers_packed.__all__) - names, set())

    @parameterized.expand(FUNCTIONS)
    def test_functions_are_annotated(self, name):
        function = getattr(transformers_packed, name)
        hints = typing.get_type_hints(function)
        self.assertEqual({*inspect.signature(function).parameters, "return"} - set(hints), set())


if __name__ == "__main__":
    unittest.main()
