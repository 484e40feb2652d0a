"""Experts in host memory: training, moves, files and refusals, on a CPU that takes copies of them as a GPU does."""

import copy
import tempfile
import unittest
from importlib.util import find_spec
from unittest import mock

import torch
from common.blocks import stored_and_plain
from common.late_experts import copied_on_a_cpu, without_memory
from common.processes import run_processes
from common.shown import shows_for_each
from mixins.lora import randomized
from mixins.model import packed_batch
from mixins.on_host import ROWS, OnHostTestCase, ddp_steps, four_layers, gradients, merges, run
from mixins.patch import builtin_model
from ops.test_grouped_dequantization import random_groups
from parameterized import parameterized
from peft import LoraConfig, PeftModel, get_peft_model
from torch.multiprocessing.reductions import StorageWeakRef

from transformers_packed import keep_experts_in_host_memory, patch_model, unpatch_model, use_cuda_graphs
from transformers_packed.models import cuda_graphs, host_parameters
from transformers_packed.models import experts as our_experts
from transformers_packed.models.checkpoint_formats import Blocks, PackedWeight
from transformers_packed.models.experts import is_known
from transformers_packed.models.families import EXPERT_WEIGHTS
from transformers_packed.models.host_experts import bytes_in_host_memory, names_in_host_memory
from transformers_packed.models.host_parameters import WEIGHTS, HostWeight, host_of, loading_to_host, move_to_host
from transformers_packed.models.quantized_weights import ExpertsIn4bit, set_weights
from transformers_packed.training.restore import in_dtype


LAYERS = ["q_proj", "o_proj", "out_proj"]
KINDS = ["float32", "bfloat16", "nvfp4", "awq", "fp8", "nf4"]
PACKED = {
    "nvfp4": ("nvfp4", {"divided": True, "parts": 2}),
    "awq": ("int4", {"zero": True, "rounded": torch.float16}),
    "w4a16": ("int4", {}),
    "w8a16": ("int8", {}),
    "gptq_order": ("int4", {"zero": True, "rounded": torch.float16, "ordered": True, "parts": 2}),
}


def experts_of(model):
    return [module for module in model.modules() if is_known(module)]


def mixture(family="qwen3_5_moe", kind="float32", adapters=True, experts=True):
    """A model with experts of a kind, and adapters on layers and experts."""
    if kind == "nf4" and not find_spec("bitsandbytes"):
        raise unittest.SkipTest("needs bitsandbytes")
    model = four_layers(family)
    if kind == "fp8":
        model, _ = stored_and_plain(model, (16, 16))
    for module in experts_of(model):
        for name in WEIGHTS:
            weight = module._parameters[name]
            if kind == "bfloat16":
                weight.data = weight.data.bfloat16()
            elif kind in PACKED:
                code, options = PACKED[kind]
                stored = PackedWeight(random_groups(code, weight.shape, 16, **options), torch.float32)
                module._parameters[name] = torch.nn.Parameter(stored, requires_grad=False)
            elif kind == "fp8_rows":
                weight = weight.detach()
                scale = weight.abs().amax(-1, keepdim=True) / 448
                values = (weight / scale).to(torch.float8_e4m3fn)
                stored = PackedWeight(Blocks(values, scale, (1, weight.shape[-1]), torch.float32), torch.float32)
                module._parameters[name] = torch.nn.Parameter(stored, requires_grad=False)
            elif kind == "nf4":
                set_weights(module, name, ExpertsIn4bit.of(weight.data, "nf4", True))
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=LAYERS, target_parameters=list(EXPERT_WEIGHTS) if experts else None)
    return randomized(get_peft_model(model, config)) if adapters else model.requires_grad_(False)


