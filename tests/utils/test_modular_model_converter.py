import ast
import contextlib
import importlib
import importlib.util
import io
import shutil
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path

from parameterized import parameterized


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "utils" / "modular_model_converter.py"

BUILTIN = """
class {0}Net:
    def forward(self, x):
        return "builtin {0}", x

    def describe(self):
        return "builtin {0}Net"


class {0}Block:
    pass
"""

ALPHA = '''
"""Alpha."""

import math
from functools import partial

from zoo.alpha import modeling_alpha as builtin


SCALE = 2
OFFSET = SCALE + 1
UNUSED = 5


def stretch(x):
    return math.floor(x * SCALE) + OFFSET


def mark(cls):
    cls.marked = True
    return cls


@mark
class AlphaNet(builtin.AlphaNet):
    """The AlphaNet of ours."""

    color: str = "red"
    size = 3
    low, high = OFFSET, 10

    def forward(self, x):
        # The AlphaNet stretches.
        return f"AlphaNet {self.size}", stretch(x), super().forward(x)

    def later(self, x):
        return partial(stretch, x)


class AlphaBlock(builtin.AlphaBlock):
    def net(self):
        return AlphaNet()
'''

BETA_HEAD = """
from zoo.beta import modeling_beta as builtin

from ..alpha.modular_alpha import AlphaBlock, AlphaNet
"""

GAMMA_HEAD = """
from zoo.gamma import modeling_gamma as builtin

from ..beta.modular_beta import BetaNet
"""


