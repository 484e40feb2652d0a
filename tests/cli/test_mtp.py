"""The head of multi-token prediction on the command line: `train --mtp`, `train --mtp-only` and `mtp`."""

import json
import re
import shutil
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
from common.commands import fails, succeeds
from common.records import THINKING, make_tokenizer
from parameterized import parameterized
from safetensors.torch import load_file
from scripts.trainer_arms import TINY
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig, set_seed

from transformers_packed import add_mtp, mtp_acceptance, patch_model, registered
from transformers_packed.cli import finetune, models
from transformers_packed.data.records.samples import make_samples, read_records


SIZES = {**TINY, "vocab_size": 264, "eos_token_id": 1}
WORDS = "the quick brown fox jumps over a lazy dog".split()
# The log of a step.
STEP = r"^step \d/\d, epoch [0-9.]+: loss ([0-9.]+), mtp loss ([0-9.]+), [0-9.]+% accepted, [0-9,]+ tokens/s"


class CommandTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.data = cls.root / "texts.jsonl"
        rows = [{"prompt": WORDS[i % 9], "completion": " ".join(WORDS[i % 4 : 5 + i % 5])} for i in range(12)]
        cls.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        cls.save("model", 1)
        # Nothing is declared, and no tensors.
        cls.save("without", 0)
        # Tensors of a head that is declared as none.
        shutil.copytree(cls.root / "model", cls.root / "undeclared")
        config = json.loads((cls.root / "undeclared" / "config.json").read_text())
        (cls.root / "undeclared" / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 0}))

    @classmethod
    def save(cls, name, layers):
        set_seed(0)
        model = patch_model(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, mtp_num_hidden_layers=layers)))
        if layers:
            add_mtp(model)
        model.save_pretrained(cls.root / name)
        make_tokenizer(THINKING).save_pretrained(cls.root / name)

    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.output = self.folder / "output"

    def weights(self, folder, file="model.safetensors"):
        return load_file(folder / file)

    def changed(self, folder):
        """The first part of the names of all weights that training has changed."""
        before, after = self.weights(self.root / "model"), self.weights(folder)
        self.assertEqual(before.keys(), after.keys())
        return {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}


class TrainTest(CommandTest):
    def train(self, *arguments, model="model"):
        where = "--model", self.root / model, "--data", self.data, "--output", self.output
        return ("train", *where, "--learning-rate=0.01", "--logging-steps=1", *arguments)

    def test_with_the_model(self):
        out = succeeds(*self.train("--mtp", "--max-steps=2"))
        self.assertIn("; trains with 0.1 x the loss of the head of multi-token prediction\n", out)
        self.assertEqual(len(re.findall(STEP, out, re.M)), 2, out)
        self.assertIn(f"Saved the model, the head and the tokenizer in {self.output}\n", out)
        self.assertEqual(self.changed(self.output), {"model", "lm_head", "mtp"})
        _, about = AutoModelForCausalLM.from_pretrained(self.output, output_loading_info=True)
        self.assertFalse(any(about.values()))

    def test_alone(self):
        out = succeeds(*self.train("--mtp-only", "--max-steps=2"))
        for loss, of_head in re.findall(STEP, out, re.M):
            self.assertEqual(loss, of_head)
        self.assertIn(f"Saved the model, the head and the tokenizer in {self.output}\n", out)
        self.assertEqual(self.changed(self.output), {"mtp"})

    def test_without_either_the_head_is_kept(self):
        out = succeeds(*self.train("--max-steps=1"))
        self.assertNotIn("head", out)
        self.assertEqual(self.changed(self.output), {"model", "lm_head"})

    def test_adapters(self):
        out = succeeds(*self.train("--mtp", "--lora", "--max-steps=1"))
        self.assertIn(f"Saved the adapter, the head and the tokenizer in {self.output}\n", out)
        head, before = self.weights(self.output, "mtp.safetensors"), self.weights(self.root / "model")
        self.assertEqual(head.keys(), {name for name in before if name.startswith("mtp.")})
        self.assertFalse(torch.equal(head["mtp.fc.weight"], before["mtp.fc.weight"]))
        self.assertFalse([x for x in self.weights(self.output, "adapter_model.safetensors") if "mtp" in x])
        # The folder is no model, and a merge must not lose the head.
        err = fails("mtp", "--model", self.output, "--data", self.data)
        self.assertIn("Before merge_and_unload, load its trained head: add_mtp(model, adapter).", err)

    @parameterized.expand(
        [
            ("without", "--mtp-only", "expected a head of multi-token prediction .*, got none in .*/without. Choose"),
            ("undeclared", "--mtp", "expected a configuration with mtp_num_hidden_layers=1, .*, got 0"),
        ]
    )
    def test_a_checkpoint_without_a_head(self, model, option, message):
        err = fails(*self.train(option, model=model))
        self.assertRegex(err, f"^transformers-packed train: {option}: {message}")
        self.assertEqual(len(err.splitlines()), 1, err)
        self.assertFalse(self.output.exists())

    def test_options_that_exclude_each_other(self):
        err = fails(*self.train("--mtp-only", "--lora"))
        self.assertIn("train: --mtp-only: expected --mtp-only without --lora, got both. Adapters would not be", err)
        err = fails(*self.train("--mtp", "--mtp-only"), status=2)
        self.assertIn("--mtp-only: not allowed with argument --mtp", err)

    def test_the_head_is_looked_for_when_the_weights_are_loaded(self):
        """Before, those of a model on the Hub are not in the cache."""
        loaded, original = [], finetune.load_model
        checked = mock.patch.object(models, "find_head", lambda config: loaded and {"mtp.fc.weight": None})
        load = mock.patch.object(finetune, "load_model", lambda *args: loaded.append(1) or original(*args))
        with checked, load:
            succeeds(*self.train("--mtp", "--max-steps=1"))


