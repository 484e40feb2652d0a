"""`transformers-packed audit`, and the output of its report."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pytest
from common.commands import run_command
from transformers import Qwen3_5Config, Qwen3_5TextConfig

from transformers_packed import AuditReport
from transformers_packed.audit.tiny import tiny_config, tiny_model


SHORT = ["--lengths", "9", "1", "12"]


def audit(*arguments: str, status: int = 0) -> str:
    """What the command prints, or its error if it cannot audit, when it ends with this status."""
    found, stdout, stderr = run_command("audit", *arguments)
    assert found == status, stdout + stderr
    assert status == 2 or not stderr, stderr
    return stderr if status == 2 else stdout


class AuditCommandTest(unittest.TestCase):
    def test_before_and_after_with_json_and_pictures(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        picture, both = folder / "audit.png", folder / "both.svg"
        written = audit("qwen3_5_text", *SHORT, "--json", "--plot", str(picture))
        self.assertEqual(picture.read_bytes()[:4], b"\x89PNG")
        self.assertTrue(json.loads(written)["ok"])
        after = AuditReport.from_json(written)
        self.assertEqual((after.ok, after.lengths), (True, [9, 1, 12]))
        self.assertEqual(after.model, "transformers_packed.Qwen3_5ForCausalLM")
        self.assertIn("position_ids  isolated  0", after.table())
        self.assertIn("all           isolated  0", after.table())
        written = audit("qwen3_5_text", "--stock", *SHORT, "--json", status=1)
        before = AuditReport.from_json(written)
        self.assertIn("transformers.Qwen3_5ForCausalLM: float32", before.table())
        self.assertIn("in model.layers.0.linear_attn (Qwen3_5GatedDeltaNet): ", before.table())
        before.plot(both, after, titles=["before it", "after it"])
        self.assertIn("<svg", both.read_text())
        with self.assertRaisesRegex(ValueError, "expected 2 titles"):
            before.plot(both, after, titles=["one"])

    def test_options(self):
        options = ("--dtype", "bfloat16", "--attn", "eager", "--inputs", "seq_idx", "--device", "cpu", "--seed", "3")
        stdout = audit("llama", *options, *SHORT, status=1)
        self.assertIn("bfloat16, cpu, eager", stdout)
        self.assertIn("seed 3", stdout)
        self.assertIn("model.layers.0.self_attn (LlamaAttention): attention", stdout)
        self.assertNotIn("\nall ", stdout)

    def test_checkpoint(self):
        with tempfile.TemporaryDirectory() as folder:
            tiny_model("qwen3_5_text", dtype="bfloat16").save_pretrained(folder)
            stdout = audit(folder, *SHORT, status=0)
            self.assertIn("transformers_packed.Qwen3_5ForCausalLM: bfloat16", stdout)

    def test_what_cannot_be_audited(self):
        stderr = audit("bert", *SHORT, status=2)
        self.assertIn("bert could not be audited: not causal", stderr)
        stderr = audit("vit", status=2)
        self.assertIn("expected a causal language model, got the type vit", stderr)
        with tempfile.TemporaryDirectory() as folder:
            stderr = audit(folder, status=2)
        self.assertIn("it has no config.json", stderr)
        stderr = audit("llama", "--lengths", "5", status=2)
        self.assertIn("lengths of at least two documents", stderr)

    @pytest.mark.slow
    def test_kernels_for_a_gpu_are_hidden_in_a_process_of_its_own(self):
        code = "import sys; from transformers_packed.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "audit", "qwen3_5_text", "--stock", "--device", "cpu", *SHORT]
        result = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual((result.returncode, result.stderr), (1, ""))
        try:
            import importlib.metadata

            importlib.metadata.version("flash-linear-attention")
        except importlib.metadata.PackageNotFoundError:
            return
        self.assertRegex(result.stdout, r"fla.* cannot run without a GPU")

    def test_tiny_configurations(self):
        text = tiny_config("qwen3_5_text")
        self.assertIsInstance(text, Qwen3_5TextConfig)
        self.assertEqual(set(text.layer_types), {"linear_attention", "full_attention"})
        composite = tiny_config("qwen3_5")
        self.assertIsInstance(composite, Qwen3_5Config)
        self.assertEqual(composite.text_config.hidden_size, text.hidden_size)
        # Use the configuration's own name for the setting.
        self.assertEqual(tiny_config("gpt2").n_embd, text.hidden_size)
        self.assertEqual(set(tiny_config("lfm2").layer_types), {"conv", "full_attention"})


class AuditReportTest(unittest.TestCase):
    def test_ok(self):
        def report(**verdicts):
            from transformers_packed.audit.report import SourceResult

            sources = {name: SourceResult(verdict) for name, verdict in verdicts.items()}
            return AuditReport("m", {}, [1, 2], sources, [])

        for ok, verdicts in (
            (True, {"position_ids": "isolated", "all": "isolated"}),
            (True, {"position_ids": "leaks", "all": "isolated"}),
            (False, {"position_ids": "isolated", "all": "leaks"}),
            (True, {"position_ids": "isolated", "all": "refused"}),
            (False, {"position_ids": "leaks", "all": "refused"}),
            (False, {"position_ids": "refused", "all": "refused"}),
            (False, {"position_ids": "isolated", "seq_idx": "leaks"}),
            (True, {"position_ids": "refused", "seq_idx": "isolated"}),
        ):
            self.assertIs(report(**verdicts).ok, ok, verdicts)
            self.assertIs(report(**verdicts).refused, set(verdicts.values()) == {"refused"})

    def test_from_json_of_something_else(self):
        for text in ("", "[]", "{}", '{"ok": true, "sources": {"all": 1}}'):
            with self.assertRaisesRegex(ValueError, "expected the text"):
                AuditReport.from_json(text)
