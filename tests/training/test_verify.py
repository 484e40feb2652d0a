"""The check before the first step: it finds what differs from padded training, and is quiet about what does not."""

import contextlib
import gc
import io
import unittest
from functools import partial
from itertools import accumulate
from unittest import mock

import peft
import torch
from common.records import MARKED, assistant, make_tokenizer, user
from common.trl_trainers import SGD, build_model, preference_trainer
from datasets import Dataset
from mixins.configure import ConfigureTestCase, said, train_configured
from mixins.padding import unpack_elsewhere
from parameterized import parameterized
from scripts.configured_arms import tokenizer
from scripts.trainer_arms import CONFIGS, Samples, Stream, collate_padded
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, TrainerCallback
from trl import SFTConfig, SFTTrainer

from transformers_packed import (
    DataCollatorWithFlattening,
    PackingDataset,
    configure_packing,
    patch_model,
    set_loss_normalization,
    unpatch_model,
    verify_packing,
)
from transformers_packed.audit.tiny import tiny_config
from transformers_packed.models.padding import PaddedBatch
from transformers_packed.models.qwen3_5 import modeling_qwen3_5
from transformers_packed.models.registry import has_our_classes
from transformers_packed.ops import gated_delta_rule, prompts
from transformers_packed.training import checks, evaluation, facts
from transformers_packed.training.callbacks import verify as callback
from transformers_packed.training.restore import against_other_rows


_FSDP = "torch.distributed.fsdp._fully_shard"
STEP = {"max_steps": 1, "logging_steps": 1}


def per_sample(model, inputs, return_outputs=False, num_items_in_batch=None):
    """A loss of the user: the mean over the rows of a batch of each row's mean."""
    labels = inputs["labels"]
    outputs = model(**{name: x for name, x in inputs.items() if name != "labels"}, use_cache=False)
    logits, targets = outputs.logits[:, :-1], labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    counts = (targets != -100).sum(1)
    loss = (losses.sum(1) / counts.clamp(min=1))[counts > 0].mean()
    return (loss, outputs) if return_outputs else loss


class VerifyTestCase(ConfigureTestCase):
    def sft(self, samples, template=MARKED, **options):
        tokens = make_tokenizer(template)
        lora = options.pop("peft_config", None)
        args = {**SGD, **STEP, "max_length": None, "per_device_train_batch_size": 3, **options}
        args = SFTConfig(self.directory, **args)
        dataset = Dataset.from_list(samples)
        model = build_model("padded", len(tokens))
        return SFTTrainer(model, args, train_dataset=dataset, processing_class=tokens, peft_config=lora)

    def check_quiet(self, trainer, words="gradients between documents are 0", **options):
        output, _ = said(configure_packing, trainer, **options)
        output += said(trainer.train)[0]
        self.assertIn("Verified packing on ", output)
        self.assertIn(words, output)
        self.assertNotIn("Packing off", output)
        self.assertGreater(trainer.state.global_step, 0)


