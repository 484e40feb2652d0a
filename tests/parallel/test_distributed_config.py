"""Training under Transformers' `DistributedConfig` equals one process, or is refused before it starts.

`python tests/parallel/test_distributed_config.py` prints the table of docs/how_to/experts_and_tensors.md.
"""

import copy
import math
import os
import tempfile
import time
import unittest
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from common.processes import FSDP_ON_CPU, pretend_gpus, run_processes
from datasets import Dataset
from mixins.model import total_relative_error
from mixins.patch import CONFIGS, builtin_model
from packaging.version import Version
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from scripts.trainer_arms import OPTIONS, Samples
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments, set_seed
from transformers.distributed.configuration_utils import DistributedConfig

from transformers_packed import add_mtp, configure_packing, patch_model, registered
from transformers_packed.models.versions import averages_experts
from transformers_packed.training import compare


PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "experts_and_tensors.md"
SHARES = {"sequence_parallel_size": 2}
# By name: the arguments of `DistributedConfig`, or of accelerate's `ParallelismConfig`, and options of `configure_packing`.
PLANS: dict[str, tuple[dict, dict]] = {
    "FSDP2": ({"fsdp_size": 2}, {}),
    "HSDP": ({"fsdp_size": 2, "dp_replicate_size": 2}, {}),
    "EP": ({"fsdp_size": 2, "ep_size": 2}, {}),
    "EP + FSDP2": ({"fsdp_size": 4, "ep_size": 2}, {}),
    "TP": ({"tp_size": 2}, {}),
    "TP, accumulation": ({"tp_size": 2}, {}),
    "TP + EP": ({"tp_size": 2, "ep_size": 2}, {}),
    "TP + FSDP2": ({"tp_size": 2, "fsdp_size": 2}, {}),
    "SP + FSDP2": ({"fsdp_size": 2}, SHARES),
    "SP + EP": ({"fsdp_size": 2, "ep_size": 2}, SHARES),
    "FSDP2 by accelerate": ({"dp_shard_size": 2}, {}),
    "HSDP by accelerate": ({"dp_shard_size": 2, "dp_replicate_size": 2}, {}),
}
# Rows in a step. Each process reads one of them under tensor parallelism, except where training is refused for it.
ROWS = dict.fromkeys(PLANS, 4) | {"TP": 1, "TP, accumulation": 2, "TP + EP": 1, "TP + FSDP2": 2}
KINDS = ("dense", "experts", "LoRA", "LoRA of experts", "MTP", "QLoRA")
DENSE = ("dense", "QLoRA")
# What stops training, as a part of its error. Everything else equals one process.
NO_EXPERTS, ONE_BACKWARD, SPLIT = "no `ep_plan`", "one backward per step", "adapters on .* which is split over"
PEFT_EXPERTS, PEFT_4BIT = "'ParamWrapper' object has no attribute", "no attribute 'compress_statistics'"
REASONS = {
    NO_EXPERTS: "no experts",
    ONE_BACKWARD: "several backwards",
    SPLIT: "split layers",
    PEFT_EXPERTS: "PEFT cannot",
    PEFT_4BIT: "PEFT cannot",
}


def reason(plan: str, kind: str) -> str | None:
    experts, tensors = "EP" in plan, "TP" in plan
    if "accelerate" in plan:
        return None
    if experts and not averages_experts() and kind not in DENSE:
        return "transformers >= 5.23 for ep_size=2"
    if kind == "QLoRA":
        return NO_EXPERTS if experts else PEFT_4BIT
    if kind == "LoRA of experts" and tensors:
        return PEFT_EXPERTS
    if kind == "dense" and experts:
        return NO_EXPERTS
    # Adapters of other layers than experts fit under expert parallelism.
    if "LoRA" in kind and (tensors or plan == "HSDP" or experts and "experts" in kind):
        return SPLIT
    return ONE_BACKWARD if "accumulation" in plan else None


def table() -> str:
    rows = [["", *KINDS]] + [[plan, *(REASONS.get(reason(plan, kind), "equal") for kind in KINDS)] for plan in PLANS]
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def quantized(kind: str) -> dict:
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)} if kind == "QLoRA" else {}


def with_adapters(model, kind: str):
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if kind == "LoRA of experts" else None
    layers = ["q_proj", "o_proj", "in_proj_qkv", "out_proj"]
    set_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=layers, target_parameters=experts)
    model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    return model


