"""The experts of our models: which implementation runs, and how other documents of a row affect a document."""

import copy
import tempfile
import unittest
from inspect import signature
from pathlib import Path
from unittest import mock

import torch
from mixins.model import packed_batch, relative_error
from mixins.patch import COMPOSITE, CONFIGS, builtin_model, documents
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from peft.utils import ModulesToSaveWrapper
from transformers import GptOssConfig, GptOssForCausalLM, set_seed
from transformers.integrations import finegrained_fp8, moe

from transformers_packed import patch_model, unpatch_model
from transformers_packed.models import experts as our_experts
from transformers_packed.models.qwen3_5_moe import modeling_qwen3_5_moe as packed_qwen3_5_moe
from transformers_packed.models.qwen3_next import modeling_qwen3_next as packed_qwen3_next


PACKED = {
    "qwen3_next": packed_qwen3_next.Qwen3NextForCausalLM,
    "qwen3_5_moe": packed_qwen3_5_moe.Qwen3_5MoeForCausalLM,
}
OURS = "transformers_packed"
LAYERS = 2


def packed_model(family, attention="sdpa", **config):
    set_seed(0)
    config = copy.deepcopy(CONFIGS[family]).to_dict() | config
    return PACKED[family]._from_config(type(CONFIGS[family])(**config), attn_implementation=attention).train()


class MoeTestCase(unittest.TestCase):
    def setUp(self):
        """Count the calls of our op and of the functions of Transformers."""
        self.calls = []

        def counted(name, function):
            def call(*args, **kwargs):
                self.calls.append(f"{name}_lora" if kwargs.get("gate_up_adapter") is not None else name)
                return function(*args, **kwargs)

            return call

        self.enterContext(mock.patch.object(our_experts, "experts", counted(OURS, our_experts.experts)))
        grouped = counted("grouped_mm", moe.grouped_mm_experts_forward)
        self.enterContext(mock.patch.object(moe, "grouped_mm_experts_forward", grouped))
        batched = counted("batched_mm", moe.batched_mm_experts_forward)
        functions = {"grouped_mm": grouped, "batched_mm": batched}
        self.enterContext(mock.patch.dict(type(moe.ALL_EXPERTS_FUNCTIONS)._global_mapping, functions))

    def ran(self, model):
        """The implementations that ran in a forward, one per layer."""
        self.calls.clear()
        with torch.no_grad():
            model(**packed_batch(documents()))
        return list(self.calls)


