"""Weights of experts in 4 bit as tensors, on a CPU."""

import copy
import os
import pickle
import subprocess
import sys
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from parameterized import parameterized
from torch.distributed.fsdp import fully_shard
from transformers import set_seed

from transformers_packed.models.quantized_weights import ExpertsIn4bit, set_weights


HAS_BITSANDBYTES = find_spec("bitsandbytes") is not None
if HAS_BITSANDBYTES:
    from bitsandbytes.functional import dequantize_4bit


@unittest.skipUnless(HAS_BITSANDBYTES, "needs bitsandbytes")
class TensorTest(unittest.TestCase):
    def setUp(self):
        # bitsandbytes would compile its code for odd sizes.
        self.enterContext(torch.compiler.set_stance("force_eager"))

    def weights(self, shape=(5, 16, 24), double=True, dtype=torch.bfloat16):
        set_seed(0)
        return ExpertsIn4bit.of(torch.randn(shape).to(dtype), double=double)

    def module(self, weights):
        module = torch.nn.Module()
        set_weights(module, "down_proj", weights)
        return module

    @parameterized.expand([((5, 48, 32),), ((3, 7, 9),), ((6, 256, 160),), ((1, 1, 1),)])
    def test_some_experts(self, shape):
        for double in (False, True):
            weights = self.weights(shape, double)
            flat = copy.copy(weights.state)
            flat.shape = torch.Size([flat.shape.numel()])
            everything = dequantize_4bit(weights.packed, flat).view(shape)
            self.assertEqual(everything.dtype, torch.bfloat16)
            for first in range(shape[0]):
                for last in range(first + 1, shape[0] + 1):
                    self.assertTrue(torch.equal(weights.compute(first, last), everything[first:last]), (first, last))

    @parameterized.expand(
        {
            "deepcopy": copy.deepcopy,
            "pickle": lambda module: pickle.loads(pickle.dumps(module)),
            "dtype": lambda module: copy.deepcopy(module).to(torch.float32),
            "device": lambda module: copy.deepcopy(module).to("cpu"),
            "half": lambda module: copy.deepcopy(module).half(),
        }.items()
    )
    def test_copies_stay_in_4_bit(self, name, make):
        for double in (False, True):
            module = self.module(self.weights(double=double))
            copied = make(module)
            self.assertIs(type(copied.down_proj), ExpertsIn4bit)
            self.assertIsNot(copied.down_proj.packed, module.down_proj.packed)
            self.assertFalse(copied.down_proj.requires_grad)
            self.assertTrue(torch.equal(copied.down_proj.compute(), module.down_proj.compute()))
            dtype = {"dtype": torch.float32, "half": torch.float16}.get(name, torch.bfloat16)
            self.assertEqual((copied.down_proj.dtype, copied.down_proj.compute().dtype), (dtype, torch.bfloat16))
            self.assertEqual(copied.state_dict().keys(), module.state_dict().keys())
        self.assertEqual(self.module(self.weights()).to("meta").down_proj.packed.device.type, "meta")

    def test_other_operations_get_the_whole_tensor(self):
        weights = self.weights()
        self.assertTrue(torch.equal(weights + 1, weights.compute() + 1))
        self.assertTrue(torch.equal(weights[1], weights.compute()[1]))
        self.assertEqual((weights.float() @ torch.ones(24)).dtype, torch.float32)

    @parameterized.expand(
        {
            "add": lambda x: x.add_(1),
            "zero": lambda x: x.data.zero_(),
            "copy": lambda x: x.copy_(torch.zeros(x.shape)),
            "out": lambda x: torch.add(torch.ones(x.shape), 1, out=x),
            "index": lambda x: x.__setitem__(0, 0.0),
            "normal": lambda x: torch.nn.init.normal_(x),
            "foreach": lambda x: torch._foreach_add_([x], 1.0),
        }.items()
    )
    def test_changes_in_place_are_errors(self, _, change):
        weights = self.weights()
        before = weights.compute()
        with self.assertRaisesRegex(ValueError, "expected .*got (weights in fewer bits|others)"), torch.no_grad():
            change(weights)
        self.assertTrue(torch.equal(weights.compute(), before))

    def test_a_copy_of_the_same_values(self):
        weights = self.weights()
        self.assertIs(weights.copy_(weights.compute()), weights)

    @parameterized.expand(
        {
            "chunk": lambda x: torch.chunk(x, 2),
            "split": lambda x: x.split([2, 3]),
            "dimension": lambda x: x.split(8, 1),
        }.items()
    )
    def test_sharding_is_an_error(self, _, shard):
        with self.assertRaisesRegex(
            ValueError, "weights in a floating dtype to shard or split, got weights in fewer bits"
        ):
            shard(self.weights())

    def test_fully_shard_is_an_error(self):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.addCleanup(torch.distributed.destroy_process_group)
        with self.assertRaisesRegex(
            ValueError, "weights in a floating dtype to shard or split, got weights in fewer bits"
        ):
            fully_shard(self.module(self.weights()), mesh=torch.distributed.init_device_mesh("cpu", (1,)))

    def test_too_many_elements(self):
        with self.assertRaisesRegex(ValueError, "fewer than 2,147,483,648 elements to quantize to 4 bit"):
            ExpertsIn4bit.of(torch.empty(2, 2**15, 2**15, device="meta"))


class WithoutPackagesTest(unittest.TestCase):
    @pytest.mark.slow
    def test_without_bitsandbytes_torchao_and_peft(self):
        code = (
            "import sys; sys.modules.update(dict.fromkeys(('fla', 'causal_conv1d', 'bitsandbytes', 'torchao', 'peft')))\n"
            "import torch, transformers, transformers_packed\n"
            "from common.families import tiny_model\n"
            "transformers_packed.register()\n"
            "model = transformers_packed.patch_model(tiny_model('qwen3_next'))\n"
            "model.save_pretrained(sys.argv[1])\n"
            "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
            "model(input_ids=torch.arange(9)[None], use_cache=False).logits.sum().backward()\n"
            "print(type(model).__module__)\n"
        )
        path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        with tempfile.TemporaryDirectory() as folder:
            call = [sys.executable, "-c", code, folder]
            done = subprocess.run(call, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
        self.assertEqual(
            done.stdout.split(), ["transformers_packed.models.qwen3_next.modeling_qwen3_next"], done.stderr
        )
