"""Models that train in float8: which layers do, what changes, and that documents of a row stay apart."""

import copy
import math
import pickle
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch
from common.recordings import OTHERS, other_model
from common.sizes import SIZES as SHAPES
from mixins.lora import lora, randomized
from mixins.model import packed_batch, total_relative_error
from mixins.patch import COMPOSITE, builtin_model
from mixins.triton import InterpretedKernelsTest
from mixins.vision import EXPERTS, TINY
from parameterized import parameterized
from peft import get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    set_seed,
)

from transformers_packed import patch_model, use_cuda_graphs, use_float8
from transformers_packed.models import float8, float8_marks, projections
from transformers_packed.models.checkpoint_kinds import store_in_blocks
from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers_packed.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM
from transformers_packed.ops import dispatch, implementations_used
from transformers_packed.ops.terms import Float8, Float8Weight
from transformers_packed.training.compare import precision_of


ROOT = Path(__file__).parents[2]
SIZES = TINY | {
    "head_dim": 8,
    "linear_value_head_dim": 8,
    # The gates' layers have 16 rows, so their sizes would suit float8.
    "linear_num_value_heads": 16,
    # Larger weights would amplify rounding, in bfloat16 too.
    "initializer_range": 0.02,
    "use_cache": False,
}
LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
FAMILIES = {
    "qwen3_5": lambda layers: Qwen3_5ForCausalLM(config(Qwen3_5TextConfig, layers)),
    "qwen3_next": lambda layers: Qwen3NextForCausalLM(config(Qwen3NextConfig, layers, **EXPERTS)),
}
LENGTHS = (9, 1, 20, 13)


def config(cls, layers, **options):
    return cls(**{**SIZES, "num_hidden_layers": len(layers), "layer_types": list(layers), **options})


def make(family="qwen3_5", layers=LAYERS[1:3]):
    set_seed(0)
    return FAMILIES[family](layers).train()


def documents(seed=0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 97, (n,), generator=generator) for n in lengths]


def supported(layer, name):
    """Whether a layer can run in float8, for a filter that chooses as many layers as possible."""
    return ".layers." in name and not (layer.in_features % 16 or layer.out_features % 16) and "lora_" not in name


def chosen(model):
    return {name for name, module in model.named_modules() if vars(module).get(float8_marks.MARK) is not None}


def result(model, texts=None, **options):
    """The loss and all gradients."""
    output = model(**packed_batch(documents() if texts is None else texts, **options), use_cache=False)
    loss = output.loss
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(a, b):
    return torch.equal(a[0], b[0]) and a[1].keys() == b[1].keys() and all(torch.equal(a[1][n], b[1][n]) for n in a[1])


class Float8TestCase(unittest.TestCase):
    def setUp(self):
        self.enterContext(mock.patch.object(dispatch, "_used", {}))
        self.enterContext(mock.patch.object(dispatch, "_of_tokens", set()))

    def assert_differs(self, found, plain, low=0.01, high=0.2):
        """Gradients differ from those without float8 by some percent."""
        self.assertEqual(found[1].keys(), plain[1].keys())
        error = total_relative_error(found[1], plain[1])
        self.assertGreater(error, low)
        self.assertLess(error, high)


