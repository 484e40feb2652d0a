"""Fine-tune a language model on chats with TRL's SFTTrainer, in TRL's packed rows.

python examples/sft.py                                                                        # a tiny model, on a CPU
python examples/sft.py --model Qwen/Qwen3.5-0.8B --dataset trl-lib/Capybara --batch-size 1    # on a GPU
"""

import common
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from transformers_packed import configure_packing


def main(options):
    name = options.model or common.tiny_checkpoint()
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32),
        SFTConfig(
            options.output,
            packing=True,
            max_length=options.max_length,
            max_steps=options.max_steps,
            per_device_train_batch_size=options.batch_size,
            bf16=torch.cuda.is_available(),
            logging_steps=5,
            report_to="none",
        ),
        train_dataset=load_dataset(options.dataset, split="train") if options.dataset else common.chats(),
        processing_class=AutoTokenizer.from_pretrained(name),
    )
    configure_packing(trainer)  # keeps TRL's rows; the model isolates their documents
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    common.run(main, __doc__, dataset="a column that TRL supports, such as messages")
