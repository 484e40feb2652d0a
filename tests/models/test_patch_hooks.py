"""`patch_model` on models with hooks and wrappers. Models that it refuses stay unchanged."""

import copy
import inspect
import tempfile
import types
import unittest
from functools import partial
from importlib.util import find_spec
from types import MethodType
from unittest import mock

import torch
from accelerate import Accelerator, dispatch_model
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.state import AcceleratorState
from common.families import tiny_model
from common.releases import STOCK_REFUSAL
from mixins.model import alone, gradients, packed_batch, relative_error
from mixins.patch import BUILTINS, COMPOSITE, OTHERS, PatchTestCase, builtin_model, documents, ours, snapshot
from parameterized import parameterized
from torch import distributed

from transformers_packed import patch_model, unpatch_model
from transformers_packed.models import versions
from transformers_packed.models.qwen3_5 import modeling_qwen3_5 as packed
from transformers_packed.ops import linear_cross_entropy


builtin = BUILTINS["qwen3_5"]


class Counter(ModelHook):
    """A hook that counts its calls."""

    def __init__(self):
        self.before = self.after = 0

    def pre_forward(self, module, *args, **kwargs):
        self.before += 1
        return args, kwargs

    def post_forward(self, module, output):
        self.after += 1
        return output


def linear_attention(model) -> torch.nn.Module:
    names = ("GatedDeltaNet", "DeltaAttention")
    return next(module for module in model.modules() if type(module).__name__.endswith(names))


class HooksTest(PatchTestCase):
    """The hooks of accelerate keep a bound forward in the module, which has to follow the class."""

    def check_there_and_back(self, model, expected):
        logits, hooks = expected[0], [vars(module).get("_hf_hook") for module in model.modules()]
        before = snapshot(model)
        patch_model(model)
        self.check_packed_is_alone(model, expected, 5e-6)
        self.assertEqual([vars(module).get("_hf_hook") for module in model.modules()], hooks)
        self.assertEqual(snapshot(model)["attributes"], before["attributes"])
        for module in model.modules():
            if "_old_forward" in vars(module):
                self.assertIs(module._old_forward.__func__, type(module).forward)
                self.assertEqual(inspect.signature(module.forward), inspect.signature(module._old_forward))
        # Trainer keeps the columns in the signature.
        self.assertEqual(
            list(inspect.signature(model.forward).parameters),
            list(inspect.signature(type(model).forward).parameters)[1:],
        )
        unpatch_model(model)
        self.assertEqual({**snapshot(model), "recorders": 0}, {**before, "recorders": 0})
        for module in model.modules():
            if "_old_forward" in vars(module):
                self.assertIs(module._old_forward.__func__, type(module).forward)
        for got, want in zip(alone(model, documents())[0], logits, strict=True):
            self.assertTrue(torch.equal(got, want))
        with self.assertRaisesRegex(*STOCK_REFUSAL):
            model(**packed_batch(documents()))

    @parameterized.expand(["qwen3_5", *OTHERS[1::2]])
    def test_hooks_on_every_module(self, family):
        model = builtin_model(family)
        counters = {}
        for name, module in model.named_modules():
            add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
            counters[name] = Counter()
            add_hook_to_module(module, counters[name], append=True)
        self.check_there_and_back(model, self.expected(model))
        patch_model(model)
        for counter in counters.values():
            counter.before = counter.after = 0
        model(**packed_batch(documents()))
        mixers = [name for name, module in model.named_modules() if module is linear_attention(model)]
        for name in ("", "model", "model.layers.0", *mixers, "model.layers.1.self_attn"):
            self.assertEqual((counters[name].before, counters[name].after), (1, 1), name)

    def test_device_map_over_host_and_disk(self):
        model = builtin_model()
        device_map = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
        device_map |= {"model.layers.0": "disk", "model.layers.1": "cpu"}
        with torch.no_grad(), tempfile.TemporaryDirectory() as directory:
            logits, _ = alone(model, documents())
            dispatch_model(model, device_map, main_device="cpu", offload_dir=directory)
            before = snapshot(model)
            self.assertEqual({p.device.type for p in model.parameters()}, {"cpu", "meta"})
            patch_model(model)
            self.assertIn("model.layers.0.linear_attn", ours(model))
            row = model(**packed_batch(documents()))
            self.assertLess(relative_error(row.logits[0], torch.cat(logits)), 1e-5)
            self.assertEqual({p.device.type for p in model.parameters()}, {"cpu", "meta"})
            unpatch_model(model)
            self.assertEqual(snapshot(model)["classes"], before["classes"])
            self.assertTrue(torch.equal(torch.cat(alone(model, documents())[0]), torch.cat(logits)))

    def test_hooks_removed_before_and_after(self):
        """accelerate leaves a bound forward behind when it removes a hook."""
        model = builtin_model()
        expected = self.expected(model)
        for module in model.modules():
            add_hook_to_module(module, Counter())
        remove_hook_from_module(model, recurse=True)
        self.assertIsInstance(vars(model)["forward"], MethodType)
        self.check_there_and_back(model, expected)
        add_hook_to_module(linear_attention(model), Counter())
        patch_model(model)
        remove_hook_from_module(model, recurse=True)
        self.check_packed_is_alone(model, expected)
        self.assertIs(unpatch_model(model).forward.__func__, type(model).forward)

    def test_a_copy_of_a_hooked_model(self):
        model = builtin_model()
        expected = self.expected(model)
        for module in model.modules():
            add_hook_to_module(module, Counter())
        other = copy.deepcopy(model)
        self.check_packed_is_alone(patch_model(other), expected)
        self.assertEqual(ours(model), set())

    def test_a_foreign_forward_below_a_hook(self):
        model = builtin_model()
        module = linear_attention(model)
        module.forward = lambda *args, **kwargs: None
        add_hook_to_module(module, Counter())
        self.assert_refused(patch_model, model, r"linear_attn \(Qwen3_5GatedDeltaNet\) with its own forward")


