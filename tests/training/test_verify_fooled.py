"""The check before the first step: what noise, rounding, values that are not finite, and short excerpts do not hide."""

import unittest
from dataclasses import replace
from unittest import mock

import peft
import pytest
import torch
from mixins.configure import ConfigureTestCase, said, train_configured
from parameterized import parameterized
from scripts.configured_arms import tokenizer
from scripts.trainer_arms import CONFIGS, EXPERTS, TINY, Samples
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    TrainerCallback,
)

from transformers_packed import audit_model, configure_packing, patch_model, unpatch_model, verify_packing
from transformers_packed.data.collator import DataCollatorWithFlattening
from transformers_packed.models import segments
from transformers_packed.models.versions import can_cut_rows
from transformers_packed.training import restore
from transformers_packed.training.callbacks import verify


def token_losses(model, inputs):
    """The loss of each token of a batch, 0 where it is no target, and the targets."""
    logits = model(**{name: x for name, x in inputs.items() if name != "labels"}, use_cache=False).logits
    labels = inputs["labels"][:, 1:]
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")
    return losses, labels != -100


def summed(model, inputs, **kwargs):
    """The mean over rows of the sum of each, which is not the same for a row of several documents."""
    return token_losses(model, inputs)[0].sum(1).mean()


def per_token(model, inputs, **kwargs):
    losses, targets = token_losses(model, inputs)
    return losses.sum() / targets.sum()


def spread_of_samples(model, inputs, **kwargs):
    """Of a single row, the standard deviation over samples is NaN."""
    losses, targets = token_losses(model, inputs)
    return per_token(model, inputs) + losses.sum(1).std()


def late_tokens(model, inputs, **kwargs):
    """Tokens from column 150 on count ten times as much, wherever documents begin."""
    losses, targets = token_losses(model, inputs)
    weights = torch.where(torch.arange(losses.shape[1]) < 150, 1.0, 10.0)
    return (losses * weights).sum() / targets.sum()


class FooledTestCase(ConfigureTestCase):
    def configured(self, loss=None, **options):
        trainer = self.trainer(collator=DataCollatorForSeq2Seq(tokenizer()), **options)
        said(configure_packing, trainer, "padding_free")
        if loss is not None:
            trainer.compute_loss = loss
        return trainer

    def refuses(self, trainer, message):
        with self.assertRaisesRegex(ValueError, message):
            said(trainer.train)
        self.assertTrue(all(x.isfinite().all() for x in trainer.model.parameters()))


class Conv(torch.nn.Module):
    """A bottleneck with a causal convolution, which begins at zero and knows nothing of documents."""

    def __init__(self, size):
        super().__init__()
        self.down, self.up = torch.nn.Conv1d(size, 4, 3, padding=2), torch.nn.Linear(4, size, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, hidden):
        mixed = self.down(hidden.transpose(1, 2))[..., : hidden.shape[1]]
        return self.up(mixed.transpose(1, 2))


def with_conv(model):
    layer = model.model.layers[0]
    layer.conv = Conv(model.config.hidden_size)
    layer.mlp.register_forward_hook(lambda module, inputs, output: output + layer.conv(inputs[0]))
    return model


