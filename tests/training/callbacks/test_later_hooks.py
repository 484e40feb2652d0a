"""The check before the first step sees the hooks of user code that callbacks add later, and hooks of libraries do not see it."""

from itertools import product
from unittest import mock

import torch
from datasets import Dataset
from mixins.configure import ConfigureTestCase, said
from parameterized import parameterized
from scripts.trainer_arms import Samples
from transformers import TrainerCallback

from transformers_packed import configure_packing


class Hooking(TrainerCallback):
    """Registers a hook on the first layer at an event, and counts its calls."""

    def __init__(self, hook, event="on_train_begin"):
        self.hook, self.calls = hook, []
        setattr(self, event, self.register)

    def register(self, args, state, control, model=None, **kwargs):
        layer = model.model.layers[0]
        layer.register_forward_hook(self.hook)
        layer.register_forward_hook(lambda *_: self.calls.append(len(self.calls)))


def leak(module, inputs, output):
    return output + output.roll(1, 1)


def double(module, inputs, output):
    return 2 * output


class LaterHooksTest(ConfigureTestCase):
    def refuses(self, trainer, packing, callback):
        said(configure_packing, trainer, packing)
        trainer.add_callback(callback)
        with self.assertRaisesRegex(ValueError, "expected no gradient between the . documents"):
            said(trainer.train)
        self.assertEqual(trainer.state.global_step, 0)

    @parameterized.expand(product(["auto", "padding_free"], ["on_train_begin", "on_epoch_begin"]))
    def test_a_leak(self, packing, event):
        """An error in every mode, because training has begun."""
        self.refuses(self.trainer(), packing, Hooking(leak, event))

    def test_a_leak_in_a_stream(self):
        stream = Dataset.from_list(Samples(6).rows).to_iterable_dataset()
        self.refuses(self.trainer(dataset=stream), "padding_free", Hooking(leak))

    def trained(self, **options):
        torch.manual_seed(0)
        trainer, callback = self.trainer(args={"max_steps": 2}), Hooking(double)
        said(configure_packing, trainer, "padding_free", **options)
        trainer.add_callback(callback)
        printed, _ = said(trainer.train)
        self.assertEqual(callback.calls, [0, 1])
        return printed, trainer.model

    def test_a_leak_of_a_function_without_a_module(self):
        function = eval("lambda module, inputs, output: output + output.roll(1, 1)", {})
        self.assertIs(function.__module__, None)
        self.refuses(self.trainer(), "padding_free", Hooking(function))

    def test_training_is_as_without_the_check(self):
        printed, model = self.trained()
        self.assertRegex(printed, "Verified packing on 3 .*\nVerified packing, with the hooks of callbacks, on 3 ")
        printed, other = self.trained(verify=False)
        self.assertNotIn("erified", printed)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            self.assertTrue(torch.equal(a, b))

    @parameterized.expand([("alone", [], 1), ("beside those of the user", [Hooking(double)], 2)])
    def test_hooks_of_libraries(self, _, beside, verified):
        """Such as of a log, which sees no row of the check."""
        # The check puts back a list, but not this.
        note = mock.Mock(return_value=None)

        class Log(TrainerCallback):
            def on_train_begin(self, args, state, control, model=None, **kwargs):
                def watch(*call):
                    note(state.global_step)

                watch.__module__ = "transformers.integrations"
                model.register_forward_hook(watch)

        trainer = self.trainer(args={"max_steps": 2})
        said(configure_packing, trainer, "padding_free")
        for callback in (Log(), *beside):
            trainer.add_callback(callback)
        self.assertEqual(said(trainer.train)[0].count("Verified packing"), verified)
        self.assertEqual(note.call_args_list, [mock.call(0), mock.call(1)])
