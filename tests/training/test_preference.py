"""TRL's trainers of preferences and of reinforcement learning after `configure_packing`, against the stock model."""

import copy
import io
import os
import random
import unittest
from contextlib import redirect_stdout
from unittest import mock

import torch
from common.records import make_tokenizer
from common.trl_trainers import HAS_TRL, SGD, TRLTestCase, build_model
from mixins.padding import computed_tokens
from parameterized import parameterized
from transformers import Trainer, TrainingArguments

from transformers_packed import configure_packing, prefix_tree
from transformers_packed.models import padding
from transformers_packed.models.padding import PaddedBatch
from transformers_packed.models.registry import has_our_classes, transformers_model
from transformers_packed.shared_prompts import SharedPrompts, paths_of


if HAS_TRL:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import (
        DPOConfig,
        DPOTrainer,
        GRPOConfig,
        GRPOTrainer,
        KTOConfig,
        KTOTrainer,
        RewardTrainer,
        RLOOConfig,
        RLOOTrainer,
    )

PAIRS = [{"prompt": "q" * i, "chosen": "yes" * (i % 4 + 1), "rejected": "no" * i} for i in range(1, 17)]
UNPAIRED = [
    {"prompt": "why" * (i % 5 + 1), "completion": "yes" * (i % 4 + 1), "label": bool(i % 3)} for i in range(1, 17)
]
PROMPTS = [{"prompt": "q" * i} for i in range(1, 9)]
GENERATION = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}


def reward(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


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

    def checkpoint(self, vocab_size):
        """A folder from which TRL loads the reference model, next to a policy with the same weights."""
        folder = os.path.join(self.directory, "checkpoint")
        if not os.path.exists(folder):
            build_model("padded", vocab_size).save_pretrained(folder)
        return folder

    def trainer(self, kind, *, lora=False, reference=False, steps=10, rollout_func=None, **arguments):
        tokenizer = make_tokenizer()
        model = build_model("padded", len(tokenizer))
        if reference:
            model = type(model).from_pretrained(self.checkpoint(len(tokenizer)))
        options = {"processing_class": tokenizer}
        if lora:
            options["peft_config"] = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
        common = {**SGD, "max_steps": steps, "logging_steps": 1}
        if kind in ("grpo", "rloo"):
            options["reward_funcs"] = reward
            if rollout_func is not None:
                options["rollout_func"] = rollout_func
            common |= GENERATION
        else:
            common |= {"per_device_train_batch_size": 4}
            if not lora and not arguments.get("precompute_ref_log_probs"):
                options["ref_model"] = copy.deepcopy(model)
        cls, config, samples = {
            "dpo": (DPOTrainer, DPOConfig, PAIRS),
            "kto": (KTOTrainer, KTOConfig, UNPAIRED),
            "grpo": (GRPOTrainer, GRPOConfig, PROMPTS),
            "rloo": (RLOOTrainer, RLOOConfig, PROMPTS),
        }[kind] if HAS_TRL else ()  # fmt: skip
        if arguments.get("eval_strategy"):
            options["eval_dataset"] = Dataset.from_list(samples[:6])
        args = config(self.directory, **{**common, **arguments})
        return cls(model, args=args, train_dataset=Dataset.from_list(samples), **options)

    def check(self, kind, **arguments):
        for share_prompts in (False, True):
            with self.subTest(share_prompts=share_prompts):
                packed, padded = (self.trainer(kind, **arguments) for _ in range(2))
                self.assertIn("Padding-free on", configured(packed, share_prompts=share_prompts))
                self.check_same_training(packed, padded)
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
    """Ten steps of SGD change the parameters as the stock model on padded batches does, and log the same metrics."""

    @parameterized.expand(
        [
            ("plain", {}),
            ("lora", {"lora": True}),
            ("evaluation", {"eval_strategy": "steps", "eval_steps": 5, "steps": 5}),
            ("accumulation", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "steps": 4}),
            ("weights", {"use_weighting": True, "steps": 4}),
            ("length_desensitization", {"ld_alpha": 0.5, "steps": 4}),
            ("several_losses", {"loss_type": ["sigmoid", "bco_pair", "sft"], "steps": 4}),
            ("ipo", {"loss_type": "ipo", "learning_rate": 0.003, "steps": 4}),
            ("precomputed", {"precompute_ref_log_probs": True, "reference": True, "steps": 4}),
        ]
    )
    def test_dpo(self, _, arguments):
        self.check("dpo", **arguments)

    @parameterized.expand(
        [("plain", {}), ("lora", {"lora": True, "steps": 4}), ("apo", {"loss_type": "apo_zero_unpaired", "steps": 4})]
    )
    def test_kto(self, _, arguments):
        self.check("kto", **arguments)

    @parameterized.expand(
        [
            ("plain", {}),
            ("reference", {"beta": 0.1, "reference": True, "steps": 4}),
            ("lora", {"beta": 0.1, "lora": True, "num_iterations": 2, "steps": 4}),
            ("two_batches_of_a_generation", {"steps_per_generation": 2, "loss_type": "dr_grpo", "steps": 4}),
        ]
    )
    def test_grpo(self, _, arguments):
        self.check("grpo", learning_rate=0.05, **arguments)

    @parameterized.expand([("plain", {}), ("lora", {"beta": 0.1, "lora": True, "num_iterations": 2, "steps": 4})])
    def test_grpo_of_conversations_that_branch(self, _, arguments):
        """Prompts begin alike, a group shares its prompt and first turn, and pairs of it share the second turn."""
        with mock.patch.object(padding.SharedPrompts, "of", side_effect=SharedPrompts.of) as rows:
            arguments = {"learning_rate": 0.05, "per_device_train_batch_size": 8, **arguments}
            self.check("grpo", rollout_func=branching_rollouts, **arguments)
        self.assertEqual(max(len(paths_of(call.args[1])) for call in rows.call_args_list), 4)

    @parameterized.expand([("plain", {"beta": 0.0}), ("reference", {"beta": 0.05, "reference": True, "steps": 4})])
    def test_rloo(self, _, arguments):
        self.check("rloo", learning_rate=0.01, **arguments)


