"""Weights with a scale for each group of columns have the same bits from the kernel on a GPU and from the reference.

`make test-gpu` runs these tests.
"""

import unittest

import torch
from common.gpu import needs_gpu
from ops.test_dequantization import DTYPES
from ops.test_grouped_dequantization import random_groups
from parameterized import parameterized

from transformers_packed.models.checkpoint_formats import PackedWeight
from transformers_packed.ops.grouped_dequantization import Groups, dequantize_groups


def on_the_gpu(groups: Groups) -> Groups:
    return Groups(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in groups))


@needs_gpu
class CudaGroupsTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("int4", (1024, 2560), 128, {"zero": True, "rounded": torch.float16}),
            ("int4", (768, 5120), 5120, {}),
            ("int4", (3, 64, 2048), 128, {"ordered": True, "parts": 2, "zero": True, "rounded": torch.float16}),
            ("int8", (257, 1100), 20, {"zero": True}),
            ("int8", (64, 96), 32, {"ordered": True, "rounded": torch.float32}),
            ("nvfp4", (5, 128, 512), 16, {"divided": True, "parts": 2}),
            ("nvfp4", (1000, 48), 16, {"divided": False}),
        ]
    )
    def test_bits_of_the_reference(self, code, shape, size, options):
        groups = random_groups(code, shape, size, **options)
        for dtype in DTYPES:
            expected = dequantize_groups(groups, dtype, impl="reference")
            found = dequantize_groups(on_the_gpu(groups), dtype, impl="triton")
            self.assertTrue(torch.equal(found.cpu(), expected), dtype)

    def test_bytes_beyond_32_bits(self):
        rows = 2**31 // 4096 + 5
        values = torch.randint(256, (rows, 2048), dtype=torch.uint8, device="cuda")
        scale = torch.rand(rows, 32, device="cuda").half()
        found = dequantize_groups(Groups(values, scale, "int4", torch.float16), torch.bfloat16, impl="triton")
        for part in (slice(0, 9), slice(-9, None)):
            groups = Groups(values[part], scale[part], "int4", torch.float16)
            self.assertTrue(torch.equal(found[part], dequantize_groups(groups, torch.bfloat16, impl="reference")))

    @parameterized.expand(["int4", "nvfp4"])
    def test_a_layer_and_its_gradient(self, code):
        options = {"divided": True} if code == "nvfp4" else {}
        weight = PackedWeight(on_the_gpu(random_groups(code, (256, 512), 16, **options)), torch.bfloat16)
        layer, plain = torch.nn.Linear(512, 256, False, "meta"), torch.nn.Linear(512, 256, False, "meta")
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        plain.weight = torch.nn.Parameter(weight.compute(), requires_grad=False)
        x = torch.randn(70, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        found = [(y := module(x)).detach() for module in (layer, plain)]
        gradients = [torch.autograd.grad(module(x), x, y)[0] for module in (layer, plain)]
        for a, b in (found, gradients):
            self.assertTrue(torch.equal(a, b))

    @parameterized.expand(["int4", "nvfp4"])
    def test_a_module_that_moves(self, code):
        groups = random_groups(code, (64, 128), 16, **({"divided": True} if code == "nvfp4" else {}))
        layer = torch.nn.Linear(128, 64, False, "meta")
        layer.weight = torch.nn.Parameter(PackedWeight(groups, torch.bfloat16), requires_grad=False)
        expected = layer.weight.compute()
        for device in ("cuda", "cpu"):
            layer.to(device)
            self.assertEqual((layer.weight.device.type, layer.weight.packed.device.type), (device, device))
            self.assertTrue(torch.equal(layer.weight.compute().cpu(), expected))


if __name__ == "__main__":
    unittest.main()