class ChosenLayersTest(Float8TestCase):
    def names(self, paths, *numbers):
        return {f"model.layers.{i}.{path}" for i in numbers for path in paths}

    @parameterized.expand(
        [("qwen3_5", "mlp", ["in_proj_qkv", "in_proj_z"]), ("qwen3_next", "mlp.shared_expert", ["in_proj_qkvz"])]
    )
    def test_by_default(self, family, mlp, projections):
        """All layers of a decoder layer, but the gates, routers and routed experts; neither the first nor the last
        decoder layer, nor the head.
        """
        model = use_float8(make(family, LAYERS))
        mlp = [f"{mlp}.{name}_proj" for name in ("gate", "up", "down")]
        rule = [f"linear_attn.{name}" for name in (*projections, "out_proj")]
        attention = [f"self_attn.{name}_proj" for name in "qkvo"]
        self.assertEqual(chosen(model), self.names(mlp + rule, 1) | self.names(mlp + attention, 2))
        for count in (1, 2):
            self.assertEqual(chosen(use_float8(make(family, LAYERS[:count]))), set())

    @parameterized.expand([("before",), ("after",)])
    def test_adapters(self, order):
        """The layers that adapters are added to, not the adapters, whichever comes first."""
        model = make(layers=LAYERS)
        expected = {name: name for name in chosen(use_float8(copy.deepcopy(model)))}
        targets = ["q_proj", "in_proj_qkv", "in_proj_a", "down_proj"]
        if order == "before":
            use_float8(model)
        model = get_peft_model(model, lora(target_modules=targets))
        if order == "after":
            use_float8(model)
        adapted = {n for n in expected if n.endswith(tuple(targets))}
        wanted = {f"base_model.model.{n}" + ".base_layer" * (n in adapted) for n in expected}
        self.assertEqual(chosen(model), wanted)

    def test_a_model_with_images(self):
        """Only layers of the text model."""
        options = copy.deepcopy(COMPOSITE["qwen3_5"])
        options.text_config.num_hidden_layers, options.text_config.layer_types = 4, LAYERS
        model = use_float8(patch_model(builtin_model("qwen3_5", "Qwen3_5ForConditionalGeneration", options)))
        self.assertTrue(chosen(model))
        self.assertTrue(all("language_model.layers." in name for name in chosen(model)))
        self.assertEqual({name.split("layers.")[1][0] for name in chosen(model)}, {"1", "2"})

    def test_a_filter(self):
        """It is asked about each linear layer and decides alone. A later call replaces the choice."""
        model, asked = make(layers=LAYERS), {}

        def ask(module, name):
            asked[name] = module
            return name.endswith("0.mlp.up_proj") or "in_proj_a" in name

        self.assertIs(use_float8(model, ask), model)
        linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        self.assertEqual(asked, linears)
        gates = self.names(["linear_attn.in_proj_a"], 0, 1, 3)
        self.assertEqual(chosen(model), {"model.layers.0.mlp.up_proj"} | gates)
        use_float8(model, lambda module, name: name.endswith("3.mlp.up_proj"))
        self.assertEqual(chosen(model), {"model.layers.3.mlp.up_proj"})
        self.assertEqual(precision_of(model), "float8")
        use_float8(model, lambda *_: False)
        self.assertEqual(chosen(model), set())
        self.assertEqual(precision_of(model), "float32")

    def test_what_a_filter_may_not_select(self):
        set_seed(0)
        small = Qwen3_5ForCausalLM(config(Qwen3_5TextConfig, LAYERS, intermediate_size=40))

        class Foreign(type(small.model.layers[1].mlp)):
            def forward(self, x):
                return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

        foreign = make(layers=LAYERS)
        foreign.model.layers[1].mlp.__class__ = Foreign
        adapted = get_peft_model(make(layers=LAYERS), lora(r=16, target_modules=["q_proj"]))
        for model, name, message in (
            (make(), "lm_head", "97 x 32, not multiples of 16"),
            (make("qwen3_next"), "model.layers.0.mlp.shared_expert_gate", "1 x 32, not multiples of 16"),
            (small, "model.layers.0.mlp.up_proj", "40 x 32, not multiples of 16"),
            (foreign, "model.layers.1.mlp.up_proj", "Foreign calls outside of the ops"),
            (adapted, "base_model.model.model.layers.2.self_attn.q_proj.lora_A.default", "ModuleDict calls outside"),
        ):
            with self.subTest(name), self.assertRaisesRegex(ValueError, f"{name}, which .*{message}"):
                use_float8(model, lambda module, path, name=name: path == name)
            # Nothing is half done.
            self.assertEqual(chosen(model), set())
        # By default, they are left out.
        for model in (foreign, small):
            found = chosen(use_float8(model))
            self.assertTrue(found and not any("1.mlp" in name for name in found))

    def test_other_models(self):
        sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
        other = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
        for model in (other, builtin_model()):
            with self.assertRaisesRegex(ValueError, f"{type(model).__name__}.*patch_model"):
                use_float8(model)
        self.assertTrue(use_float8(patch_model(builtin_model())))
        for name in {"kimi_linear"} & {*OTHERS}:
            with self.assertRaisesRegex(ValueError, "KimiLinearForCausalLM. Train it without float8"):
                use_float8(other_model(name))

    def test_the_least_work(self):
        """By default, layers use float8 from a number of tokens on that depends on their size."""
        model, plain = make(layers=LAYERS), make(layers=LAYERS)
        expected = result(plain)
        use_float8(model)
        self.assertTrue(same(result(model), expected))
        self.assertNotIn("linear_float8", implementations_used())
        up, q = model.model.layers[1].mlp.up_proj, model.model.layers[2].self_attn.q_proj
        for tokens, layers in ((1e11 / (32 * 48), (up,)), (1e11 / (32 * 64), (q,))):
            for layer in layers:
                rows = mock.Mock()
                rows.numel.return_value = (int(tokens) + 1) * 32
                self.assertTrue(float8_marks.is_in_float8(layer, rows))
                rows.numel.return_value = int(tokens) * 32 - 32
                self.assertFalse(float8_marks.is_in_float8(layer, rows))
        with mock.patch.object(float8_marks.logger, "warning_once") as warn:
            for layer in (up, q):
                float8_marks.is_in_float8(layer, torch.empty(1, 2, 32))
        first, second = warn.call_args_list
        self.assertEqual(first, second)
        # With less work, the same row trains in float8.
        with mock.patch.object(float8, "_LEAST_WORK", sum(LENGTHS) * 32 * 48):
            use_float8(model)
        self.assert_differs(result(model), expected, low=1e-3)
        # A row that is too short for the MLP.
        self.assertTrue(float8_marks.is_in_float8(up, torch.empty(1, sum(LENGTHS), 32)))
        self.assertFalse(float8_marks.is_in_float8(up, torch.empty(1, sum(LENGTHS) - 1, 32)))
        self.assertTrue(float8_marks.is_in_float8(q, torch.empty(1, sum(LENGTHS) - 1, 32)))
        # The layers with one input share the threshold of the largest one.
        attention = model.model.layers[2].self_attn
        self.assertEqual(attention.k_proj.in_features, q.in_features)
        self.assertLess(attention.k_proj.out_features, q.out_features)
        for layer in (attention.k_proj, attention.v_proj):
            self.assertEqual(vars(layer)[float8_marks.MARK], vars(q)[float8_marks.MARK])

    def test_the_share_of_a_row(self):
        """The layers of both inner decoder layers, and the experts of a token."""
        model, mixture = make(layers=LAYERS), make("qwen3_next", LAYERS)
        for each, experts in ((model, 0), (mixture, 4 * 3 * 2 * 32 * 16)):
            layers = {n: x for n, x in each.named_modules() if isinstance(x, torch.nn.Linear) and "layers." in n}
            work = {name: x.in_features * x.out_features for name, x in layers.items()}
            found = sum(work[name] for name in chosen(use_float8(each))) / (sum(work.values()) + experts)
            self.assertEqual(float8.share_in_float8(each, 10**12), found)
            self.assertEqual(float8.share_in_float8(each, 1000), 0)
        # Between the limits of attention's projections and the MLP.
        some = float8.share_in_float8(model, int(1e11 / (32 * 64)) + 1)
        self.assertTrue(0 < some < float8.share_in_float8(model, 10**12))

    def test_the_page_has_these_figures(self):
        page, shares = " ".join((ROOT / "docs" / "how_to" / "float8.md").read_text().split()), {}
        for size, arguments in SHAPES.items():
            with torch.device("meta"):
                model = patch_model(AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**arguments)))
            shares[size] = f"{float8.share_in_float8(model, 16384):.0%}".replace("%", " %")
            gate = model.model.layers[1].mlp.gate_proj
            use_float8(model)
            tokens = math.ceil(vars(gate)[float8_marks.MARK])
            row = f"| {gate.out_features:,} x {gate.in_features:,} | {tokens:,} tokens |"
            self.assertTrue(row in page, row)
        self.assertEqual(shares["4B"], shares["9B"])
        with torch.device("meta"):
            mixture = patch_model(AutoModelForCausalLM.from_config(Qwen3_5MoeTextConfig()))
        shares["35B-A3B"] = f"{float8.share_in_float8(mixture, 16384):.0%}".replace("%", " %")
        in_blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["in_proj_a"]}
        store_in_blocks(Qwen3_5MoeTextConfig(quantization_config=in_blocks), mixture)
        shares["in FP8"] = f"{float8.share_in_float8(mixture, 16384):.0%}".replace("%", " %")
        dense = f"{shares['0.8B']} at 0.8B, {shares['9B']} at 4B and 9B, {shares['27B']} at 27B."
        mixed = f"so it is {shares['35B-A3B']} for a mixture of 35B-A3B. For its checkpoint in FP8, it is {shares['in FP8']}."
        for text in (dense, mixed):
            self.assertTrue(text in page, text)


