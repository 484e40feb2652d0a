"""Train LoRA adapters on preferences with TRL's DPOTrainer.

DPOTrainer uses padded batches. A registered model accepts them like the stock model, on any device.

python examples/dpo.py                                                                          # a tiny model, on a CPU
python examples/dpo.py --model Qwen/Qwen3.5-0.8B --dataset trl-lib/ultrafeedback_binarized      # on a GPU
"""

import common
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import transformers_packed


def main(options):
    name = options.model or common.tiny_checkpoint()
    transformers_packed.register()
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16 if torch.cuda.is_available() else None),
        args=DPOConfig(
            options.output,
            max_length=options.max_length,
            max_steps=options.max_steps,
            per_device_train_batch_size=options.batch_size,
            bf16=torch.cuda.is_available(),
            logging_steps=5,
            report_to="none",
        ),
        train_dataset=load_dataset(options.dataset, split="train") if options.dataset else common.preferences(),
        processing_class=AutoTokenizer.from_pretrained(name),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    common.run(main, __doc__, dataset="columns chosen and rejected, and prompt if they do not start with it")
