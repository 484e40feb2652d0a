"""The scripts in `examples/` with their default arguments, as a user runs them."""

import io
import os
import runpy
import subprocess
import sys
import tempfile
import unittest
from contextlib import redirect_stderr
from pathlib import Path
from unittest import mock

from parameterized import parameterized
from transformers import AutoModelForCausalLM, Trainer


EXAMPLES = Path(__file__).parent.parent / "examples"
PADDING_FREE = [
    r"Padding-free on: about \d\.\d x fewer tokens computed than in padded batches; isolation by ",
    r"'tokens_per_second': .*'documents_per_row': '4', 'padding_avoided': ",
    r"Padding-free: 40 documents with [\d,]+ tokens in ",
]
PACKED = [r"'packing_fill': ", r"Packing: [\d,]+ documents with [\d,]+ tokens in .* fill \d\d\.\d%, "]
# What each prints, and what it saves.
SCRIPTS = {
    "trainer": (PADDING_FREE, "model.safetensors"),
    "sft": ([r"Packing on: isolation by ", *PACKED], "model.safetensors"),
    "lora": ([r"Packing on: fill \d\d\.\d%, .* rows of at most 1,024 tokens", *PACKED], "adapter_model.safetensors"),
    "dpo": ([r"'rewards/margins': "], "adapter_model.safetensors"),
    "vision_language": (PADDING_FREE, "model.safetensors"),
}


class ExamplesTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def test_none_is_left_out(self):
        self.assertEqual({path.stem for path in EXAMPLES.glob("*.py")} - {"common"}, set(SCRIPTS))

    @parameterized.expand(SCRIPTS)
    def test_default_arguments(self, name):
        printed, saved = SCRIPTS[name]
        result = subprocess.run(
            [sys.executable, str(EXAMPLES / f"{name}.py")],
            capture_output=True,
            text=True,
            cwd=self.directory,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        self.assertEqual(result.returncode, 0, result.stderr[-3000:])
        for line in printed:
            self.assertRegex(result.stdout, line)
        self.assertTrue((self.directory / "tuned" / saved).is_file())
        if name == "trainer":
            # With the built-in class, to which nothing is new or missing.
            _, loading = AutoModelForCausalLM.from_pretrained(self.directory / "tuned", output_loading_info=True)
            self.assertFalse(any(loading.values()), loading)

    def run_here(self, name, *arguments):
        """The exit status and what the script wrote to stderr."""
        stderr, argv = io.StringIO(), [f"{name}.py", "--output", str(self.directory), *arguments]
        with (
            mock.patch.object(sys, "argv", argv),
            mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
            redirect_stderr(stderr),
            self.assertRaises(SystemExit) as exit,
        ):
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return exit.exception.code, stderr.getvalue()

    @parameterized.expand(SCRIPTS)
    def test_wrong_flags(self, name):
        for arguments, message in (
            (["--modell", "x"], "unrecognized arguments: --modell"),
            (["--max-steps", "many"], "argument --max-steps: invalid int value"),
        ):
            status, stderr = self.run_here(name, *arguments)
            self.assertEqual(status, 2)
            self.assertRegex(stderr, rf"^usage: {name}.py")
            self.assertIn(message, stderr)

    def test_ctrl_c(self):
        with mock.patch.object(Trainer, "training_step", side_effect=KeyboardInterrupt):
            status, stderr = self.run_here("trainer")
        self.assertEqual(status, 130)
        self.assertTrue(stderr.endswith("\nInterrupted.\n"), stderr)
        self.assertNotIn("Traceback", stderr)


if __name__ == "__main__":
    unittest.main()