class ZeroTest(FooledTestCase):
    """What begins at zero changes nothing before the first step, and something after it."""

    def test_a_leak(self):
        model = with_conv(self.trainer().model)
        self.refuses(self.configured(model=model), "no gradient between the 3 documents")
        self.assertFalse(model.model.layers[0].conv.up.weight.any())

    def test_a_leak_in_a_loop(self):
        model = patch_model(with_conv(self.trainer().model))
        batch = DataCollatorWithFlattening(on_leak="ignore")(Samples(4).rows)
        with self.assertRaisesRegex(ValueError, "no gradient between the 4 documents"):
            verify_packing(model, batch)

    def test_a_loop_under_autocast(self):
        """Autocast keeps the weights that it has cast, and those of the check are other ones."""
        model = patch_model(with_conv(self.trainer().model))
        model.model.layers[0].conv.down = torch.nn.Conv1d(model.config.hidden_size, 4, 1)
        batch = DataCollatorWithFlattening(on_leak="ignore")(Samples(4).rows)
        losses = []
        for verifies in (False, True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = verify_packing(model, batch).loss if verifies else model(**batch).loss.item()
                losses += [loss, model(**batch).loss.item()]
        self.assertEqual(losses, losses[:1] * 4)

    def test_a_leak_in_an_audit(self):
        model = patch_model(with_conv(self.trainer().model))
        self.assertEqual(audit_model(model, inputs=["all"]).sources["all"].verdict, "leaks")
        self.assertFalse(model.model.layers[0].conv.up.weight.any())

    def test_adapters(self):
        """Their weights are the same numbers afterwards, and training is as without the check."""
        models = []
        for options in ({}, {"verify": False}):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
            config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
            trainer = self.trainer(peft.get_peft_model(model, config), args={"max_steps": 2})
            self.assertEqual("Verified" in train_configured(trainer, **options), not options)
            models.append(trainer.model)
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            self.assertTrue(torch.equal(a, b))

    def test_a_prompt_of_each_row(self):
        """Only the gradient of its own weight differs."""
        model = self.trainer().model
        model.prompt = torch.nn.Parameter(torch.zeros(4, model.config.hidden_size))

        def add(layer, inputs, output):
            return torch.cat((output[:, :4] + model.prompt, output[:, 4:]), 1)

        model.model.embed_tokens.register_forward_hook(add)
        self.refuses(
            self.configured(model=model), "a gradient of the weights of the row that equals that of the padded"
        )


class NoiseTest(FooledTestCase):
    @parameterized.expand([0.1])
    def test_a_wrong_loss_with_noise(self, noise):
        def loss(*args, **kwargs):
            return summed(*args, **kwargs) * (1 + noise * torch.randn(()))

        self.refuses(self.configured(loss), "expected the loss .* of the padded batch of the same documents, got")

    @parameterized.expand([0.02])
    def test_a_right_loss_with_noise(self, noise):
        def loss(*args, **kwargs):
            return per_token(*args, **kwargs) * (1 + noise * torch.randn(()))

        self.assertIn("which differs from run to run by", said(self.configured(loss).train)[0])

    def test_noise_of_padded_batches_alone(self):
        """Rows of a batch are mixed at random, and a packed row has no others."""
        trainer = self.configured()

        def mix(layer, inputs, output):
            share = 0.1 * torch.rand(())
            return (1 - share) * output + share * output.roll(1, 0)

        trainer.model.model.embed_tokens.register_forward_hook(mix)
        self.refuses(trainer, "a gradient.* of the row that varies from run to run like that of")

    def test_a_wrong_gradient_with_noise(self):
        """The loss is right, and the gradient of rows is three times as large."""

        def loss(model, inputs, **kwargs):
            found = per_token(model, inputs) * (1 + 1e-3 * torch.randn(()))
            return 3 * found - 2 * found.detach() if len(inputs["input_ids"]) == 1 else found

        self.refuses(self.configured(loss), "expected a gradient of the row that equals that of")


class NotFiniteTest(FooledTestCase):
    def test_a_loss(self):
        self.refuses(self.configured(spread_of_samples), "expected a finite loss of the row, as of the padded batch")

    @parameterized.expand(["both", "row"])
    def test_hidden_states(self, of):
        """Of the row alone, or of both sides. The loss of the user leaves out what is not finite."""

        def loss(model, inputs, **kwargs):
            losses, targets = token_losses(model, inputs)
            return losses.nan_to_num().sum() / targets.sum()

        trainer = self.configured(loss)

        def spoil(layer, inputs, output):
            if of == "row" and len(output) > 1:
                return output
            return output * float("nan")

        trainer.model.model.norm.register_forward_hook(spoil)
        if of == "row":
            self.refuses(trainer, "expected a finite last hidden state of the row, as of the")
        else:
            self.assertIn(
                "Not verified: the row and the padded batch of the same documents both have NaN or infinity in their last",
                said(trainer.train)[0],
            )

    @parameterized.expand(["embed_tokens", "norm"])
    def test_a_gradient(self, of):
        """Of the embeddings, or of a weight behind the last hidden states, in a row alone."""
        trainer, seen = self.configured(per_token), {}
        model = trainer.model
        model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.update(rows=len(kwargs["input_ids"])), with_kwargs=True
        )

        def spoil(gradient):
            return gradient * float("nan") if seen["rows"] == 1 else gradient

        if of == "norm":
            model.model.norm.weight.register_hook(spoil)
        else:
            model.model.embed_tokens.register_forward_hook(
                lambda layer, args, output: output.register_hook(spoil) and None
            )
        self.refuses(trainer, "expected a finite gradient.* of the row")

    def test_in_a_loop(self):
        model = patch_model(self.trainer().model)
        batch = DataCollatorWithFlattening(on_leak="ignore")(Samples(4).rows)

        def spoil(layer, inputs, output):
            return output * float("nan") if output.shape[1] > shortest else output

        model.model.norm.register_forward_hook(spoil)
        shortest = 90
        with self.assertRaisesRegex(ValueError, "finite values, as of the documents alone"):
            verify_packing(model, batch)
        shortest = 0
        with self.assertRaisesRegex(ValueError, "A document alone has them"):
            verify_packing(model, batch)