class FindsTest(VerifyTestCase):
    """Each of these is refused by a check that is switched off here."""

    def check_undone(self, trainer, message):
        """`"auto"` trains padded instead, and as a Trainer that was never configured."""
        collator, before = trainer.data_collator, {k: v for k, v in vars(trainer).items() if k != "model"}
        output, _ = said(configure_packing, trainer)
        self.assertIn("Padding-free on", output)
        batches, step = [], trainer.compute_loss

        class Batches(TrainerCallback):
            def on_step_begin(self, *args, **kwargs):
                trainer.compute_loss = record

        def record(model, inputs, *args, **kwargs):
            batches.append(inputs["input_ids"].shape)
            return step(model, inputs, *args, **kwargs)

        trainer.callback_handler.callbacks.append(Batches())
        output, _ = said(trainer.train)
        self.assertRegex(output, f"Packing off, training is unchanged: .*{message}")
        self.assertIs(trainer.data_collator, collator)
        self.assertEqual(trainer.args.padding_free, False)
        self.assertFalse(has_our_classes(trainer.model))
        self.assertEqual((trainer.state.global_step, {rows for rows, _ in batches}), (1, {3}))
        self.assertFalse(any(module._forward_pre_hooks for module in trainer.model.modules()))
        for name in ("train_dataset", "training_step", "get_eval_dataloader"):
            self.assertIs(vars(trainer).get(name), before.get(name), name)

    def test_a_loss_on_the_instance(self):
        trainer = self.trainer(collator=None)
        trainer.data_collator = collate = _SamplesCollator()
        trainer.compute_loss = lambda *args, **kwargs: per_sample(*args, **kwargs)
        with (
            mock.patch.object(facts, "replaced_in", return_value=[]),
            mock.patch.object(checks, "KNOWN_COLLATORS", (type(collate).__name__,)),
        ):
            self.check_undone(trainer, "the padded batch of the same documents")

    def test_a_step_that_stops(self):
        """A method of the user, set after `configure_packing`, needs what a row does not have."""
        trainer = self.trainer(collator=DataCollatorForSeq2Seq(tokenizer()))
        said(configure_packing, trainer)
        step = trainer.training_step

        def training_step(model, inputs, *args, **kwargs):
            inputs["attention_mask"].sum()
            return step(model, inputs, *args, **kwargs)

        trainer.training_step = training_step
        message = "expected a step of training on packed rows, got KeyError: 'attention_mask'"
        self.assertIn(f"Packing off, training is unchanged: {message}", said(trainer.train)[0])
        self.assertEqual((trainer.state.global_step, trainer.training_step), (1, training_step))

    def test_a_step_without_enough_memory(self):
        """It stops training too. Packing is not undone for it, since padded batches need more memory."""
        trainer = self.trainer()
        said(configure_packing, trainer)
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")
        trainer.training_step = mock.Mock(side_effect=error)
        with contextlib.redirect_stdout(io.StringIO()) as stdout, self.assertRaises(torch.OutOfMemoryError):
            trainer.train()
        self.assertEqual(stdout.getvalue(), "Not verified: OutOfMemoryError: CUDA out of memory.\n")

    def test_a_collator_around_ours(self):
        """It cannot be undone, so a difference is an error in auto mode too."""
        trainer = self.trainer()
        said(configure_packing, trainer)
        unpatch_model(trainer.model)
        collate = trainer.data_collator
        names = ("input_ids", "labels", "position_ids")
        trainer.data_collator = lambda features: {name: collate(features)[name] for name in names}
        with self.assertRaisesRegex(ValueError, "no gradient between the 3 documents"):
            said(trainer.train)

    def test_an_evaluation_that_loses_documents(self):
        args, samples = {"eval_strategy": "steps", "eval_steps": 1}, PackingDataset(Samples(24), 128)
        trainer = self.trainer(args=args, eval_dataset=samples, compute_metrics=lambda p: {})
        message = r"an evaluation of \d+ documents and \d+ targets, got \d+ documents"
        with mock.patch.object(evaluation, "unpacked", lambda dataset: dataset):
            said(configure_packing, trainer, "padding_free")
            with self.assertRaisesRegex(ValueError, message):
                said(trainer.train)

    def test_a_model_that_leaks_in_a_batch_of_preferences(self):
        trainer = DPOTests.dpo(self.directory)
        said(configure_packing, trainer)
        with mock.patch("transformers_packed.models.padding.PaddedBatch.unpack", unpack_elsewhere):
            output, _ = said(trainer.train)
        self.assertRegex(output, "Packing off, training is unchanged: expected (no gradient|log-probabilities)")

    def test_a_teacher_that_leaks(self):
        """The student keeps documents apart, and the loss alone shows that its teacher does not."""
        trainer = preference_trainer("distillation", self.directory, max_steps=1)
        said(configure_packing, trainer)
        unpack = PaddedBatch.unpack

        def leak(batch, tokens):
            return (unpack if torch.is_grad_enabled() else unpack_elsewhere)(batch, tokens)

        with mock.patch("transformers_packed.models.padding.PaddedBatch.unpack", leak):
            output, _ = said(trainer.train)
        self.assertRegex(output, "Packing off, training is unchanged: expected the loss")

    @parameterized.expand(
        [
            (
                "none",
                lambda x, packs: x,
                "Verified .*: gradients between rows are 0; loss, gradient and reward differ by",
            ),
            ("loss", lambda x, packs: x * (1 + packs), "Packing off, .*: expected the loss .* of the padded batch"),
            # The loss has only the differences of rewards.
            ("all", lambda x, packs: x + packs, "Packing off, training is unchanged: expected a reward of the row"),
        ]
    )
    def test_rewards_that_differ(self, _, fault, message):
        trainer = preference_trainer("reward", self.directory, max_steps=1)
        said(configure_packing, trainer)
        score, packs = trainer.model.score, lambda: getattr(trainer.model, "packs_padding", False)
        score.register_forward_hook(lambda module, args, output: fault(output, packs()))
        self.assertRegex(said(trainer.train)[0], message)