class ChoiceTest(MoeTestCase):
    @parameterized.expand([("qwen3_next", "grouped_mm"), ("qwen3_5_moe", "batched_mm"), ("qwen3_5_moe", "eager")])
    def test_the_choice_of_the_user(self, family, name):
        expected = [] if name == "eager" else [name] * LAYERS
        model = packed_model(family)
        self.assertEqual(model.config._experts_implementation, OURS)
        self.assertEqual(self.ran(model), [OURS] * LAYERS)
        model.set_experts_implementation(name)
        self.assertEqual(self.ran(model), expected)
        model.set_experts_implementation(OURS)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            self.assertNotIn(OURS, Path(folder, "config.json").read_text(encoding="utf-8"))
            loaded = PACKED[family].from_pretrained(folder, experts_implementation=name)
            self.assertEqual(self.ran(loaded), expected)
            self.assertEqual(self.ran(PACKED[family].from_pretrained(folder)), [OURS] * LAYERS)

    @parameterized.expand([("qwen3_next", None), ("qwen3_5_moe", "batched_mm"), ("qwen3_5_moe", "eager")])
    def test_patch_and_unpatch(self, family, chosen):
        model, other = builtin_model(family), builtin_model(family)
        self.assertEqual(model.config._experts_implementation, "grouped_mm")
        if chosen:
            model.set_experts_implementation(chosen)
        expected = [] if chosen == "eager" else [chosen or OURS] * LAYERS
        # Patching again changes nothing.
        for _ in range(2):
            self.assertEqual(self.ran(patch_model(model)), expected)
        self.assertEqual(other.config._experts_implementation, "grouped_mm")
        unpatch_model(model)
        self.assertEqual(model.config._experts_implementation, chosen or "grouped_mm")
        self.calls.clear()
        model(input_ids=documents()[1][None])
        self.assertEqual(self.calls, expected if chosen else ["grouped_mm"] * LAYERS)

    def test_patch_keeps_the_default_of_transformers_in_our_classes(self):
        for model in (packed_model("qwen3_next"), patch_model(builtin_model("qwen3_5_moe"))):
            model.set_experts_implementation("grouped_mm")
            self.assertEqual(self.ran(patch_model(model)), ["grouped_mm"] * LAYERS)

    @unittest.skipUnless("expert_dtype" in signature(finegrained_fp8.FP8Experts).parameters, "needs experts in 4 bit")
    def test_experts_of_an_fp8_checkpoint(self):
        """Weights of 4 bit with a scale for 32 of them run as with Transformers' default."""
        config = packed_model("qwen3_next").config
        cls = moe.use_experts_implementation(
            finegrained_fp8.FP8Experts, experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
        )
        x, index = torch.randn(3, config.hidden_size), torch.tensor([[0], [1], [1]])
        for kind in ("fp8", "fp4"):
            layer = cls(config, block_size=(16, 16), expert_dtype=kind).requires_grad_(False)
            for parameter in layer.parameters():
                parameter.zero_()
            with mock.patch.object(our_experts, "fp8_grouped_mm_experts_forward") as theirs:
                layer(x, index, torch.ones(3, 1))
            self.assertEqual(theirs.called, kind == "fp4")
            self.assertEqual(our_experts.isolates(layer), kind == "fp8")

    def test_experts_without_a_gate(self):
        """The experts of another model, which gets the name of our implementation, have other weights."""
        layer = packed_model("qwen3_next").model.layers[0].mlp.experts
        width = layer.down_proj.shape[2]
        layer.has_gate, layer.up_proj = False, torch.nn.Parameter(layer.gate_up_proj.data[:, :width].contiguous())
        del layer.gate_up_proj
        x, index = torch.randn(3, layer.up_proj.shape[2]), torch.tensor([[0], [1], [1]])
        output = layer(x, index, torch.ones(3, 1))
        self.assertEqual(self.calls, ["grouped_mm"])
        for token, expert in enumerate(index[:, 0].tolist()):
            expected = layer.down_proj[expert] @ layer.act_fn(layer.up_proj[expert] @ x[token])
            self.assertLess(relative_error(output[token], expected), 1e-5)

    def test_modules_in_place_of_the_experts_do_not_isolate(self):
        layer = packed_model("qwen3_next").model.layers[0].mlp.experts
        self.assertTrue(our_experts.isolates(layer))
        wrapper = ModulesToSaveWrapper(layer, "default")
        for module in (wrapper, torch.nn.ModuleList([layer]), torch.compile(layer)):
            self.assertFalse(our_experts.isolates(module), type(module).__name__)

    def test_devices_that_have_no_kernels(self):
        """The reference of the op runs on CPUs only, because it is slow elsewhere."""
        layer = packed_model("qwen3_next").model.layers[0].mlp.experts
        self.assertTrue(our_experts.isolates(layer))
        self.assertFalse(our_experts.isolates(layer.to("meta")))

    def test_experts_without_an_activation_of_their_own(self):
        """The name is in the table of all families."""
        config = GptOssConfig(
            hidden_size=16, intermediate_size=8, num_local_experts=4, num_hidden_layers=1, vocab_size=9, head_dim=4,
            num_attention_heads=4, num_key_value_heads=4,
        )  # fmt: skip
        model = GptOssForCausalLM(config).eval()
        ids = torch.arange(9)[None]
        expected = model(input_ids=ids).logits
        model.set_experts_implementation(OURS)
        self.assertLess(relative_error(model(input_ids=ids).logits, expected), 1e-5)

    def test_with_images(self):
        model = builtin_model("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", COMPOSITE["qwen3_5_moe"])
        patch_model(model)
        self.assertEqual(self.ran(model), [OURS] * LAYERS)
        unpatch_model(model)
        self.assertEqual(model.config.get_text_config()._experts_implementation, "grouped_mm")


def run_row(model, row, upstream):
    """The logits, and the gradients at the embeddings, of a packed row of token sequences."""
    batch = packed_batch(row)
    batch.pop("labels")
    embeddings = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings, **batch, use_cache=False).logits
    return logits.detach()[0], torch.autograd.grad(logits, embeddings, upstream)[0][0]


class CorrectnessTest(MoeTestCase):
    @parameterized.expand([("qwen3_next", "eager", torch.float32), ("qwen3_5_moe", "sdpa", torch.bfloat16)])
    def test_other_documents_change_no_bit(self, family, attention, dtype):
        """Other tokens choose other experts, so the experts multiply other numbers of rows."""
        model = packed_model(family, attention, initializer_range=0.2, num_experts=4).to(dtype)
        lengths, generator = (20, 33, 1, 12), torch.Generator().manual_seed(1)
        row = [torch.randint(1, 90, (n,), generator=generator) for n in lengths]
        upstream = torch.randn(1, sum(lengths), 97, generator=generator).to(dtype)
        expected = [x.split(lengths) for x in run_row(model, row, upstream)]
        for kept in range(len(row)):
            for case in range(3):
                changed = [torch.randint(1, 90, (n,), generator=generator) for n in lengths]
                if case == 2:
                    # All other tokens choose the same experts.
                    changed = [torch.full_like(document, 7) for document in changed]
                changed[kept] = row[kept]
                found = [x.split(lengths) for x in run_row(model, changed, upstream)]
                for a, b in zip(found, expected, strict=True):
                    self.assertTrue(torch.equal(a[kept], b[kept]), (kept, case))
                    other = kept - 1
                    self.assertFalse(torch.equal(a[other], b[other]))

    def test_weights_that_are_not_normalized(self):
        stock = builtin_model(
            "qwen3_next",
            config=type(CONFIGS["qwen3_next"])(**{**CONFIGS["qwen3_next"].to_dict(), "norm_topk_prob": False}),
        )
        self.assertFalse(stock.model.layers[0].mlp.gate.norm_topk_prob)
        model, ids = patch_model(copy.deepcopy(stock)), documents()[-1][None]
        self.assertLess(relative_error(model(input_ids=ids).logits, stock(input_ids=ids).logits), 1e-5)


