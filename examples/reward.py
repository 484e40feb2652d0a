"""Train a reward model with LoRA adapters in TRL's RewardTrainer.

The chosen and the rejected answers of a batch form one packed row, which has a prompt once for both of its answers.

python examples/reward.py                                                                       # a tiny model, on a CPU
python examples/reward.py --model Qwen/Qwen3.5-0.8B --dataset trl-lib/ultrafeedback_binarized   # on a GPU
"""

import common
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from transformers_packed import configure_packing


def main(options):
    name = options.model or common.tiny_checkpoint()
    dtype = torch.bfloat16 if torch.cuda.is_available() else None
    trainer = RewardTrainer(
        AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, dtype=dtype),
        args=RewardConfig(
            options.output,
            max_length=options.max_length,
            max_steps=options.max_steps,
            per_device_train_batch_size=options.batch_size,
            # Rewards stay around 0.
            center_rewards_coefficient=0.01,
            bf16=torch.cuda.is_available(),
            logging_steps=5,
            report_to="none",
        ),
        train_dataset=load_dataset(options.dataset, split="train") if options.dataset else common.preferences(),
        processing_class=AutoTokenizer.from_pretrained(name),
        peft_config=LoraConfig(task_type="SEQ_CLS", r=16, target_modules="all-linear"),
    )
    configure_packing(trainer, share_prompts=True)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    common.run(main, __doc__, dataset="columns chosen and rejected, and prompt if they do not start with it")
