"""The check before the first step tells rounding to 16 bits from faults."""

import unittest
from unittest import mock

import torch
from mixins.configure import ConfigureTestCase, said
from parameterized import parameterized
from transformers import MambaConfig, MambaForCausalLM

from transformers_packed import configure_packing, unpatch_model


def sensitive(dtype=torch.float32):
    """A model with large weights, whose gradients rounding to 16 bits changes by half."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 8, "initializer_range": 0.5}
    return MambaForCausalLM(MambaConfig(vocab_size=61, pad_token_id=0, **sizes)).to(dtype)


class RoundingTest(ConfigureTestCase):
    """Differences of rounding to 16 bits are none, and others are found in spite of it."""

    def refuses(self, trainer, message):
        with self.assertRaisesRegex(ValueError, message):
            said(trainer.train)

    @parameterized.expand([("weights", torch.bfloat16, {}), ("autocast", torch.float32, {"bf16": True})])
    def test_a_sensitive_model(self, _, dtype, args):
        # The check puts back a list, but not what a library keeps.
        trainer, note = self.trainer(sensitive(dtype), args=args), mock.Mock(return_value=None)
        trainer.model.backbone.embeddings.register_forward_hook(
            lambda layer, inputs, output: note(layer.weight.dtype, torch.is_autocast_enabled("cpu"))
        )
        said(configure_packing, trainer)
        self.assertRegex(said(trainer.train)[0], "Verified .*, which differ by rounding: float32 is equal")
        types = [call.args for call in note.call_args_list]
        self.assertIn((torch.float32, False), types)
        self.assertEqual(types[-1], (dtype, bool(args)))
        # Training is as without the check.
        other = self.trainer(sensitive(dtype), args=args)
        said(configure_packing, other, verify=False)
        said(other.train)
        for a, b in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
            self.assertTrue(a.requires_grad and a.dtype == dtype)
            self.assertTrue(torch.equal(a, b))

    @parameterized.expand([("sensitive", sensitive), ("usual", None)])
    def test_a_fault(self, _, model):
        """Only the second half of a row counts in its loss."""
        trainer = self.trainer(model and model(), args={"bf16": True})
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
        self.refuses(trainer, "This is more than rounding: float32 is equal, and other rounding changes less.")

    def test_a_leak(self):
        trainer = self.trainer(sensitive(torch.bfloat16))
        said(configure_packing, trainer, "padding_free")
        unpatch_model(trainer.model)
        self.refuses(trainer, "no gradient between the 3 documents")

    def test_a_model_that_stops_in_float32(self):
        trainer = self.trainer(sensitive(), args={"bf16": True})
        said(configure_packing, trainer, "padding_free")

        def stop(layer, inputs, output):
            if not torch.is_autocast_enabled("cpu"):
                raise RuntimeError("only 16 bits")

        trainer.model.backbone.embeddings.register_forward_hook(stop)
        self.refuses(trainer, "relative difference.*float32 would show .*, but it stopped: RuntimeError: only 16 bits")


if __name__ == "__main__":
    unittest.main()
