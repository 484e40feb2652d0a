"""Settings that change in training: those that let documents mix stop it before the weights change."""

import torch
from mixins.configure import ConfigureTestCase, llama, said
from parameterized import parameterized
from scripts.configured_arms import tokenizer
from transformers import AttentionInterface, DataCollatorForSeq2Seq, TrainerCallback
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from transformers_packed import configure_packing


class Changes(TrainerCallback):
    """Changes the model in the second step."""

    def __init__(self, change):
        self.change = change

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            self.weights = [x.detach().clone() for x in model.parameters()]
            self.change(model)


class Generates(TrainerCallback):
    """Has a cache between steps."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.config.use_cache = False

    def on_step_end(self, args, state, control, model=None, **kwargs):
        use_cache(model)


def use_cache(model):
    model.config.use_cache = True


def attend(model):
    model.config._attn_implementation = "of_the_user"


class SettingsTest(ConfigureTestCase):
    def configured(self, callback, mode="auto"):
        trainer = self.trainer(llama(), collator=DataCollatorForSeq2Seq(tokenizer()), args={"max_steps": 3})
        said(configure_packing, trainer, mode, verify=False)
        trainer.add_callback(callback)
        return trainer

    @parameterized.expand([("use_cache=True", use_cache), ('attn_implementation="of_the_user"', attend)])
    def test_documents_that_would_mix(self, got, change):
        AttentionInterface.register("of_the_user", sdpa_attention_forward)
        callback = Changes(change)
        trainer = self.configured(callback)
        with self.assertRaisesRegex(ValueError, got):
            said(trainer.train)
        self.assertEqual(trainer.state.global_step, 1)
        for weight, before in zip(trainer.model.parameters(), callback.weights, strict=True):
            self.assertTrue(torch.equal(weight, before))

    def test_other_changes(self):
        """Another attention that keeps documents apart."""
        trainer = self.configured(Changes(lambda model: model.set_attn_implementation("eager")))
        said(trainer.train)
        self.assertEqual(trainer.state.global_step, 3)

    def test_a_cache_between_steps(self):
        """A generation needs it, and the next step turns it off."""
        trainer = self.configured(Generates())
        said(trainer.train)
        self.assertEqual(trainer.state.global_step, 3)

    def test_padded_batches(self):
        trainer = self.configured(Changes(use_cache), "off")
        said(trainer.train)
        self.assertEqual(trainer.state.global_step, 3)
