"""The benchmark of the loss of FP8 training: its corpus, its rows, and two steps on a CPU."""

import io
import json
import tempfile
import unittest
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import float8_corpus
import float8_loss
import numpy as np
from common.commands import run_main


FILES = sorted(Path(json.__file__).parent.glob("*.py"))


def run(path: Path, *arguments: str) -> dict:
    run_main(float8_loss, *arguments, "--output", path)
    return json.loads(path.read_text())


class Float8LossTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.folder, cls.corpus = Path(folder), Path(folder, "corpus.npz")
        arguments = ["--tokens", "4000", "--vocab-size", "512", "--output", str(cls.corpus)]
        with (
            # The second time as copies.
            mock.patch.object(float8_corpus, "source_files", lambda: FILES * 2),
            mock.patch.object(float8_corpus, "MAX_LENGTH", 500),
            redirect_stdout(io.StringIO()),
        ):
            float8_corpus.main(arguments)

    def train(self, name: str, *arguments: str) -> dict:
        options = ["--models", "tiny", "--device", "cpu", "--steps", "2", "--tokens", "64", *arguments]
        return run(self.folder / name, "--corpus", str(self.corpus), *options)

    def test_the_corpus_has_as_many_tokens_as_wanted(self):
        documents, vocab_size = float8_loss.load(self.corpus)
        self.assertEqual(sum(map(len, documents)), 4000)
        self.assertEqual(max(map(len, documents)), 500)
        self.assertEqual(vocab_size, 512)
        self.assertLess(max(x.max() for x in documents), vocab_size)

    def test_rows_are_full_and_documents_continue_in_the_next(self):
        documents = np.split(np.arange(23), [3, 13, 20])
        rows = float8_loss.pack(documents, 8)
        self.assertEqual([[len(x) for x in row] for row in rows], [[3, 5], [5, 3]])
        self.assertEqual(np.concatenate(sum(rows, [])).tolist(), list(range(16)))

    def test_two_steps_and_merging(self):
        names = ("first", "other")
        runs = [self.train(name, "--order", order)["runs"][0] for name, order in zip(names, "01", strict=True)]
        for entry in runs:
            self.assertEqual([len(entry[key]) for key in ("loss", "gradient_norm")], [2, 2])
            self.assertAlmostEqual(entry["mean_loss_of_last_steps"], sum(entry["loss"]) / 2, places=4)
            # Close to a uniform distribution over the vocabulary.
            self.assertLess(abs(entry["held_out_loss"] - np.log(512)), 0.3)
        self.assertNotEqual(runs[0]["loss"], runs[1]["loss"])
        merged = run(self.folder / "merged", "--merge", *(str(self.folder / name) for name in names))
        self.assertEqual(merged["runs"], runs)

    def test_float8_takes_the_inner_layers(self):
        with mock.patch("transformers_packed.use_float8", create=True) as use_float8:
            (entry,) = self.train("float8", "--arm", "float8")["runs"]
        (model,), options = use_float8.call_args
        takes = options["module_filter"]
        taken = [name for name, module in model.named_modules() if takes(module, name)]
        self.assertEqual(entry["float8_layers"], len(taken))
        self.assertEqual({name.split(".")[2] for name in taken}, {"1", "2"})
        # Of each of the two layers: three of the MLP, and in_proj_qkv, in_proj_z, out_proj.
        self.assertEqual(len(taken), 2 * 6)
