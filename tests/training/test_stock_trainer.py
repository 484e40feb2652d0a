import tempfile
import unittest

import torch
from mixins.model import relative_error, total_relative_error
from mixins.padding import computed_tokens
from mixins.patch import OTHERS
from parameterized import parameterized
from scripts.trainer_arms import CONFIGS, Samples, build_trainer, run_in_two_processes, train
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast


# Of the updates of some families, which magnify rounding. Weights that differ by half a unit in the last place change the
# updates by 3e-7 in Qwen3.5, by 2e-6 to 6e-6 in these families, and by 1e-4 to 7e-4 in Qwen4-Exp. Bars are three times that.
BARS = {"qwen3_next_moe": 1e-4, **dict.fromkeys(OTHERS, 2e-5), "qwen4_exp": 2e-3}


class TrainerTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name

    def check_same_training(self, padded, packed, bar=1e-6):
        updates, losses = padded
        got_updates, got_losses = packed
        self.assertEqual(len(losses), 20)
        for got, want in zip(got_losses, losses, strict=True):
            self.assertLess(abs(got - want) / want, 1e-5)
        self.assertLess(total_relative_error(got_updates, updates), bar)

    @parameterized.expand(CONFIGS)
    def test_packed_updates_equal_padded_updates(self, family):
        """20 steps of SGD with accumulation over unequal rows. The loss is a mean over the tokens of a step."""
        *padded, _ = train("padded", family, self.directory)
        *packed, trainer = train("packed", family, self.directory)
        self.check_same_training(padded, packed, bar=BARS.get(family, 1e-6))
        self.assertTrue(trainer.model_accepts_loss_kwargs)
        for name, update in packed[0].items():
            # The choices of an indexer have no gradient.
            self.assertEqual(bool(update.any()), "indexer" not in name, name)

    @parameterized.expand([(True,), (False,)])
    def test_gradient_checkpointing(self, use_reentrant):
        options = {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant},
        }
        *padded, _ = train("padded", "qwen3_5", self.directory)
        *packed, _ = train("packed", "qwen3_5", self.directory, **options)
        self.check_same_training(padded, packed)

    @parameterized.expand(["qwen3_5", "qwen3_next_moe"])
    def test_padded_batches_through_our_model(self, family):
        """Train and evaluate with a padding collator, without computing padding tokens."""
        *padded, builtin = train("padded", family, self.directory)
        trainer = build_trainer("padded_ours", family, self.directory)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        real, collate = [], trainer.data_collator

        def count(features):
            real.append(sum(len(feature["input_ids"]) for feature in features))
            return collate(features)

        trainer.data_collator = count
        with computed_tokens(trainer.model) as seen:
            trainer.train()
        self.assertLessEqual(seen, set(real))
        updates = {name: p.detach() - before[name] for name, p in trainer.model.named_parameters()}
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        self.check_same_training(padded, (updates, losses), bar=1e-4 if family.endswith("moe") else 1e-6)

        # Transformers' own collator, which pads with the tokenizer.
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<unk>": 1}, "<unk>")), pad_token="<pad>"
        )
        for side in ("left", "right"):
            tokenizer.padding_side = side
            results = []
            for each in (builtin, trainer):
                each.data_collator = DataCollatorForSeq2Seq(tokenizer)
                with computed_tokens(each.model) as seen:
                    results.append(each.evaluate()["eval_loss"])
            self.assertEqual(seen, {sum(len(row["input_ids"]) for row in Samples(7).rows)})
            self.assertLess(abs(results[1] - results[0]) / results[0], 1e-5)

    def test_the_comparison_can_fail(self):
        """The same training without boundaries changes the parameters by more than a hundred times the bar."""
        updates, *_ = train("padded", "qwen3_5", self.directory)
        trainer = build_trainer("packed", "qwen3_5", self.directory)
        collate = trainer.data_collator
        trainer.data_collator = lambda features: {
            name: value for name, value in collate(features).items() if name in ("input_ids", "labels")
        }
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        leaking = {name: p.detach() - before[name] for name, p in trainer.model.named_parameters()}
        self.assertGreater(total_relative_error(leaking, updates), 1e-4)

    def test_evaluate_and_predict(self):
        padded, packed = (build_trainer(arm, "qwen3_5", self.directory) for arm in ("padded", "packed"))
        options = {"per_device_eval_batch_size": 7}
        for trainer in (padded, packed):
            for name, value in options.items():
                setattr(trainer.args, name, value)
        want, got = (trainer.evaluate()["eval_loss"] for trainer in (padded, packed))
        self.assertLess(abs(got - want) / want, 1e-5)

        # Rows of one sample, so that padded and packed rows have the same tokens in the same places.
        packed.args.per_device_eval_batch_size = 1
        predicted = packed.predict(Samples(3))
        self.assertEqual(predicted.predictions.shape[0], 3)
        for row, logits in zip(Samples(3).rows, predicted.predictions, strict=True):
            with torch.no_grad():
                alone = padded.model(torch.tensor([row["input_ids"]])).logits[0]
            self.assertLess(relative_error(torch.tensor(logits[: len(alone)]), alone), 1e-5)

        # Several samples per row.
        packed.args.per_device_eval_batch_size = 3
        predicted = packed.predict(Samples(3))
        lengths = [len(row["input_ids"]) for row in Samples(3).rows]
        self.assertEqual(predicted.predictions.shape[:2], (1, sum(lengths)))
        last = torch.tensor(predicted.predictions[0, -lengths[-1] :])
        self.assertLess(relative_error(last, alone), 1e-5)

    def test_a_datasets_dataset_with_further_columns(self):
        """With its default, `remove_unused_columns` drops exactly the columns that the model does not accept."""
        from datasets import Dataset

        rows = [{**row, "text": "x", "score": 1.0} for row in Samples(6).rows]
        trainer = build_trainer("packed", "qwen3_5", self.directory, max_steps=1)
        trainer.train_dataset = Dataset.from_list(rows)
        trainer.train()
        self.assertEqual(trainer.state.global_step, 1)

    @parameterized.expand(["qwen3_5", "qwen3_next", *OTHERS])
    def test_two_processes(self, family):
        results = {}
        for arm in ("padded", "packed"):
            output = f"{self.directory}/{arm}.pt"
            _, results[arm] = run_in_two_processes(self, "trainer_arms.py", arm, family, output)
        padded, packed = ((results[arm]["updates"], results[arm]["losses"]) for arm in ("padded", "packed"))
        self.check_same_training(padded, packed, bar=BARS.get(family, 1e-6))
