"""Hooks, wrappers, replacements, parametrizations and sharding have the same effect as on the stock model.

Each test covers every submodule of a model of each family, text and vision: two or three at once for the first family,
half of them for the others. The models also select the fused ops that are useful only on a GPU, in their torch forms.
"""

import copy
import unittest
from functools import partial
from inspect import isfunction, signature
from types import MethodType

import torch
from mixins.model import total_relative_error
from mixins.patch import COMPOSITE, OTHERS, builtin_model, on_a_gpu
from mixins.vision import alone_batch, document
from parameterized import parameterized
from peft import LoKrConfig, LoraConfig, get_peft_model
from torch import distributed
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import PreTrainedModel

from transformers_packed import patch_model


MODELS = {
    "qwen3_next": ("qwen3_next", None, None),
    "qwen3_5": ("qwen3_5", None, None),
    "qwen3_5_moe": ("qwen3_5_moe", None, None),
    "qwen3_5_vision": ("qwen3_5", "Qwen3_5ForConditionalGeneration", COMPOSITE["qwen3_5"]),
    "qwen3_5_moe_vision": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", COMPOSITE["qwen3_5_moe"]),
    **{name: (name, None, None) for name in OTHERS},
}
# The layers around the vision tower are those of the text models.
TEXT_MODELS = [name for name in MODELS if not name.endswith("vision")]
KINDS = ("forward_pre", "forward", "full_backward_pre", "full_backward")


def first_tensor(value):
    return value if isinstance(value, torch.Tensor) else next((x for x in value if isinstance(x, torch.Tensor)), None)


def rows(x: torch.Tensor | None, name: str) -> torch.Tensor | None:
    """The rows of what a hook has seen. Some layers of other families than Qwen's get their tokens in another shape."""
    return x.flatten(0, -2) if x is not None and name in OTHERS and x.ndim > 1 else x


def stretched(x: torch.Tensor) -> torch.Tensor:
    """Different values per channel, which a following norm does not undo."""
    return x * torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)


def utilities() -> dict:
    """All functions of torch that change how a parameter of a module is computed, given the module and its name."""
    # Without some of its rows, the weight of a router makes experts equal, and any of them may be chosen.
    options = {"amount": 0.5, "n": 2, "dim": 1}
    found = {}
    for package in (torch.nn.utils, prune, parametrizations):
        for function in vars(package).values():
            arguments = list(signature(function).parameters) if isfunction(function) else []
            if arguments[:2] == ["module", "name"] and not function.__name__.startswith("remove"):
                given = {x: options[x] for x in arguments if x in options and package is prune}
                found[f"{package.__name__.rpartition('.')[2]}_{function.__name__}"] = partial(function, **given)
    return found


UTILITIES = utilities()


def touch_every_other(model: torch.nn.Module, utility: str, start: int) -> int:
    """Apply a utility to every other parameter that it supports, and return their number."""
    torch.manual_seed(0)
    with torch.no_grad():
        # A norm of the row of padding must not be zero.
        model.get_input_embeddings().weight[0] = 1
    number = touched = 0
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            options = {"mask": parameter > 0} if utility.endswith("mask") else {}
            number += 1
            if number % 2 == start and parameter.ndim > 1:
                UTILITIES[utility](module, name, **options)
                touched += 1
    return touched


