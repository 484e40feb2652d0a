"""`packing="batches"`: any Trainer's own padded batches, packed inside the model and verified by the Trainer's own step."""

import copy
import re
import unittest
from functools import partial
from importlib.util import find_spec
from unittest import mock

import torch
from common.records import make_tokenizer
from common.trl_trainers import PAIRS, SGD, TRLTestCase, build_model
from datasets import Dataset
from mixins.configure import ConfigureTestCase, said, train_configured
from mixins.model import total_relative_error
from mixins.padding import computed_tokens, unpack_elsewhere
from mixins.patch import COMPOSITE
from parameterized import parameterized
from scripts.configured_arms import tokenizer
from scripts.trainer_arms import CONFIGS, Samples, updates_and_losses
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
)
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from transformers_packed import PackedTrainer, PackedTrainingArguments, PackingDataset, configure_packing
from transformers_packed.models.registry import has_our_classes


ARGS = {**{name: SGD[name] for name in SGD if name != "bf16"}, "learning_rate": 0.1, "max_steps": 2}
VERIFIED = r"Verified packing on a batch of which (\d+) of (\d+) tokens are computed: .*differ by (\S+) from padded"


class Margin(Trainer):
    """A loss of the user on padded logits: what a row's real tokens score, more for the first row than for the last."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        scores = model(**inputs).logits.log_softmax(-1)[:, :-1]
        real = labels[:, 1:] != -100
        scores = scores.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        means = (scores * real).sum(1) / real.sum(1)
        return -(means / torch.arange(1, 1 + len(means))).sum()


class ReadsPadding(Margin):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).logits[inputs["attention_mask"] == 0].logsumexp(-1).square().sum()


class ReadsRows(Margin):
    """Weights the rows of hidden states inside of the model, which has one packed row there."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        def weight(module, args, output):
            return output * torch.arange(1.0, 1 + len(output))[:, None, None]

        handle = model.model.norm.register_forward_hook(weight)
        try:
            return super().compute_loss(model, inputs)
        finally:
            handle.remove()


class Draws(Margin):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs) * (1 + torch.rand(()))


Library = type("Library", (Margin,), {"__module__": "library.trainers"})


class BatchesTestCase(ConfigureTestCase):
    def own(self, kind=Margin, **options) -> Trainer:
        torch.manual_seed(0)
        model = options.pop("model", None) or AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
        options = {
            "args": {**ARGS, **options.pop("args", {})},
            "collator": DataCollatorForSeq2Seq(tokenizer()),
            **options,
        }
        trainer = self.trainer(model, **options)
        trainer.__class__ = kind
        return trainer


def check_same(case, packed, padded, mode="batches", **options) -> None:
    """The check measures what is the same to 1e-5, and two updates are the same."""
    case.assertIn("Padding-free on", said(configure_packing, packed, mode, **options)[0])
    output, (updates, losses) = said(updates_and_losses, packed)
    case.assertRegex(output, VERIFIED)
    computed, given, error = re.search(VERIFIED, output).groups()
    case.assertLess(int(computed), int(given))
    case.assertLessEqual(float(error), 1e-5)
    want, expected = updates_and_losses(padded)
    case.assertEqual(len(expected), 2)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    case.assertLess(total_relative_error(updates, want), 3e-5)


class OwnTrainerTest(BatchesTestCase):
    @parameterized.expand([(Draws,), (Library,)])
    def test_trains_as_padded(self, kind):
        check_same(self, self.own(kind), self.own(kind))

    def test_in_mixed_precision(self):
        """A copy of the output has its logits."""
        trainer = self.own(args={"bf16": True, "max_steps": 1})
        self.assertRegex(train_configured(trainer, "batches"), VERIFIED)

    @parameterized.expand([(ReadsPadding, "loss"), (ReadsRows, "loss")])
    def test_a_difference_is_an_error(self, kind, what):
        trainer = self.own(kind)
        before = [x.detach().clone() for x in trainer.model.parameters()]
        said(configure_packing, trainer, "batches")
        with self.assertRaisesRegex(ValueError, f"expected .*{what}.* of the padded batch .*pass verify=False"):
            said(trainer.train)
        self.assertTrue(all(map(torch.equal, before, trainer.model.parameters())))

    def test_a_step_that_stops_on_packed_rows(self):
        class Stops(Margin):
            def compute_loss(self, model, inputs, *args, **kwargs):
                with computed_tokens(model.model) as seen:
                    loss = super().compute_loss(model, inputs)
                if seen != {inputs["input_ids"].numel()}:
                    raise KeyError("rows")
                return loss

        trainer = self.own(Stops)
        said(configure_packing, trainer, "batches")
        with self.assertRaisesRegex(ValueError, "expected a step of training on packed rows, got KeyError: 'rows'"):
            said(trainer.train)

    def test_batches_without_padding(self):
        trainer = self.own(dataset=[{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 6)
        self.assertIn("Not verified: the model computes all 9 tokens of a batch", train_configured(trainer, "batches"))

    def test_a_loss_without_tokens(self):
        class Constant(Margin):
            def compute_loss(self, model, inputs, *args, **kwargs):
                return super().compute_loss(model, inputs) * 0

        trainer = self.own(Constant)
        self.assertIn("Not verified: the loss depends on no token", train_configured(trainer, "batches"))

    def test_packed_trainer(self):
        args = PackedTrainingArguments(self.directory, packing="batches", report_to="none", use_cpu=True)
        model, collator = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]()), DataCollatorForSeq2Seq(tokenizer())
        output, trainer = said(PackedTrainer, model, args, train_dataset=Samples(6), data_collator=collator)
        self.assertIn("only the real tokens of padded batches", output)
        self.assertEqual((trainer.args.packing, trainer.args.padding_free), (False, True))

    @parameterized.expand(
        [
            ("rows", {"dataset": PackingDataset(Samples(24), 128)}, {}, "padded batches, got packed rows of the tr"),
            ("mtp", {"kind": Trainer}, {"mtp_loss_weight": 0.1}, 'got packing="batches"'),
            ("graphs", {}, {"cuda_graphs": True}, "whose batches are padded"),
            ("length", {}, {"max_length": 64}, "expected packing=True with max_length"),
        ]
    )
    def test_refused(self, _, options, arguments, message):
        trainer = self.own(**options)
        with self.assertRaisesRegex(ValueError, message):
            configure_packing(trainer, "batches", **arguments)
        self.assertFalse(has_our_classes(trainer.model))