class BatchesTest(PreferenceTestCase):
    @parameterized.expand(["dpo", "grpo"])
    def test_tokens_that_are_computed(self, kind):
        """All of the padded batch, its real tokens, or these without repeated prompts; the reference model too."""
        counts = {}
        for arm, options in {"padded": None, "packed": {}, "shared": {"share_prompts": True}}.items():
            trainer = self.trainer(kind, steps=1)
            if options is not None:
                configured(trainer, verify=False, **options)
            models = [model for model in (trainer.model, trainer.ref_model) if model is not None]
            seen = [self.enterContext(computed_tokens(model)) for model in models]
            batch = next(iter(trainer.get_train_dataloader()))
            if kind == "grpo":
                # Four answers of eight tokens to one prompt: no padding.
                trainer.train()
                counts[arm] = max(seen[0] - {1})
                continue
            trainer.compute_loss(trainer.model, batch)
            ids, mask = batch["input_ids"], batch["attention_mask"]
            row = PaddedBatch.from_attention_mask(mask, mask.device, ids).boundaries
            expected = {"padded": ids.numel(), "packed": int(mask.sum()), "shared": row.total_length}[arm]
            self.assertEqual(seen, [{expected}] * 2)
            counts[arm] = expected
        self.assertGreater(counts["padded"], counts["packed"] - (kind == "grpo"))
        self.assertGreater(counts["packed"], counts["shared"])

    def test_the_comparison_can_fail(self):
        """Without the window and the state of a prompt, answers train other parameters."""
        from transformers_packed.ops import prompts

        packed, padded = (self.trainer("dpo", steps=2) for _ in range(2))
        configured(packed, share_prompts=True, verify=False)
        states = mock.patch.object(prompts, "repeat_rows", lambda x, copies: x.index_select(0, copies.rows) * 0)
        with states, self.assertRaises(AssertionError):
            self.check_same_training(packed, padded)

    def test_saves_and_generates(self):
        trainer = self.trainer("dpo", steps=1)
        configured(trainer, share_prompts=True)
        trainer.train()
        trainer.save_model()
        loaded = build_model("padded", trainer.model.config.vocab_size).from_pretrained(self.directory)
        prompt = torch.tensor([[3, 4, 5, 6]])
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        self.assertEqual(
            trainer.model.generate(prompt, **options).tolist(), loaded.generate(prompt, **options).tolist()
        )


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

    def test_neftune(self):
        self.check_off(self.trainer("dpo", neftune_noise_alpha=5.0), "expected padded batches without NEFTune")

    def test_compiled_models_compute_padding(self):
        self.check_off(self.trainer("dpo", torch_compile=True), "expected padded batches without torch.compile")

    @parameterized.expand(["output_hidden_states", "output_attentions"])
    def test_models_with_other_outputs_compute_padding(self, name):
        trainer = self.trainer("dpo")
        trainer.model.set_attn_implementation("eager")
        setattr(trainer.model.config, name, True)
        self.check_off(trainer, f"expected padded batches that return only .*got {name}=True")

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

    def test_a_switch_of_the_user(self):
        trainer = self.trainer("dpo")
        configured(trainer)
        transformers_model(trainer.model).packs_padding = False
        with self.assertRaisesRegex(ValueError, "got packs_padding=False"):
            configure_packing(trainer, "padding_free")

    def test_the_printed_line_names_shared_prompts(self):
        """Also those that an earlier call or the user turned on."""
        trainer = self.trainer("dpo")
        self.assertNotIn("a prompt once", configured(trainer))
        transformers_model(trainer.model).share_prompts = True
        self.assertIn("a prompt once", configured(trainer))

    def test_sharing_prompts_without_packing(self):
        trainer = self.trainer("dpo")
        with self.assertRaisesRegex(
            ValueError, "expected packing other than False with share_prompts, got packing=False"
        ):
            configure_packing(trainer, False, share_prompts=True)
        self.assertFalse(has_our_classes(trainer.model))

    @parameterized.expand([("dpo", {}), ("grpo", {"beta": 0.1, "reference": True})])
    def test_a_reference_model_in_mixed_precision(self, kind, arguments):
        """TRL wraps its forward before `configure_packing`; it stays wrapped, and keeps TRL's head."""
        trainer = self.trainer(kind, steps=1, bf16=True, **arguments)
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

    def test_a_reference_model_that_the_user_wraps(self):
        trainer = self.trainer("dpo", bf16=True)
        prepared = trainer.ref_model.forward

        def wrapper(*args, **kwargs):
            return prepared(*args, **kwargs)

        trainer.ref_model.forward = wrapper
        self.check_off(trainer, "expected a model that can be packed")
        self.assertIs(trainer.ref_model.forward, wrapper)

    def test_a_reference_model_that_cannot_be_patched(self):
        """Then the policy is not patched either."""
        trainer = self.trainer("dpo")
        layer = trainer.ref_model.model.layers[0].linear_attn
        layer.forward = lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)
        self.check_off(trainer, "expected a model that can be packed")
        self.assertFalse(has_our_classes(trainer.ref_model))

    @unittest.skipUnless(HAS_TRL, "needs trl")
    def test_sharing_prompts_elsewhere(self):
        args = TrainingArguments(self.directory, use_cpu=True, report_to="none")
        for kind in (Trainer, RewardTrainer):
            trainer = Trainer(build_model("padded", 64), args)
            trainer.__class__ = kind
            with self.assertRaisesRegex(ValueError, "expected share_prompts with DPOTrainer.*share_prompts = True"):
                configure_packing(trainer, share_prompts=True)


if __name__ == "__main__":
    unittest.main()