class LoraTest(MoeTestCase):
    def adapted(self, family, attention="sdpa", rank=4):
        """A stock model and a patched one with the same adapters of all experts."""
        stock = builtin_model(family)
        stock.set_attn_implementation(attention)
        config = LoraConfig(
            r=rank, lora_alpha=8, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
        )
        stock = get_peft_model(stock, config)
        for name, parameter in stock.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        return stock, patch_model(copy.deepcopy(stock))

    def test_disabled_and_merged_adapters(self):
        stock, model = self.adapted("qwen3_5_moe")
        ids = documents()[-1][None]
        expected = stock(input_ids=ids).logits
        with stock.disable_adapter(), model.disable_adapter():
            plain = stock(input_ids=ids).logits
            self.assertGreater(relative_error(plain, expected), 1e-3)
            self.assertLess(relative_error(model(input_ids=ids).logits, plain), 1e-5)
        model.merge_adapter()
        self.assertLess(relative_error(model(input_ids=ids).logits, expected), 1e-5)
        model.unmerge_adapter()
        self.assertLess(relative_error(model(input_ids=ids).logits, expected), 1e-5)

    def test_hooks_on_the_wrapped_experts_run(self):
        stock, model = self.adapted("qwen3_5_moe")
        ids = documents()[-1][None]
        for target in ("experts", "experts.base_layer", "experts.base_layer.base_layer"):
            outputs = []
            for one in (stock, model):
                module = one.get_base_model().model.layers[1].mlp.get_submodule(target)
                handle = module.register_forward_hook(lambda module, args, output: 2 * output)
                outputs.append(one(input_ids=ids).logits)
                handle.remove()
            self.assertLess(relative_error(outputs[1], outputs[0]), 1e-5, target)


class TouchedTest(MoeTestCase):
    def test_hooks_run(self):
        model, batch = packed_model("qwen3_5_moe"), packed_batch(documents())
        expected = model(**batch, skip_logits=False).logits
        for name in ("gate", "experts", "experts.act_fn"):
            ran = []
            module = model.model.layers[1].mlp.get_submodule(name)
            handles = [
                module.register_forward_pre_hook(lambda module, args, ran=ran: ran.append("before")),
                module.register_forward_hook(lambda module, args, output, ran=ran: ran.append("after")),
            ]
            self.calls.clear()
            found = model(**batch, skip_logits=False).logits
            # Each expert of Transformers' eager loop would call the activation. Its grouped products call it once.
            self.assertEqual(ran, ["before", "after"], name)
            self.assertEqual(self.calls, [OURS, "grouped_mm" if name == "experts.act_fn" else OURS])
            self.assertLess(relative_error(found, expected), 1e-5)
            for handle in handles:
                handle.remove()
        self.assertEqual(self.ran(model), [OURS] * LAYERS)

    def test_a_hook_that_changes_the_router(self):
        """The experts use the weights that they get."""
        stock = builtin_model("qwen3_5_moe")
        model, ids = patch_model(copy.deepcopy(stock)), documents()[-1][None]
        plain = model(input_ids=ids).logits
        for one in (stock, model):
            one.model.layers[0].mlp.gate.register_forward_hook(
                lambda module, args, output: (output[0], output[1] * 0.5, (output[2] + 1) % 8)
            )
        found = model(input_ids=ids).logits
        self.assertLess(relative_error(found, stock(input_ids=ids).logits), 1e-5)
        self.assertGreater(relative_error(found, plain), 1e-4)

    def test_other_activations_and_gates(self):
        """They run in Transformers' function, layer by layer."""

        class Other(packed_qwen3_5_moe.builtin.Qwen3_5MoeExperts):
            def _apply_gate(self, gate_up):
                gate, up = gate_up.chunk(2, -1)
                return torch.tanh(gate) * up

        for change in (
            lambda experts: setattr(experts, "act_fn", torch.nn.GELU()),
            lambda experts: setattr(experts.act_fn, "forward", torch.tanh),
            lambda experts: setattr(experts, "__class__", Other),
        ):
            stock = builtin_model("qwen3_5_moe")
            model, ids = patch_model(copy.deepcopy(stock)), documents()[-1][None]
            for one in (stock, model):
                change(one.model.layers[0].mlp.experts)
            self.calls.clear()
            found = model(input_ids=ids).logits
            self.assertEqual(self.calls, ["grouped_mm", OURS])
            self.assertLess(relative_error(found, stock(input_ids=ids).logits), 1e-5)