class TrainingTest(OnHostTestCase):
    @shows_for_each(
        [(kind, "qwen3_5_moe", again) for kind in KINDS for again in (False, True)]
        + [(kind, "qwen3_5_moe", False) for kind in ("fp8_rows", "w4a16", "w8a16", "gptq_order")]
        + [("float32", family, True) for family in ("qwen3_next", "kimi_linear", "qwen4_exp")],
        "experts in host memory",
    )
    def test_changes_no_bit(self, kind, family, checkpointing):
        model = mixture(family, kind)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        other = copy.deepcopy(model)
        expected = run(model)
        self.assertTrue(any("experts" in str(name) and "lora_A" in str(name) for name in expected))
        self.assertTrue(any("q_proj" in str(name) for name in expected))
        self.assertIs(keep_experts_in_host_memory(other), other)
        # Where the products are those of the CPU, nothing is copied.
        self.assert_same(gradients(other, ROWS[0]), gradients(model, ROWS[0]))
        with copied_on_a_cpu() as copies:
            self.assert_same(run(other), expected)
            self.assertGreaterEqual(copies.copies.copies, 2 * len(experts_of(other)))
            misses = copies.misses
            gradients(other, ROWS[0])
            self.assertLessEqual(copies.misses - misses, 2)
            misses = copies.misses
            gradients(other, ROWS[0])
            self.assertEqual(copies.misses, misses)

    @parameterized.expand([("float32",), ("nvfp4",), ("nf4",)])
    def test_grouped_mm(self, kind):
        """Where the op does not run, Transformers' function reads copies, and saves none for backward."""
        model = mixture(kind=kind, experts=False)
        other = keep_experts_in_host_memory(copy.deepcopy(model))
        self.enterContext(mock.patch.object(our_experts, "_weights_for_op", lambda *_: "a reason"))
        expected = run(model)
        with copied_on_a_cpu() as copies:
            self.assert_same(run(other), expected)
            loss = other(**packed_batch(ROWS[0], "cu_seqlens"), use_cache=False).loss
            buffers = [StorageWeakRef(x.untyped_storage()) for x in copies.layers[-1].buffers.values()]
            without_memory(copies)
            self.assertTrue(all(x.expired() for x in buffers))
            loss.backward()
        self.assertTrue(any("q_proj" in str(name) for name in expected))

    @parameterized.expand([("bfloat16",), ("fp8",)])
    def test_the_check_computes_in_another_dtype(self, kind):
        """Afterwards, the experts and their bytes are as before, and so are the parameters."""
        model = keep_experts_in_host_memory(mixture(kind=kind))
        with copied_on_a_cpu():
            expected, number = gradients(model, ROWS[0]), bytes_in_host_memory(model)
            before = {name: (x, x.dtype) for name, x in model.named_parameters()}
            with in_dtype(model, torch.float64), torch.no_grad():
                model(**packed_batch(ROWS[0], "cu_seqlens"), use_cache=False)
            self.assert_same(gradients(model, ROWS[0]), expected)
        self.assertEqual(bytes_in_host_memory(model), number)
        after = {name: (x, x.dtype) for name, x in model.named_parameters()}
        self.assertTrue(all(after[name][0] is x and after[name][1] == dtype for name, (x, dtype) in before.items()))

    def test_moved_in_inference_mode(self):
        model, row = mixture(), packed_batch(ROWS[0], "cu_seqlens")
        other = copy.deepcopy(model)
        with torch.inference_mode(), copied_on_a_cpu():
            keep_experts_in_host_memory(other)
            other(**row, use_cache=False)
        with copied_on_a_cpu():
            self.assert_same(gradients(other, ROWS[0]), gradients(model, ROWS[0]))

    def test_a_copy_of_the_model(self):
        model = keep_experts_in_host_memory(mixture(kind="nvfp4"))
        other = copy.deepcopy(model)
        with copied_on_a_cpu():
            self.assert_same(gradients(other, ROWS[0]), gradients(model, ROWS[0]))
        pages = [
            {x.data_ptr() for module in experts_of(one) for x in host_of(module).pages.values()}
            for one in (model, other)
        ]
        self.assertEqual([len(x) for x in pages], [8, 8])
        self.assertFalse(pages[0] & pages[1])

    def test_hooks_of_experts_run(self):
        model = mixture()
        seen, module = [], experts_of(model)[0]
        module.register_forward_hook(lambda *_: seen.append(1))
        expected = gradients(model, ROWS[0])
        keep_experts_in_host_memory(model)
        with (
            copied_on_a_cpu(),
            self.assertRaisesRegex(ValueError, "expected plain experts in host memory, got others: their"),
        ):
            # PEFT then adds its products to the weights.
            gradients(model, ROWS[0])
        plain = mixture(adapters=False)
        experts_of(plain)[0].register_forward_hook(lambda *_: seen.append(2))
        expected = plain(**packed_batch(ROWS[0], "cu_seqlens")).logits
        keep_experts_in_host_memory(plain)
        with copied_on_a_cpu():
            self.assertTrue(torch.equal(plain(**packed_batch(ROWS[0], "cu_seqlens")).logits, expected))
        self.assertEqual(seen[-2:], [2, 2])

    def test_weights_that_are_replaced(self):
        model = keep_experts_in_host_memory(mixture(adapters=False))
        # After several forwards, the copy of the first layer is there before the next one.
        row, module = packed_batch(ROWS[0], "cu_seqlens"), experts_of(model)[0]
        with copied_on_a_cpu() as copies:
            for _ in range(2):
                model(**row)
            self.check_replaced(model, module, "down_proj", copies)

    def test_two_processes(self):
        """They have the experts once, and train as with experts on the device."""
        ignored = self.check_two_processes(ddp)
        self.assertEqual(len(ignored), 8)
        self.assertTrue(all("experts.base_layer" in name for name in ignored))

    def test_two_processes_that_merge(self):
        """Each one merges its adapters into its own weights."""
        for same, near, shared in run_processes(merge, 2):
            self.assertTrue(same and near)
            self.assertGreater(shared[0], 0)
            self.assertEqual(shared[1], 0)


