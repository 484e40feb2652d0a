"""What a user replaces in a Trainer: auto mode leaves it alone, or it works as on padded batches."""

import copy
import tempfile
from functools import wraps
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers
from datasets import Dataset
from mixins.configure import ConfigureTestCase, callbacks_of, said, train_configured
from parameterized import parameterized
from scripts.configured_arms import tokenizer
from scripts.trainer_arms import CONFIGS, Samples, Stream, collate_padded, run_in_two_processes
from transformers import AutoModelForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from transformers_packed import (
    PackedTrainer,
    PackedTrainingArguments,
    PackingDataset,
    PackingMetricsCallback,
    configure_packing,
    pack_dataset,
)
from transformers_packed.data.documents import PaddedSamples
from transformers_packed.models.registry import has_our_classes
from transformers_packed.training import setup
from transformers_packed.training.apply import apply, undo
from transformers_packed.training.facts import Facts
from transformers_packed.training.options import Options
from transformers_packed.training.setup import decide


def seq2seq(samples=None, **options):
    """A collator of Transformers that pads labels as well."""
    return transformers.DataCollatorForSeq2Seq(tokenizer(), **options)


DEPENDENT = (
    "compute_loss training_step evaluate evaluation_loop predict get_train_dataloader get_batch_samples".split()
)


def passing(name):
    """A method of a user that calls Trainer's."""
    return lambda self, *args, **kwargs: getattr(Trainer, name)(self, *args, **kwargs)


def exact_match(self, model, inputs, *args, **kwargs):
    """A prediction step with a score per sample."""
    loss, logits, labels = Trainer.prediction_step(self, model, inputs, *args, **kwargs)
    if logits is None:
        return loss, None, None
    return loss, (logits.argmax(-1)[:, :-1] == labels[:, 1:]).all(-1).float(), labels


class SetupTestCase(ConfigureTestCase):
    def own(self, name, how="class", **options) -> Trainer:
        """A Trainer with one method of a user: of its class, or set on the object as itself or inside a wrapper."""
        trainer = self.trainer(collator=seq2seq(), **options)
        method = exact_match if name == "prediction_step" else passing(name)
        if how == "class":
            trainer.__class__ = type("OwnTrainer", (Trainer,), {name: method})
        elif how == "instance":
            setattr(trainer, name, method.__get__(trainer))
        else:
            setattr(trainer, name, wraps(getattr(Trainer, name))(lambda *args, **kw: method(trainer, *args, **kw)))
        return trainer


class OverriddenTest(SetupTestCase):
    def test_what_rows_depend_on(self):
        for name in DEPENDENT:
            self.assertEqual(Facts.of(self.own(name, "class"), Options()).custom, [name])

    @parameterized.expand([("training_step", "class"), ("compute_loss", "instance"), ("evaluate", "wrapped")])
    def test_auto_leaves_it_alone(self, name, how):
        trainer = self.own(name, how)
        self.assertEqual(Facts.of(trainer, Options()).custom, [name])
        named = f"OwnTrainer.{name}" if how == "class" else name
        self.assertIn(f"got a custom {named}, which may count samples", said(configure_packing, trainer)[0])
        self.assertFalse(has_our_classes(trainer.model))
        output, _ = said(configure_packing, trainer, "padding_free")
        self.assertIn(f"; trusted to work on packed rows: {name}\n", output)

    @parameterized.expand([("create_optimizer", "instance"), ("log", "class")])
    def test_no_row_depends_on_it(self, name, how):
        trainer = self.own(name, how)
        self.assertIn("Padding-free on", said(configure_packing, trainer)[0])
        said(trainer.train)

    def test_trainers_of_libraries_and_of_this_package(self):
        trainers = [self.trainer(), self.build("sft")]
        args = PackedTrainingArguments(self.directory, report_to="none", use_cpu=True)
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
        trainers.append(said(PackedTrainer, model, args, train_dataset=Samples(6))[1])
        for trainer in trainers:
            self.assertEqual(Facts.of(trainer, Options()).custom, [])
            said(configure_packing, trainer)
            self.assertEqual(Facts.of(trainer, Options()).custom, [])

    def test_a_loss_that_reads_logits_in_mixed_precision(self):
        """accelerate copies the output of the model, and a copy cannot compute logits later."""
        trainer = self.trainer(args={"bf16": True})

        def compute_loss(model, inputs, *args, **kwargs):
            outputs = model(**inputs)
            return outputs.loss + 0 * outputs.logits.float().mean()

        trainer.compute_loss = compute_loss
        train_configured(trainer, "padding_free")
        self.assertEqual(trainer.state.global_step, 1)


