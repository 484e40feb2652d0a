"""TRL's trainer of asynchronous GRPO with states that follow trees, against the stock model on each sample alone."""

import os
import queue
import random
import tempfile
import unittest
from unittest import mock

import numpy as np
import torch
from common.records import make_tokenizer
from common.trl_trainers import HAS_TRL, build_model
from mixins.model import total_relative_error
from peft import LoraConfig
from transformers import Qwen3Config, Qwen3ForCausalLM


if HAS_TRL:
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    from transformers_packed.training.async_grpo import AsyncGRPOTrainer

PROMPT, GROUP = 6, 4


def rollouts(groups):
    """Groups of four conversations: all share the prompt, pairs the first turn, and a tool replies to each."""
    draw = random.Random(0)

    def tokens(count):
        return [draw.randrange(3, 40) for _ in range(count)]

    found = []
    for group in range(groups):
        prompt, turns = tokens(PROMPT), [tokens(5), tokens(3)]
        for number in range(GROUP):
            ids = prompt + turns[number // 2] + tokens(3 + number)
            mask = [0] * PROMPT + [1] * (len(ids) - PROMPT)
            # The reply of a tool.
            mask[PROMPT + 4 : PROMPT + 6] = [0, 0]
            logps = np.array([draw.uniform(-4, -3.4) for _ in ids], dtype=np.float32)
            columns = [np.array(ids), np.array(mask), logps, draw.uniform(-1, 1), 0, group]
            found.append(RolloutSample([], [], *columns, metrics={"reward": 1.0}))
    return found


class ScriptedWorker:
    """A server that has answered all prompts before training."""

    def __init__(self, samples):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def start(self): ...

    def stop(self): ...

    def update_model_version(self, model_version): ...

    def check_health(self, stale_after_s):
        raise RuntimeError("no rollouts are left")


@unittest.skipUnless(HAS_TRL, "needs trl, datasets and peft")
class AsyncGRPOTest(unittest.TestCase):
    def setUp(self):
        self.directory = self.enterContext(tempfile.TemporaryDirectory())
        self.tokenizer = make_tokenizer()
        self.samples = rollouts(8)
        # TRL asks the GPU how fast it is.
        self.enterContext(mock.patch.object(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None))

    def trainer(self, model, **options):
        path = os.path.join(self.directory, "model")
        model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        arguments = {"per_device_train_batch_size": 8, "token_budget": 0, "max_steps": 2, "learning_rate": 0.1}
        arguments |= {"use_cpu": True, "bf16": False, "report_to": "none", "dtype": "float32"}
        return AsyncGRPOTrainer(
            path,
            reward_funcs=lambda **_: [0.0],
            args=AsyncGRPOConfig(self.directory, **arguments),
            train_dataset=Dataset.from_list([{"prompt": "q"}] * 8),
            processing_class=self.tokenizer,
            rollout_worker=ScriptedWorker(self.samples),
            weight_transfer=mock.MagicMock(),
            **options,
        )

    def expected(self, model, samples, trainer):
        """The loss of the samples one after another, with the stock model, and the gradients."""
        losses = []
        for sample in samples:
            ids = torch.tensor(sample.input_ids)[None]
            logps = (model(ids).logits[0, :-1] / trainer.temperature).log_softmax(-1)
            logps = logps.gather(1, ids[0, 1:, None])[:, 0][sample.completion_mask[1:] == 1]
            ratio = (logps - torch.tensor(sample.old_log_probs[1:][sample.completion_mask[1:] == 1])).exp()
            clipped = ratio.clamp(1 - trainer.epsilon_low, 1 + trainer.epsilon_high)
            losses.append(-torch.min(ratio * sample.advantage, clipped * sample.advantage))
        loss = torch.cat(losses).mean()
        loss.backward()
        return loss.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

    def test_equals_separate_samples(self):
        stock = build_model("padded", len(self.tokenizer))
        trainer = self.trainer(stock)
        batch = next(iter(trainer.get_train_dataloader()))
        # A row computes what is shared once.
        self.assertLess(int(batch["attention_mask"].sum()), sum(len(x.input_ids) for x in self.samples[:8]))
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        want, gradients = self.expected(stock, self.samples[:8], trainer)
        self.assertLess(abs(loss - want) / abs(want), 1e-5)
        found = {name: x.grad for name, x in trainer.model.named_parameters() if x.grad is not None}
        self.assertLess(total_relative_error(found, gradients), 1e-5)

    def test_trains(self):
        """A few steps with LoRA. The tree of each row reaches the ops, and the configuration is as it was."""
        adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
        trainer = self.trainer(build_model("padded", len(self.tokenizer)), peft_config=adapter)
        before = {name: x.clone() for name, x in trainer.model.named_parameters() if x.requires_grad}
        trainer.train()
        self.assertGreater(trainer.state.log_history[0]["batch/packing_ratio"], 1.3)
        self.assertTrue(
            any((x != before[name]).any() for name, x in trainer.model.named_parameters() if name in before)
        )
        self.assertEqual(trainer.model.config.layer_types, ["linear_attention", "full_attention"])
        self.assertEqual(async_grpo_trainer.create_model_from_path.__module__, "trl.trainer.utils")

    def test_other_families_are_refused(self):
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, head_dim=8, num_key_value_heads=1, **sizes))
        with self.assertRaisesRegex(ValueError, "got Qwen3Config. Use the AsyncGRPOTrainer of TRL"):
            self.trainer(model)
