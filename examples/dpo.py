"""Train LoRA adapters on preferences with TRL's DPOTrainer.

The model computes only the real tokens of a padded batch, and a prompt once for both of its answers.

python examples/dpo.py                                                                          # a tiny model, on a CPU
python examples/dpo.py --model Qwen/Qwen3.5-0.8B --dataset trl-lib/ultrafeedback_binarized      # on a GPU
"""

import common
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from transformers_packed import configure_packing


def main(options):
    name = options.model or common.tiny_checkpoint()
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
    configure_packing(trainer, share_prompts=True)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    common.run(main, __doc__, dataset="columns chosen and rejected, and prompt if they do not start with it")
