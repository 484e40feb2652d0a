"""Tensor and expert parallelism of Transformers over two processes give the gradients of one process without it."""

import copy
import tempfile
import unittest

import torch
from common.processes import run_processes
from mixins.model import packed_batch, total_relative_error
from mixins.patch import BUILTINS, COMPOSITE, CONFIGS, builtin_model
from mixins.vision import alone_batch, document
from parameterized import parameterized
from torch.distributed.tensor import DTensor
from transformers.distributed.configuration_utils import DistributedConfig

from transformers_packed import patch_model
from transformers_packed.models.families import modeling_module


MODELS = {
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM", None),
    "qwen3_5": ("qwen3_5", "Qwen3_5ForCausalLM", None),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeForCausalLM", None),
    "qwen3_5_vision": ("qwen3_5", "Qwen3_5ForConditionalGeneration", COMPOSITE["qwen3_5"]),
    "qwen3_5_moe_vision": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", COMPOSITE["qwen3_5_moe"]),
}
PLANS = {"tp": {"tp_size": 2}, "ep": {"tp_size": 2, "ep_size": 2}}
EXPERTS = ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_vision")


def features(name: str) -> list[dict]:
    if name.endswith("vision"):
        return [document(9, 1, images=((1, 4, 4),)), document(5, 2), document(66, 3, images=((1, 4, 4),))]
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, 90, (n,), generator=generator).tolist()} for n in (9, 1, 66)]


def batches(name: str) -> dict[str, dict]:
    """Return one document as a batch, and a packed row."""
    document = alone_batch(features(name)[0])
    return {"document": {**document, "labels": document["input_ids"]}, "row": packed_batch(features(name))}


def gradients(model, batch) -> dict[str, torch.Tensor]:
    loss = model.train()(**batch, use_cache=False).loss
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = whole(parameter.grad)
    return {name: x.detach().clone() for name, x in found.items()}


def whole(gradient: torch.Tensor) -> torch.Tensor:
    placement = gradient.placements[0] if isinstance(gradient, DTensor) else None
    if not hasattr(placement, "split_factor"):
        return gradient if placement is None else gradient.full_tensor()
    # A process has a part of each of `split_factor` blocks, here gate and up. torch 2.11 cannot gather them.
    local = gradient.to_local().contiguous()
    parts = [torch.empty_like(local) for _ in range(gradient.device_mesh.size())]
    torch.distributed.all_gather(parts, local)
    blocks = zip(*(part.chunk(placement.split_factor, placement.dim) for part in parts), strict=True)
    return torch.cat([part for block in blocks for part in block], placement.dim)


def on_one_rank(name: str, plans: list[str], folder: str) -> dict[tuple, dict]:
    """Return a rank's result for each plan, from our class and a patched model, on a document and a packed row."""
    family, head, _ = MODELS[name]
    results = {}
    for plan in plans:
        for way, module in (("ours", modeling_module(family)), ("patched", BUILTINS[family])):
            for what in ("document", "row"):
                config = DistributedConfig(**PLANS[plan])
                model = patch_model(getattr(module, head).from_pretrained(folder, distributed_config=config))
                results[plan, way, what] = gradients(model, batches(name)[what])
    return results


class TensorParallelTest(unittest.TestCase):
    @parameterized.expand(MODELS)
    def test_gradients(self, name):
        family, head, config = MODELS[name]
        config = copy.deepcopy(config or CONFIGS[family])
        # Before Transformers 5.21, a split head needs a vocabulary that the processes divide.
        config.get_text_config().vocab_size = 98
        model = builtin_model(family, head, config)
        plans = [plan for plan in PLANS if plan == "tp" or name in EXPERTS]
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            ranks = run_processes(on_one_rank, 2, name, plans, folder)
        document, row = batches(name).values()
        expected = {"document": gradients(model, document)}
        model.zero_grad()
        expected["row"] = gradients(patch_model(model), row)
        for rank, results in enumerate(ranks):
            for (plan, way, what), got in results.items():
                with self.subTest(plan=plan, way=way, what=what, rank=rank):
                    self.assertEqual(got.keys(), expected[what].keys())
                    for key, gradient in got.items():
                        self.assertLess(total_relative_error({key: gradient}, {key: expected[what][key]}), 1e-3, key)