class ClassifiersTest(BatchesTestCase):
    @parameterized.expand(
        [
            (
                "tokens",
                AutoModelForTokenClassification,
                "qwen3_next",
                DataCollatorForTokenClassification,
                lambda ids: ids,
            ),
            ("rows", AutoModelForSequenceClassification, "qwen3_5", DataCollatorWithPadding, lambda ids: ids[0] % 3),
            (
                "rows of a composite",
                AutoModelForSequenceClassification,
                "composite",
                DataCollatorWithPadding,
                lambda ids: 1,
            ),
            (
                "tokens of a composite",
                AutoModelForTokenClassification,
                "composite",
                DataCollatorForTokenClassification,
                lambda ids: ids,
            ),
        ]
    )
    def test_trains_as_padded(self, _, auto, kind, collator, label):
        """Also its evaluation, whose predictions are those of padded batches."""
        trainers, seen = [], []
        rows = [{"input_ids": row["input_ids"], "labels": label(row["input_ids"])} for row in Samples(16).rows]
        for _ in range(2):
            torch.manual_seed(0)
            config = CONFIGS[kind]() if kind in CONFIGS else copy.deepcopy(COMPOSITE["qwen3_5"])
            config.num_labels, config.classifier_dropout, config.get_text_config().pad_token_id = 61, 0.0, 0
            options = {"dataset": rows, "eval_dataset": rows[:5], "compute_metrics": lambda x: seen.append(x) or {}}
            # The stock class of a composite does not name its labels.
            args = {"eval_strategy": "steps", "eval_steps": 2, "label_names": ["labels"]}
            model = auto.from_config(config)
            trainers.append(self.own(Trainer, model=model, collator=collator(tokenizer()), args=args, **options))
        check_same(self, *trainers, "auto")
        (got, want) = seen[-2:]
        self.assertEqual(got.predictions.shape, want.predictions.shape)
        real = slice(None) if want.label_ids.ndim == 1 else want.label_ids != -100
        torch.testing.assert_close(*(torch.from_numpy(x.predictions[real]) for x in (got, want)), rtol=1e-3, atol=1e-3)

    def test_refused(self):
        model = AutoModelForSequenceClassification.from_config(CONFIGS["qwen3_5"]())
        trainer = self.own(Trainer, model=model, collator=DataCollatorWithPadding(tokenizer()))
        with self.assertRaisesRegex(ValueError, "whole batches of a classifier .*, got packing=True. Pass"):
            configure_packing(trainer, True, max_length=64)


def orpo(directory):
    tokens = make_tokenizer()
    args = ORPOConfig(directory, **{**SGD, "max_steps": 2}, per_device_train_batch_size=4, max_length=64)
    model = build_model("padded", len(tokens))
    return ORPOTrainer(model, args, train_dataset=Dataset.from_list(PAIRS), processing_class=tokens)


def distilled(kind, config, directory, **options):
    """Off-policy distillation. The teacher packs its batches too."""
    tokens = make_tokenizer()
    options |= {"max_length": 64, "lmbda": 0.0, "learning_rate": 0.1, "per_device_train_batch_size": 4}
    args = config(directory, **{**SGD, "max_steps": 2, **options})
    model, teacher = build_model("padded", len(tokens)), build_model("padded", len(tokens), seed=1)
    teacher.lm_head.weight.data.mul_(100)
    names = {"user": "prompt", "assistant": "chosen"}
    rows = [{"messages": [{"role": role, "content": x[name]} for role, name in names.items()]} for x in PAIRS]
    return kind(model, teacher, args, train_dataset=Dataset.from_list(rows), processing_class=tokens)


