"""`PackedTrainer` and its arguments, and the packing metrics in the log."""

from itertools import count
from unittest import mock

import torch
from mixins.configure import ConfigureTestCase, llama, said
from parameterized import parameterized
from scripts.trainer_arms import CONFIGS, Samples, Stream, collate_padded
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from transformers_packed import (
    DataCollatorWithFlattening,
    PackedTrainer,
    PackedTrainingArguments,
    PackingCost,
    configure_packing,
    patch_model,
)
from transformers_packed.audit.tiny import tiny_config
from transformers_packed.models import float8
from transformers_packed.models.registry import has_our_classes
from transformers_packed.ops import dispatch, implementations_used
from transformers_packed.training.callbacks import metrics


class TrainerTestCase(ConfigureTestCase):
    def args(self, cls=PackedTrainingArguments, **options):
        defaults = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 3, "max_steps": 4}
        defaults |= {"logging_steps": 2, "save_strategy": "no", "report_to": "none", "use_cpu": True}
        return cls(self.directory, **defaults | {"disable_tqdm": True} | options)

    def build(self, cls=PackedTrainer, args=None, model=None, **options):
        set_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]()) if model is None else model
        samples = {"train_dataset": Samples(24), "eval_dataset": Samples(8)}
        return said(cls, model, args or self.args(), **samples | options)[1]