class ProcessGroupTest(PatchTestCase):
    """Form a group of one process."""

    def setUp(self):
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        self.addCleanup(distributed.destroy_process_group)

    @parameterized.expand(["qwen3_5", *OTHERS[-1:]])
    def test_distributed_data_parallel(self, family):
        model = builtin_model(family)
        expected = self.expected(model)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        self.assertIs(patch_model(wrapped), wrapped)
        output = wrapped(**packed_batch(documents()))
        self.assertLess(relative_error(output.logits[0], torch.cat(expected[0])), 1e-5)
        for name, grad in gradients(model, output.loss).items():
            self.assertLess(relative_error(grad, expected[2][name]), 1e-4, name)
        self.assertEqual(ours(unpatch_model(wrapped)), set())

    @parameterized.expand([("qwen3_5", True), ("qwen3_5", False), *((family, True) for family in OTHERS[-1:])])
    def test_fully_shard(self, family, whole):
        def shard(model):
            mesh = distributed.init_device_mesh("cpu", (1,))
            for module in [linear_attention(model), *model.model.layers, model] if whole else model.model.layers:
                distributed.fsdp.fully_shard(module, mesh=mesh)
            return model

        self.assert_refused(
            patch_model, shard(builtin_model(family)), "under FSDP .* Convert the model before sharding"
        )
        model = builtin_model(family)
        logits, _ = alone(model, documents())
        shard(patch_model(model))
        self.assertIs(patch_model(model), model)
        output = model(**packed_batch(documents()))
        self.assertLess(relative_error(output.logits[0], torch.cat(logits)), 1e-5)
        self.assert_refused(unpatch_model, model, "under FSDP .* Convert the model before sharding")

    @parameterized.expand([("alone", False, False), ("with_the_last_norm", True, False), ("hooked", False, True)])
    def test_the_loss_of_a_head_that_is_sharded_apart(self, _, with_norm, hooked):
        model = patch_model(builtin_model())
        batch = packed_batch(documents())
        expected = model(**batch, skip_logits=False)
        expected_gradients = gradients(model, expected.loss)
        model.zero_grad(set_to_none=True)
        mesh = distributed.init_device_mesh("cpu", (1,))
        # accelerate shards the last norm and the head as one unit.
        for module in [[model.model.norm, model.lm_head] if with_norm else model.lm_head, *model.model.layers, model]:
            distributed.fsdp.fully_shard(module, mesh=mesh)
        seen = []
        if hooked:
            model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
        with mock.patch(
            "transformers_packed.models.losses.head.linear_cross_entropy", wraps=linear_cross_entropy
        ) as fused:
            output = model.train()(**batch)
        # A user's hook on the head requires logits.
        self.assertEqual((fused.call_count, len(seen)), (0, 1) if hooked else (1, 0))
        self.assertLess(relative_error(output.loss, expected.loss), 1e-6)
        output.loss.backward()
        got = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        self.assertEqual(got.keys(), expected_gradients.keys())
        for name, gradient in got.items():
            self.assertLess(relative_error(gradient, expected_gradients[name]), 1e-4, name)
        self.assertLess(relative_error(output.logits, expected.logits), 1e-5)

    def test_fully_sharded_data_parallel(self):
        def shard(model):
            return distributed.fsdp.FullyShardedDataParallel(
                model, device_id=torch.device("cpu"), use_orig_params=True
            )

        self.assert_refused(patch_model, shard(builtin_model()), "under FSDP .* Convert the model before sharding")
        model = builtin_model()
        logits, _ = alone(model, documents())
        model = shard(patch_model(model))
        self.assertLess(relative_error(model(**packed_batch(documents())).logits[0], torch.cat(logits)), 1e-5)
        self.assert_refused(unpatch_model, model, "under FSDP")


