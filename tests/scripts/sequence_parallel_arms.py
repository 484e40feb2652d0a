"""Train a small model for some steps with `PackedTrainer`, sharded by FSDP2: `sequence_parallel_arms.py OUTPUT ARM ...`.

Start it with `accelerate launch`. Every arm has the same weights and rows, and the log goes to OUTPUT. Accelerate
shards on GPUs only. On a CPU, start the script with torchrun instead, and it pretends that there are GPUs.
"""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import torch
import transformers.training_args
from accelerate import DistributedType, PartialState
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, set_seed

from transformers_packed import PackedTrainer, PackedTrainingArguments, register
from transformers_packed.ops import dispatch, implementations_used


ON_CPU = bool(os.environ.get("TRANSFORMERS_PACKED_TEST_SP_ON_CPU"))
ARMS = {
    "alone": {"sequence_parallel_size": 1},
    "the default methods": {"sequence_parallel_size": 2},
    "the other methods": {
        "sequence_parallel_size": 2,
        "sequence_parallel_gated_delta_rule": "heads",
        "sequence_parallel_attention": "gather",
    },
}
STEPS, ROWS_PER_STEP = 20, 2
TOTAL = 128 if ON_CPU else 2048
KEY_HEADS, VALUE_HEADS, DIM, HEADS, HEAD_DIM = (2, 4, 16, 4, 16) if ON_CPU else (16, 32, 128, 16, 256)
CONFIG = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 4,
    "head_dim": HEAD_DIM,
    "linear_key_head_dim": DIM,
    "linear_value_head_dim": DIM,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "pad_token_id": 0,
    "use_cache": False,
}


def make_rows() -> list[dict]:
    """Draw rows of documents that count upwards, at least three on each of two ranks, with short and long parts."""
    generator = torch.Generator().manual_seed(0)
    half, rows = TOTAL // 2, []
    for number in range(STEPS * ROWS_PER_STEP):
        ends = [(torch.randperm(half - 1, generator=generator)[: 3 + number % 4] + 1).sort().values for _ in range(2)]
        ends = torch.cat([torch.tensor([0]), ends[0], half + ends[1], torch.tensor([TOTAL])])
        lengths = ends.diff().tolist()
        ids = []
        for length in lengths:
            start = int(torch.randint(96, (), generator=generator))
            ids += [(start + i) % 96 + 1 for i in range(length)]
        rows.append({"input_ids": ids, "labels": ids, "seq_lengths": lengths})
    return rows


def train(options: dict) -> dict:
    dispatch._used.clear()
    args = PackedTrainingArguments(
        tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ROWS_PER_STEP,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        optim="sgd",
        learning_rate=0.02,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=True,
        # The rows need few kernels.
        compile_before_training=False,
        **options,
    )
    register()
    set_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**CONFIG), dtype=torch.float32)
    trainer = PackedTrainer(model, args, train_dataset=make_rows())
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in log],
        "grad_norms": [float(entry["grad_norm"]) for entry in log],
        "sharded": isinstance(next(trainer.model.parameters()), DTensor),
        "implementations": implementations_used(isolating=True),
    }


if __name__ == "__main__":
    output, *arms = sys.argv[1:]
    if not ON_CPU and importlib.util.find_spec("fla"):
        sys.path.append(str(Path(__file__).parents[1]))
        from common.gpu import compile_one_configuration

        compile_one_configuration()
    if ON_CPU:
        PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
        transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    found = {name: train(ARMS[name]) for name in arms}
    if torch.distributed.get_rank() == 0:
        torch.save(found, output)
    torch.distributed.destroy_process_group()
