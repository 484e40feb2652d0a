"""`PackedTrainer` evaluates streams, and classifiers whose rows end with padding."""

import contextlib
import io
import tempfile
import unittest

from parameterized import parameterized
from scripts.trainer_arms import CONFIGS, Samples
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, set_seed

from transformers_packed import DataCollatorWithFlattening, PackedTrainer, PackedTrainingArguments, patch_model


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class EvaluationTest(unittest.TestCase):
    def build(self, auto=AutoModelForCausalLM, **options):
        set_seed(0)
        model = patch_model(auto.from_config(CONFIGS["qwen3_5"]()))
        folder = self.enterContext(tempfile.TemporaryDirectory())
        args = PackedTrainingArguments(folder, per_device_eval_batch_size=4, use_cpu=True, report_to="none")
        with contextlib.redirect_stdout(io.StringIO()):
            return PackedTrainer(model, args, **options)

    def test_a_stream_beside_samples(self):
        """accelerate would read it in one process, and cut its boundaries."""
        samples = Samples(10)
        trainer = self.build(train_dataset=samples)
        expected = trainer.evaluate(samples)["eval_loss"]
        self.assertAlmostEqual(trainer.evaluate(Stream(samples.rows))["eval_loss"], expected, places=5)

    @parameterized.expand([(None,), (64,)])
    def test_padding_of_a_classifier_is_no_sample(self, multiple):
        samples = [{"input_ids": [n] * n, "labels": n % 2} for n in range(2, 12)]
        collator = DataCollatorWithFlattening(
            return_cu_seqlens=True, pad_to_multiple_of=multiple, pad_token_id=0, on_leak="ignore"
        )
        seen = []
        trainer = self.build(
            AutoModelForSequenceClassification,
            train_dataset=samples,
            data_collator=collator,
            compute_metrics=lambda prediction: seen.append(prediction) or {},
        )
        trainer.evaluate(samples)
        self.assertEqual(seen[0].label_ids.tolist(), [n % 2 for n in range(2, 12)])
        self.assertEqual(seen[0].predictions.shape, (10, 2))


if __name__ == "__main__":
    unittest.main()