def ddp(on_host):
    return ddp_steps(mixture(), keep_experts_in_host_memory if on_host else None)


def merge():
    return merges(mixture(), keep_experts_in_host_memory)


class MovesTest(OnHostTestCase):
    @parameterized.expand([(kind,) for kind in KINDS])
    def test_stay_where_they_are(self, kind):
        """The meta device stands for a GPU."""
        model = mixture(kind=kind)
        before = {name: x.detach().clone() for name, x in model.named_parameters()}
        size = sum(
            x.nbytes
            for module in experts_of(model)
            for name in WEIGHTS
            for x in host_parameters._tensors_of(module, name)
        )
        keep_experts_in_host_memory(model)
        names = names_in_host_memory(model)
        self.assertEqual({name.rpartition(".")[2] for name in names} >= {*WEIGHTS}, True)
        # Each tensor begins at a multiple of some bytes.
        self.assertLessEqual(size, bytes_in_host_memory(model))
        self.assertLess(bytes_in_host_memory(model), size + 30 * 512 * len(experts_of(model)))
        self.check_moved_to_meta(model, names, before)
        self.assertTrue(all("lora_" in name for name, x in model.named_parameters() if x.requires_grad))
        self.check_kept_dtype(model)

    def test_no_tensor_is_there_twice(self):
        model = mixture(adapters=False)
        kept = [x.data_ptr() for m in experts_of(model) for x in m.parameters()]
        keep_experts_in_host_memory(model)
        self.assertFalse({*kept} & {x.data_ptr() for m in experts_of(model) for x in m.parameters()})
        pages = [host.pages for module in experts_of(model) if (host := host_of(module))]
        keep_experts_in_host_memory(model)
        self.assertTrue(all(a is b for a, b in zip(pages, [host_of(x).pages for x in experts_of(model)], strict=True)))

    def test_files(self):
        model = mixture(adapters=False)
        expected = {name: x.clone() for name, x in model.state_dict().items()}
        row = packed_batch(ROWS[0], "cu_seqlens")
        logits = model(**row).logits
        keep_experts_in_host_memory(model)
        self.assert_same(dict(model.state_dict()), expected)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = type(model).from_pretrained(folder)
        self.assertTrue(torch.equal(loaded(**row).logits, logits))
        self.assertEqual(names_in_host_memory(loaded), [])
        keep_experts_in_host_memory(loaded.requires_grad_(False)).load_state_dict(expected)

    def test_adapters_are_saved_and_merged(self):
        model = mixture()
        row = packed_batch(ROWS[0], "cu_seqlens")
        plain = copy.deepcopy(model)
        keep_experts_in_host_memory(model)
        with copied_on_a_cpu():
            before = model(**row).logits
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                base = keep_experts_in_host_memory(mixture(adapters=False))
                self.assertTrue(torch.equal(PeftModel.from_pretrained(base, folder).train()(**row).logits, before))
            model.merge_adapter()
            merged = model(**row).logits
            plain.merge_adapter()
            with mock.patch.object(host_parameters, "is_apart", lambda device: False):
                self.assertTrue(torch.equal(merged, plain(**row).logits))
            self.assertLess((merged - before).abs().max(), 1e-4)
            model.unmerge_adapter()
            self.assertLess((model(**row).logits - before).abs().max(), 1e-4)
            found = model.merge_and_unload()(**row).logits
        self.assertTrue(
            torch.equal(found, plain.merge_and_unload()(**row).logits) or (found - merged).abs().max() < 1e-5
        )

    @unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
    def test_quantized_while_they_are_loaded(self):
        from transformers_packed.models.quantization import nf4

        with tempfile.TemporaryDirectory() as folder:
            source = mixture(adapters=False)
            source.save_pretrained(folder)
            cls, options = type(source), {"quantization_config": nf4(torch.float32), "dtype": torch.float32}
            expected = cls.from_pretrained(folder, **options)
            with loading_to_host():
                model = cls.from_pretrained(folder, **options)
        self.assertTrue(all(host_of(module) is not None for module in experts_of(model)))
        # They are not yet in pages, but already stay.
        self.assertEqual(bytes_in_host_memory(model), 0)
        self.assertTrue(all(x.device.type == "cpu" for x in experts_of(model.to("cpu"))[0].parameters()))
        keep_experts_in_host_memory(model)
        self.assertGreater(bytes_in_host_memory(model), 0)
        row = packed_batch(ROWS[0], "cu_seqlens")
        with copied_on_a_cpu():
            self.assertTrue(torch.equal(model(**row).logits, expected(**row).logits))
        self.assertEqual(host_of(experts_of(expected)[0]), None)


