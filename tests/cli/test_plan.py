import json
import tempfile
import unittest
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from common.commands import run_command
from common.records import make_tokenizer
from parameterized import parameterized
from transformers import Qwen3_5TextConfig

from transformers_packed import PackingCost, PackingPlan, plan_packing


TEXTS = ["def f():\n\treturn 1", "a\x1b[31m red", "long " * 100, "é💡"]


class PlanCommandTest(unittest.TestCase):
    def setUp(self):
        self.path = Path(self.enterContext(tempfile.TemporaryDirectory()))
        make_tokenizer().save_pretrained(self.path / "tokenizer")

    def write(self, *rows, name="data.jsonl"):
        path = self.path / name
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        else:
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return str(path)

    def command(self, *arguments, status=0):
        """Return the output to stdout, or to stderr if the command fails."""
        found, out, err = run_command("plan", *arguments)
        self.assertEqual(found, status, err)
        return err if status else out

    @parameterized.expand(["data.jsonl", "data.parquet"])
    def test_tokenized_data(self, name):
        lengths = np.random.default_rng(0).integers(1, 60, 300)
        data = self.write(*({"input_ids": [7] * length} for length in lengths.tolist()), name=name)
        saved = self.path / "plan.npz"
        arguments = ["--overlong", "split", "--world-size", 2, "--gradient-accumulation-steps", 3, "--seed", 5]
        output = self.command("--data", data, "--row-length", 50, *arguments, "--save", saved)
        expected = plan_packing(lengths, 50, overlong="split", world_size=2, gradient_accumulation_steps=3, seed=5)
        np.testing.assert_array_equal(PackingPlan.load(saved).samples, expected.samples)
        self.assertEqual(output, f"{expected.summary()}\nWrote {saved}\n")
        for part in (f"{expected.overlong_samples} samples split", "imbalance", "(2 ranks x 3 rows each)"):
            self.assertIn(part, output)

    def test_text_and_preview(self):
        data = self.write(*({"text": text} for text in TEXTS))
        arguments = ["--data", data, "--tokenizer", self.path / "tokenizer", "--row-length", 600]
        output = self.command(*arguments, "--preview", 3)
        tokens = [len(text.encode()) + 1 for text in TEXTS]
        self.assertIn(f"4 with {sum(tokens):,} tokens", output)
        self.assertIn(f"Row 0: 4 documents, {sum(tokens)} of 600 tokens", output)
        self.assertNotIn("Row 1", output)
        for index, count in enumerate(tokens):
            self.assertIn(f"sample {index}, {count} tokens, {count - 1} with loss -", output)
        self.assertIn("|   def f():\n|   \\treturn 1<|im_end|>\n+--", output)
        self.assertIn("|   a\\x1b[31m red<|im_end|>", output)
        self.assertIn("|   é💡<|im_end|>", output)
        self.assertIn(f"[... {500 + len('<|im_end|>') - 320} characters ...]", output)

    def test_preview_of_a_part(self):
        data = self.write({"input_ids": [72] * 5 + [73] * 4, "labels": [-100] * 5 + [73] * 4})
        arguments = ["--data", data, "--tokenizer", self.path / "tokenizer", "--row-length", 6, "--preview", 2]
        output = self.command(*arguments, "--overlong", "split")
        self.assertIn("document 1, sample 0, 6 tokens from 0 on, 1 with loss -", output)
        self.assertIn("document 1, sample 0, 3 tokens from 6 on, 2 with loss -", output)
        text = make_tokenizer().decode([72, 73])
        self.assertIn(f"|   {text[0] * 5}{text[1]}\n", output)
        self.assertIn(f"|   {text[1] * 3}\n", output)

    def test_samples_are_cut_by_default(self):
        texts = [{"text": "a" * length} for length in (5, 30)]
        data = self.write(*texts)
        arguments = ["--data", data, "--tokenizer", self.path / "tokenizer", "--row-length", 20]
        self.assertIn("1 sample truncated, 11 tokens lost", self.command(*arguments))
        data = self.write({"prompt": "a" * 50, "completion": "b"})
        message = self.command("--data", data, *arguments[2:], status=1)
        self.assertIn("--data: expected a target among the first 20 tokens of a sample, got none. Raise", message)

    def test_dropped_records(self):
        """Those without a target, and those that lose it in a row."""
        turns = [{"role": "user", "content": "a" * 50}, {"role": "assistant", "content": "b"}]
        data = self.write({"messages": turns}, {"messages": turns[:1]}, {"messages": [turns[1]]})
        arguments = ["plan", "--data", data, "--tokenizer", self.path / "tokenizer", "--row-length", 40]
        dropped = "Dropped 2 records without a token with loss"
        found = run_command(*arguments)
        self.assertEqual(
            (found[0], found[2]), (0, f"{dropped} (1 by truncation to 40 tokens), which the plan leaves out.\n")
        )
        self.assertEqual(
            run_command(*arguments, "--overlong", "split")[2], f"{dropped.replace('2 records', '1 record')}.\n"
        )

    def test_picture(self):
        data = self.write(*({"input_ids": [7] * length} for length in range(1, 41)))
        plot = self.path / "plan.png"
        self.assertIn(f"Wrote {plot}", self.command("--data", data, "--row-length", 50, "--plot", plot))
        self.assertEqual(plot.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")

    def test_cost_and_tokenizer_of_a_model(self):
        config = Qwen3_5TextConfig(hidden_size=64, num_hidden_layers=4)
        model, saved = self.path / "tokenizer", self.path / "plan.npz"
        config.save_pretrained(model)
        data = self.write({"text": "abc"})
        self.command("--data", data, "--model", model, "--row-length", 8, "--save", saved)
        self.assertEqual(PackingPlan.load(saved).cost, PackingCost.from_config(config))
        saved.unlink()
        self.command("--data", data, "--model", model / "config.json", "--row-length", 8, "--save", saved)
        self.assertEqual(PackingPlan.load(saved).cost, PackingCost.from_config(config))

    def test_a_configuration_alone(self):
        """The command loads no tokenizer if it needs none."""
        path = self.path / "alone"
        Qwen3_5TextConfig(hidden_size=64, num_hidden_layers=4).save_pretrained(path)
        ids, text = self.write({"input_ids": [7]}), self.write({"text": "abc"}, name="text.jsonl")
        for model in (path, path / "config.json"):
            self.assertIn("1 with 1 tokens", self.command("--data", ids, "--model", model, "--row-length", 8))
            message = self.command("--data", text, "--model", model, "--row-length", 8, status=1)
            self.assertIn(f"--model: expected a tokenizer in {path}, got none", message)
        message = self.command("--data", ids, "--model", self.path / "nothing", "--row-length", 8, status=1)
        self.assertIn(
            f"--model: expected a local directory or a model on the Hub, got '{self.path / 'nothing'}': no such",
            message,
        )
        missing = self.path / "nothing" / "config.json"
        message = self.command("--data", ids, "--model", missing, "--row-length", 8, status=1)
        self.assertIn(f"--model: cannot read a configuration from {missing}: file not found", message)

    @parameterized.expand(
        [
            ("no tokenizer", [{"text": "a"}], [], "expected the column input_ids, or a tokenizer"),
            ("preview without tokenizer", [{"input_ids": [1]}], ["--preview", 1], "--preview: expected a tokenizer"),
            ("nothing", [], [], "--data: expected at least one record, got none"),
            ("no ids", [{"input_ids": [1]}, {"input_ids": []}], [], r"line 2: expected input_ids as a list"),
            ("two formats", [{"input_ids": [1], "text": "a"}], [], "Choose one with --format text or tokens"),
            ("packed", [{"input_ids": [1, 2], "seq_lengths": [1, 1]}], [], "line 1: expected no column seq_lengths"),
            ("another kind of record", [{"input_ids": [1]}, 3], [], "line 2: expected a JSON object"),
        ]
    )
    def test_errors(self, _, rows, arguments, message):
        data = self.write(*rows)
        self.assertIn(message, self.command("--data", data, "--row-length", 8, *arguments, status=1))

    def test_a_directory_is_no_plan(self):
        with self.assertRaisesRegex(IsADirectoryError, f"expected a file, got the directory {self.path}"):
            plan_packing([1, 2], 4).save(self.path)