class TouchedModulesTest(unittest.TestCase):
    def setUp(self):
        self.enterContext(on_a_gpu())

    def models(self, name: str) -> tuple[PreTrainedModel, PreTrainedModel, dict]:
        """Build the stock model and ours, and one document, which our model gets as a packed row."""
        builtin = builtin_model(*MODELS[name])
        feature = document(9, 1, images=((1, 4, 4),)) if name.endswith("vision") else {"input_ids": list(range(1, 10))}
        batch = alone_batch(feature)
        return builtin, patch_model(copy.deepcopy(builtin)), {**batch, "labels": batch["input_ids"]}

    def paths(self, name: str) -> list[str]:
        """The submodules to be touched."""
        containers = (torch.nn.ModuleList, PreTrainedModel)
        model = builtin_model(*MODELS[name])
        # The layers of the vision tower are stock layers, and all alike. Short documents need no indexer.
        left_out = ("visual.blocks.1", "indexer")
        return [
            path
            for path, module in model.named_modules()
            if not isinstance(module, containers) and not any(part in path for part in left_out)
        ]

    def groups(self, name: str) -> list[list[str]]:
        """The submodules, each group to be touched at once."""
        paths, number = self.paths(name), 17 if name == "qwen3_5" else 2
        return [paths[start::number] for start in range(number)]

    def check_touched(self, name: str, touch, has_effect=lambda path: True):
        """`touch(model, path)` returns a function that undoes it, or None if the submodule has no such part."""
        builtin, ours, batch = self.models(name)
        plain, _ = self.run_once(builtin, batch, packed=False)
        touched = 0
        for paths in self.groups(name):
            undo = [touch(model, path) for path in paths for model in (builtin, ours)]
            if any(undo):
                loss, _ = self.check_equal(builtin, ours, batch, str(paths))
                self.assertEqual(bool((loss != plain).item()), any(map(has_effect, paths)), paths)
            for function in filter(None, undo):
                function()
            touched += len([*filter(None, undo)])
        self.assertGreater(touched, 10)

    def run_once(self, model, batch, packed: bool) -> tuple[torch.Tensor, dict]:
        model.zero_grad()
        boundaries = {"cu_seqlens": torch.tensor([0, batch["input_ids"].shape[1]])} if packed else {}
        loss = model(**batch, **boundaries, use_cache=False).loss
        loss.backward()
        return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def check_equal(self, builtin, ours, batch, what: str, bar: float = 1e-4) -> tuple[torch.Tensor, dict]:
        expected, got = self.run_once(builtin, batch, packed=False), self.run_once(ours, batch, packed=True)
        torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=0, msg=lambda text: f"{what}: {text}")
        self.assertEqual(got[1].keys(), expected[1].keys(), what)
        self.assertLess(total_relative_error(got[1], expected[1]), bar, what)
        return expected

    @parameterized.expand(MODELS)
    def test_hooks_see_what_they_see_in_the_builtin(self, name):
        builtin, ours, batch = self.models(name)

        def hook(model, path, events):
            def note(kind):
                def called(module, *values):
                    # A backward hook gets gradients of inputs and outputs, a forward hook gets the tensors.
                    seen = [None if x is None else first_tensor(x) for x in values]
                    events.append((kind, [None if x is None else x.detach().clone() for x in seen]))

                return called

            module = model.get_submodule(path)
            return [getattr(module, f"register_{kind}_hook")(note(kind)) for kind in KINDS]

        expected = {path: [] for paths in self.groups(name) for path in paths}
        for path, events in expected.items():
            hook(builtin, path, events)
        loss, gradients = self.run_once(builtin, batch, packed=False)
        self.assertGreater(sum(map(bool, expected.values())), 20)
        for paths in self.groups(name):
            got = {path: [] for path in paths}
            handles = [handle for path, events in got.items() for handle in hook(ours, path, events)]
            own_loss, own_gradients = self.run_once(ours, batch, packed=True)
            for handle in handles:
                handle.remove()
            for path, events in got.items():
                self.assertEqual([kind for kind, _ in events], [kind for kind, _ in expected[path]], path)
                # In a packed row, this one also embeds what precedes each document.
                if not path.endswith("ngram_embedding"):
                    both = (events, expected[path])
                    seen = [[rows(x, name) for _, tensors in each for x in tensors] for each in both]
                    torch.testing.assert_close(*seen, rtol=1e-3, atol=1e-5, msg=f"seen at {path}")
            torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=0, msg=str(paths))
            self.assertLess(total_relative_error(own_gradients, gradients), 1e-4, paths)

    def test_hooks_for_all_modules(self):
        """`torch.nn.modules.module.register_module_forward_hook`, as in torch's operation counters."""
        builtin, ours, batch = self.models("qwen3_5")
        names = {module: path for model in (builtin, ours) for path, module in model.named_modules()}
        seen = {False: [], True: []}
        for packed, model in ((False, builtin), (True, ours)):
            handle = torch.nn.modules.module.register_module_forward_hook(
                lambda module, args, output, packed=packed: seen[packed].append(names.get(module))
            )
            self.addCleanup(handle.remove)
            self.run_once(model, batch, packed)
            handle.remove()
        # The activation of a convolution is not a module of the model.
        called = [sorted(path for path in paths if path is not None) for paths in seen.values()]
        self.assertEqual(called[1], called[0])

    @parameterized.expand(TEXT_MODELS)
    def test_a_forward_of_its_own(self, name):
        def scaled(module, *args, **kwargs):
            output = type(module).forward(module, *args, **kwargs)
            if isinstance(output, torch.Tensor):
                return stretched(output)
            return type(output)((stretched(output[0]), *output[1:]))

        def touch(model, path):
            module = model.get_submodule(path)
            module.forward = MethodType(scaled, module)
            return lambda: delattr(module, "forward")

        # Also the weight of a convolution is used without a call.
        self.check_touched(name, touch, lambda path: not path.endswith(("attn.conv1d", "mlp.gate")))

    def test_a_compiled_call(self):
        _, ours, batch = self.models("qwen3_5")
        plain = self.run_once(ours, batch, packed=True)[0]
        for path in self.paths("qwen3_5"):
            if path.endswith(("norm", "proj", "act_fn", "lm_head")):
                module, calls = ours.get_submodule(path), []
                module._compiled_call_impl = lambda *args, m=module, c=calls: c.append(1) or m.forward(*args)
                loss, _ = self.run_once(ours, batch, packed=True)
                module._compiled_call_impl = None
                self.assertEqual(len(calls), 1, path)
                torch.testing.assert_close(loss, plain, rtol=1e-5, atol=0)

    @parameterized.expand(TEXT_MODELS[::2])
    def test_a_parametrization(self, name):
        class Scaled(torch.nn.Module):
            def forward(self, weight):
                return stretched(weight)

        def touch(model, path):
            module = model.get_submodule(path)
            if "weight" in module._parameters:
                parametrize.register_parametrization(module, "weight", Scaled())
                return lambda: parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)

        self.check_touched(name, touch)

    @parameterized.expand(
        [
            (utility, name)
            for utility in UTILITIES
            for name in TEXT_MODELS
            if name == "qwen3_5" or (utility == "utils_spectral_norm" and name in TEXT_MODELS[::2])
        ]
    )
    def test_a_utility_of_torch(self, utility, name):
        """Pruning and norms of weights, old and new: on every other parameter, so that ops see both kinds."""
        plain = None
        for start in (0, 1) if utility == "utils_spectral_norm" else (0,):
            builtin, ours, batch = self.models(name)
            plain = plain or self.run_once(builtin, batch, packed=False)[0]
            touched = [touch_every_other(model, utility, start) for model in (builtin, ours)]
            self.assertGreater(touched[0], 5)
            # Norms of many weights magnify rounding.
            loss, _ = self.check_equal(builtin, ours, batch, utility, bar=1e-3)
            self.assertEqual(touched[0], touched[1])
            if not utility.endswith(("identity", "weight_norm")):
                self.assertNotEqual(loss.item(), plain.item())

    @parameterized.expand(TEXT_MODELS[1::2])
    def test_a_replaced_module(self, name):
        class Gated(torch.nn.Module):
            def forward(self, hidden_states, gate):
                return hidden_states * gate

        class Stretched(torch.nn.Linear):
            def forward(self, x):
                return stretched(super().forward(x))

        def touch(model, path):
            original, (parent, _, attribute) = model.get_submodule(path), path.rpartition(".")
            if attribute in ("norm", "o_norm") and parent.endswith("attn"):
                module = Gated()
            elif attribute.endswith("norm"):
                module = torch.nn.Identity()
            elif attribute == "act_fn":
                module = torch.nn.Tanh()
            elif type(original) is torch.nn.Linear:
                module = Stretched(original.in_features, original.out_features, original.bias is not None)
                module.load_state_dict(original.state_dict())
            else:
                return None
            model.set_submodule(path, module)
            return lambda: model.set_submodule(path, original)

        self.check_touched(name, touch)

    def test_an_adapter_that_computes_in_another_dtype(self):
        """Under autocast, PEFT's LoKr returns float32, a linear layer bfloat16."""
        builtin, ours, batch = self.models("qwen3_5")
        for target in ("gate_proj", "up_proj", "q_proj", "o_proj", "in_proj_z", "in_proj_a"):
            config = LoKrConfig(r=4, target_modules=[target], init_weights=False)
            arms = []
            for model, packed in ((builtin, False), (ours, True)):
                torch.manual_seed(0)
                adapted = get_peft_model(copy.deepcopy(model), config)
                with torch.autocast("cpu", torch.bfloat16):
                    arms.append(self.run_once(adapted, batch, packed))
            (expected_loss, expected), (loss, got) = arms
            torch.testing.assert_close(loss, expected_loss, rtol=1e-2, atol=0, msg=target)
            self.assertEqual(got.keys(), expected.keys())
            self.assertLess(total_relative_error(got, expected), 0.1, target)

    def test_an_adapter_of_the_convolution(self):
        """PEFT would wrap it without effect, because its weight is used without a call."""
        _, ours, batch = self.models("qwen3_5")
        ours = get_peft_model(ours, LoraConfig(r=96, target_modules=["conv1d"], init_lora_weights=False))
        with self.assertRaisesRegex(ValueError, "conv1d as a torch.nn.Conv1d.*got peft.*Conv1d"):
            self.run_once(ours, batch, packed=True)

    def test_a_module_that_is_sharded_apart(self):
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        self.addCleanup(distributed.destroy_process_group)
        builtin, _, batch = self.models("qwen3_5")
        loss, gradients = self.run_once(builtin, batch, packed=False)
        mesh = distributed.init_device_mesh("cpu", (1,))
        # A layer uses the parameters of its convolution, so it has to gather them itself.
        paths = [
            path
            for path in self.paths("qwen3_5")
            if not path.endswith("conv1d") and list(builtin.get_submodule(path).parameters(recurse=False))
        ]
        for start in range(4):
            _, ours, _ = self.models("qwen3_5")
            for module in [*(ours.get_submodule(path) for path in paths[start::4][::-1]), ours]:
                distributed.fsdp.fully_shard(module, mesh=mesh)
            got, sharded = self.run_once(ours, batch, packed=True)
            torch.testing.assert_close(got, loss, rtol=1e-5, atol=0)
            whole = {parameter: gradient.full_tensor() for parameter, gradient in sharded.items()}
            self.assertLess(total_relative_error(whole, gradients), 1e-4, paths[start::4])