class TrainingTest(Float8TestCase):
    @parameterized.expand(FAMILIES)
    def test_gradients(self, family):
        model = make(family)
        plain = result(model)
        self.assertNotIn("linear_float8", implementations_used())
        use_float8(model, supported)
        with (
            mock.patch.object(projections, "fused_linears", wraps=projections.fused_linears) as shared,
            mock.patch.object(float8_marks.logger, "warning_once") as warn,
        ):
            found = result(model)
        warn.assert_not_called()
        self.assertEqual(implementations_used()["linear_float8"], ["fused"])
        self.assertNotIn("linear_float8", implementations_used(isolating=True))
        self.assert_differs(found, plain)
        self.assertNotEqual(found[0], plain[0])
        self.assertLess((found[0] - plain[0]).abs(), 0.01)
        self.assertEqual({g.dtype for g in found[1].values()}, {torch.float32})
        # All chosen layers are in float8, and layers with one input share a call.
        calls = [
            [p.weight for p in call.args[1] if isinstance(p.weight, Float8Weight)] for call in shared.call_args_list
        ]
        with mock.patch.object(projections, "is_in_float8", wraps=projections.is_in_float8) as read:
            result(model)
        asked = {id(call.args[0]) for call in read.call_args_list}
        self.assertEqual(asked, {id(model.get_submodule(name)) for name in chosen(model)})
        self.assertEqual(len(calls), 4)
        self.assertTrue(all(len(weights) > 1 for weights in calls))
        # Off, the model is as before.
        use_float8(model, lambda *_: False)
        self.assertTrue(same(result(model), plain))

    @parameterized.expand([("qwen3_next", torch.bfloat16, None), ("qwen3_5", torch.float32, torch.bfloat16),
                           ("qwen3_5", torch.float32, torch.float16)])  # fmt: skip
    def test_half_precision(self, family, dtype, autocast):
        """Products of numbers up to 448 are not computed in float16, where their sums would overflow."""
        model = make(family).to(dtype)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            plain = result(model)
            use_float8(model, supported)
            found = result(model)
            self.assertTrue(same(result(model), found))
        self.assert_differs(found, plain)
        self.assertEqual(implementations_used()["linear_float8"], ["fused"])
        for name, gradient in found[1].items():
            self.assertEqual(gradient.dtype, model.get_parameter(name).dtype)

    def test_evaluation_is_that_of_the_plain_model(self):
        model, batch = make(), packed_batch(documents())
        plain = model.eval()(**batch).logits
        use_float8(model, supported)
        self.assertTrue(torch.equal(model.eval()(**batch).logits, plain))
        self.assertNotIn("linear_float8", implementations_used())
        with torch.no_grad():
            self.assertTrue(torch.equal(model(**batch).logits, plain))
            prompt = documents()[0][None]
            generated = model.generate(prompt, max_new_tokens=4, do_sample=False)
        self.assertFalse(torch.equal(model.train()(**batch, skip_logits=False).logits, plain))
        use_float8(model, lambda *_: False)
        self.assertTrue(torch.equal(model.eval().generate(prompt, max_new_tokens=4, do_sample=False), generated))

    def test_compiled_layers_are_those_of_the_plain_model(self):
        layer, rows = use_float8(make(), supported).model.layers[0].mlp.up_proj, torch.empty(1, 5, 32)
        self.assertTrue(float8_marks.is_in_float8(layer, rows))
        with mock.patch("torch.compiler.is_compiling", lambda: True):
            self.assertFalse(float8_marks.is_in_float8(layer, rows))

    @parameterized.expand([("qwen3_5", True), ("qwen3_next", False)])
    def test_checkpointing_gives_the_same_bits(self, family, reentrant):
        model = use_float8(make(family), supported)
        expected = result(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        self.assertTrue(same(result(model), expected))

    def test_steps_of_an_optimizer(self):
        """Weights are cast again after each change, so training goes on as without float8."""
        losses = []
        for function in (lambda *_: False, supported):
            model = use_float8(make(), function)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses.append([])
            for _ in range(4):
                loss = model(**packed_batch(documents()), use_cache=False).loss
                losses[-1].append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        for plain, found in zip(*losses, strict=True):
            self.assertLess(abs(plain - found), 0.03 * plain)
        self.assertLess(losses[1][-1], losses[1][0] - 0.4)

    @parameterized.expand([("forward_hook",), ("own_forward",), ("own_class",)])
    def test_layers_that_something_hangs_on(self, kind):
        """They are called in the dtype of the model, with their hooks, and the log names them."""
        model, seen = use_float8(make(), supported), []

        class Own(torch.nn.Linear):
            def forward(self, x):
                seen.append(x)
                return super().forward(x)

        for name in ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"):
            layer = model.get_submodule(name)
            if kind == "forward_hook":
                layer.register_forward_hook(lambda *_: seen.append(1))
            elif kind == "own_forward":
                layer.forward = lambda x, layer=layer: seen.append(1) or torch.nn.functional.linear(x, layer.weight)
            else:
                layer.__class__ = Own
        with mock.patch.object(float8_marks.logger, "warning_once") as warn:
            found = result(model)
        self.assertEqual(len(seen), 2)
        self.assertTrue(warn.call_args_list)
        for call in warn.call_args_list:
            self.assertRegex(
                call.args[0], f"use_float8: a {'Own' if kind == 'own_class' else 'Linear'} runs in its own"
            )
        # They get the same numbers as layers that were not chosen.
        other = use_float8(make(), lambda m, n: supported(m, n) and not n.endswith(("0.mlp.down_proj", "q_proj")))
        self.assertTrue(same(found, result(other)))

    @parameterized.expand([("hooked_norm",), ("own_activation",)])
    def test_layers_after_a_changed_module(self, kind):
        """They stay in float8 if the preceding op cannot compute them."""
        model = use_float8(make(), supported)
        if kind == "hooked_norm":
            model.model.layers[0].linear_attn.norm.register_forward_hook(lambda *_: None)
        else:
            for layer in model.model.layers:
                layer.mlp.act_fn = torch.nn.GELU()
        with mock.patch.object(Float8, "forward", autospec=True, side_effect=Float8.forward) as forward:
            result(model)
        weights = {id(weight.values) for call in forward.call_args_list for weight in call.args[0].weights}
        self.assertEqual(weights, {id(model.get_submodule(name).weight) for name in chosen(model)})

    def test_layers_that_peft_wraps_to_save_them_are_named(self):
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["up_proj"])
        model = get_peft_model(use_float8(make(), supported), lora).train()
        self.enterContext(mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: True))
        wrapper = next(m for name, m in model.named_modules() if name.endswith("up_proj"))
        with mock.patch.object(float8_marks.logger, "warning_once") as warn:
            self.assertIsNone(projections.terms_of(wrapper, torch.zeros(1, 3, wrapper.in_features)))
        self.assertIn("a ModulesToSaveWrapper runs in its own dtype", warn.call_args.args[0])


