import functools
import tempfile

import torch
from mixins.configure import ConfigureTestCase
from mixins.model import total_relative_error
from mixins.padding import computed_tokens
from mixins.patch import OTHERS
from parameterized import parameterized
from scripts.configured_arms import tokenizer
from scripts.trainer_arms import CONFIGS, Samples, build_trainer, run_in_two_processes, train, updates_and_losses
from transformers import DataCollatorForSeq2Seq


# Of the updates of some families, which magnify rounding. Weights that differ by half a unit in the last place change the
# updates by 3e-7 in Qwen3.5, by 2e-6 to 6e-6 in these families, and by 1e-4 to 7e-4 in Qwen4-Exp. Bars are three times that.
BARS = {"qwen3_next_moe": 1e-4, **dict.fromkeys(OTHERS, 2e-5), "qwen4_exp": 2e-3}


@functools.cache
def padded_training():
    """The updates and losses of a padded training, which no test changes, and its trainer."""
    with tempfile.TemporaryDirectory() as folder:
        return train("padded", "qwen3_5", folder)


class TrainerTest(ConfigureTestCase):
    # In float32 on 1 and 4 threads, updates differ by up to 6e-7.
    def check_same_training(self, padded, packed, bar=3e-6):
        updates, losses = padded
        got_updates, got_losses = packed
        self.assertEqual(len(losses), 4)
        torch.testing.assert_close(got_losses, losses, rtol=1e-5, atol=0)
        self.assertLess(total_relative_error(got_updates, updates), bar)

    @parameterized.expand(sorted(CONFIGS.keys() - {"qwen3_next", "olmo_hybrid"}))
    def test_packed_updates_equal_padded_updates(self, family):
        """Steps of SGD with accumulation over unequal rows. The loss is a mean over the tokens of a step."""
        *padded, _ = train("padded", family, self.directory)
        *packed, trainer = train("packed", family, self.directory)
        self.check_same_training(padded, packed, bar=BARS.get(family, 3e-6))
        self.assertTrue(trainer.model_accepts_loss_kwargs)
        for name, update in packed[0].items():
            # The choices of an indexer have no gradient.
            self.assertEqual(bool(update.any()), "indexer" not in name, name)

    def test_gradient_checkpointing(self):
        options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
        *packed, _ = train("packed", "qwen3_5", self.directory, **options)
        self.check_same_training(padded_training()[:2], packed)

    def test_padded_batches_through_our_model(self):
        """Train and evaluate with a padding collator, without computing padding tokens."""
        *padded, builtin = padded_training()
        trainer = build_trainer("padded_ours", "qwen3_5", self.directory)
        real, collate = [], trainer.data_collator

        def count(features):
            real.append(sum(len(feature["input_ids"]) for feature in features))
            return collate(features)

        trainer.data_collator = count
        with computed_tokens(trainer.model) as seen:
            ours = updates_and_losses(trainer)
        self.assertLessEqual(seen, set(real))
        self.check_same_training(padded, ours)

        # Transformers' own collator, which pads with the tokenizer.
        tokens = tokenizer()
        tokens.padding_side = "left"
        results = []
        for each in (builtin, trainer):
            each.data_collator = DataCollatorForSeq2Seq(tokens)
            with computed_tokens(each.model) as seen:
                results.append(each.evaluate()["eval_loss"])
        self.assertEqual(seen, {sum(len(row["input_ids"]) for row in Samples(7).rows)})
        self.assertLess(abs(results[1] - results[0]) / results[0], 1e-5)

    def test_a_datasets_dataset_with_further_columns(self):
        """With its default, `remove_unused_columns` drops exactly the columns that the model does not accept."""
        from datasets import Dataset

        rows = [{**row, "text": "x", "score": 1.0} for row in Samples(6).rows]
        trainer = build_trainer("packed", "qwen3_5", self.directory, max_steps=1)
        trainer.train_dataset = Dataset.from_list(rows)
        trainer.train()
        self.assertEqual(trainer.state.global_step, 1)

    @parameterized.expand(["qwen3_5", *[name for name in OTHERS if name == "qwen4_exp"]])
    def test_two_processes(self, family):
        results = {}
        for arm in ("padded", "packed"):
            output = f"{self.directory}/{arm}.pt"
            _, results[arm] = run_in_two_processes(self, "trainer_arms.py", arm, family, output)
        padded, packed = ((results[arm]["updates"], results[arm]["losses"]) for arm in ("padded", "packed"))
        self.check_same_training(padded, packed, bar=BARS.get(family, 3e-6))