class RefusalsTest(unittest.TestCase):
    def check(self, message, model):
        with self.assertRaisesRegex(ValueError, message):
            keep_experts_in_host_memory(model)
        self.assertEqual(names_in_host_memory(model), [])

    def test_models(self):
        self.check(
            "expected a .*MoE.* model with experts, got Qwen3_5ForCausalLM", patch_model(builtin_model("qwen3_5"))
        )
        stock = builtin_model("qwen3_5_moe").requires_grad_(False)
        self.check(
            'expected experts_implementation="transformers_packed" .* got grouped_mm. Load it .* patch_model first',
            stock,
        )
        model = patch_model(builtin_model("qwen3_5_moe"))
        self.check(
            "expected frozen weights in host memory, got a trained gate_up_proj. Call it after get_peft_model", model
        )
        model.requires_grad_(False)
        experts_of(model)[1].register_parameter("bias", torch.nn.Parameter(torch.zeros(1), False))
        with self.assertRaisesRegex(
            ValueError, "gate_up_proj and down_proj alone in host memory.* got bias, a Parameter"
        ):
            move_to_host(experts_of(model)[1])
        hooked = mixture(adapters=False)
        vars(experts_of(hooked)[0])["_hf_hook"] = None
        self.check("stay in host memory, got a device_map, by which accelerate", hooked)
        shared = mixture(adapters=False)
        experts_of(shared)[0].down_proj.device_mesh = None
        self.check("expected whole experts in host memory, got experts that several processes share", shared)
        with mock.patch("transformers_packed.models.host_experts.gathers_weights", lambda model: True):
            self.check("without FSDP and ZeRO-3 for experts in host memory, got a sharded", mixture(adapters=False))

    def test_what_comes_later(self):
        model = keep_experts_in_host_memory(mixture(adapters=False))
        row = packed_batch(ROWS[0], "cu_seqlens")
        with self.assertRaisesRegex(ValueError, "got weights in host memory, which stock classes do not copy"):
            unpatch_model(model)
        with copied_on_a_cpu():
            model.set_experts_implementation("grouped_mm")
            with self.assertRaisesRegex(
                ValueError, 'expected experts_implementation="transformers_packed" .* got .grouped_mm'
            ):
                model(**row)
            model.set_experts_implementation("transformers_packed")
            experts_of(model)[0].gate_up_proj.requires_grad_(True)
            message = (
                "weights in host memory that stay frozen, got .*Experts.gate_up_proj, which trains now. Freeze it"
            )
            with self.assertRaisesRegex(ValueError, message):
                model(**row)
            experts_of(model)[0].gate_up_proj.requires_grad_(False)
            model(**row)

    def test_graphs(self):
        model = keep_experts_in_host_memory(mixture())
        use_cuda_graphs(model, 64)
        (text,) = cuda_graphs.text_models_of(model)
        reason = cuda_graphs.reason_of_layers(text, torch.device("cpu"))
        self.assertEqual(reason, "weights are in host memory")

    def test_a_parameter_of_another_name_is_plain(self):
        weight = HostWeight(torch.ones(2), requires_grad=False)
        weight.data.add_(1)
        self.assertEqual(weight.tolist(), [2, 2])
