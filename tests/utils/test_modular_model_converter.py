"""The generated files are those that the converter makes of the modular files, which have all that it does."""

import contextlib
import importlib.util
import io
import re
import shutil
import tempfile
import unittest
from pathlib import Path

import libcst as cst
from parameterized import parameterized


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "utils" / "modular_model_converter.py"
BASE = "class Qwen3_5TextModel(Qwen3NextModel):"
PROJECT = "z, mixed_qkv, b, a = project("


def load_script():
    """Use a new converter for each test, because it caches files."""
    spec = importlib.util.spec_from_file_location("modular_model_converter", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ConverterTest(unittest.TestCase):
    """In a copy of the package."""

    def setUp(self):
        root = Path(self.enterContext(tempfile.TemporaryDirectory())).resolve()
        self.converter, self.models = load_script(), root / "src" / "transformers_packed" / "models"
        shutil.copytree(self.converter.MODELS, self.models, ignore=shutil.ignore_patterns("__pycache__"))
        # The formatter reads the settings at the target.
        shutil.copy(ROOT / "pyproject.toml", root)
        self.converter.MODELS = self.models

    def main(self, *arguments):
        """Return the exit code and the printed text."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = self.converter.main([str(argument) for argument in arguments])
        return code, out.getvalue(), err.getvalue()

    def change(self, family, old, new):
        path = self.models / family / f"modular_{family}.py"
        text = path.read_text()
        self.assertEqual(text.count(old), 1)
        path.write_text(text.replace(old, new))
        return path

    def test_a_changed_modular_file_makes_its_family_stale(self):
        """And those into which its method is unfolded. All other files are up to date."""
        self.change("qwen3_5", "Project `[B, T, hidden]` to qkv `[B, T, conv_dim]`", "Project it to qkv")
        code, out, _ = self.main("--check")
        self.assertEqual(code, 1)
        stale = set(re.findall(r"modeling_(\w+)\.py is stale", out))
        self.assertEqual(stale, {"qwen3_5", "qwen3_5_moe", "qwen4_exp"})

    def test_names_in_strings_and_comments(self):
        code = 'class AlphaNet:\n    """The AlphaNet of ours."""\n\n    # The Alpha stretches.\n    name = f"AlphaNet {size}"\n'
        renames = self.converter.Rename({"AlphaNet": "BetaNet"}, {"Alpha": "Beta"})
        self.assertEqual(cst.parse_module(code).visit(renames).code, code.replace("Alpha", "Beta"))

    def test_what_is_written(self):
        path = self.models / "qwen3_5_moe" / "modular_qwen3_5_moe.py"
        target = path.with_name("modeling_qwen3_5_moe.py")
        committed = target.read_text()
        target.unlink()
        code, out, _ = self.main("--check", path)
        self.assertEqual(code, 1)
        self.assertIn(f"{target} is stale", out)
        self.assertFalse(target.exists())
        self.assertEqual(self.main(path), (0, f"wrote {target}\n", ""))
        self.assertEqual(target.read_text(), committed)
        for options in (["--check"], []):
            self.assertEqual(self.main(*options, path), (0, "", ""))

    @parameterized.expand(
        [
            (
                PROJECT,
                f"super().project(hidden_states)\n        {PROJECT}",
                "Qwen3_5GatedDeltaNet calls super.*project",
            ),
            (
                BASE,
                "class Qwen3_5OddModel(Qwen3NextModel):",
                "Qwen3_5OddModel is unfolded from Qwen3NextModel, but there is no builtin.Qwen3_5OddModel",
            ),
            (
                BASE,
                "class Qwen3_5TextModel(Qwen3NextModel, dict):",
                "Qwen3_5TextModel derives from Qwen3NextModel and",
            ),
            ("import modeling_qwen3_5 as builtin", "import modeling_qwen3_5", "no `from transformers.models"),
        ]
    )
    def test_errors(self, old, new, message):
        path = self.change("qwen3_5", old, new)
        with self.assertRaisesRegex(self.converter.ConversionError, f"^modular_qwen3_5.py: {message}"):
            self.converter.convert(path)