class _SamplesCollator:
    """Pads samples, as Transformers' collators do."""

    def __call__(self, features):
        return collate_padded(features)


_SamplesCollator.__module__ = "transformers.data.data_collator"


class QuietTest(VerifyTestCase):
    def test_no_step_makes_a_cache(self):
        """Where the model's `use_cache` stays on, a padded batch would otherwise have to run kernels for states."""
        trainer, made = self.trainer(args={"use_cache": True}), []

        def rule(*args, output_final_state=False, **kwargs):
            made.append(output_final_state)
            return gated_delta_rule(*args, output_final_state=output_final_state, **kwargs)

        with mock.patch.object(modeling_qwen3_5, "gated_delta_rule", rule):
            self.check_quiet(trainer)
        self.assertTrue(made and not any(made))
        self.assertTrue(trainer.model.config.use_cache)

    @parameterized.expand(
        [
            (
                "accumulation",
                {"gradient_accumulation_steps": 3, "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0},
            ),
            (
                "checkpointing",
                {
                    "bf16": True,
                    "gradient_checkpointing": True,
                    "gradient_checkpointing_kwargs": {"use_reentrant": True},
                },
            ),
            ("evaluation", {"eval_strategy": "steps", "eval_steps": 1}),
        ]
    )
    def test_arguments(self, name, args):
        metrics = {"compute_metrics": lambda p: {}} if name == "evaluation" else {}
        trainer = self.trainer(args=args, eval_dataset=Samples(7), **metrics)
        words = "evaluation of 3 documents and 29 targets is complete" if metrics else "loss "
        self.check_quiet(trainer, words)

    @parameterized.expand(["own_stream", "packed_stream", "model_init", "sample_mean"])
    def test_data_and_models(self, kind):
        stream = Dataset.from_list(Samples(24).rows).to_iterable_dataset()
        options = {"packing": True, "max_length": 128} if kind == "packed_stream" else {}
        datasets = {"own_stream": Stream(Samples(24).rows), "packed_stream": stream}
        trainer = self.trainer(dataset=datasets.get(kind) or Samples(24))
        if kind == "model_init":
            trainer.model_init = lambda: AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
        if kind == "sample_mean":
            set_loss_normalization(trainer, "sample")
        self.check_quiet(trainer, **options)

    @parameterized.expand(["qwen3_next_moe", "gpt_oss"])
    def test_other_models(self, kind):
        config = CONFIGS[kind]() if kind in CONFIGS else tiny_config(kind)
        config.output_router_logits = kind == "qwen3_next_moe"
        config.attention_dropout = 0.2
        torch.manual_seed(0)
        self.check_quiet(self.trainer(AutoModelForCausalLM.from_config(config)))

    def test_adapters_with_dropout_and_modules_to_save(self):
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
        config = peft.LoraConfig(
            r=4, lora_dropout=0.3, target_modules="all-linear", modules_to_save=["embed_tokens"], task_type="CAUSAL_LM"
        )
        self.check_quiet(self.trainer(peft.get_peft_model(model, config)))

    def test_sft(self):
        turns = [
            {"messages": [user("a" * i), assistant("b" * (i % 5 + 1)), user("c"), assistant("d" * (i % 3 + 1))]}
            for i in range(1, 25)
        ]
        self.check_quiet(self.sft(turns, assistant_only_loss=True), packing=True, max_length=200)
        pairs = [{"prompt": "q" * i, "completion": "yes" * (i % 4 + 1)} for i in range(1, 17)]
        self.check_quiet(self.sft(pairs, label_smoothing_factor=0.1))

    def test_a_stream_that_workers_read(self):
        trainer = self.trainer(dataset=Stream(Samples(24).rows), args={"dataloader_num_workers": 1})
        self.assertIn("Not verified: workers of the data loader read the stream", train_configured(trainer))

    def test_a_resumed_run(self):
        for resumed in (False, True):
            trainer = self.trainer(args={"save_strategy": "steps", "save_steps": 1, "max_steps": 1 + resumed})
            said(configure_packing, trainer)
            output, _ = said(trainer.train, resume_from_checkpoint=resumed)
            self.assertIn("Verified packing on 3 documents", output)

    def test_each_training(self):
        trainer = self.trainer()
        said(configure_packing, trainer, "padding_free")
        self.assertEqual(["Verified" in said(trainer.train)[0] for _ in range(2)], [True, True])
        layer = trainer.model.model.layers[0].mlp
        layer.register_forward_hook(lambda module, inputs, output: output + output.roll(1, 1))
        with self.assertRaisesRegex(ValueError, "no gradient between the 3 documents"):
            said(trainer.train)

    def test_a_trunk_that_does_not_train(self):
        """Gradients of a comparison are not added to those of the look for gradients that stopped."""
        trainer = self.trainer()
        trainer.model.model.layers[0].register_forward_hook(lambda module, inputs, output: output.detach())
        output = train_configured(trainer, "padding_free")
        self.assertIn("Not verified: no hidden state depends on an embedding", output)
        self.assertEqual(trainer.state.global_step, 1)

    def test_a_model_that_draws_random_numbers(self):
        trainer = self.trainer()
        layer = trainer.model.model.layers[0].mlp
        layer.register_forward_hook(lambda module, args, output: output * (10 * torch.rand(())))
        self.check_quiet(trainer, "differs from run to run")

    @parameterized.expand([(5,), (5.0,)])
    def test_noise_of_embeddings_is_off(self, alpha):
        trainer = self.trainer(args={"neftune_noise_alpha": alpha})
        self.assertRegex(train_configured(trainer), r"loss [\d.]+, padded [\d.]+(; for documents of .*)? \([\d.]+ s\)")

    def test_an_optimizer_that_steps_in_backward(self):
        trainer = self.trainer()
        said(configure_packing, trainer)
        self.assertIsNone(against_other_rows(trainer))
        # Its hooks need the options of the backward that Trainer runs for it.
        with mock.patch.object(trainer.args, "optim", "adalomo"):
            why = against_other_rows(trainer)
        self.assertEqual(why, "the optimizer updates weights in backward")
        with mock.patch.object(callback, "against_other_rows", lambda trainer: why):
            self.assertIn("Not verified: the optimizer updates weights in backward", said(trainer.train)[0])

    def test_a_loss_that_logs(self):
        """Neither the log nor counters of the user have the check."""
        trainer = self.trainer(args={"eval_strategy": "steps", "eval_steps": 1}, eval_dataset=Samples(4))
        compute_loss, trainer.calls = trainer.compute_loss, [0]

        def own(*args, **kwargs):
            trainer.calls[0] += trainer.model.training
            trainer.log({"own": 1.0})
            return compute_loss(*args, **kwargs)

        trainer.compute_loss = own
        self.assertIn("Verified", train_configured(trainer, "padding_free"))
        trained = [entry for entry in trainer.state.log_history if "own" in entry and entry["step"] == 0]
        self.assertEqual((trainer.calls, len(trained)), ([1], 1))

    def test_loaders_that_persist(self):
        """The loader of an evaluation before training must not serve the check."""
        args = {"eval_strategy": "steps", "eval_steps": 1, "dataloader_num_workers": 1}
        args["dataloader_persistent_workers"] = True
        # Workers that persist end five seconds after the loader otherwise.
        with mock.patch("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2):
            trainer = self.trainer(args=args, eval_dataset=Samples(7), compute_metrics=lambda p: {})
            said(configure_packing, trainer)
            said(trainer.evaluate)
            self.assertIn("evaluation of 3 documents and 29 targets is complete", said(trainer.train)[0])
            del trainer
            gc.collect()

    @parameterized.expand(["dropout", "sft"])
    def test_training_is_as_without_it(self, kind):
        """Updates, metrics of TRL and random numbers are the same to the last bit."""
        results = []
        for verify in (True, False):
            if kind == "sft":
                trainer = self.sft([{"text": "a" * i} for i in range(2, 30)], max_steps=2)
            else:
                torch.manual_seed(0)
                config = CONFIGS["qwen3_5"]()
                config.attention_dropout = 0.5
                trainer = self.trainer(AutoModelForCausalLM.from_config(config), args={"bf16": True, "max_steps": 2})
            self.assertEqual("Verified" in train_configured(trainer, verify=verify), verify)
            times = ("runtime", "per_second", "total_flos")
            log = [{k: v for k, v in x.items() if not k.endswith(times)} for x in trainer.state.log_history]
            results.append((log, [p.detach().clone() for p in trainer.model.parameters()]))
        self.assertEqual(results[0][0], results[1][0])
        torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)


class DPOTests(VerifyTestCase):
    @staticmethod
    def dpo(directory):
        pairs = [{"prompt": "q" * (i + 70), "chosen": "yes" * (i % 4 + 1), "rejected": "no" * i} for i in range(1, 9)]
        return preference_trainer("dpo", directory, samples=pairs, per_device_train_batch_size=2, max_steps=1)

    @parameterized.expand([("dpo", True), ("kto", True), ("grpo", False), ("distillation", True)])
    def test_preferences(self, kind, share):
        make = self.dpo if kind == "dpo" else partial(preference_trainer, kind, max_steps=1)
        trainer = make(directory=self.directory)
        words = "because rows share prompts" if share else "gradients between rows are 0"
        if share and kind == "dpo":
            # Two prompts with two answers each. The shorter prompt is the start of the longer one.
            words = " tokens are computed: gradients between rows were not looked at, because rows share prompts"
        self.check_quiet(trainer, words, share_prompts=share)


class OwnLoopTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
        self.batch = DataCollatorWithFlattening(on_leak="ignore")(Samples(4).rows)

    def test_a_patched_model(self):
        found = verify_packing(patch_model(self.model), self.batch)
        self.assertEqual((found.documents, found.leak), (4, 0.0))
        self.assertAlmostEqual(found.loss, found.loss_alone, places=5)
        self.assertTrue(all(p.grad is None for p in self.model.parameters()))

    def test_a_tree(self):
        lengths, parent_of = [9, 7, 4, 1, 8, 5], [-1, -1, 0, 0, 2, 1]
        ids = torch.arange(1, 1 + sum(lengths))[None]
        batch = {"input_ids": ids, "labels": ids, "parent_of": torch.tensor(parent_of)}
        batch["cu_seqlens"] = torch.tensor([0, *accumulate(lengths)])
        model = patch_model(self.model)
        found = verify_packing(model, batch)
        self.assertEqual((found.documents, found.leak), (6, 0.0))
        self.assertAlmostEqual(found.loss, found.loss_alone, places=5)
        with (
            mock.patch.object(prompts, "repeat_rows", lambda x, copies: x[copies.rows.flip(0)]),
            self.assertRaisesRegex(ValueError, "expected no gradient between the 6 documents of a row"),
        ):
            verify_packing(model, batch)

    def test_a_stock_model(self):
        with self.assertRaisesRegex(ValueError, r"no gradient between the 4 documents of a row, got one of \d"):
            verify_packing(self.model, self.batch)

    def test_a_wrong_loss(self):
        """Targets that cross documents change no gradient between them."""
        model = patch_model(self.model)
        batch = self.batch | {"labels": self.batch["input_ids"]}
        with (
            mock.patch("transformers_packed.models.outputs.mask_targets_across_documents", lambda _, x, *__: x),
            self.assertRaisesRegex(ValueError, "expected the loss .* of the documents alone, got"),
        ):
            verify_packing(model, batch)

    def test_a_sharded_model(self):
        """A backward from hidden states would read weights that FSDP has freed."""
        model = patch_model(self.model)
        model.model.layers[0].__class__ = type("Sharded", (type(model.model.layers[0]),), {"__module__": _FSDP})
        with self.assertRaisesRegex(ValueError, "expected a model without FSDP"):
            verify_packing(model, self.batch)

    def test_no_row(self):
        with self.assertRaisesRegex(ValueError, "expected a packed row of several documents, got no boundaries"):
            verify_packing(patch_model(self.model), collate_padded(Samples(2).rows))
