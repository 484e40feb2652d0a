"""Trainers of TRL with tiny models, and the comparison of two of them."""

import copy
import tempfile
import unittest
from importlib.metadata import version

from common.records import make_tokenizer
from mixins.model import total_relative_error
from scripts.trainer_arms import CONFIGS, OPTIONS, updates_and_losses
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, set_seed
from transformers.utils import is_datasets_available, is_peft_available
from transformers.utils.import_utils import _is_package_available

from transformers_packed import registered


HAS_TRL = _is_package_available("trl")[0] and is_datasets_available() and is_peft_available()
if HAS_TRL:
    import trl
    from datasets import Dataset
SGD = OPTIONS | {"max_steps": 2, "bf16": False}
PAIRS = [{"prompt": "q" * i, "chosen": "yes" * (i % 4 + 1), "rejected": "no" * i} for i in range(1, 17)]
UNPAIRED = [
    {"prompt": "why" * (i % 5 + 1), "completion": "yes" * (i % 4 + 1), "label": bool(i % 3)} for i in range(1, 17)
]
MARGINS = [{**pair, "margin": i / 8} for i, pair in enumerate(PAIRS)]
PROMPTS = [{"prompt": "q" * i} for i in range(1, 9)]


def build_model(arm: str, vocab_size: int, auto=AutoModelForCausalLM, seed: int = 0, **values):
    set_seed(seed)
    config = CONFIGS["qwen3_5"](**values)
    config.vocab_size = vocab_size
    if arm == "padded":
        return auto.from_config(config)
    with registered():
        return auto.from_config(config)


def build_classifier(arm: str, vocab_size: int):
    return build_model(arm, vocab_size, AutoModelForSequenceClassification, num_labels=1)


def reward(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


def preference_trainer(kind, directory, model=None, samples=None, peft_config=None, rollout_func=None, **arguments):
    """A trainer of preferences or of reinforcement learning, for two steps of SGD."""
    tokenizer = make_tokenizer()
    if model is None:
        model = (build_classifier if kind == "reward" else build_model)("padded", len(tokenizer))
    options = {"processing_class": tokenizer, "peft_config": peft_config}
    common = {**SGD, "per_device_train_batch_size": 4}
    if kind == "distillation":
        options["teacher_model"] = build_model("padded", len(tokenizer), seed=1)
        # Fresh models are nearly the same, and what an update is made of is then rounding.
        options["teacher_model"].lm_head.weight.data.mul_(100)
        common |= {"max_completion_length": 8}
    elif kind in ("grpo", "rloo"):
        options["reward_funcs"] = reward
        if rollout_func is not None:
            options["rollout_func"] = rollout_func
        common |= {"num_generations": 4, "max_completion_length": 8}
    elif kind != "reward" and peft_config is None and not arguments.get("precompute_ref_log_probs"):
        options["ref_model"] = copy.deepcopy(model)
    cls, config, some = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig, PAIRS),
        "reward": (trl.RewardTrainer, trl.RewardConfig, MARGINS),
        "kto": (trl.KTOTrainer, trl.KTOConfig, UNPAIRED),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig, PROMPTS),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig, PROMPTS),
        "distillation": (trl.DistillationTrainer, trl.DistillationConfig, PROMPTS),
    }[kind]
    samples = some if samples is None else samples
    if arguments.get("eval_strategy"):
        options["eval_dataset"] = Dataset.from_list(samples[:6])
    args = config(directory, **common | arguments)
    return cls(model, args=args, train_dataset=Dataset.from_list(samples), **options)


def sft_trainer(directory, model, samples, tokenizer, **arguments):
    """An SFTTrainer for tokenized samples, in float32."""
    args = trl.SFTConfig(directory, **{**OPTIONS, "bf16": False, "gradient_checkpointing": False, **arguments})
    return trl.SFTTrainer(model, args, train_dataset=Dataset.from_list(samples), processing_class=tokenizer)


@unittest.skipUnless(HAS_TRL, 'needs trl, datasets and peft: pip install -e ".[dev]"; written for TRL 1.16.0')
class TRLTestCase(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name

    def check_same_training(self, packed, padded, bar=4e-6):
        """Compare the losses of each step and the total change of parameters of both trainers. Return the change."""
        return self.check_trains_like(updates_and_losses(padded), packed, bar)

    def check_trains_like(self, result, packed, bar=4e-6):
        (want, expected), (updates, losses) = result, updates_and_losses(packed)
        message = f"TRL {version('trl')}"
        self.assertEqual(len(expected), packed.args.max_steps, message)
        for actual, loss in zip(losses, expected, strict=True):
            self.assertLess(abs(actual - loss), 1e-5 * max(abs(loss), 1), message)
        self.assertGreater(sum(x.abs().sum() for x in want.values()), 0)
        self.assertLess(total_relative_error(updates, want), bar, message)
        return want