class RefusalTest(PatchTestCase):
    @parameterized.expand(
        [
            ("attention", lambda m: m.model.layers[1].self_attn, r"layers.1.self_attn \(Qwen3_5Attention\)"),
            ("linear", lambda m: m.model.layers[0].linear_attn, r"layers.0.linear_attn \(Qwen3_5GatedDeltaNet\)"),
            ("base_model", lambda m: m.model, r"module model \(Qwen3_5TextModel\)"),
            ("root", lambda m: m, r"module \(the model itself\) \(Qwen3_5ForCausalLM\)"),
        ]
    )
    def test_a_forward_of_its_own(self, _, find, pattern):
        """An instance forward is refused by name before any change. Once it is removed, the model is accepted."""
        for switch in (patch_model, unpatch_model):
            model = builtin_model()
            if switch is unpatch_model:
                patch_model(model)
            module, other = find(model), find(builtin_model())
            original = module.forward
            for forward in (
                lambda *args, run=original, **kwargs: run(*args, **kwargs),
                MethodType(lambda self, *args, run=original, **kwargs: run(*args, **kwargs), module),
                partial(original),
                other.forward,
            ):
                module.forward = forward
                self.assert_refused(switch, model, f"{pattern} with its own forward. Convert it bef")
            del module.forward
            switch(model)
            self.assertEqual(bool(ours(model)), switch is patch_model)

    @unittest.skipUnless(find_spec("trl"), "needs trl")
    def test_trl_around_another_forward_is_refused(self):
        from trl.trainer.utils import add_fused_lm_head

        model = builtin_model()
        model.forward = types.MethodType(lambda self, *args, **kwargs: "of the user", model)
        add_fused_lm_head(model)
        self.assert_refused(patch_model, model, "with its own forward")

    def test_another_method_of_its_own(self):
        model = builtin_model("qwen3_5", "Qwen3_5ForConditionalGeneration", COMPOSITE["qwen3_5"])
        model.model.get_image_features = lambda *args, **kwargs: None
        self.assert_refused(patch_model, model, r"model \(Qwen3_5Model\) with its own get_image_features")
        # Methods that our class does not override may be replaced.
        del model.model.get_image_features
        model.can_generate = lambda: False
        self.assertFalse(patch_model(model).can_generate())

    def test_other_modules_may_have_a_forward_of_their_own(self):
        """Forwards of Liger and tensor parallelism on norms, MLPs and projections stay, and so do the classes."""
        model = builtin_model()
        inner = model.model.layers[0].post_attention_layernorm
        inner.forward = partial(inner.forward)
        norm, run, calls = model.model.norm, model.model.norm.forward, []
        norm.forward = lambda hidden_states: calls.append(1) or run(hidden_states)
        expected = self.expected(model)
        calls.clear()
        self.check_packed_is_alone(patch_model(model), expected)
        self.assertEqual(len(calls), 1)
        self.assertIs(type(norm), builtin.Qwen3_5RMSNorm)

    def test_mixed_precision_was_prepared(self):
        self.addCleanup(AcceleratorState._reset_state, True)
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = accelerator.prepare(builtin_model())
        self.assertIn("_original_forward", vars(model))
        self.assert_refused(patch_model, model, "the model itself.*Accelerator.prepare")
        model = accelerator.prepare(patch_model(builtin_model()))
        # The wrapper copies outputs, and a copy cannot compute logits later.
        self.assertEqual(model(**packed_batch(documents()), skip_logits=False).logits.dtype, torch.float32)

    @parameterized.expand(["qwen3_5", *(["bamba"] if versions.supports_other_families() else [])])
    def test_unwrapped_after_mixed_precision(self, family):
        """accelerate removes its wrappers until no attribute refers to a wrapped function. Our forward remains."""
        self.addCleanup(AcceleratorState._reset_state, True)
        AcceleratorState._reset_state(True)
        model, accelerator = patch_model(tiny_model(family)), Accelerator(cpu=True, mixed_precision="bf16")
        batch = packed_batch(documents())
        # Every token is a target, so a target across documents would change the loss.
        batch["labels"] = batch["input_ids"]
        expected, signature = model(**batch).loss, inspect.signature(model.forward)
        model = accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=False)
        self.assertEqual(model(**batch).loss, expected)
        self.assertEqual(inspect.signature(model.forward), signature)
        self.assert_refused(unpatch_model, model, "the model itself.*Accelerator.prepare")

    def test_subclasses_and_copies(self):
        class Custom(builtin.Qwen3_5ForCausalLM):
            pass

        class Qwen3_5GatedDeltaNet(torch.nn.Module):
            """A patch as libraries write it in their own module."""

        root, layer = builtin_model(), builtin_model()
        root.__class__ = Custom
        self.assert_refused(patch_model, root, r"the model itself\) of a subclass or copy .*Custom\. Load")
        layer.model.layers[0].linear_attn = Qwen3_5GatedDeltaNet()
        self.assert_refused(patch_model, layer, r"layers.0.linear_attn of a subclass or copy")
        parametrized = builtin_model()
        torch.nn.utils.parametrizations.weight_norm(linear_attention(parametrized).conv1d)
        torch.nn.utils.parametrize.register_parametrization(
            linear_attention(parametrized), "A_log", torch.nn.Identity()
        )
        self.assert_refused(patch_model, parametrized, r"linear_attn of a subclass .*ParametrizedQwen3_5GatedDeltaNet")

        class Derived(packed.Qwen3_5ForCausalLM):
            """A user's subclass of our class counts as ours, and has no stock class to return to."""

        model = Derived._from_config(builtin_model().config)
        self.assertIs(type(patch_model(model)), Derived)
        self.assert_refused(unpatch_model, model, "of a subclass .*Derived")

    def test_a_model_of_a_class_of_the_users_own(self):
        """In a head that Transformers does not define, over the stock model, the inner model is converted."""

        class Reward(builtin.Qwen3_5PreTrainedModel):
            def __init__(self, config):
                super().__init__(config)
                self.model = builtin.Qwen3_5TextModel(config)
                self.score = torch.nn.Linear(config.hidden_size, 1)
                self.post_init()

            def forward(self, input_ids=None, **kwargs):
                return self.score(self.model(input_ids, **kwargs).last_hidden_state)

        model = Reward(builtin_model().config)
        want = torch.cat([model(row[None])[0] for row in documents()])
        patch_model(model)
        self.assertEqual(ours(model), {"model", "model.layers.0.linear_attn", "model.layers.1.self_attn"})
        batch = packed_batch(documents())
        batch.pop("labels")
        self.assertLess(relative_error(model(**batch)[0], want), 1e-5)

    def test_other_architectures(self):
        self.assert_refused(patch_model, torch.nn.Linear(2, 2), "got Linear")
        vision = builtin.Qwen3_5VisionModel(COMPOSITE["qwen3_5"].vision_config)
        self.assert_refused(patch_model, vision, "got Qwen3_5VisionModel")
        for call in (patch_model, unpatch_model):
            with self.assertRaisesRegex(ValueError, "^expected a torch.nn.Module, got str"):
                call("Qwen/Qwen3.5-0.8B")
