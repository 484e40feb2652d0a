"""The API reference: each public name is on one page, and docstrings become Markdown."""

import importlib
import inspect
import re
import shlex
import sys
import unittest
from collections import Counter
from pathlib import Path
from unittest import mock

from common import shown
from transformers import PreTrainedModel

import transformers_packed
from transformers_packed import cli, ops, parallel
from transformers_packed.cli.options import parsers
from transformers_packed.models.families import OWN


ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference" / "api"
FAMILIES = [family.name for family in OWN]
sys.path.insert(0, str(ROOT / "docs"))


OPS = [name for name, value in vars(ops).items() if inspect.isfunction(value)]


def public_names() -> set[str]:
    listed = {transformers_packed: transformers_packed.__all__, ops: OPS, parallel: parallel.__all__}
    names = {f"{module.__name__}.{name}" for module, own in listed.items() for name in own}
    for family in FAMILIES:
        module = importlib.import_module(f"transformers_packed.models.{family}.modeling_{family}")
        models = [x for x in vars(module).values() if getattr(x, "__module__", None) == module.__name__]
        names |= {
            f"{x.__module__}.{x.__name__}" for x in models if isinstance(x, type) and issubclass(x, PreTrainedModel)
        }
    return names


class ApiReferenceTest(unittest.TestCase):
    def test_every_public_name_stands_on_one_page(self):
        pages = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("*.md")))
        listed = Counter(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
        self.assertEqual(set(listed), public_names())
        self.assertEqual({name: count for name, count in listed.items() if count > 1}, {})


class DocstringTest(unittest.TestCase):
    def markdown(self, text: str) -> str:
        import hf_docstrings

        public = {"glu": "transformers_packed.ops.glu", "Report.plot": "transformers_packed.Report.plot"}
        return hf_docstrings.to_markdown(text, public.get)[0]

    def test_parameters_become_a_list(self):
        text = "Do it.\n\nArgs:\n    a, b (`int`, *optional*, defaults to 3):\n        How often.\n\n        At least 1.\nMore."
        expected = "Do it.\n\n**Parameters**\n\n- **`a`**, **`b`** (`int`, *optional*, defaults to 3):\n    How often.\n\n    At least 1.\nMore."
        self.assertEqual(self.markdown(text), expected)

    def test_a_parameter_without_a_type(self):
        for section, title in (("Args", "Parameters"), ("Keyword Args", "Keyword parameters")):
            text = self.markdown(f"{section}:\n    kwargs:\n        More.")
            self.assertEqual(text, f"**{title}**\n\n- **`kwargs`**:\n    More.")

    def test_attributes_with_the_text_in_the_same_line(self):
        text = "Attributes:\n    a (`dict[str, int]`): one\n        thing."
        self.assertEqual(self.markdown(text), "**Attributes**\n\n- **`a`** (`dict[str, int]`): one\n    thing.")

    def test_returns_and_raises(self):
        text = "Returns:\n    `tuple`: one,\n    two.\n\nRaises:\n    `ValueError`: a row\n    without it.\n    `OSError`: no file."
        expected = "**Returns**\n\n`tuple`: one,\ntwo.\n\n**Raises**\n\n- `ValueError`: a row\n    without it.\n- `OSError`: no file."
        self.assertEqual(self.markdown(text), expected)

    def test_an_example_becomes_a_session(self):
        text = "Example:\n\n```python\n>>> 1 + 1\n2\n\n```\n\nArgs in prose."
        self.assertEqual(self.markdown(text), "**Example**\n\n```pycon\n>>> 1 + 1\n2\n```\n\nArgs in prose.")

    def test_references_become_links_where_the_name_is_public(self):
        text = "See [`glu`], [`~Report.plot`], [`_hidden`], [`page`](page.md) and nothing."
        expected = "See [`glu`][transformers_packed.ops.glu], [`plot`][transformers_packed.Report.plot], `_hidden`, "
        self.assertEqual(self.markdown(text), expected + "[`page`](page.md) and nothing.")


class ExtensionTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        import griffe

        extensions = griffe.load_extensions(str(ROOT / "docs" / "hf_docstrings.py"))
        cls.package = griffe.load("transformers_packed", search_paths=[ROOT / "src"], extensions=extensions)

    def test_it_is_registered(self):
        self.assertIn("extensions: [docs/hf_docstrings.py]", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def test_public_functions_hide_modules_of_their_name(self):
        for name in OPS:
            self.assertTrue(self.package["ops"][name].is_function, name)

    def test_docstrings_are_rewritten(self):
        text = self.package["ops"]["gated_delta_rule"].docstring.value
        self.assertIn("- **`boundaries`** ([`SequenceBoundaries`][transformers_packed.SequenceBoundaries], *opt", text)
        self.assertIn("**Example**\n\n```pycon\n>>> import torch", text)

    def test_public_paths(self):
        import hf_docstrings

        for name, path in (
            ("SequenceBoundaries.pack", "SequenceBoundaries.pack"),
            ("transformers_packed.ops.glu", "ops.glu"),
            ("gather_loss_tensors", "parallel.gather_loss_tensors"),
        ):
            self.assertEqual(hf_docstrings.public_path(self.package, name), f"transformers_packed.{path}")
        for name in ("SequenceBoundaries.nothing", "replaces_builtin", "transformers_packed.ops"):
            self.assertIsNone(hf_docstrings.public_path(self.package, name))


class FeaturesTest(unittest.TestCase):
    def test_the_table_is_that_of_the_tests(self):
        import write_features

        text = write_features.PAGE.read_text(encoding="utf-8")
        self.assertEqual(text, write_features.page(), "run python docs/write_features.py")

    def test_entries(self):
        """A test is there for each, and tests do not contradict each other."""
        with mock.patch.dict(shown.SHOWN, clear=True):
            shown.shows_for_each([("awq", 1), ("float32", 1)], "DDP")
            self.assertEqual(shown.SHOWN, {("AWQ", "DDP"): "yes"})
            for kind, feature, error in (("awq", "other", ValueError), ("other", "DDP", KeyError)):
                self.assertRaises(error, shown.shows(kind, feature), self.test_entries)
            self.assertRaises(AssertionError, shown.shows("awq", "DDP"), lambda: None)
            with self.assertRaisesRegex(ValueError, "AWQ and DDP: tests say yes and error"):
                shown.shows_for_each(["awq"], "DDP", says="error")


class CommandLineTest(unittest.TestCase):
    def test_the_page_is_up_to_date(self):
        import write_cli

        self.assertEqual(write_cli.PAGE.read_text(encoding="utf-8"), write_cli.page(), "run python docs/write_cli.py")

    def test_every_command_has_its_section(self):
        import write_cli

        modules = Path(cli.__file__).parent.glob("*.py")
        commands = {path.stem for path in modules if "\ndef add_options(" in path.read_text(encoding="utf-8")}
        self.assertEqual(set(cli.COMMANDS), commands)
        for name in commands:
            self.assertIn(f"## transformers-packed {name}\n", write_cli.page())

    def test_examples_of_help_are_valid(self):
        _, commands = parsers()
        for name, parser in commands.items():
            for example in parser.examples:
                words = shlex.split(example.split(" > ")[0])
                self.assertEqual(words[:2], ["transformers-packed", name])
                parser.parse_args(words[2:])
                self.assertIn(example, parser.format_help())
        self.assertEqual({name for name, parser in commands.items() if not parser.examples}, {"env"})
