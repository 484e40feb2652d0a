"""`configure_packing`: packed training equals training on padded batches."""

import unittest
from functools import partial
from unittest import mock

import numpy as np
import peft
import pytest
import torch
import transformers
from accelerate.data_loader import DataLoaderShard
from common.families import tiny_model
from common.late_copies import on_a_cpu
from common.processes import FSDP_ON_CPU
from common.shown import shows
from datasets import Dataset
from mixins.configure import UPDATE_BAR, ConfigureTestCase, llama, said, train_configured
from mixins.model import total_relative_error
from mixins.patch import ours
from parameterized import parameterized
from scripts.configured_arms import MAX_LENGTH, STEPS, configure, tokenizer
from scripts.trainer_arms import Samples, collate_padded, run_in_two_processes, updates_and_log
from transformers import AutoModelForCausalLM

from transformers_packed import IterablePackingDataset, configure_packing, pack_dataset
from transformers_packed.audit.tiny import tiny_config
from transformers_packed.models.checkpointing import keep_long_attention
from transformers_packed.models.versions import can_select_checkpoints, supports_other_families
from transformers_packed.training import setup
from transformers_packed.training.callbacks.metrics import PackingMetricsCallback
from transformers_packed.training.callbacks.weights import EveryGradient


FIGURES = {"tokens_per_second", "documents_per_row", "padding_avoided"}


def gpt_oss():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config("gpt_oss"))


class SameTrainingTest(ConfigureTestCase):
    @parameterized.expand([("trainer", "pack", 4), ("sft", "padding_free", 1)])
    def test_the_padded_runs_updates(self, kind, mode, accumulation):
        """Compare steps of SGD in float32 on the same samples per step. test_lora.py does it with adapters."""
        # Elsewhere: packing recipes leak despite claims of isolation; target counts are wrong with several rows or
        # with accumulation; the first loss differs from padded training; a batch is limited to one row.
        want, log = updates_and_log(configure(self.build(kind, accumulation=accumulation), "padded", mode))
        _, trainer = said(configure, self.build(kind, accumulation=accumulation), "packed", mode)
        _, (got, packed_log) = said(updates_and_log, trainer)
        self.assertEqual([len(log), len(packed_log)], [STEPS, STEPS])
        for entry, padded in zip(packed_log, log, strict=True):
            self.assertLess(abs(entry["loss"] - padded["loss"]) / padded["loss"], 1e-5)
            self.assertLessEqual(FIGURES, set(entry))
        self.assertLess(total_relative_error(got, want), UPDATE_BAR)
        self.assertGreater(min(update.abs().max() for update in want.values()), 0)
        self.assertEqual([trainer.args.packing, trainer.args.padding_free], [mode == "pack", True])

    def test_labels_of_the_language_modeling_collator(self):
        """All tokens are targets except the padding token, even if it ends a sample."""
        rows = [{"input_ids": [*row["input_ids"][:-1], 0]} for row in Samples(12).rows]
        collator = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
        results = []
        for packed in (False, True):
            torch.manual_seed(0)
            args = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.3}
            trainer = self.trainer(dataset=rows, collator=collator, args=args)
            if packed:
                said(configure_packing, trainer)
                self.assertTrue(trainer.args.padding_free)
            results.append(said(updates_and_log, trainer)[1][0])
        self.assertLess(total_relative_error(results[1], results[0]), UPDATE_BAR)

    @parameterized.expand(
        [
            (kind, "packed", mode, tuning, {})
            for kind in ("trainer", "sft")
            for mode in ("padding_free", "pack")
            for tuning in ("full", "lora")
        ]
        # Rows and collator handed to SFTTrainer, and shards through accelerate.
        + [("sft", "handed", "pack", "full", {}), ("trainer", "packed", "pack", "full", FSDP_ON_CPU)]
    )
    @pytest.mark.slow
    def test_two_processes(self, kind, arm, mode, tuning, variables):
        # Elsewhere: DDP drops boundaries, boundaries get lost between Trainer, wrapper and model, or processes with
        # different numbers of rows hang at the end of an epoch.
        results = {}
        for name, environment in (("padded", {}), (arm, variables)):
            arguments = (kind, name, mode, tuning, f"{self.directory}/{name}.pt")
            printed, results[name] = run_in_two_processes(self, "configured_arms.py", *arguments, **environment)
        self.assertEqual([results[x]["sharded"] for x in ("padded", arm)], [False, bool(variables)])
        self.assertLess(total_relative_error(results[arm]["updates"], results["padded"]["updates"]), UPDATE_BAR)
        if arm == "packed":
            # One line at the start and one at the end, from one process.
            self.assertEqual(sum(line.startswith(("Packing", "Padding-free")) for line in printed.splitlines()), 2)
            self.assertLessEqual(FIGURES | {"rank_imbalance"}, set(results[arm]["log"][-1]))

    @pytest.mark.slow
    @shows("torchao", "DDP")
    def test_weights_in_float8_in_two_processes(self):
        """DDP leaves them as they are: no backend sends all of their dtypes."""
        results = []
        for arm, tuning in (("padded", "plain"), ("packed", "stored")):
            arguments = ("trainer", arm, "pack", tuning, f"{self.directory}/{arm}.pt")
            results.append(run_in_two_processes(self, "configured_arms.py", *arguments)[1]["updates"])
        # PEFT adds the adapters of a plain layer in another order.
        self.assertLess(total_relative_error(results[1], results[0]), 10 * UPDATE_BAR)

    @parameterized.expand(
        [
            ("reward", "gradient and reward", "num_tokens min_reward mean_reward max_reward margin accuracy"),
            ("distillation", "loss and gradient", "num_tokens entropy completions/mean_length"),
        ]
    )
    @pytest.mark.slow
    def test_whole_batches_in_two_processes(self, kind, compared, metrics):
        """Rows of both processes count in the loss, and in the metrics, which gather them."""
        results = []
        for arm in ("padded", "packed"):
            arguments = (kind, arm, "padding_free", "full", f"{self.directory}/{arm}.pt")
            printed, result = run_in_two_processes(self, "configured_arms.py", *arguments)
            results.append(result)
        self.assertEqual(printed.count(f"{compared} differ by"), 1)
        self.assertLess(total_relative_error(results[1]["updates"], results[0]["updates"]), UPDATE_BAR)
        for got, want in zip(*(result["log"] for result in results[::-1]), strict=True):
            for name in ("loss", "grad_norm", *metrics.split()):
                self.assertAlmostEqual(got[name], want[name], delta=1e-5 * max(1, abs(want[name])), msg=name)