class UndoTest(SetupTestCase):
    def state(self, trainer):
        targets = [trainer.accelerator.dataloader_config, trainer.args.accelerator_config]
        ddp = trainer.accelerator.ddp_handler
        return {
            "trainer": {k: id(v) for k, v in vars(trainer).items()},
            "args": {k: repr(v) for k, v in vars(trainer.args).items() if k not in ("packing", "padding_free")},
            "others": [repr(vars(x)) for x in [*targets, ddp] if x is not None],
            "callbacks": [id(c) for c in trainer.callback_handler.callbacks],
            "classes": [type(module) for module in trainer.model.modules()],
        }

    @parameterized.expand([("padding_free", {}), ("pack", {"max_length": 128}), ("off", {"float8": True})])
    def test_decide_changes_nothing_and_undo_undoes(self, packing, options):
        trainer = self.trainer(dataset=Samples(24))
        before = self.state(trainer)
        decided = decide(trainer, Options(packing=packing, **options))
        self.assertEqual(self.state(trainer), before)
        apply(trainer, decided)
        self.assertNotEqual(self.state(trainer), before)
        undo(trainer, decided)
        self.assertEqual(self.state(trainer), before)

    def test_a_callback_that_the_set_up_replaced(self):
        trainer = self.trainer()
        trainer.add_callback(PackingMetricsCallback(trainer))
        before = self.state(trainer)
        said(configure_packing, trainer, "padding_free", verify=False)
        later = transformers.TrainerCallback()
        trainer.add_callback(later)
        said(configure_packing, trainer, False)
        self.assertEqual([id(c) for c in callbacks_of(trainer)], [*before["callbacks"], id(later)])

    def test_models_of_an_earlier_set_up(self):
        trainer = self.trainer()
        trainer.teacher_model = copy.deepcopy(trainer.model)
        said(configure_packing, trainer, "batches", verify=False)
        self.assertTrue(has_our_classes(trainer.teacher_model))
        said(configure_packing, trainer, "padding_free", verify=False)
        self.assertFalse(has_our_classes(trainer.teacher_model))

    def test_an_error_in_the_model_leaves_the_trainer(self):
        trainer = self.trainer()
        before = self.state(trainer)
        with (
            mock.patch.object(setup, "use_float8", side_effect=ValueError("no products")),
            self.assertRaisesRegex(ValueError, "no products"),
        ):
            configure_packing(trainer, float8=True)
        self.assertEqual(self.state(trainer), before)