def train(source: str, folder: str, kind: str, rows: int, config: dict | None = None, **options) -> dict:
    """Train two steps of `rows` rows per process that reads, save, and return what was logged."""
    by_accelerate = config is not None and "dp_shard_size" in config
    shards = {} if config is None or by_accelerate else {"distributed_config": DistributedConfig(**config)}
    with registered():
        model = AutoModelForCausalLM.from_pretrained(source, **shards, **quantized(kind))
    if "LoRA" in kind:
        model = with_adapters(model, kind)
    arguments = {
        **OPTIONS,
        "max_steps": 2,
        "learning_rate": 0.1,
        "use_cpu": config is None,
        "gradient_accumulation_steps": rows,
        "parallelism_config": ParallelismConfig(**config) if by_accelerate else None,
    }
    args = TrainingArguments(folder, per_device_train_batch_size=1, **arguments)
    trainer = Trainer(model, args, train_dataset=Dataset.from_list(Samples().rows))
    options |= {"mtp_loss_weight": 0.3} if kind == "MTP" else {}
    configure_packing(trainer, "pack", max_length=128, **options)
    trainer.train()
    trainer.save_model(folder)
    names = "loss", "mtp_loss", "documents_per_row", "packing_fill"
    logged = [{name: x[name] for name in names if name in x} for x in trainer.state.log_history if "loss" in x]
    return {"logged": logged, "readers": trainer.train_dataset.plan.world_size}


def on_ranks(kind: str, plan: str, source: str, folder: str, rows: int) -> dict | str:
    """What a plan logs, or the error that stops it."""
    pretend_gpus()
    config, options = PLANS[plan]
    if "accelerate" in plan:
        layer = "Qwen3_5DecoderLayer" if kind in DENSE else "Qwen3_5MoeDecoderLayer"
        os.environ |= FSDP_ON_CPU | {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT", "FSDP_TRANSFORMER_CLS_TO_WRAP": layer}
    # The check takes time, which no two processes measure alike.
    now, speed = time.perf_counter, 1 + 2 * dist.get_rank()
    compare.time = SimpleNamespace(perf_counter=lambda: speed * now())
    try:
        return train(source, f"{folder}/{plan}", kind, rows, config, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def size(config: dict) -> int:
    return math.prod(value for name, value in config.items() if name != "ep_size")


class DistributedConfigTest(unittest.TestCase):
    def check(self, kind: str, plans: list[str]) -> None:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        source = str(folder / "source")
        self.save_source(kind, source)
        with torch.random.fork_rng():
            expected = {}
            for rows in sorted({ROWS[plan] for plan in plans}):
                logged = train(source, str(folder / f"expected_{rows}"), kind, rows)["logged"]
                expected[rows] = logged, self.updates(source, folder / f"expected_{rows}")
        for plan in plans:
            rows = ROWS[plan] // self.readers(plan)
            # Each plan has processes of its own: groups of an earlier one would be destroyed at some time of the next.
            for result in run_processes(on_ranks, size(PLANS[plan][0]), kind, plan, source, str(folder), rows):
                with self.subTest(kind=kind, plan=plan):
                    self.compare(plan, kind, result, folder / plan, expected[ROWS[plan]], source)

    def readers(self, plan: str) -> int:
        config, options = PLANS[plan]
        return size(config) // config.get("tp_size", 1) // options.get("sequence_parallel_size", 1)

    def save_source(self, kind: str, source: str) -> None:
        name = "qwen3_5" if kind in DENSE else "qwen3_5_moe"
        config = copy.deepcopy(CONFIGS[name])
        config.mtp_num_hidden_layers = int(kind == "MTP")
        model = builtin_model(name, config=config)
        if kind == "MTP":
            add_mtp(patch_model(model))
        model.save_pretrained(source)

    def updates(self, source: str, folder: Path) -> dict[str, torch.Tensor]:
        """The change of each saved weight. That of adapters is from 0."""
        if (adapters := folder / "adapter_model.safetensors").exists():
            return load_file(adapters)
        before, after = (load_file(f"{x}/model.safetensors") for x in (source, folder))
        self.assertEqual(before.keys(), after.keys())
        return {name: after[name] - before[name] for name in before}

    def compare(self, plan: str, kind: str, result: dict | str, folder: Path, expected: tuple, source: str) -> None:
        wanted = reason(plan, kind)
        if wanted is not None:
            self.assertIsInstance(result, str)
            self.assertRegex(result, wanted)
            return
        self.assertIsInstance(result, dict, result)
        self.assertEqual(result["readers"], self.readers(plan))
        logged, updates = expected
        for got, one in zip(result["logged"], logged, strict=True):
            self.assertEqual(got.keys(), one.keys())
            for name, value in one.items():
                self.assertAlmostEqual(got[name], value, delta=2e-4, msg=name)
        got = self.updates(source, folder)
        self.assertEqual(got.keys(), updates.keys())
        self.assertLess(total_relative_error(got, updates), 1e-5)

    def test_experts_and_tensors(self):
        # Transformers 5.23 refuses tensor parallelism with earlier releases of accelerate.
        tensors = ["TP", "TP, accumulation"] if Version(accelerate.__version__) > Version("1.12") else []
        self.check("experts", ["EP", *tensors])

    @parameterized.expand(KINDS)
    @pytest.mark.slow
    def test_all_plans(self, kind):
        self.check(kind, list(PLANS))

    @unittest.skipUnless(averages_experts(), "needs Transformers 5.23")
    def test_the_table_of_the_docs(self):
        self.assertIn(table(), PAGE.read_text())


if __name__ == "__main__":
    print(table())
