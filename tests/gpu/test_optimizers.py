"""Optimizers with small states on a GPU: whole steps, their bytes, resuming, and gradient release."""

import tempfile
import unittest
from importlib.util import find_spec

import torch
from common.gpu import needs_gpu, report
from common.optimizers import state_bytes
from common.real_heads import model_on_gpu
from parameterized import parameterized
from scripts.trainer_arms import Samples

from transformers_packed import GradientReleaseCallback, PackedTrainer, PackedTrainingArguments
from transformers_packed.models.matrices import hidden_matrices
from transformers_packed.models.optimizers import OPTIMIZERS
from transformers_packed.training.optimizers import arguments_for, class_and_kwargs, unwrapped


STEPS = 6


@needs_gpu
class CudaOptimizersTest(unittest.TestCase):
    def setUp(self):
        self.directory = self.enterContext(tempfile.TemporaryDirectory())

    def make(self, name, family="qwen3_5", **options):
        optimizer = OPTIMIZERS[name]
        if find_spec(optimizer.package) is None:
            self.skipTest(f"needs {optimizer.package}")
        # Parameters of more elements than small ones, whose states stay as they are.
        model = model_on_gpu(family, getattr(torch, optimizer.weights), vocab_size=1024)
        args = PackedTrainingArguments(
            self.directory,
            padding_free=True,
            per_device_train_batch_size=4,
            max_steps=STEPS,
            learning_rate=1e-3,
            logging_steps=1,
            bf16=optimizer.weights == "float32",
            report_to="none",
            disable_tqdm=True,
            **{"save_strategy": "no", **arguments_for(name), **options},
        )
        given = class_and_kwargs(name, args)
        trainer = PackedTrainer(model, args, train_dataset=Samples(64), optimizer_cls_and_kwargs=given)
        if optimizer.releases:
            trainer.add_callback(GradientReleaseCallback(trainer))
        return trainer

    def losses(self, trainer):
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    @parameterized.expand([(name, family) for name in OPTIMIZERS for family in ("qwen3_5", "qwen3_5_moe")])
    def test_whole_steps(self, name, family):
        trainer = self.make(name, family)
        trainer.train()
        losses, model = self.losses(trainer), trainer.model
        report(f"{family}, {name}", first=losses[0], last=losses[-1])
        self.assertLess(losses[-1], losses[0])
        weights, width = sum(x.numel() for x in model.parameters()), next(model.parameters()).element_size()
        embeddings = model.get_input_embeddings().weight.numel()
        matrices = sum(model.get_parameter(x).numel() for x in hidden_matrices(model))
        expected = OPTIMIZERS[name].states(width, weights, embeddings, matrices)
        # Small tensors have large states.
        self.assertLess(abs(state_bytes(unwrapped(trainer.optimizer)) / expected - 1), 0.05)

    @parameterized.expand([(name,) for name, optimizer in OPTIMIZERS.items() if not optimizer.releases])
    def test_resumed_steps(self, name):
        whole = self.make(name, save_strategy="steps", save_steps=3)
        whole.train()
        again = self.make(name, save_strategy="steps", save_steps=3)
        again.train(resume_from_checkpoint=f"{self.directory}/checkpoint-3")
        pairs = zip(whole.model.parameters(), again.model.parameters(), strict=True)
        difference = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
        report(f"{name}, resumed", difference=difference)
        self.assertLess(difference, 1e-2)

    def test_gradient_release(self):
        """The same weights as without it, but for sums of kernels in another order, and fewer gradients at a time."""
        trained, peaks = [], []
        for name in ("flash_adamw", "flash_adamw_release"):
            trainer = self.make(name, max_grad_norm=0.0, cuda_graphs=False)
            torch.cuda.reset_peak_memory_stats()
            trainer.train()
            peaks.append(torch.cuda.max_memory_allocated())
            trained.append(trainer.model)
            del trainer
        pairs = zip(*(model.parameters() for model in trained), strict=True)
        difference = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
        report("gradient release", difference=difference, saved_MiB=(peaks[0] - peaks[1]) / 2**20)
        self.assertLess(difference, 1e-2)
