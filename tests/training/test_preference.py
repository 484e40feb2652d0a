"""TRL's trainers of preferences and of reinforcement learning after `configure_packing`, against the stock model."""

import io
import os
import random
import unittest
from contextlib import redirect_stdout
from unittest import mock

import torch
from common.late_copies import on_a_cpu
from common.records import make_tokenizer
from common.trl_trainers import TRLTestCase, build_classifier, build_model, preference_trainer
from mixins.padding import computed_tokens
from parameterized import parameterized
from peft import LoraConfig
from scripts.trainer_arms import updates_and_losses
from transformers import Trainer, TrainingArguments

from transformers_packed import configure_packing, prefix_tree
from transformers_packed.models import padding
from transformers_packed.models.checkpointing import keep_long_attention
from transformers_packed.models.padding import PaddedBatch
from transformers_packed.models.registry import has_our_classes, transformers_model
from transformers_packed.models.versions import can_select_checkpoints
from transformers_packed.ops.offload import HostCheckpoints
from transformers_packed.shared_prompts import SharedPrompts, paths_of
from transformers_packed.training import setup


def branching_rollouts(prompts, trainer):
    """Conversations of three turns. A group shares the first turn, and pairs the second one. A tool replies to both."""
    fields = {"prompt_ids": [], "completion_ids": [], "env_mask": [], "logprobs": None}
    for number, prompt in enumerate(prompts):
        completion, mask = [], []
        for turn, shared_by in enumerate((4, 2, 1)):
            branch = number % 4 // shared_by
            draw = random.Random(f"{prompt} {turn} {branch}")
            lengths = draw.randint(2, 5), 0 if shared_by == 1 else draw.randint(1, 4)
            completion += [draw.randrange(3, 40) for _ in range(sum(lengths))]
            mask += [1] * lengths[0] + [0] * lengths[1]
        fields["prompt_ids"].append(trainer.processing_class(prompt)["input_ids"])
        fields["completion_ids"].append(completion)
        fields["env_mask"].append(mask)
    return fields


def configured(trainer, *args, **options):
    """Call `configure_packing` and return what it prints."""
    with redirect_stdout(io.StringIO()) as printed, mock.patch("tqdm.auto.tqdm.write", print):
        assert configure_packing(trainer, *args, **options) is trainer
    return printed.getvalue()


class PreferenceTestCase(TRLTestCase):
    def setUp(self):
        super().setUp()
        # The prompts here are shorter than those that are worth sharing.
        self.enterContext(mock.patch.object(prefix_tree, "_LEAST_SAVED", 1))

    def trainer(self, kind, *, lora=False, reference=False, **arguments):
        """With `reference`, TRL loads the reference model from a folder with the policy's weights."""
        build, task = (build_classifier, "SEQ_CLS") if kind == "reward" else (build_model, "CAUSAL_LM")
        model, adapter = build("padded", len(make_tokenizer())), None
        if reference:
            folder = os.path.join(self.directory, "checkpoint")
            model.save_pretrained(folder)
            model = type(model).from_pretrained(folder)
        if lora:
            adapter = LoraConfig(task_type=task, r=4, target_modules="all-linear")
        return preference_trainer(kind, self.directory, model, peft_config=adapter, **arguments)

    def check(self, kind, **arguments):
        padded = self.trainer(kind, **arguments)
        expected = updates_and_losses(padded)
        for share_prompts in (False, True):
            with self.subTest(share_prompts=share_prompts):
                packed = self.trainer(kind, **arguments)
                self.assertIn("Padding-free on", configured(packed, share_prompts=share_prompts))
                self.check_trains_like(expected, packed)
                for got, want in zip(packed.state.log_history, padded.state.log_history, strict=True):
                    self.assertEqual(got.keys(), want.keys())
                    skipped = ("runtime", "per_second", "time", "flos")
                    # Before the first update, all rewards are rounding errors, and their order is arbitrary.
                    if max(abs(want.get(f"rewards/{name}", 1)) for name in ("chosen", "rejected")) < 1e-6:
                        skipped += ("accuracies",)
                    for name, value in want.items():
                        if not name.endswith(skipped):
                            self.assertLess(abs(got[name] - value), 2e-4 * max(1, abs(value)), name)