gkd = partial(distilled, GKDTrainer, GKDConfig)
gold = partial(distilled, GOLDTrainer, GOLDConfig, max_completion_length=16)


def self_distilled(kind, config, rows, directory, **options):
    """The student with more in its prompt is the teacher of its own answers."""
    tokens = make_tokenizer()
    tokens.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    sizes = {"per_device_train_batch_size": 4, "max_completion_length": 8}
    args = config(directory, **{**SGD, "max_steps": 2, "learning_rate": 0.01, "teacher_model_kind": "live", **sizes})
    model = build_model("padded", len(tokens))
    model.lm_head.weight.data.mul_(100)
    return kind(model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokens, **options)


def each_second_one(completions, **kwargs) -> list[float]:
    """The answers that succeed are those that the teacher is told."""
    return [float(n % 2) for n in range(len(completions))]


HINTS = [{"prompt": "q" * n, "privileged_context": "yes" * (n % 4 + 1)} for n in range(1, 17)]
QUESTIONS = [{"prompt": [{"role": "user", "content": "q" * n}]} for n in range(1, 17)]
sdft = partial(self_distilled, SDFTTrainer, partial(SDFTConfig, num_generations=2), HINTS)
sdpo = partial(
    self_distilled,
    SDPOTrainer,
    partial(SDPOConfig, num_generations=4, success_reward_threshold=0.5, distillation_mode="full_logits"),
    QUESTIONS,
    reward_funcs=each_second_one,
)


class TRLTest(TRLTestCase):
    @parameterized.expand([(orpo,), (gkd,), (gold,), (sdft,), (sdpo,)])
    def test_trains_as_padded(self, make):
        """Trainers that this package does not know."""
        trainers = [make(self.directory) for _ in range(2)]
        self.assertIn('packing="batches"', said(configure_packing, trainers[0])[0])
        check_same(self, *trainers)

    def test_a_model_that_leaks(self):
        """Its batches have columns, from which the trainer makes those of the model."""
        trainer = orpo(self.directory)
        said(configure_packing, trainer, "batches")
        with (
            mock.patch("transformers_packed.models.padding.PaddedBatch.unpack", unpack_elsewhere),
            self.assertRaisesRegex(ValueError, "expected no gradient between the 4 documents of a row"),
        ):
            said(trainer.train)


@unittest.skipUnless(find_spec("sentence_transformers"), "needs sentence-transformers; written for 6.2.0")
class SentenceTransformersTest(BatchesTestCase):
    @parameterized.expand(["mean", "lasttoken", "cross_encoder"])
    def test_trains_as_padded(self, kind):
        """Also a loss with negatives of the same batch. What depends on other rows are their distances alone."""
        check_same(self, *(self.build(kind, number) for number in range(2)), mode="auto")

    def test_a_model_that_leaks(self):
        trainer = self.build("lasttoken", 0)
        said(configure_packing, trainer)
        with mock.patch("transformers_packed.models.padding.PaddedBatch.unpack", unpack_elsewhere):
            self.assertRegex(
                said(trainer.train)[0], "Packing off, training is unchanged: expected no gradient between"
            )

    def build(self, kind, number):
        from sentence_transformers import (
            CrossEncoder,
            CrossEncoderTrainer,
            CrossEncoderTrainingArguments,
            SentenceTransformer,
            SentenceTransformerTrainer,
            SentenceTransformerTrainingArguments,
        )
        from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
        from sentence_transformers.losses import MultipleNegativesRankingLoss
        from sentence_transformers.models import Pooling, Transformer

        torch.manual_seed(0)
        tokens, folder = make_tokenizer(), f"{self.directory}/{number}"
        config = CONFIGS["qwen3_5"]()
        config.vocab_size, config.pad_token_id, config.num_labels = len(tokens), tokens.pad_token_id, 1
        auto = AutoModelForSequenceClassification if kind == "cross_encoder" else AutoModel
        auto.from_config(config).save_pretrained(folder)
        tokens.save_pretrained(folder)
        rows = [{"anchor": "q" * (i % 7 + 1), "positive": "yes" * (i % 4 + 1)} for i in range(16)]
        options = {**ARGS, "per_device_train_batch_size": 4}
        if kind == "cross_encoder":
            rows = [{**row, "label": float(i % 2)} for i, row in enumerate(rows)]
            model, args = CrossEncoder(folder, device="cpu"), CrossEncoderTrainingArguments(self.directory, **options)
            cls, loss = CrossEncoderTrainer, BinaryCrossEntropyLoss(model)
        else:
            modules = [Transformer(folder), Pooling(config.hidden_size, pooling_mode=kind)]
            model = SentenceTransformer(modules=modules, device="cpu")
            args = SentenceTransformerTrainingArguments(self.directory, **options)
            cls, loss = SentenceTransformerTrainer, MultipleNegativesRankingLoss(model)
        return cls(model, args, train_dataset=Dataset.from_list(rows), loss=loss)