class KeptTest(Float8TestCase):
    @parameterized.expand(
        [
            ("deepcopy", copy.deepcopy),
            ("pickle", lambda model: pickle.loads(pickle.dumps(model))),
        ]
    )
    def test_copies_keep_the_setting(self, _, duplicate):
        model = use_float8(make(), supported)
        other = duplicate(model)
        self.assertEqual(chosen(other), chosen(model))
        self.assertTrue(same(result(other), result(model)))
        # Each has its own.
        use_float8(other, lambda *_: False)
        self.assertEqual(chosen(other), set())
        self.assertTrue(chosen(model))

    def test_saved_files_are_those_of_the_plain_model(self):
        plain, model = make(), use_float8(make(), supported)
        a, b = plain.state_dict(), model.state_dict()
        self.assertEqual(a.keys(), b.keys())
        self.assertTrue(all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a))
        self.assertEqual(plain.config.to_dict(), model.config.to_dict())
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = Qwen3_5ForCausalLM.from_pretrained(folder).train()
        self.assertEqual(chosen(loaded), set())
        self.assertTrue(same(result(loaded), result(plain)))

    def test_recorded_graphs_are_dropped(self):
        """Graphs that were recorded before hold the earlier products."""
        model = make()
        use_cuda_graphs(model, max_length=64)
        before = model.model.layer_graphs
        self.assertIsNotNone(before)
        use_float8(model, supported)
        after = model.model.layer_graphs
        self.assertIsNot(after, before)
        self.assertEqual(after.max_length, 64)