class LongTest(FooledTestCase):
    def setUp(self):
        super().setUp()
        # A busy CPU has no time for longer documents.
        self.enterContext(mock.patch.object(verify, "_PATIENCE", 1e6))

    def samples(self, longest):
        generator = torch.Generator().manual_seed(0)
        ids = [
            torch.randint(1, 61, (n,), generator=generator).tolist() for n in (longest, 40, max(longest - 60, 9), 12)
        ]
        return [{"input_ids": x, "labels": x} for x in ids]

    def test_a_fault_of_late_tokens(self):
        trainer = self.configured(late_tokens, dataset=self.samples(300))
        self.refuses(trainer, "expected the loss .* of the padded batch of the same documents, got")

    def test_a_leak_in_16_bits(self):
        """Of long rows alone, and small beside rounding."""

        def leak(layer, inputs, output):
            is_long = len(output) == 1 and output.shape[1] > 200
            return output + 0.05 * output.roll(64, 1) if is_long else output

        trainer = self.configured(dataset=self.samples(300), args={"bf16": True})
        trainer.model.model.layers[0].mlp.register_forward_hook(leak)
        self.refuses(trainer, "no gradient between the 3 documents")

    @parameterized.expand([(45, None), (700, 448)])
    def test_what_was_looked_at(self, longest, said_to_be):
        trainer = self.configured(dataset=self.samples(longest))
        line = said(trainer.train)[0]
        self.assertIn("Verified packing on 3 documents of up to ", line)
        self.assertEqual(f"; for documents of up to {said_to_be} tokens" in line, said_to_be is not None, line)

    def test_memory_is_bounded(self):
        """At most 512 tokens of a document are computed, whatever its length."""
        trainer, tokens = self.configured(dataset=self.samples(100_000)), mock.Mock(return_value=None)
        trainer.model.model.embed_tokens.register_forward_pre_hook(lambda layer, inputs: tokens(inputs[0].numel()))

        class Stop(TrainerCallback):
            def on_step_begin(self, *args, **kwargs):
                raise InterruptedError

        trainer.add_callback(Stop())
        with self.assertRaises(InterruptedError):
            said(trainer.train)
        self.assertLessEqual(max(call.args[0] for call in tokens.call_args_list), 3 * 512)


@unittest.skipUnless(can_cut_rows(), "needs Transformers 5.24")
class SegmentsTest(FooledTestCase):
    """Documents of the check are shorter than a segment of training."""

    ARGS = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"segment_tokens": 8192}}

    def configured(self):
        config = CONFIGS["qwen3_5"]()
        # States of a model with small weights change little.
        config.initializer_range = 0.3
        torch.manual_seed(0)
        return super().configured(model=patch_model(AutoModelForCausalLM.from_config(config)), args=self.ARGS)

    def test_a_fault_between_segments(self):
        rule = segments._by_pieces

        def without_states(operator, segment, *tensors, **options):
            return rule(operator, replace(segment, tokens_before=0), *tensors, **options)

        with mock.patch.object(segments, "_by_pieces", without_states):
            self.refuses(self.configured(), "expected the loss|expected a gradient")

    def test_segments_are_those_of_training_again(self):
        trainer, sizes, cut = self.configured(), [], segments._segments_of
        with mock.patch.object(segments, "_segments_of", lambda row, size: sizes.append(size) or cut(row, size)):
            self.assertIn("Verified packing on 3 documents", said(trainer.train)[0])
        self.assertEqual((min(sizes), max(sizes) % 64), (64, 0))
        self.assertLess(max(sizes), 512)
        self.assertEqual(segments._fewest, 1)


