"""Train a language model with TRL's GRPOTrainer and a reward of your own.

A batch is one prompt with its answers. The learning step computes the prompt once for all of them.

python examples/grpo.py                                                                       # a tiny model, on a CPU
python examples/grpo.py --model Qwen/Qwen3.5-0.8B --dataset trl-lib/ultrafeedback-prompt      # on a GPU
"""

import common
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from transformers_packed import configure_packing


def short_answers(completions, **columns):
    """Prefer short answers: the reward is minus the number of characters."""
    return [-float(len(completion[0]["content"])) for completion in completions]


def main(options):
    name = options.model or common.tiny_checkpoint()
    dataset = load_dataset(options.dataset, split="train") if options.dataset else common.preferences()
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32),
        reward_funcs=short_answers,
        args=GRPOConfig(
            options.output,
            max_steps=options.max_steps,
            per_device_train_batch_size=options.batch_size,
            num_generations=options.batch_size,
            # With random weights, a model rarely ends an answer by itself.
            max_completion_length=options.max_length if options.model else 16,
            bf16=torch.cuda.is_available(),
            logging_steps=5,
            report_to="none",
        ),
        train_dataset=dataset.select_columns(["prompt"]),
        processing_class=AutoTokenizer.from_pretrained(name),
    )
    configure_packing(trainer, share_prompts=True)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    common.run(main, __doc__, dataset="a column prompt of messages")