class EqualityTest(PreferenceTestCase):
    """Steps of SGD change the parameters as the stock model on padded batches does, and log the same metrics."""

    @parameterized.expand(
        [
            (
                "lora_and_accumulation",
                {"lora": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
            ),
            ("evaluation", {"eval_strategy": "steps", "eval_steps": 2, "use_weighting": True}),
            ("several_losses", {"loss_type": ["sigmoid", "bco_pair", "sft"], "ld_alpha": 0.5}),
            ("ipo", {"precompute_ref_log_probs": True, "reference": True, "loss_type": "ipo", "learning_rate": 0.003}),
        ]
    )
    def test_dpo(self, _, arguments):
        self.check("dpo", **arguments)

    @parameterized.expand(
        [
            ("margins_and_centring", {"center_rewards_coefficient": 0.1, "eval_strategy": "steps", "eval_steps": 2}),
            ("lora", {"lora": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
        ]
    )
    def test_reward(self, _, arguments):
        self.check("reward", **arguments)

    def test_kto(self):
        self.check("kto", loss_type="apo_zero_unpaired")

    @parameterized.expand(
        [
            ("reference", {"beta": 0.1, "reference": True}),
            ("two_batches_of_a_generation", {"steps_per_generation": 2, "loss_type": "dr_grpo"}),
        ]
    )
    def test_grpo(self, _, arguments):
        # Elsewhere: padding-free reinforcement learning scores lower.
        self.check("grpo", learning_rate=0.05, **arguments)

    def test_grpo_of_conversations_that_branch(self):
        """Prompts begin alike, a group shares its prompt and first turn, and pairs of it share the second turn."""
        with mock.patch.object(padding.SharedPrompts, "of", side_effect=SharedPrompts.of) as rows:
            arguments = {"learning_rate": 0.05, "per_device_train_batch_size": 8, "num_iterations": 2}
            self.check("grpo", rollout_func=branching_rollouts, lora=True, beta=0.1, **arguments)
        self.assertEqual(max(len(paths_of(call.args[1])) for call in rows.call_args_list), 4)

    @parameterized.expand(
        [
            ("reverse", {}),
            ("mixture_lora", {"beta": 0.4, "temperature": 0.8, "lora": True, "gradient_accumulation_steps": 2}),
        ]
    )
    def test_distillation(self, _, arguments):
        self.check("distillation", learning_rate=0.05, **arguments)

    def test_rloo(self):
        self.check("rloo", learning_rate=0.01, beta=0.05, reference=True)


class CheckpointsTest(PreferenceTestCase):
    @parameterized.expand(["dpo", "grpo"])
    @unittest.skipUnless(can_select_checkpoints(), "needs Transformers 5.23")
    def test_go_to_the_host_by_themselves(self, kind):
        """TRL turns checkpointing off and on again in a step."""
        trainer = self.trainer(kind, gradient_checkpointing=True, max_steps=2)
        with mock.patch.object(setup, "compiles_kernels", return_value=True):
            configured(trainer)
        with on_a_cpu(64):
            trainer.train()
        layers = trainer.model.model.layers
        functions = [layer._gradient_checkpointing_func for layer in layers]
        self.assertEqual({x.func for x in functions}, {keep_long_attention})
        # It runs the copies, which all layers share.
        hosts = {host for x in functions for host in (x.args[0], x.args[1].func)}
        self.assertEqual([type(x) for x in hosts], [HostCheckpoints])
        # The buffers were used again.
        (copies,) = hosts.pop()._copies.values()
        self.assertGreater(copies.copies, 2 * copies.allocated)


class BatchesTest(PreferenceTestCase):
    def test_tokens_that_are_computed(self):
        """All of the padded batch, its real tokens, or these without repeated prompts; the reference model too."""
        counts = []
        for arm, options in {"padded": None, "packed": {}, "shared": {"share_prompts": True}}.items():
            trainer = self.trainer("dpo", max_steps=1)
            if options is not None:
                configured(trainer, verify=False, **options)
            seen = [self.enterContext(computed_tokens(model)) for model in (trainer.model, trainer.ref_model)]
            batch = next(iter(trainer.get_train_dataloader()))
            trainer.compute_loss(trainer.model, batch)
            ids, mask = batch["input_ids"], batch["attention_mask"]
            row = PaddedBatch.from_attention_mask(mask, mask.device, ids).boundaries
            counts.append({"padded": ids.numel(), "packed": int(mask.sum()), "shared": row.total_length}[arm])
            self.assertEqual(seen, [{counts[-1]}] * 2)
        self.assertGreater(counts[0], counts[1])
        self.assertGreater(counts[1], counts[2])


class ReasonsTest(PreferenceTestCase):
    def check_off(self, trainer, pattern, **options):
        """`"auto"` prints the reason, and an explicit mode raises it. The Trainer is unchanged."""
        model = trainer.model
        self.assertRegex(configured(trainer, **options), rf"^Packing off, training is unchanged: {pattern}")
        with self.assertRaisesRegex(ValueError, pattern):
            configure_packing(trainer, "padding_free", **options)
        self.assertIs(trainer.model, model)
        self.assertFalse(has_our_classes(model))

    def test_rows_of_several_batches(self):
        trainer = self.trainer("dpo")
        with self.assertRaisesRegex(ValueError, "expected whole batches of DPOTrainer.*got packing=True"):
            configure_packing(trainer, True, max_length=64)
        self.assertFalse(has_our_classes(trainer.model))

    @parameterized.expand(
        [
            ("output_hidden_states", "that return only .*got output_hidden_states=True"),
            ("output_attentions", "that return only .*got output_attentions=True"),
        ]
    )
    def test_what_computes_padding(self, output, message):
        trainer = self.trainer("dpo")
        trainer.model.set_attn_implementation("eager")
        setattr(trainer.model.config, output, True)
        self.check_off(trainer, f"expected padded batches {message}")

    def test_a_family_without_packed_batches(self):
        trainer = self.trainer("kto")
        trainer.model = torch.nn.Linear(2, 2)
        self.check_off(trainer, "expected a model that packs padded batches.*got Linear")

    def test_flex_attention(self):
        """It runs packed rows on a GPU, but cannot continue a prompt."""
        trainer = self.trainer("dpo")
        trainer.model.config._attn_implementation = "flex_attention"
        isolates = mock.patch("transformers_packed.training.checks.way_of_isolation", return_value=("flex", None))
        with isolates:
            self.check_off(trainer, "expected an attention implementation that supports shared", share_prompts=True)

    def test_switches_of_the_user(self):
        """The printed line names shared prompts that an earlier call or the user turned on."""
        trainer = self.trainer("dpo")
        self.assertNotIn("a prompt once", configured(trainer))
        transformers_model(trainer.model).share_prompts = True
        self.assertIn("a prompt once", configured(trainer))
        transformers_model(trainer.model).packs_padding = False
        with self.assertRaisesRegex(ValueError, "got packs_padding=False"):
            configure_packing(trainer, "padding_free")

    def test_a_reference_model_in_mixed_precision(self):
        """TRL wraps its forward before `configure_packing`; it stays wrapped, and keeps TRL's head."""
        trainer = self.trainer("dpo", max_steps=1, bf16=True)
        self.assertIn("_original_forward", vars(trainer.ref_model))
        self.assertIn("Padding-free on", configured(trainer))
        self.assertIn("_original_forward", vars(trainer.ref_model))
        self.assertEqual(sum(model is trainer.ref_model for model in trainer.accelerator._models), 1)
        self.assertTrue(has_our_classes(trainer.ref_model))
        dtypes = []
        layer = trainer.ref_model.model.layers[0].mlp.down_proj
        layer.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
        trainer.train()
        self.assertEqual(set(dtypes), {torch.bfloat16})

    @parameterized.expand(["reference_wrapped", "layer_replaced"])
    def test_a_reference_model_that_cannot_be_patched(self, how):
        """Then the policy is not patched either."""
        trainer = self.trainer("dpo", bf16=how == "reference_wrapped")
        module = trainer.ref_model if how == "reference_wrapped" else trainer.ref_model.model.layers[0].linear_attn
        forward = module.forward
        module.forward = own = lambda *args, **kwargs: forward(*args, **kwargs)
        self.check_off(trainer, "expected a model that can be packed")
        self.assertIs(module.forward, own)
        self.assertFalse(has_our_classes(trainer.ref_model))

    def test_sharing_prompts_elsewhere(self):
        args = TrainingArguments(self.directory, use_cpu=True, report_to="none")
        trainer = Trainer(build_model("padded", 64), args)
        with self.assertRaisesRegex(ValueError, "expected share_prompts with DPOTrainer.*share_prompts = True"):
            configure_packing(trainer, share_prompts=True)
