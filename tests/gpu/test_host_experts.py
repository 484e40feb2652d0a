"""Experts in host memory on a GPU: gradients, memory, and what waits for what: `make test-gpu`."""

from unittest import mock

import torch
from common.blocks import stored_and_plain
from common.gpu import needs_gpu, report
from common.late_experts import without_memory
from common.real_heads import model_on_gpu, row_on_gpu
from mixins.model import total_relative_error
from mixins.on_host_gpu import LENGTHS, OnHostGpuTestCase, copies_of_this_gpu, in_nvfp4, step, with_adapters
from parameterized import parameterized
from peft import LoraConfig

from transformers_packed import keep_experts_in_host_memory
from transformers_packed.models import experts as our_experts
from transformers_packed.models.experts import is_known
from transformers_packed.models.families import EXPERT_WEIGHTS
from transformers_packed.models.host_experts import bytes_in_host_memory
from transformers_packed.models.host_parameters import host_of
from transformers_packed.ops import implementations_used


# Experts of 12 MiB a layer in bfloat16.
SIZES = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "num_hidden_layers": 4}
KINDS = ("bfloat16", "nvfp4", "fp8")


def experts_of(model):
    return [module for module in model.modules() if is_known(module)]


def mixture(kind: str, experts: bool = True) -> torch.nn.Module:
    """A model in host memory, with adapters on linear layers and experts."""
    model = model_on_gpu("qwen3_5_moe", **SIZES).cpu()
    if kind == "fp8":
        model, _ = stored_and_plain(model, (128, 128))
    for module in experts_of(model) if kind == "nvfp4" else ():
        for name in ("gate_up_proj", "down_proj"):
            setattr(module, name, in_nvfp4(getattr(module, name).shape))
    torch.manual_seed(1)
    config = LoraConfig(
        r=8,
        target_modules=["q_proj", "o_proj", "out_proj", "up_proj"],
        target_parameters=list(EXPERT_WEIGHTS) if experts else None,
    )
    return with_adapters(model, config)


@needs_gpu
class HostExpertsTest(OnHostGpuTestCase):
    make, keep = staticmethod(mixture), staticmethod(keep_experts_in_host_memory)

    @parameterized.expand([(kind, again) for kind in KINDS for again in (False, True)])
    def test_changes_no_bit(self, kind, checkpointing):
        model, other = self.both(kind, checkpointing)
        self.check_bits(model, other, "experts")
        self.assertIn("triton", implementations_used()["experts_lora"])
        self.assertTrue(
            all(pages.is_pinned() for module in experts_of(other) for pages in host_of(module).pages.values())
        )

    @parameterized.expand([("copies",), ("computation",)])
    def test_slow_streams(self, which):
        self.check_slow_streams(which)

    @parameterized.expand([("bfloat16",), ("nvfp4",)])
    def test_memory(self, kind):
        (first, most), (second, most_on_host), other = self.peaks(kind)
        experts = bytes_in_host_memory(other)
        report(f"experts in host memory, {kind}", MiB=experts / 2**20, saved_MiB=(most - most_on_host) / 2**20)
        # The GPU has those of two layers of four. The allocator rounds blocks up to 2 MiB.
        least = experts / 2 - 2**21
        self.assertGreaterEqual(first - second, least)
        self.assertGreaterEqual(most - most_on_host, least)

    def test_does_not_wait_for_the_gpu(self):
        self.check_waits("nvfp4")

    def test_copies_run_beside_the_products(self):
        self.check_copies_run_beside(SIZES["num_hidden_layers"])

    def test_grouped_mm(self):
        """Where the op does not run, Transformers' function reads the copies, and saves none for backward."""
        model, other = self.both("bfloat16", checkpointing=False, experts=False)
        # Its histogram and its sums are not deterministic.
        torch.use_deterministic_algorithms(False)
        self.enterContext(mock.patch.object(our_experts, "_weights_for_op", lambda *_: "a reason"))
        for _ in range(2):
            self.assertLess(total_relative_error(step(other), step(model)), 2e-2)
        with torch.autocast("cuda", torch.bfloat16):
            loss = other(**row_on_gpu(LENGTHS), use_cache=False).loss
        torch.cuda.synchronize()
        with_graph = torch.cuda.memory_allocated()
        without_memory(copies_of_this_gpu())
        # Both layers that were there are freed.
        self.assertLess(torch.cuda.memory_allocated(), with_graph - bytes_in_host_memory(other) / 2 + 2**20)
        loss.backward()

    def test_merge(self):
        model, other = self.both("bfloat16")
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            for x in (model, other):
                x.eval()(**row_on_gpu(LENGTHS), use_cache=False)
                x.merge_adapter()
            logits = [x(**row_on_gpu(LENGTHS), use_cache=False).logits for x in (model, other)]
        self.assertTrue(torch.equal(*logits))
