"""Kernels of the delta rules are compiled in the first forward, and in threads as far as they are FlashQLA's."""

import threading
import unittest
from unittest import mock

import torch
from common.gpu import needs_gpu, report

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import compilations, gated_delta_rule, kimi_delta_rule
from transformers_packed.ops.backends import flash_qla, flash_qla_kernels
from transformers_packed.shared_prompts import SharedPrompts


def inputs(rule, tokens, heads):
    """Query, key, value, gate and rate in bfloat16, with another number of heads than other tests have."""
    torch.manual_seed(0)
    shapes = [(heads[0], 128), (heads[0], 128), (heads[1], 128)]
    tensors = [torch.randn(1, tokens, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    by_channel = (128,) if rule is kimi_delta_rule else ()
    gate = -torch.rand(1, tokens, heads[1], *by_channel, device="cuda")
    return [*(x.requires_grad_() for x in tensors), gate, torch.rand(1, tokens, heads[1], device="cuda")]


@needs_gpu
class CompilationTest(unittest.TestCase):
    def setUp(self):
        self.found = []
        self.enterContext(mock.patch.object(flash_qla_kernels, "_GROUPS", {}))
        self.enterContext(mock.patch.object(compilations, "_TUNED", set()))
        self.enterContext(compilations.compilations(self.tell))

    def tell(self, compilation):
        self.found.append((compilation.package, threading.current_thread().name, compilation.kernel))

    @unittest.skipUnless(torch.cuda.is_available() and flash_qla.is_usable(), "needs FlashQLA")
    def test_trees(self):
        row = SharedPrompts.of(SequenceBoundaries.from_lengths([70, 64, 3, 9, 5]), [-1, 0, 0, 2, 2]).to("cuda")
        tensors = inputs(gated_delta_rule, row.total_length, (3, 6))
        output, _ = gated_delta_rule(*tensors, boundaries=row, impl="flash_qla", use_qk_l2norm_in_kernel=True)
        output.float().sum().backward()
        threads = [name for package, name, _ in self.found if package == "tilelang"]
        report("kernels of a tree", tilelang=len(threads))
        # Forwards by the states that they begin and end with, and each kernel of the backward with and without them.
        self.assertGreaterEqual(len(threads), 8)
        self.assertEqual([name for name in threads if not name.startswith("ThreadPoolExecutor")], [])

    def test_nothing_is_left_for_the_backward(self):
        for rule, impl in ((gated_delta_rule, "fla"), (kimi_delta_rule, "fla")):
            with self.subTest(rule.__name__):
                row = SequenceBoundaries.from_lengths([100, 30, 62], device="cuda")
                output, _ = rule(*inputs(rule, 192, (3, 3)), boundaries=row, impl=impl, use_qk_l2norm_in_kernel=True)
                self.assertTrue(self.found)
                loss = output.float().sum()
                self.found.clear()
                loss.backward()
                self.assertEqual([x for x in self.found if x[0] in ("triton", "autotune", "tilelang")], [])