def sensitive(dtype=torch.float32):
    """A model with large weights, whose gradients rounding to 16 bits changes by half."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 8, "initializer_range": 0.5}
    return MambaForCausalLM(MambaConfig(vocab_size=61, pad_token_id=0, **sizes)).to(dtype)


# Mamba's stock layer runs token by token.
SHORT = [{name: ids[:24] for name, ids in row.items()} for row in Samples(6).rows]


class RoundingTest(FooledTestCase):
    """Differences of rounding to 16 bits are none, and others are found in spite of it."""

    @parameterized.expand([("autocast", torch.float32, {"bf16": True})])
    def test_a_sensitive_model(self, _, dtype, args):
        # The check puts back a list, but not what a library keeps.
        trainer, note = self.trainer(sensitive(dtype), SHORT, args=args), mock.Mock(return_value=None)
        trainer.model.backbone.embeddings.register_forward_hook(
            lambda layer, inputs, output: note(layer.weight.dtype, torch.is_autocast_enabled("cpu"))
        )
        self.assertRegex(train_configured(trainer), "Verified .*, which differ by rounding: float32 is equal")
        types = [call.args for call in note.call_args_list]
        self.assertIn((torch.float32, False), types)
        self.assertEqual(types[-1], (dtype, bool(args)))
        # Training is as without the check.
        other = self.trainer(sensitive(dtype), SHORT, args=args)
        train_configured(other, verify=False)
        for a, b in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
            self.assertTrue(a.requires_grad and a.dtype == dtype)
            self.assertTrue(torch.equal(a, b))

    @parameterized.expand([False, True])
    def test_the_autocast_around_a_model(self, compiled):
        """It is not there in float32, where a compiler is around it, too."""
        options = {"bf16": True, "torch_compile": compiled, "torch_compile_backend": "eager" if compiled else None}
        trainer = self.trainer(args=options)
        model, wrapped = trainer.model, trainer.accelerator.prepare(trainer.model)
        self.assertEqual(isinstance(wrapped, torch._dynamo.OptimizedModule), compiled)
        forward = vars(model)["forward"]
        with restore.in_dtype(wrapped, torch.float32):
            self.assertNotIn("forward", vars(model))
        self.assertIs(vars(model)["forward"], forward)

    def test_a_fault(self):
        """Only the second half of a row counts in its loss."""
        trainer = self.trainer(sensitive(), SHORT, args={"bf16": True})
        said(configure_packing, trainer, "padding_free")
        compute = trainer.compute_loss

        def halved(model, inputs, **options):
            if len(inputs["input_ids"]) == 1:
                inputs["labels"] = inputs["labels"].clone()
                inputs["labels"][:, : inputs["labels"].shape[1] // 2] = -100
            return compute(model, inputs, **options)

        trainer.compute_loss = halved
        self.refuses(trainer, "This is more than rounding: float32 differs too. Use padded batches")

    def test_a_fault_in_16_bits(self):
        """As of a kernel that float32 does not run."""
        trainer = self.trainer(args={"bf16": True})
        said(configure_packing, trainer, "padding_free")

        def scaled(layer, inputs, output):
            is_faulty = torch.is_autocast_enabled("cpu") and len(output) == 1
            return 1.5 * output if is_faulty else output

        trainer.model.model.layers[0].mlp.register_forward_hook(scaled)
        trainer.model.lm_head.register_forward_hook(scaled)
        self.refuses(
            trainer, "This is more than rounding: float32 shows no difference, and other rounding changes less."
        )

    def test_a_leak(self):
        trainer = self.trainer(sensitive(torch.bfloat16), SHORT)
        said(configure_packing, trainer, "padding_free")
        unpatch_model(trainer.model)
        self.refuses(trainer, "no gradient between the 3 documents")

    def test_a_model_that_stops_in_float32(self):
        trainer = self.trainer(sensitive(), SHORT, args={"bf16": True})
        said(configure_packing, trainer, "padding_free")

        def stop(layer, inputs, output):
            if not torch.is_autocast_enabled("cpu"):
                raise RuntimeError("only 16 bits")

        trainer.model.backbone.embeddings.register_forward_hook(stop)
        self.refuses(trainer, "relative difference.*float32 would show .*, but it stopped: RuntimeError: only 16 bits")

    @parameterized.expand(["padding_free", "auto"])
    def test_a_model_that_does_not_fit_in_float32(self, packing):
        trainer = self.trainer(sensitive(torch.bfloat16), SHORT, DataCollatorForSeq2Seq(tokenizer()))
        places = [x.data_ptr() for x in trainer.model.parameters()]
        said(configure_packing, trainer, packing)
        message = (
            "relative difference of [0-9.e-]+. Other rounding changes as much. float32 would show .* fit the memory"
        )
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 130 GiB.")
        with mock.patch.object(restore, "in_dtype", side_effect=error):
            if packing == "auto":
                self.assertRegex(said(trainer.train)[0], f"Packing off, training is unchanged: .*{message}")
            else:
                self.refuses(trainer, message)
        self.assertEqual([x.data_ptr() for x in trainer.model.parameters()], places)

    @pytest.mark.slow
    def test_a_router_in_float32(self):
        """With large weights, rounding changes the expert of a token, and with it the loss by 2e-3."""
        layers = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
        config = Qwen3NextConfig(**{**TINY, **EXPERTS, **layers, "initializer_range": 0.5})
        lines = []
        # Which weights it does so for depends on the CPU.
        while len(lines) < 20 and "differ by rounding" not in "".join(lines):
            torch.manual_seed(len(lines))
            trainer = self.configured(model=AutoModelForCausalLM.from_config(config), dataset=Samples(24))
            lines.append(said(trainer.train)[0])
            self.assertIn("Verified packing on ", lines[-1])
        self.assertRegex(lines[-1], "Verified packing on .*, which differ by rounding: float64 is equal")