class PackedTrainerTest(TrainerTestCase):
    @parameterized.expand(
        [
            ("auto", {}, (False, True)),
            ("padding_free", {"padding_free": True}, (False, True)),
            ("pack", {"packing": True, "max_length": 128}, (True, True)),
            ("off", {"padding_free": False}, (False, False)),
            ("auto", None, (False, True)),
        ]
    )
    def test_what_the_arguments_ask_for(self, mode, options, active):
        """Plain arguments, here `None`, mean auto."""
        args = self.args(TrainingArguments) if options is None else self.args(**options)
        self.assertEqual(getattr(args, "packing_mode", "auto"), mode)
        trainer = self.build(args=args)
        self.assertEqual((args.packing, args.padding_free), active)
        self.assertEqual(hasattr(trainer.train_dataset, "plan"), mode == "pack")

    def test_contradictions(self):
        for options, message in (
            ({}, "expected max_length, the tokens of a row, with packing=True, got none"),
            ({"padding_free": True}, "expected max_length"),
            (
                {"max_length": 8, "padding_free": False},
                "expected padding_free=True or None with packing=True, got False",
            ),
        ):
            with self.assertRaisesRegex(ValueError, message):
                self.args(packing=True, **options)
        with self.assertRaisesRegex(ValueError, "expected packing=True with max_length, got none"):
            self.args(max_length=8)

    def test_on_the_command_line(self):
        line = ["--output_dir", self.directory, "--packing", "true", "--max_length", "64", "--float8", "true"]
        (args,) = HfArgumentParser(PackedTrainingArguments).parse_args_into_dataclasses(line)
        self.assertEqual((args.packing, args.max_length, args.padding_free, args.float8), (True, 64, None, True))

    def test_evaluation_is_the_mean_over_all_targets(self):
        # Elsewhere: the evaluation loss changes when packing is turned on.
        trainer = self.build()
        losses, targets = 0.0, 0
        with torch.no_grad():
            for row in Samples(8).rows:
                labels = torch.tensor([row["labels"]])
                count = int((labels[:, 1:] != -100).sum())
                if count:
                    loss = trainer.model(input_ids=torch.tensor([row["input_ids"]]), labels=labels).loss
                    losses, targets = losses + count * float(loss), targets + count
        self.assertAlmostEqual(trainer.evaluate()["eval_loss"], losses / targets, places=5)
        # The stock Trainer reports the mean of the batches' means, which is a different number.
        stock = self.build(Trainer, self.args(TrainingArguments), data_collator=collate_padded).evaluate()["eval_loss"]
        self.assertGreater(abs(stock - losses / targets), 1e-4)

    def test_evaluation_of_labels_that_are_not_shifted(self):
        """As in `Trainer` with one batch: the mean over samples, or over all tokens."""
        rows = [{"input_ids": [n] * n, "labels": [n % 2] * n} for n in range(2, 7)]

        def collate_classes(features):
            collated = collate_padded(features)
            return collated | {"labels": collated["labels"][:, 0]}

        for auto, collator in (
            (AutoModelForSequenceClassification, collate_classes),
            (AutoModelForTokenClassification, collate_padded),
        ):
            set_seed(0)
            model = auto.from_config(CONFIGS["qwen3_next"]())
            model.config.pad_token_id = 0
            options = {"model": model, "data_collator": collator, "eval_dataset": rows, "train_dataset": rows}
            found = self.build(args=self.args(per_device_eval_batch_size=3), **options).evaluate()["eval_loss"]
            arguments = self.args(TrainingArguments, per_device_eval_batch_size=5)
            expected = self.build(Trainer, arguments, **options).evaluate()["eval_loss"]
            self.assertAlmostEqual(found, expected, places=5)

    @parameterized.expand(
        [("default", {}), ("padding", {"return_flash_attn_kwargs": True, "pad_to_multiple_of": 16, "pad_token_id": 0})]
    )
    def test_metrics_get_a_document_per_row(self, name, options):
        seen = []
        collator = None if name == "default" else DataCollatorWithFlattening(on_leak="ignore", **options)
        trainer = self.build(compute_metrics=lambda prediction: seen.append(prediction) or {}, data_collator=collator)
        trainer.evaluate()
        (prediction,) = seen
        rows = Samples(8).rows
        longest = max(len(row["input_ids"]) for row in rows)
        self.assertEqual(prediction.predictions.shape, (8, longest, 61))
        self.assertEqual(prediction.label_ids.shape, (8, longest))
        for row, logits, labels in zip(rows, prediction.predictions, prediction.label_ids, strict=True):
            length = len(row["input_ids"])
            with torch.no_grad():
                alone = trainer.model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
            self.assertLess((torch.tensor(logits[:length]) - alone).abs().max(), 1e-5)
            self.assertTrue((logits[length:] == -100).all() and (labels[length:] == -100).all())
            self.assertEqual(labels[1:length].tolist(), row["labels"][1:])

    def test_metrics_get_the_inputs_of_the_documents(self):
        """With `include_for_metrics=["inputs"]`, tokens align with the labels and predictions of their documents."""
        seen = []

        def compute_metrics(prediction, compute_result=True):
            seen.append(prediction)
            return {}

        args = self.args(include_for_metrics=["inputs"], batch_eval_metrics=True)
        trainer = self.build(args=args, compute_metrics=compute_metrics)
        trainer.evaluate()
        self.assertEqual(len(seen), 3)
        rows = iter(Samples(8).rows)
        for prediction in seen:
            inputs = prediction.inputs["input_ids"]
            self.assertEqual(inputs.shape, prediction.label_ids.shape)
            for tokens in inputs.tolist():
                length = len(expected := next(rows)["input_ids"])
                self.assertEqual(tokens[:length], expected)
                self.assertEqual(set(tokens[length:]) - {-100}, set())
        self.assertIsNone(next(rows, None))


class EvaluationTest(TrainerTestCase):
    def test_a_stream_beside_samples(self):
        """accelerate would read it in one process, and cut its boundaries."""
        trainer = self.build()
        expected = trainer.evaluate()["eval_loss"]
        self.assertAlmostEqual(trainer.evaluate(Stream(Samples(8).rows))["eval_loss"], expected, places=5)

    def test_padding_of_a_classifier_is_no_sample(self):
        samples = [{"input_ids": [n] * n, "labels": n % 2} for n in range(2, 12)]
        options = {"return_cu_seqlens": True, "pad_to_multiple_of": 64, "pad_token_id": 0, "on_leak": "ignore"}
        seen = []
        trainer = self.build(
            model=patch_model(AutoModelForSequenceClassification.from_config(CONFIGS["qwen3_5"]())),
            train_dataset=samples,
            data_collator=DataCollatorWithFlattening(**options),
            compute_metrics=lambda prediction: seen.append(prediction) or {},
        )
        trainer.evaluate(samples)
        self.assertEqual(seen[0].label_ids.tolist(), [n % 2 for n in range(2, 12)])
        self.assertEqual(seen[0].predictions.shape, (10, 2))