def load_script():
    """Use a new converter for each test, because it caches files."""
    spec = importlib.util.spec_from_file_location("modular_model_converter", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ConverterTestCase(unittest.TestCase):
    def setUp(self):
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory())).resolve()
        self.converter = load_script()

    def main(self, *arguments):
        """Return the exit code and the printed text."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = self.converter.main([str(argument) for argument in arguments])
        return code, out.getvalue(), err.getvalue()


class UnfoldingTest(ConverterTestCase):
    def setUp(self):
        super().setUp()
        for package in ("zoo", "ours"):
            self.addCleanup(self.forget, package)
            self.write(f"{package}/__init__.py", "")
            for family in ("alpha", "beta", "gamma"):
                self.write(f"{package}/{family}/__init__.py", "")
        for family in ("alpha", "beta", "gamma"):
            self.write(f"zoo/{family}/modeling_{family}.py", BUILTIN.format(family.capitalize()))
        self.write("ours/alpha/modular_alpha.py", ALPHA)
        sys.path.insert(0, str(self.root))
        self.addCleanup(sys.path.remove, str(self.root))
        importlib.invalidate_caches()

    def forget(self, package):
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]

    def write(self, path, text):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def modular(self, family, *parts):
        return self.write(f"ours/{family}/modular_{family}.py", "\n\n".join(textwrap.dedent(p).strip() for p in parts))

    def generate(self, family):
        """Return the text of the modeling file and the imported module."""
        text = self.converter.convert(self.root / f"ours/{family}/modular_{family}.py")
        self.write(f"ours/{family}/modeling_{family}.py", text)
        importlib.invalidate_caches()
        return text, importlib.import_module(f"ours.{family}.modeling_{family}")

    def beta(self, *parts):
        self.modular("beta", BETA_HEAD, *parts)
        return self.generate("beta")

    def test_classes_that_are_the_same_are_listed(self):
        head = "from zoo.beta import modeling_beta as builtin"
        self.modular("beta", head, 'SAME = [("alpha", "Alpha", "Beta", "Net Block")]')
        text, module = self.generate("beta")
        self.assertEqual(module.BetaNet().forward(1.7), ("BetaNet 3", 6, ("builtin Beta", 1.7)))
        self.assertIsInstance(module.BetaBlock().net(), module.BetaNet)
        self.assertNotIn("SAME", text)

    def test_methods_and_attributes_of_the_child(self):
        text, module = self.beta(
            '''
            class BetaNet(AlphaNet):
                """A net of its own."""

                size = 4
                depth: int = 2

                def later(self, x):
                    return super().describe(), x

                def sooner(self, x):
                    return x - 1
            '''
        )
        net = module.BetaNet()
        self.assertEqual(module.BetaNet.__doc__, "A net of its own.")
        self.assertEqual(net.forward(1), ("BetaNet 4", 5, ("builtin Beta", 1)))
        self.assertEqual(net.later(1), ("builtin BetaNet", 1))
        self.assertEqual(net.sooner(1), 0)
        self.assertEqual((net.color, net.size, net.depth, net.low, net.high), ("red", 4, 2, 3, 10))
        # Replaced in place, additions at the end, and no duplicates.
        (node,) = (s for s in ast.parse(text).body if isinstance(s, ast.ClassDef))
        names = [s.name if isinstance(s, ast.FunctionDef) else ast.unparse(s) for s in node.body]
        self.assertEqual(
            names,
            [
                "'A net of its own.'",
                "color: str = 'red'",
                "size = 4",
                "low, high = (OFFSET, 10)",
                "forward",
                "later",
                "depth: int = 2",
                "sooner",
            ],
        )

    def test_helpers_and_imports_come_along_when_used(self):
        text, _ = self.beta("class BetaNet(AlphaNet):\n    def later(self, x):\n        return x")
        for used in ("import math", "SCALE = 2", "OFFSET = SCALE + 1", "def stretch", "def mark"):
            self.assertEqual(text.count(used), 1, used)
        for unused in ("UNUSED", "partial", "AlphaNet", "alpha"):
            self.assertNotIn(unused, text)

    def test_transitive(self):
        self.modular(
            "beta",
            BETA_HEAD,
            "class BetaNet(AlphaNet):\n    size = 4\n    def later(self, x):\n        return 'BetaNet'",
        )
        self.modular("gamma", GAMMA_HEAD, "class GammaNet(BetaNet):\n    color = 'blue'")
        text, module = self.generate("gamma")
        net = module.GammaNet()
        self.assertEqual([base.__module__ for base in module.GammaNet.__bases__], ["zoo.gamma.modeling_gamma"])
        self.assertEqual(net.forward(1), ("GammaNet 4", 5, ("builtin Gamma", 1)))
        self.assertEqual((net.later(1), net.color), ("GammaNet", "blue"))
        self.assertNotRegex(text, "Alpha|alpha|Beta|beta")

    @parameterized.expand(
        [
            (
                "Net(AlphaNet):\n    def forward(self, x):\n        return super().forward(x + 1)",
                "BetaNet calls super.*forward",
            ),
            (
                "DeepNet(AlphaNet):\n    pass",
                "BetaDeepNet is unfolded from AlphaNet, but there is no builtin.BetaDeepNet",
            ),
            ("Net(AlphaNet, dict):\n    pass", "BetaNet derives from AlphaNet and something else"),
            ("Net(AlphaNet):\n    pass", "no `from transformers.models", ""),
        ]
    )
    def test_errors(self, code, message, alias=" as builtin"):
        path = self.modular("beta", BETA_HEAD.replace(" as builtin", alias), f"class Beta{code}")
        with self.assertRaisesRegex(self.converter.ConversionError, f"^modular_beta.py: {message}"):
            self.converter.convert(path)

    def test_exit_codes(self):
        path = self.modular("beta", BETA_HEAD, "class BetaNet(AlphaNet):\n    pass")
        target = path.with_name("modeling_beta.py")
        code, out, _ = self.main("--check", path)
        self.assertEqual(code, 1)
        self.assertIn(f"{target} is stale", out)
        self.assertFalse(target.exists())

        code, out, _ = self.main(path)
        self.assertEqual((code, out), (0, f"wrote {target}\n"))
        self.assertEqual(self.main("--check", path), (0, "", ""))
        self.assertEqual(self.main(path), (0, "", ""))


class CommittedFilesTest(ConverterTestCase):
    def copy_of_the_package(self):
        models = self.root / "src" / "transformers_packed" / "models"
        shutil.copytree(self.converter.MODELS, models, ignore=shutil.ignore_patterns("__pycache__"))
        # The formatter reads the settings at the target.
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.converter.MODELS = models
        return models

    def test_a_changed_modular_file_makes_its_family_stale(self):
        models = self.copy_of_the_package()
        path = models / "qwen3_next" / "modular_qwen3_next.py"
        path.write_text(path.read_text().replace("Run the layer on packed", "Run it on packed"))
        code, out, _ = self.main("--check")
        self.assertEqual(code, 1)
        # The method is also unfolded into the other family.
        for family in ("qwen3_next", "qwen3_5"):
            self.assertIn(f"modeling_{family}.py is stale", out)