class MtpTest(CommandTest):
    def mtp(self, *arguments, model="model"):
        return ("mtp", "--model", self.root / model, "--data", self.data, *arguments)

    def expected(self, steps, records=12):
        with registered():
            model = AutoModelForCausalLM.from_pretrained(self.root / "model")
        tokenizer = AutoTokenizer.from_pretrained(self.root / "model")
        samples = make_samples(list(read_records(str(self.data)))[:records], tokenizer, 2048).data
        return mtp_acceptance(model, samples, steps=steps)

    def test_the_table(self):
        out = succeeds(*self.mtp())
        expected = self.expected(3)
        first, *drafts, last = out.splitlines()[1:]
        self.assertEqual(first, f"12 samples, loss of the head {expected.loss:.4f}")
        lines = [
            f"token {step}: {rate:7.1%} accepted of {number} drafted" if number else f"token {step}: none drafted"
            for step, rate, number in zip((1, 2, 3), expected.rates, expected.drafted.sum(0).tolist(), strict=True)
        ]
        self.assertEqual(drafts, lines)
        self.assertEqual(
            last, f"{expected.tokens_per_forward:.2f} tokens per forward of the model with 3 drafted tokens"
        )

    def test_unknown_attention(self):
        """It is refused before the data is read."""
        err = fails(*self.mtp("--attn", "foo"), "--data", self.root / "missing.jsonl")
        self.assertRegex(err, "^transformers-packed mtp: --attn: expected .*, got 'foo'. Choose sdpa, .*\n$")

    def test_json(self):
        def no_constant(name):
            raise AssertionError(f"{name} is not JSON")

        out = succeeds(*self.mtp("--json", "--steps=2", "--samples=5"))
        found, expected = json.loads(out, parse_constant=no_constant), self.expected(2, records=5)
        self.assertEqual(found["documents"], 5)
        self.assertEqual(found["drafted"], expected.drafted.sum(0).tolist())
        rates = [None if rate != rate else rate for rate in expected.rates]
        self.assertEqual((found["loss"], found["accepted"]), (expected.loss, rates))

    @parameterized.expand([("without", "a head of multi-token"), ("undeclared", "mtp_num_hidden_layers=1")])
    def test_a_checkpoint_without_a_head(self, model, words):
        err = fails(*self.mtp(model=model))
        self.assertRegex(err, f"^transformers-packed mtp: --model: expected .*{words}")
        self.assertEqual(len(err.splitlines()), 1, err)