class Float8Test(TrainerTestCase):
    """Linear layers of the inner decoder layers train in float8, with and without packing."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(float8, "_LEAST_WORK", 0))
        self.addCleanup(dispatch._used.clear)

    def model(self):
        set_seed(0)
        return AutoModelForCausalLM.from_config(tiny_config("qwen3_5_text"))

    def trained(self, model, **options):
        """Return the model after two steps, the first printed line and the implementations of linear layers."""
        collator = collate_padded if options.get("padding_free") is False else None
        args = self.args(**options | {"max_steps": 2})
        dispatch._used.clear()
        options = {"args": args, "train_dataset": Samples(24), "data_collator": collator}
        output, trainer = said(PackedTrainer, **options, **model)
        output += said(trainer.train)[0]
        return trainer.model, output.splitlines()[0], implementations_used().get("linear_float8")

    @parameterized.expand(
        [
            ("model_init", {"packing": True, "max_length": 128}, "^Packing on: .*; layers train in float8$"),
            (
                "model",
                {"padding_free": False},
                "^Packing off, batches are unchanged; layers train in float8: .*off",
            ),
        ]
    )
    def test_in_each_mode(self, how, options, line):
        expected = {name: x.dtype for name, x in self.model().state_dict().items()}
        given = {how: self.model if how == "model_init" else self.model()}
        model, output, used = self.trained(given, float8=True, **options)
        self.assertRegex(output, line)
        self.assertEqual(used, ["fused"])
        self.assertTrue(has_our_classes(model))
        self.assertEqual({name: x.dtype for name, x in model.state_dict().items()}, expected)

    def test_another_model_is_an_error(self):
        """And the Trainer is unchanged."""
        message = "^expected a Qwen3-Next, Qwen3.5/3.6/3.8 or Qwen3.5/3.6/3.8-MoE model"
        with self.assertRaisesRegex(ValueError, message):
            args = self.args(float8=True, padding_free=False)
            PackedTrainer(args=args, train_dataset=Samples(24), model_init=llama)
        trainer = self.build(Trainer, self.args(TrainingArguments), model=llama())
        before = dict(vars(trainer))
        with self.assertRaisesRegex(ValueError, message):
            configure_packing(trainer, float8=True)
        self.assertEqual(vars(trainer), before)
        self.assertFalse(hasattr(trainer.args, "packing"))


class FiguresTest(TrainerTestCase):
    def args(self, *args, **options):
        # The checks before the first step would count as well.
        return super().args(*args, verify=False, **options) if not args else super().args(*args, **options)

    def log(self, trainer) -> list[dict]:
        # Clear the implementations recorded by other tests in this process.
        dispatch._used.clear()
        self.summary = said(trainer.train)[0].splitlines()[-1]
        return [entry for entry in trainer.state.log_history if "loss" in entry]

    def batches(self, trainer) -> list[list[int]]:
        """Record the lengths of the documents in each batch of the model."""
        seen = []
        collate = trainer.data_collator

        def collect(features):
            batch = collate(features)
            seen.append(batch["cu_seq_lens_q"].diff().tolist())
            return batch

        trainer.data_collator = collect
        return seen

    def test_counts_are_those_of_the_batches(self):
        trainer = self.build(args=self.args(gradient_accumulation_steps=2))
        seen = self.batches(trainer)
        log = self.log(trainer)
        self.assertEqual(len(log), 2)
        for entry, batches in zip(log, (seen[:4], seen[4:8]), strict=True):
            tokens, padded = sum(map(sum, batches)), sum(len(b) * max(b) for b in batches)
            self.assertAlmostEqual(entry["padding_avoided"], 1 - tokens / padded, places=4)
            self.assertEqual(entry["documents_per_row"], 3.0)
            self.assertNotIn("packing_fill", entry)
            self.assertNotIn("rank_imbalance", entry)
            self.assertNotIn("share_of_peak", entry)
        documents, tokens = sum(map(len, seen[:8])), sum(map(sum, seen[:8]))
        self.assertIn(f"Padding-free: {documents} documents with {tokens:,} tokens in ", self.summary)
        self.assertIn("causal_conv1d: reference; gated_delta_rule: reference; attention:", self.summary)

    def test_rows_of_the_batch_size_that_was_found(self):
        """`auto_find_batch_size` goes from 4 rows to 3. Figures are those of the plan, for the latter."""
        options = {"per_device_train_batch_size": 4, "auto_find_batch_size": True}
        args = self.args(packing=True, max_length=128, max_steps=-1, num_train_epochs=1, **options)
        trainer = self.build(args=args)
        plan = trainer.train_dataset.plan
        step, tried = trainer.training_step, []

        def training_step(model, inputs, *args, **kwargs):
            tried.append(trainer._train_batch_size)
            if tried[-1] == 4:
                raise RuntimeError("CUDA out of memory.")
            return step(model, inputs, *args, **kwargs)

        trainer.training_step = training_step
        trainer.args.logging_steps = trainer.state.logging_steps = len(plan) // 3
        (entry,) = self.log(trainer)
        self.assertEqual((set(tried), len(plan) % 3), ({4, 3}, 0))
        self.assertAlmostEqual(entry["packing_fill"], plan.fill, places=4)
        self.assertAlmostEqual(entry["documents_per_row"], plan.documents_per_row.mean(), places=2)
        self.assertAlmostEqual(entry["padding_avoided"], plan.padding_avoided, delta=2e-4)
        for words in (f"fill {plan.fill:.1%}, ", f"padding avoided {plan.padding_avoided:.1%} "):
            self.assertIn(words, self.summary)

    def test_padding_at_the_end_is_no_document(self):
        """Padding from `pad_to_multiple_of` counts neither as tokens nor as a document."""
        collator = DataCollatorWithFlattening(
            pad_to_multiple_of=64, pad_token_id=0, return_flash_attn_kwargs=True, on_leak="ignore"
        )
        trainer, read = self.build(data_collator=collator), []
        trainer.data_collator = lambda rows: read.extend(len(row["input_ids"]) for row in rows) or collator(rows)
        log = self.log(trainer)
        self.assertEqual([entry["documents_per_row"] for entry in log], [3.0, 3.0])
        self.assertIn(f"12 documents with {sum(read[:12]):,} tokens", self.summary)

    @parameterized.expand(
        [
            ("later_start", {"position_ids_start": 2}),
            ("seq_idx", {"return_position_ids": False, "return_seq_idx": True}),
            ("boundaries", {"return_position_ids": False, "return_boundaries": True}),
        ]
    )
    def test_counts_without_lengths(self, _, options):
        """For families that accept no lengths, and collators of the user."""
        trainer = self.build(Trainer, self.args(TrainingArguments))
        patch_model(trainer.model)
        trainer.data_collator = DataCollatorWithFlattening(on_leak="ignore", **options)
        said(configure_packing, trainer)
        log = self.log(trainer)
        self.assertEqual(log[0]["documents_per_row"], 3.0)
        self.assertGreater(log[0]["padding_avoided"], 0.05)

    def test_targets_of_a_step_are_counted_after_an_evaluation_too(self):
        """Trainer counts targets before it sets training mode. An evaluation or loading leaves evaluation mode."""
        trainer = self.build(args=self.args(eval_strategy="steps", eval_steps=1))
        trainer.model.eval()
        counted, get_batch_samples = [], type(trainer).get_batch_samples

        def as_one_of_two_processes(*args):
            size = mock.patch.object(type(trainer.args), "world_size", mock.PropertyMock(return_value=2))
            with size, mock.patch.object(trainer.accelerator, "gather", lambda x: x):
                result = get_batch_samples(trainer, *args)
            counted.append(result[1])
            return result

        trainer.get_batch_samples = as_one_of_two_processes
        self.log(trainer)
        self.assertGreater(len(counted), 1)
        self.assertNotIn(None, counted[: trainer.state.max_steps])

    def test_time_of_evaluation_is_not_counted(self):
        speeds = {}
        for seconds in (0.0, 100.0):
            trainer = self.build(args=self.args(eval_strategy="steps", eval_steps=1))
            # Each look at the clock takes a hundredth of a second.
            passed, ticks = [0.0], count()

            def evaluate(*args, trainer=trainer, passed=passed, seconds=seconds, **kwargs):
                passed[0] += seconds
                trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, {})
                return {"eval_loss": 1.0}

            trainer.evaluate = evaluate
            clock = lambda passed=passed, ticks=ticks: next(ticks) / 100 + passed[0]  # noqa: E731
            with mock.patch.object(metrics.time, "perf_counter", clock):
                speeds[seconds] = self.log(trainer)[-1]["tokens_per_second"]
            self.assertGreaterEqual(passed[0], seconds)
        self.assertGreater(speeds[100.0], speeds[0.0] / 2)

    def test_imbalance_and_share_of_peak(self):
        """Two ranks with as many tokens, the second with longer documents: costs and figures by hand."""
        trainer = self.build()
        callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, metrics.PackingMetricsCallback))
        callback.trainer = mock.Mock(model=trainer.model, model_wrapped=trainer.model, sequence_parallel=None)
        callback.trainer.get_tp_size.return_value = 1
        args = mock.Mock(world_size=2, device=torch.device("cpu"), per_device_train_batch_size=2)
        cost = PackingCost.from_config(trainer.model.config, quadratic_weight=1)

        def other_rank(values):
            # Counts have three dimensions. The sums of squared lengths have two.
            return torch.cat([values, values * (1 if values.dim() == 3 else 2)])

        with (
            mock.patch.object(metrics, "gather", other_rank),
            mock.patch.object(metrics, "_peak", return_value=1e9),
            mock.patch.object(metrics.time, "perf_counter", side_effect=[10.0, 10.0, 12.0, 12.0, 12.0]),
        ):
            callback.on_train_begin(args, None, None)
            lengths = [64, 128]
            batch = {
                "input_ids": torch.zeros(1, 192, dtype=torch.long),
                "cu_seq_lens_q": torch.tensor([0, 64, 192]),
                "max_length_q": 128,
            }
            trainer.model.train()
            callback._count(trainer.model, (), batch)
            callback.on_step_end(args, None, None)
            figures = callback._figures(args)
        callback._hooks.close()
        self.assertEqual(figures["tokens_per_second"], round(2 * 192 / 2.0, 1))
        self.assertEqual(figures["padding_avoided"], round(1 - 192 / 256, 4))
        # The lengths fill whole chunks, so the callback's estimate of chunks is exact. All weights are trained.
        squares = cost.quadratic * (64**2 + 128**2)
        one = cost.documents(lengths).sum()
        slowest, mean = one + (3 * 2 - 1) * squares, one + (3 * 1.5 - 1) * squares
        self.assertEqual(figures["rank_imbalance"], round(slowest / mean - 1, 4))
        want = 3 * (2 * one + squares) / 2.0 / 2 / 1e9
        self.assertAlmostEqual(figures["share_of_peak"], want, places=4)

    @parameterized.expand(
        [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("Odd", None)]
    )
    def test_peaks(self, name, peak):
        args = mock.Mock(device=torch.device("cuda"), bf16=True)
        with mock.patch.object(torch.cuda, "get_device_name", return_value=name):
            self.assertEqual(metrics._peak(args, None), peak)
        model = mock.Mock(dtype=torch.float32)
        self.assertIsNone(metrics._peak(mock.Mock(device=torch.device("cpu"), bf16=True), model))
        self.assertIsNone(metrics._peak(mock.Mock(device=torch.device("cuda"), bf16=False, fp16=False), model))
