import sys
import types
import unittest
from unittest import mock

import torch
from transformers.integrations import hub_kernels


def double(x, scale=1, **kwargs):
    return 2 * scale * x


def crash(x, scale=1, cu_seqlens=None):
    raise RuntimeError("0 active drivers")


class DispatchByDeviceTest(unittest.TestCase):
    def decorated(self, kernel, function=double):
        package = {"gpu_package": types.SimpleNamespace(double=kernel)} if kernel else {}
        with mock.patch.dict(sys.modules, package):
            return hub_kernels.use_kernel_func_from_hub_with_fallback("double", "gpu_package")(function)

    def test_cpu_tensors_take_the_torch_function(self):
        run = self.decorated(crash)
        self.assertEqual(run(torch.ones(1)).item(), 2)
        self.assertEqual(run(x=torch.ones(1), scale=3, unknown=1).item(), 6)

    def test_cpu_tensors_keep_gradients(self):
        x = torch.ones(1, requires_grad=True)
        self.decorated(crash)(x).backward()
        self.assertEqual(x.grad.item(), 2)

    def test_meta_tensors_take_the_torch_function(self):
        self.assertEqual(self.decorated(crash)(torch.ones(3, device="meta")).shape, (3,))

    def test_packed_sequences_on_a_cpu_are_refused_as_without_the_package(self):
        for kwargs in ({"cu_seqlens": torch.tensor([0, 1])}, {"seq_idx": torch.tensor([[0]])}):
            with self.assertRaisesRegex(ValueError, "packed sequences"):
                self.decorated(crash)(torch.ones(1), **kwargs)

    def test_compiled(self):
        run = self.decorated(crash)
        compiled = torch.compile(lambda x: run(x) + 1, backend="eager", fullgraph=True)
        self.assertEqual(compiled(torch.ones(1)).item(), 3)

    def test_unchanged_on_an_accelerator(self):
        told = {}
        run = self.decorated(lambda x, cu_seqlens=None: told.update(cu_seqlens=cu_seqlens) or 3 * x)
        boundaries = torch.tensor([0, 1])
        with mock.patch.object(hub_kernels, "_on_accelerator", lambda *values: True, create=True):
            output = run(torch.ones(1), cu_seqlens=boundaries, unknown=1)
        self.assertEqual(output.item(), 3)
        self.assertIs(told["cu_seqlens"], boundaries)

    def test_unchanged_by_keyword_on_an_accelerator(self):
        run = self.decorated(lambda x, scale=1: 3 * x)

        def on_accelerator(*values):
            return any(isinstance(value, torch.Tensor) for value in values)

        with mock.patch.object(hub_kernels, "_on_accelerator", on_accelerator, create=True):
            self.assertEqual(run(x=torch.ones(1)).item(), 3)

    def test_unchanged_without_the_package(self):
        run = self.decorated(None)
        self.assertEqual(run(torch.ones(1), unknown=1).item(), 2)
        with self.assertRaisesRegex(ValueError, "packed sequences"):
            run(torch.ones(1), cu_seqlens=torch.tensor([0, 1]))


if __name__ == "__main__":
    unittest.main()