class SetUpTest(ConfigureTestCase):
    def test_buckets_of_ddp(self):
        for given, expected in ((None, 100), (7, 7)):
            trainer = self.trainer(args={"ddp_bucket_cap_mb": given})
            said(configure_packing, trainer)
            options = trainer.accelerator.ddp_handler.to_kwargs()
            self.assertEqual((options["bucket_cap_mb"], options["gradient_as_bucket_view"]), (expected, True))

    @unittest.skipUnless(can_select_checkpoints(), "needs Transformers 5.23")
    def test_checkpoints_go_to_the_host_by_themselves(self):
        checkpointing, losses = {"activation_checkpointing": True, "logging_steps": 1, "max_steps": 3}, []
        for on_gpu in (False, True):
            torch.manual_seed(0)
            trainer = self.trainer(args=checkpointing)
            with mock.patch.object(setup, "compiles_kernels", return_value=on_gpu):
                line, _ = said(configure_packing, trainer)
            self.assertIs("checkpointed layers go to host memory" in line, on_gpu)
            with on_a_cpu(64):
                said(trainer.train)
            functions = [layer._gradient_checkpointing_func for layer in trainer.model.model.layers]
            self.assertEqual([x.func is keep_long_attention for x in functions], [on_gpu] * len(functions))
            losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        host, inner = functions[0].args
        self.assertIs(inner.func, host)
        (copies,) = host._copies.values()
        self.assertGreater(copies.copies, 3 * len(functions))
        self.assertEqual(*losses)
        said(configure_packing, trainer, "off")
        self.assertIsNone(trainer.args.activation_checkpointing_kwargs)

    @unittest.skipUnless(can_select_checkpoints(), "needs Transformers 5.23")
    def test_checkpoints_that_stay_where_they_are(self):
        """The user decides, nothing is checkpointed, or the copies of Transformers would run."""
        checkpointing, refused = {"activation_checkpointing": True}, {"offload": False, "every_n_layers": 2}
        with mock.patch.object(setup, "compiles_kernels", return_value=True):
            for args, model, expected in (
                (checkpointing | {"activation_checkpointing_kwargs": refused}, None, refused),
                ({}, None, None),
                (checkpointing, llama(), None),
            ):
                trainer = self.trainer(model, args=args)
                said(configure_packing, trainer)
                self.assertEqual(trainer.args.activation_checkpointing_kwargs, expected)
            given = checkpointing | {"activation_checkpointing_kwargs": {"every_n_layers": 2}}
            trainer = self.trainer(args=given)
            said(configure_packing, trainer)
            self.assertEqual(
                trainer.args.activation_checkpointing_kwargs,
                {"every_n_layers": 2, "offload": "auto", "keep_attention": "auto"},
            )
            for options, kept in (({}, True), ({"keep_attention": False}, False), ({"use_reentrant": True}, False)):
                trainer = self.trainer(args=checkpointing | {"activation_checkpointing_kwargs": options})
                line, _ = said(configure_packing, trainer)
                self.assertIn("inputs of checkpointed layers go to host memory where", line)
                self.assertIs("and attention of long documents" in line, kept)

    @parameterized.expand(
        [
            ("text", None, False),
            ("value head, asked not to", False, False),
            ("vision tower", None, True),
            ("another family", None, True),
            *[("indexer", None, True)] * supports_other_families(),
            ("loss of the user", None, True),
            ("two adapters", None, True),
        ]
    )
    def test_parameters_that_ddp_looks_for(self, kind, given, expected):
        loss = (
            {"compute_loss_func": lambda outputs, labels, **_: outputs.logits.sum()} if kind.startswith("loss") else {}
        )
        model = {"another family": llama, "indexer": partial(tiny_model, "qwen4_exp")}.get(kind, lambda: None)()
        trainer = self.trainer(model, args={"ddp_find_unused_parameters": given}, **loss)
        if kind.startswith("value head"):
            trainer.model.v_head = torch.nn.Linear(4, 1)
        elif kind == "vision tower":
            trainer.model.config.vision_config = {}
        elif "adapter" in kind:
            trainer.model = peft.get_peft_model(trainer.model, peft.LoraConfig(target_modules=["q_proj"]))
            if kind.startswith("two"):
                trainer.model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"]))
        said(configure_packing, trainer, "padding_free")
        self.assertIs(trainer.accelerator.ddp_handler.find_unused_parameters, expected)
        checks = [x for x in trainer.callback_handler.callbacks if type(x) is EveryGradient]
        self.assertEqual(len(checks), given is None and not expected)

    def test_a_parameter_without_a_gradient(self):
        """The error comes before the step of the optimizer."""
        check, model = EveryGradient(), torch.nn.Linear(2, 2)
        model.weight.grad = torch.zeros(2, 2)

        def step(world_size):
            args = mock.Mock(world_size=world_size)
            check.on_train_begin(args, None, None, model=model)
            check.on_pre_optimizer_step(args, None, None)

        step(1)
        with self.assertRaisesRegex(ValueError, "got none for 1 of them, such as bias. Pass ddp_find_unused"):
            step(2)
        model.bias.requires_grad_(False)
        step(2)

    def test_auto_says_so_in_one_line(self):
        # Elsewhere: users cannot see whether samples are isolated, or whether packing is on at all.
        trainer, guards = self.trainer(), list(transformers.trainer.DEFAULT_CALLBACKS)
        output, result = said(configure_packing, trainer)
        self.assertIs(result, trainer)
        self.assertRegex(
            output,
            r"^Padding-free on: about 1\.\d x fewer tokens computed than in padded batches; isolation by reference "
            r"\(gated delta rule\), reference \(causal convolution\), per_document\(sdpa\) \(attention\)\n$",
        )
        self.assertTrue(ours(trainer.model))
        self.assertEqual([trainer.args.packing, trainer.args.padding_free], [False, True])
        self.assertEqual(transformers.trainer.DEFAULT_CALLBACKS, guards)
        # Again changes nothing.
        said(configure_packing, trainer)
        self.assertEqual(sum(isinstance(c, PackingMetricsCallback) for c in trainer.callback_handler.callbacks), 1)

    def test_packing_says_rows_and_steps(self):
        # Elsewhere: the number of steps is wrong with packed rows.
        trainer = self.trainer(dataset=Samples(48), args={"per_device_train_batch_size": 2, "max_steps": -1})
        trainer.args.num_train_epochs = 2
        output, _ = said(configure_packing, trainer, True, 128)
        plan = trainer.train_dataset.plan
        self.assertEqual(len(plan) % 2, 0)
        self.assertIn(f"Packing on: fill {plan.fill:.1%}, about ", output)
        self.assertIn(f"{len(plan)} rows of at most 128 tokens, {len(plan) // 2} steps per epoch", output)
        self.assertEqual(output.count("\n"), 1)
        said(trainer.train)
        self.assertEqual((trainer.state.global_step, trainer.state.epoch), (len(plan), 2.0))

    def test_estimate_is_what_the_sampler_pads(self):
        lengths = np.random.default_rng(0).integers(1, 100, 500).tolist()
        rows = [{"input_ids": [1] * n, "labels": [1] * n} for n in lengths]
        batches = np.random.default_rng(1).choice(lengths, (20000, 4))
        want = batches.max(1).mean() / np.mean(lengths)
        self.assertLess(abs(setup._estimated_saving(Dataset.from_list(rows), 4) - want) / want, 0.01)
        self.assertLess(abs(setup._estimated_saving(rows, 4) - want) / want, 0.1)
        # Padding inside the samples is saved as well.
        padded = [{"input_ids": [1] * 100, "attention_mask": [1] * n + [0] * (100 - n)} for n in lengths]
        saved = setup._estimated_saving(Dataset.from_list(padded), 4)
        self.assertLess(abs(saved - 100 / np.mean(lengths)) / saved, 0.01)

    @parameterized.expand(
        [
            (llama, "isolation by sdpa attention with a mask made from position_ids"),
            *[(gpt_oss, "isolation by running the model on each document alone")] * supports_other_families(),
        ]
    )
    def test_families_that_need_no_patch(self, model, message):
        trainer = self.trainer(model())
        self.assertIn(message, said(configure_packing, trainer)[0])
        said(trainer.train)
        self.assertEqual(trainer.state.global_step, 1)

    def test_trl_rows_that_are_packed_already(self):
        options = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 1}
        trainer = self.build("sft", packing=True, packing_strategy="bfd", **options)
        dataset = trainer.train_dataset
        output, _ = said(configure_packing, trainer)
        self.assertTrue(output.startswith("Packing on: isolation by"), output)
        self.assertIs(trainer.train_dataset, dataset)
        output, _ = said(trainer.train)
        self.assertEqual(trainer.state.global_step, len(dataset))
        fill = sum(map(len, dataset["input_ids"])) / len(dataset) / MAX_LENGTH
        self.assertIn(f"Packing: {len(Samples())} documents", output)
        self.assertIn(f"fill {fill:.1%}, ", output)

    def test_rows_of_unknown_length(self):
        rows = pack_dataset(Dataset.from_list(Samples(24).rows), 128)
        trainer = self.trainer(dataset=rows, args={"remove_unused_columns": False, "logging_steps": 1})
        output = train_configured(trainer)
        self.assertIn("Packing: ", output)
        self.assertNotIn("fill", output)
        documents = sum(map(len, rows["seq_lengths"]))
        self.assertLess(trainer.state.log_history[0]["documents_per_row"], documents / 2)

    def test_evaluation_in_sft_keeps_its_packing(self):
        trainer = self.build("sft")
        said(configure_packing, trainer, True)
        self.assertEqual([trainer.args.packing, trainer.args.eval_packing], [True, False])
        metrics = trainer.evaluate(Dataset.from_list(Samples(5).rows))
        self.assertGreater(metrics["eval_loss"], 0)

    @parameterized.expand([("padding_free", None), ("pack", 128)])
    def test_streams_are_not_dispatched(self, mode, max_length):
        # Elsewhere: a stream cannot be packed.
        stream = Dataset.from_list(Samples(24).rows).to_iterable_dataset()
        trainer = self.trainer(dataset=stream, args={"max_steps": 2})
        output, _ = said(configure_packing, trainer, mode, max_length)
        self.assertEqual(output.count("\n"), 1)
        self.assertIs(trainer.args.accelerator_config.dispatch_batches, False)
        self.assertIs(type(trainer.get_train_dataloader()), DataLoaderShard)
        self.assertEqual(isinstance(trainer.train_dataset, IterablePackingDataset), mode == "pack")
        said(trainer.train)
        self.assertEqual(trainer.state.global_step, 2)

    @parameterized.expand(
        [
            (False, {"overlogn": "drop"}, "got overlogn. Did you mean overlong?"),
            (False, {"buffer_size": 8}, "got buffer_size. PackingDataset has length_column, overlong, "),
            (True, {"seed": 1, "num_proc": 2}, "got seed and num_proc. IterablePackingDataset has buffer_size, "),
        ]
    )
    def test_unknown_arguments(self, streamed, given, expected):
        rows = Dataset.from_list(Samples(8).rows)
        trainer = self.trainer(dataset=rows.to_iterable_dataset() if streamed else rows, args={"max_steps": 1})
        with self.assertRaisesRegex(ValueError, "expected known arguments, " + expected.replace("?", r"\?")):
            configure_packing(trainer, True, 600, **given)

    def test_models_of_model_init_make_no_cache(self):
        """Trainer sets `use_cache` only in the model passed to its constructor, not in the one it trains."""
        results = []
        for packed in (False, True):
            args = {"optim": "sgd", "learning_rate": 0.3, "seed": 1, "max_steps": 2}
            trainer = self.trainer(llama(), args=args)
            trainer.model_init = llama
            trainer.data_collator = collate_padded
            if packed:
                trainer.data_collator = transformers.default_data_collator
                said(configure_packing, trainer)
            said(trainer.train)
            results.append({name: p.detach() for name, p in trainer.model.named_parameters()})
        self.assertLess(total_relative_error(results[1], results[0]), UPDATE_BAR)

    def test_models_of_model_init_are_judged(self):
        def make():
            return transformers.AutoModelForImageTextToText.from_config(tiny_config("gemma3"))

        first = make()
        first.config.get_text_config().use_cache = False
        trainer = self.trainer(first)
        trainer.model_init = make
        said(configure_packing, trainer)
        with self.assertRaisesRegex(ValueError, r"config.get_text_config\(\).use_cache=True"):
            trainer.train()
