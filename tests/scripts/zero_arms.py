"""Train, evaluate and save a checkpoint with packed rows and DeepSpeed: `zero_arms.py SOURCE STAGE KIND OUTPUT`.

STAGE is that of ZeRO, or 0 for DDP. KIND is `full`, `lora`, `shared` (sequence parallelism) or `dpo`. Start it in two
processes as with torchrun. The update of each parameter, the log and the weights after training go to OUTPUT, and the
saved model to `OUTPUT.saved`.
"""

import sys
from importlib import import_module

import torch
from common.processes import pretend_gpus
from common.records import make_tokenizer
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from scripts.trainer_arms import OPTIONS, save_and_end, updates_and_log, whole
from transformers import AutoModelForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer

from transformers_packed import PackedTrainer, PackedTrainingArguments, configure_packing, registered


def samples(number: int) -> list[dict]:
    """Draw short and long samples, with prompts. Processes get rows of other lengths, documents and targets."""
    generator, rows = torch.Generator().manual_seed(0), []
    for i in range(number):
        length = int(torch.randint(250, 300, (), generator=generator) if i % 3 == 1 else 2 + 3 * i % 40)
        ids = torch.randint(1, 61, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * (i % length) + ids[i % length :]})
    return rows


if __name__ == "__main__":
    source, stage, kind, output = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
    options = {
        **OPTIONS,
        "learning_rate": 0.1,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "include_num_input_tokens_seen": "all",
        # Seconds after which a process fails that waits for the other one.
        "ddp_timeout": 60,
    }
    if stage:
        # DeepSpeed would compile this op for minutes.
        import_module("deepspeed").ops.__compatible_ops__["deepspeed_shm_comm"] = False
        pretend_gpus()
        # Also small parameters are gathered for each use.
        zero = {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0}
        config = {"zero_optimization": {**zero, "stage3_gather_16bit_weights_on_model_save": True}}
        config |= {"zero_allow_untested_optimizer": True}
        names = "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"
        options |= {"use_cpu": False, "deepspeed": config | dict.fromkeys(names.split(), "auto")}
    # First, because ZeRO-3 then partitions the weights when they are loaded.
    if kind == "dpo":
        args = DPOConfig(f"{output}.trainer", bf16=False, gradient_checkpointing=False, **options)
    else:
        way = {"packing": True, "max_length": 512, "sequence_parallel_size": 2}
        way = way if kind == "shared" else {"padding_free": True}
        args = PackedTrainingArguments(f"{output}.trainer", **options | way)
    with registered():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if kind == "lora":
        set_seed(0)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    if kind == "dpo":
        pairs = [{"prompt": "q" * i, "chosen": "yes" * (i % 4 + 1), "rejected": "no" * i} for i in range(1, 33)]
        data = {"train_dataset": Dataset.from_list(pairs), "eval_dataset": Dataset.from_list(pairs[:11])}
        trainer = DPOTrainer(model, args=args, processing_class=make_tokenizer(), **data)
        configure_packing(trainer, "padding_free")
    else:
        trainer = PackedTrainer(model, args, train_dataset=samples(48), eval_dataset=samples(11))
    updates, log = updates_and_log(trainer)
    log.append(trainer.evaluate())
    trainer.save_model(f"{output}.saved")
    weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
    partitioned = hasattr(next(model.parameters()), "ds_id")
    save_and_end(trainer, output, updates=updates, log=log, weights=weights, partitioned=partitioned)