class EvaluationTest(SetupTestCase):
    """Predictions, metrics and generation have one row per sample, whatever rows the Trainer trains on."""

    def metrics(self, prediction):
        self.seen.append(prediction)
        return {"rows": len(prediction.predictions)}

    def setUp(self):
        super().setUp()
        self.seen = []

    def stock(self, samples, **options):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
        return self.trainer(model, collator=seq2seq(), eval_dataset=samples, **options)

    def check_same(self, got, want):
        """Compare labels and predictions at targets."""
        self.assertEqual(len(got.predictions), len(want.predictions))
        shifted = [x.label_ids[:, 1:] for x in (got, want)]
        width = min(x.shape[1] for x in shifted)
        targets = want.label_ids[:, 1:] != -100
        self.assertTrue((shifted[0][:, :width] == shifted[1][:, :width]).all())
        logits = [x.predictions[:, :-1][targets] for x in (got, want)]
        np.testing.assert_allclose(*logits, atol=1e-4)

    def test_samples_of_a_plain_trainer(self):
        expected = self.stock(Samples(10), compute_metrics=self.metrics)
        want, loss = expected.predict(Samples(10)), expected.evaluate()["eval_loss"]
        trainer = self.stock(Samples(10), compute_metrics=self.metrics)
        self.assertIn("Padding-free on", said(configure_packing, trainer)[0])
        self.check_same(trainer.predict(Samples(10)), want)
        evaluated = trainer.evaluate()
        self.assertAlmostEqual(evaluated["eval_loss"], loss, places=5)
        self.assertEqual(evaluated["eval_rows"], 10)

    @parameterized.expand([("rows", PackedTrainer), ("table", Trainer), ("stream", Trainer)])
    def test_packed_rows(self, kind, cls):
        """The last batch is not full, and has fewer rows than the others."""
        samples = Samples(23)
        if kind == "table":
            rows = pack_dataset(Dataset.from_list(samples.rows), 128)
        else:
            rows = PackingDataset(samples, 128)
            rows = Stream(rows) if kind == "stream" else rows
        args = {"per_device_eval_batch_size": 4, "remove_unused_columns": False}
        trainer = self.stock(samples, compute_metrics=self.metrics, args=args)
        if cls is PackedTrainer:
            args = PackedTrainingArguments(self.directory, **{**args, "report_to": "none", "use_cpu": True})
            options = {"train_dataset": samples, "compute_metrics": self.metrics}
            trainer = said(PackedTrainer, trainer.model, args, **options)[1]
        else:
            said(configure_packing, trainer)
        evaluated = trainer.evaluate(rows)
        self.assertEqual(evaluated["eval_rows"], 23)
        targets = sum(sum(x != -100 for x in row["labels"][1:]) for row in samples.rows)
        self.assertEqual(int((self.seen[0].label_ids[:, 1:] != -100).sum()), targets)
        if kind != "stream":
            self.assertEqual(len(trainer.predict(rows).predictions), 23)

    def test_two_processes(self):
        samples = Samples(23).rows
        targets = sum(sum(x != -100 for x in row["labels"][1:]) for row in samples)
        printed, found = run_in_two_processes(self, "evaluation_run.py", f"{self.directory}/found.pt")
        self.assertEqual((found["evaluated"], found["predicted"]), ((23, targets), 23))
        self.assertRegex(printed, r"evaluation of \d+ documents and \d+ targets is complete")
        self.assertAlmostEqual(found["loss"], found["alone"], places=5)

    def test_named_evaluation_sets(self):
        trainer = self.stock({"a": PackingDataset(Samples(9), 128), "b": Samples(5)}, compute_metrics=self.metrics)
        said(configure_packing, trainer)
        found = trainer.evaluate()
        self.assertEqual((found["eval_a_rows"], found["eval_b_rows"]), (9, 5))

    def test_a_prediction_step_of_the_user(self):
        """An exact match per sample, also if only the loss is asked for."""
        trainer = self.own("prediction_step", eval_dataset=Samples(6), compute_metrics=self.metrics)
        self.assertIn("prediction_step", Facts.of(trainer, Options()).replaced)
        said(configure_packing, trainer)
        self.assertEqual(trainer.evaluate()["eval_rows"], 6)
        trainer.compute_metrics = None
        self.assertEqual(len(next(iter(trainer.get_eval_dataloader()))["input_ids"]), 6)

    def test_generation(self):
        samples = [{"input_ids": row["input_ids"][:6], "labels": row["labels"][:6]} for row in Samples(7).rows]
        results = []
        for packed in (False, True):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
            options = {"predict_with_generate": True, "generation_max_length": 12, "per_device_eval_batch_size": 3}
            args = Seq2SeqTrainingArguments(self.directory, use_cpu=True, report_to="none", **options)
            collator = seq2seq(padding="longest")
            collator.tokenizer.padding_side = "left"
            trainer = Seq2SeqTrainer(model, args, collator, samples, processing_class=collator.tokenizer)
            if packed:
                self.assertIn("Padding-free on", said(configure_packing, trainer)[0])
            results.append(trainer.predict(samples).predictions)
            trainer.evaluate(samples)
        self.assertEqual(results[0].tolist(), results[1].tolist())

    def test_what_the_user_changes_later_counts(self):
        trainer = self.stock(Samples(6))
        said(configure_packing, trainer)
        trainer.data_collator = collate_padded
        self.assertIs(_collator_of(trainer.get_eval_dataloader()), collate_padded)


def _collator_of(loader):
    return getattr(loader.collate_fn, "data_collator", loader.collate_fn)


class KeptTest(SetupTestCase):
    """What users keep of a Trainer."""

    def test_the_tokenizer_of_the_collator_is_saved(self):
        for make in (seq2seq, lambda: transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)):
            rows = Samples(6).rows if make is seq2seq else [{"input_ids": row["input_ids"]} for row in Samples(6).rows]
            trainer = self.trainer(dataset=rows, collator=make())
            self.assertIn("Padding-free on", said(configure_packing, trainer)[0])
            with tempfile.TemporaryDirectory() as folder:
                trainer.save_model(folder)
                self.assertTrue((Path(folder) / "tokenizer.json").is_file())

    def test_samples_that_sft_has_cut(self):
        trainer = self.build("sft", max_length=16)
        lengths = (5, 16, 16, 16)
        trainer.train_dataset = Dataset.from_list([{"input_ids": [3] * n, "labels": [3] * n} for n in lengths])
        with mock.patch.object(setup.logger, "warning") as warning:
            said(configure_packing, trainer, True, 64)
        self.assertIn("cuts samples to its own max_length=16, and 3 samples", warning.call_args[0][0])
        with mock.patch.object(setup.logger, "warning") as warning:
            said(configure_packing, self.build("sft", max_length=128), True, 256)
        warning.assert_not_called()


class DocumentsTest(ConfigureTestCase):
    def test_padded_samples(self):
        samples = Samples(4).rows
        batch, expected = PaddedSamples(pad_token_id=7)(samples), collate_padded(samples)
        self.assertTrue(torch.equal(batch["attention_mask"], expected["attention_mask"]))
        self.assertTrue(torch.equal(batch["labels"][:, 1:], expected["labels"][:, 1:]))
        self.assertEqual(set(batch["input_ids"][expected["attention_mask"] == 0].tolist()), {7})
