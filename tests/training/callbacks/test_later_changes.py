"""The check before the first step sees what callbacks change in a model later, and hooks of libraries do not see the check."""

from functools import partial
from itertools import product
from unittest import mock

import torch
from datasets import Dataset
from mixins.configure import ConfigureTestCase, said
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from scripts.trainer_arms import CONFIGS, Samples
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, prune
from transformers import AutoModelForCausalLM, TrainerCallback

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


class Changing(TrainerCallback):
    """Calls a function of the model when training begins."""

    def __init__(self, change):
        self.change = change

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.change(model)


def leak(module, inputs, output):
    return output + output.roll(1, 1)


def double(module, inputs, output):
    return 2 * output


def leaking(forward):
    return lambda *args: leak(None, None, forward(*args))


class Wrapper(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states):
        return leak(self, None, self.inner(hidden_states))


def mlp_of(model):
    return model.model.layers[0].mlp


# Changes by which a layer mixes documents.
def wrap(model):
    model.model.layers[0].mlp = Wrapper(mlp_of(model))


def set_forward(model):
    mlp_of(model).forward = leaking(mlp_of(model).forward)


def swap_class(model):
    cls = type(mlp_of(model))
    mlp_of(model).__class__ = type(cls.__name__, (cls,), {"forward": leaking(cls.forward)})


# Changes that do not, but of which only a check can tell.
def set_library_class(model):
    model.model.layers[0].mlp = torch.nn.Sequential(mlp_of(model))


def set_subclass(model):
    cls = type(mlp_of(model))
    mlp_of(model).__class__ = type(cls.__name__, (cls,), {})


def exchange_layers(model):
    first, second, *_ = model.model.layers
    first.mlp, second.mlp = second.mlp, first.mlp


def compile_call(model):
    mlp_of(model).compile(backend="eager")


def parametrize_weight(model):
    parametrize.register_parametrization(mlp_of(model).down_proj, "weight", torch.nn.Identity())


def prune_weight(model):
    prune.random_unstructured(mlp_of(model).down_proj, "weight", 0.5)


def set_attention(model):
    model.set_attn_implementation("eager")


def set_experts(model):
    model.set_experts_implementation("eager")


def set_method(model):
    mixer = model.model.layers[0].linear_attn
    mixer.finish = leaking(mixer.finish)


# What changes no call.
def set_attributes(model):
    mlp_of(model).note, mlp_of(model).requires_grad_(False).training = leak, False
    model.model.layers[0].mlp = mlp_of(model)


def put_back_forward(model):
    mlp_of(model).forward = mlp_of(model).forward


def hook_for_a_moment(model):
    mlp_of(model).register_forward_hook(leak).remove()


AGAIN = [set_library_class, set_subclass, exchange_layers, compile_call, parametrize_weight, prune_weight]
AGAIN += [set_attention, set_experts]
ONCE = [set_attributes, put_back_forward, hook_for_a_moment]


class LaterChangesTest(ConfigureTestCase):
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

    def test_a_leak_of_a_function_without_a_module(self):
        function = eval("lambda module, inputs, output: output + output.roll(1, 1)", {})
        self.assertIs(function.__module__, None)
        self.refuses(self.trainer(), "padding_free", Hooking(function))

    @parameterized.expand([(x.__name__, x) for x in (wrap, set_forward, set_method, swap_class)])
    def test_a_leak_by(self, _, change):
        self.refuses(self.trainer(), "padding_free", Changing(change))

    @parameterized.expand(["forward", "__call__"])
    def test_a_leak_of_a_patched_class(self, name):
        def patch(model):
            cls = type(mlp_of(model))
            self.enterContext(mock.patch.object(cls, name, leaking(getattr(cls, name)), create=True))

        self.refuses(self.trainer(), "padding_free", Changing(patch))

    def test_a_leak_of_a_hook_of_all_modules(self):
        def hook(model):
            mlp = mlp_of(model)
            leak_there = lambda module, *call: leak(module, *call) if module is mlp else None  # noqa: E731
            self.addCleanup(register_module_forward_hook(leak_there).remove)

        self.refuses(self.trainer(), "padding_free", Changing(hook))

    @parameterized.expand([(x.__name__, x, 1 + (x in AGAIN)) for x in (*AGAIN, *ONCE)])
    def test_is_verified_again(self, _, change, times):
        family = "qwen3_next_moe" if change is set_experts else "qwen3_5"
        trainer = self.trainer(AutoModelForCausalLM.from_config(CONFIGS[family]()))
        said(configure_packing, trainer, "padding_free")
        trainer.add_callback(Changing(change))
        self.assertEqual(said(trainer.train)[0].count("Verified packing"), times)

    def test_a_hook_that_is_gone(self):
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
        handle = mlp_of(model).register_forward_hook(double)
        trainer = self.trainer(model)
        said(configure_packing, trainer, "padding_free")
        trainer.add_callback(Changing(lambda model: handle.remove()))
        self.assertEqual(said(trainer.train)[0].count("Verified packing"), 2)

    def test_forwards_by_mode(self):
        """As kernels for training and evaluation set them."""
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())

        def train(mode=True):
            vars(mlp_of(model)).pop("forward", None)
            if not mode:
                mlp_of(model).forward = partial(mlp_of(model).forward)
            return type(model).train(model, mode)

        model.train = train
        options = {"eval_on_start": True, "eval_strategy": "steps"}
        trainer = self.trainer(model, args=options, eval_dataset=Samples(2))
        said(configure_packing, trainer, "padding_free")
        self.assertEqual(said(trainer.train)[0].count("Verified packing"), 1)

    def test_an_evaluation_before_the_first_step(self):
        """Trainer changes modes between the checks, and no call."""
        config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
        model = get_peft_model(AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]()), config)
        options = {"eval_on_start": True, "eval_strategy": "steps", "gradient_checkpointing": True, "bf16": True}
        trainer = self.trainer(model, args=options | {"neftune_noise_alpha": 5.0}, eval_dataset=Samples(2))
        said(configure_packing, trainer, "padding_free")
        self.assertEqual(said(trainer.train)[0].count("Verified packing"), 1)

    def test_outputs_that_a_forward_since_the_check_has_recorded(self):
        def record(model):
            model(input_ids=torch.ones(1, 4, dtype=torch.long), output_router_logits=True)

        config = CONFIGS["qwen3_next_moe"]()
        config.output_router_logits = True
        trainer = self.trainer(AutoModelForCausalLM.from_config(config))
        said(configure_packing, trainer, "padding_free")
        for callback in (Changing(record), Hooking(double)):
            trainer.add_callback(callback)
        self.assertEqual(said(trainer.train)[0].count("Verified packing"), 2)

    def trained(self, **options):
        torch.manual_seed(0)
        trainer, callback = self.trainer(args={"max_steps": 2}), Hooking(double)
        said(configure_packing, trainer, "padding_free", **options)
        trainer.add_callback(callback)
        printed, _ = said(trainer.train)
        self.assertEqual(callback.calls, [0, 1])
        return printed, trainer.model

    def test_training_is_as_without_the_check(self):
        printed, model = self.trained()
        self.assertRegex(printed, "Verified packing on 3 .*\nVerified packing, with the changes of callbacks, on 3 ")
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
