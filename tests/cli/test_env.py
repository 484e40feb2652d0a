import contextlib
import io
import os
import subprocess
import sys
import unittest
from importlib.util import find_spec
from unittest import mock

import torch

from transformers_packed import cli
from transformers_packed.cli import env as environment
from transformers_packed.ops import availability
from transformers_packed.ops.dispatch import Implementation, always


FUSED = (
    "convolution to heads",
    "decay and rate",
    "norm",
    "gated norm",
    "norm and rotary positions",
    "SwiGLU",
    "gate of attention",
    "head and cross entropy",
)


class EnvironmentTest(unittest.TestCase):
    def test_the_command(self):
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            self.assertEqual(cli.main(["env"]), 0)
        output = stdout.getvalue()
        self.assertIn(f"torch {torch.__version__}", output)
        lines = output.splitlines()
        # The CPU comes last on every machine.
        cpu = lines[lines.index("On the CPU, float32, a packed row would train with") + 1 :]
        self.assertEqual(
            [line.split() for line in cpu[:3]],
            [
                ["gated", "delta", "rule", "reference"],
                ["not", "flash_qla:", "it", "needs", "CUDA", "tensors"],
                ["not", "fla:", "it", "needs", "CUDA", "tensors"],
            ],
        )
        choices = {tuple(line.split()) for line in cpu if not line.strip().startswith("not ")}
        self.assertIn(("causal", "convolution", "reference"), choices)
        self.assertIn(("attention", "sdpa", "per_document(sdpa)"), choices)
        self.assertIn(("attention", "flex_attention", "nothing"), choices)
        self.assertIn(("attention", "flash_attention_2", "nothing"), choices)
        for op in FUSED:
            self.assertIn((*op.split(), "torch" if op == "head and cross entropy" else "reference"), choices)

    def test_nobody_reads_on(self):
        read, write = os.pipe()
        os.close(read)
        code = "import sys; from transformers_packed.cli import main; sys.exit(main(['env']))"
        try:
            result = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
        finally:
            os.close(write)
        self.assertEqual((result.returncode, result.stderr), (141, ""))

    @unittest.skipUnless(find_spec("triton"), "needs triton")
    def test_what_the_fused_ops_would_run_on_a_gpu(self):
        with mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: True):
            lines = environment.describe_environment().splitlines()
        choices = {tuple(line.split()) for line in lines if not line.strip().startswith("not ")}
        for op in FUSED:
            self.assertIn((*op.split(), "triton"), choices)

    def test_what_would_run_is_what_the_verifiers_say(self):
        refuses = Implementation(run=None, verify=lambda *args, **kwargs: (False, "needs a reason"))
        serves = Implementation(run=None, verify=always)
        with mock.patch.object(availability, "GATED_DELTA_RULE", {"a": refuses, "b": serves, "c": refuses}):
            text = environment.describe_environment()
        rule = text[text.index("gated delta rule") : text.index("causal convolution")].split()
        self.assertEqual(rule, "gated delta rule b not a: it needs a reason".split())

    def test_missing_packages_are_named(self):
        packages = {"kernels": ("torch", "no-such-package")}
        with mock.patch.object(environment, "PACKAGES", packages):
            self.assertIn("no-such-package missing", environment.describe_environment())


if __name__ == "__main__":
    unittest.main()