class LeakTest(Float8TestCase):
    """Documents of a row do not change each other, bit for bit, with as many layers in float8 as possible."""

    def run_row(self, model, embeddings, targets):
        embeddings = embeddings.clone().requires_grad_()
        batch = packed_batch(documents())
        batch = {name: value for name, value in batch.items() if name not in ("input_ids", "labels")}
        logits = model(inputs_embeds=embeddings, **batch, use_cache=False).logits
        (gradient,) = torch.autograd.grad((logits * targets).sum(), embeddings)
        return [x.detach()[0].split(LENGTHS) for x in (logits, gradient)]

    @parameterized.expand([("bfloat16",), ("qwen3_next",)])
    def test_documents_stay_apart(self, name):
        model = use_float8(make("qwen3_5" if name == "bfloat16" else name), supported)
        if name == "qwen3_next":
            # Grouped products of experts round by the shapes of the groups.
            model.set_experts_implementation("batched_mm")
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        model, generator = model.to(dtype), torch.Generator().manual_seed(0)

        def draw(width):
            return torch.randn(1, sum(LENGTHS), width, generator=generator).to(dtype)

        embeddings, others, targets = draw(32), draw(32), draw(97)
        before = self.run_row(model, embeddings, targets)
        self.assertIn("linear_float8", implementations_used())
        for document, place in enumerate(torch.arange(sum(LENGTHS)).split(LENGTHS)):
            for how in ("replaced", "larger", "nan", "other_gradients"):
                changed, wanted = embeddings.clone(), targets.clone()
                if how == "replaced":
                    changed[:, place] = others[:, place]
                elif how == "larger":
                    changed[:, place] *= 1000
                elif how == "nan":
                    changed[:, place[len(place) // 2]] = float("nan")
                else:
                    wanted[:, place] *= 1000
                after = self.run_row(model, changed, wanted)
                for direction, (a, b) in enumerate(zip(before, after, strict=True)):
                    for other in range(len(LENGTHS)):
                        same_bits = torch.equal(a[other], b[other])
                        # The logits do not depend on gradients.
                        expected = other != document or (how == "other_gradients" and direction == 0)
                        self.assertEqual(same_bits, expected, (how, document, other, direction))


TARGETS = ["in_proj_qkv", "out_proj", "q_proj", "v_proj", "up_proj", "down_proj"]


def adapted(model, **options):
    return randomized(get_peft_model(model, lora(target_modules=TARGETS, **options)))


class AdaptersTest(Float8TestCase):
    def test_gradients_of_adapters(self):
        model = adapted(make())
        plain = result(model)
        use_float8(model, supported)
        found = result(model)
        self.assertEqual(implementations_used()["linear_float8_lora"], ["fused"])
        self.assertNotIn("linear_lora", implementations_used())
        self.assert_differs(found, plain)
        self.assertTrue(all("lora_" in name for name in found[1]))
        for reentrant in (True, False):
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            self.assertTrue(same(result(model), found))

    def test_disabled_and_merged_adapters(self):
        """Without active adapters, the layers are in float8 as those of the base model."""
        base = use_float8(make(), supported)
        batch = packed_batch(documents())
        expected = base(**batch, skip_logits=False).logits
        model = adapted(copy.deepcopy(base))
        with model.disable_adapter():
            self.assertTrue(torch.equal(model(**batch, skip_logits=False).logits, expected))
        active = model(**batch, skip_logits=False).logits
        self.assertFalse(torch.equal(active, expected))
        # Merged into the weights, for good.
        merged = model.merge_and_unload().train()
        self.assertEqual(chosen(merged), chosen(base))
        self.assertLess((merged(**batch, skip_logits=False).logits - active).norm() / active.norm(), 0.1)

    @unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
    def test_layers_in_4_bit(self):
        """They are dequantized to the dtype of the model, and the log names them."""
        set_seed(0)
        # On a CPU, bitsandbytes is wrong for rows that are no multiples of 64.
        options = config(Qwen3_5TextConfig, LAYERS[1:3], hidden_size=64, intermediate_size=64, head_dim=16)
        with tempfile.TemporaryDirectory() as folder:
            Qwen3_5ForCausalLM(options).save_pretrained(folder)
            in_4_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
            model = Qwen3_5ForCausalLM.from_pretrained(folder, quantization_config=in_4_bit, dtype=torch.bfloat16)
        model = adapted(model).train()
        plain = result(model)
        use_float8(model, lambda module, name: supported(module, name) and type(module) is not torch.nn.Linear)
        self.assertEqual(len(chosen(model)), 13)
        with mock.patch.object(float8_marks.logger, "warning_once") as warn:
            found = result(model)
        # Fused layers and those of bitsandbytes round to bfloat16 at other places.
        self.assertLess(total_relative_error(found[1], plain[1]), 0.03)
        self.assertNotIn("linear_float8", implementations_used())
        self.assertNotIn("linear_float8_lora", implementations_used())
        self.assertIn("a Linear4bit runs in its own dtype", warn.call_args.args[0])


class KernelsTest(InterpretedKernelsTest, Float8TestCase):
    """The ops around the layers run in kernels, and compute some of the layers."""

    def setUp(self):
        InterpretedKernelsTest.setUp(self)
        Float8TestCase.setUp(self)

    @parameterized.expand(
        [
            ("plain", lambda model: model),
            ("adapters_and_weights", lambda model: adapted(model).requires_grad_()),
        ]
    )
    def test_gradients_equal_those_of_the_torch_forms(self, _, change):
        model, texts = use_float8(change(make()), supported), documents(lengths=(4, 1))
        with mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: False):
            expected = result(model, texts)
        found = result(model, texts)
        self.assertLess(total_relative_error(found[1], expected[1]), 5e-3)
        self.assertEqual(found[1].keys(), expected[1].keys())
        ran = {op for op, names in implementations_used().items() if "triton" in names}
        self.assertLessEqual({"gated_rms_norm_linear", "sigmoid_gate_linear", "swiglu_linear"}, ran)
        # Inputs that are computed again for the adapters, not saved.
        with mock.patch("transformers_packed.ops.recipes.WORTH_RECOMPUTING", 1):
            again = result(model, texts)
        self.assertTrue(same(again, found))

    def test_dropout_of_adapters(self):
        """The layers are computed again in backward, with the same dropout."""
        model, texts = adapted(make(), lora_dropout=0.2), documents(lengths=(4, 1))
        model.enable_input_require_grads()
        set_seed(1)
        plain = result(model, texts)
        use_float8(model, supported)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        set_seed(1)
        self.assert_differs(result(model, texts), plain)
        self.assertEqual(implementations_used()["linear_float8_lora"], ["fused"])
