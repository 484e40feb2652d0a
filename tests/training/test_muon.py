"""Muon on each matrix against `torch.optim.Muon` on separate ones, in a Trainer, and in two processes."""

import unittest
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import torch
from common.matrices import MODELS, is_hidden, matrices, tiny_model
from common.processes import run_once
from common.sharded import batch, wrapped_by
from mixins.configure import ConfigureTestCase, said
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from scripts.trainer_arms import Samples
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from transformers_packed import PackedTrainer, PackedTrainingArguments, patch_model
from transformers_packed.models import releases
from transformers_packed.training.callbacks.gradient_release import GradientReleaseCallback
from transformers_packed.training.callbacks.weights import rounded_away
from transformers_packed.training.muon import muon_for
from transformers_packed.training.optimizers import class_and_kwargs


OPTIONS = {"learning_rate": 1e-2, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}
ARGS = SimpleNamespace(**OPTIONS, deepspeed_plugin=None)


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def train_two_processes(kind: str, family: str) -> dict[str, torch.Tensor]:
    """The weights after four steps. States are saved and loaded in the middle as accelerate does it."""
    model = wrapped_by(kind, patch_model(tiny_model(family)).train())
    optimizer = muon_for(model, ARGS)
    for step in range(4):
        if step == 2 and kind != "ddp":
            saved = get_optimizer_state_dict(model, optimizer)
            optimizer = muon_for(model, ARGS)
            set_optimizer_state_dict(model, optimizer, saved)
        model(**batch(distributed.get_rank())).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("module."): whole(x) for name, x in model.named_parameters()}


class StepTest(unittest.TestCase):
    @parameterized.expand(MODELS)
    def test_equals_separate_matrices(self, family):
        # The iterations magnify how batches of products in bfloat16 are rounded.
        self.enterContext(mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double))
        model, (rate, decay, *betas, eps) = tiny_model(family), OPTIONS.values()
        optimizer = muon_for(model, ARGS)
        apart, optimizers = {}, []
        for name, weight in model.named_parameters():
            if is_hidden(name):
                apart[name] = [torch.nn.Parameter(x) for x in matrices(model, name, weight.detach())]
                muon = torch.optim.Muon(apart[name], rate, decay, adjust_lr_fn="match_rms_adamw")
                optimizers.append(muon)
            else:
                apart[name] = [torch.nn.Parameter(weight.detach().clone())]
                rest = {"weight_decay": 0.0 if "norm" in name or "bias" in name else decay}
                optimizers.append(torch.optim.AdamW(apart[name], rate, betas, eps, **rest))
        for _ in range(3):
            for name, weight in model.named_parameters():
                weight.grad = torch.randn_like(weight)
                parts = matrices(model, name, weight.grad) if is_hidden(name) else [weight.grad.clone()]
                for x, gradient in zip(apart[name], parts, strict=True):
                    x.grad = gradient
            for each in (optimizer, *optimizers):
                each.step()
        for name, weight in model.named_parameters():
            parts = matrices(model, name, weight.detach()) if is_hidden(name) else [weight.detach()]
            for x, expected in zip(parts, apart[name], strict=True):
                torch.testing.assert_close(x, expected.detach(), rtol=1e-5, atol=1e-6, msg=name)
            states = {"momentum_buffer"} if is_hidden(name) else {"step", "exp_avg", "exp_avg_sq"}
            self.assertEqual(set(optimizer.state[weight]), states)

    def test_a_weight_without_a_gradient(self):
        model = tiny_model("qwen3_next")
        optimizer, before = muon_for(model, ARGS), [x.detach().clone() for x in model.parameters()]
        optimizer.step()
        self.assertTrue(all(map(torch.equal, model.parameters(), before)))
        self.assertFalse(optimizer.state)


class TrainerTest(ConfigureTestCase):
    def make(self, folder, **args):
        given = {"max_steps": 4, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "save_steps": 2}
        quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
        args = PackedTrainingArguments(folder, **OPTIONS | given | quiet | args)
        optimizer, model = class_and_kwargs("muon", args), tiny_model("qwen3_next")
        # AdamW alone would learn these samples by them. A step has all samples.
        model.get_input_embeddings().requires_grad_(False)
        model.get_output_embeddings().requires_grad_(False)
        return PackedTrainer(model, args, train_dataset=Samples(6), optimizer_cls_and_kwargs=optimizer)

    def test_learns_and_resumes(self):
        """The same bits as without a stop, with clipping and two rows per step."""
        with TemporaryDirectory() as folder:
            through, resumed = self.make(folder), self.make(folder)
            said(through.train)
            losses = [x["loss"] for x in through.state.log_history if "loss" in x]
            self.assertEqual(losses, sorted(losses, reverse=True))
            said(resumed.train, resume_from_checkpoint=f"{folder}/checkpoint-2")
        for x, expected in zip(resumed.model.parameters(), through.model.parameters(), strict=True):
            self.assertTrue(torch.equal(x, expected))

    def test_weights_in_bfloat16(self):
        model = tiny_model("qwen3_5").bfloat16()
        self.assertIn("MuonWithAdamW keeps no float32 copy of them", rounded_away(model, muon_for(model, ARGS)))

    def test_refusals(self):
        adapted = get_peft_model(tiny_model("qwen3_5"), LoraConfig(r=2, target_modules=["q_proj"]))
        with self.assertRaisesRegex(
            ValueError, "trained hidden matrices with muon, got none. Choose adamw_torch_fused:"
        ):
            muon_for(adapted, ARGS)
        with self.assertRaisesRegex(ValueError, "in their shapes with muon, got DeepSpeed. Train with DDP or FSDP2"):
            muon_for(tiny_model("qwen3_5"), SimpleNamespace(deepspeed_plugin=object()))
        with mock.patch.object(releases, "NEWTON_SCHULZ", "torch.optim._muon:_gone"):
            with self.assertRaisesRegex(ImportError, "lacks torch.optim._muon._gone, which --optim muon requires"):
                muon_for(tiny_model("qwen3_5"), ARGS)
        with TemporaryDirectory() as folder:
            trainer = self.make(folder, max_grad_norm=0.0, gradient_accumulation_steps=1)
            trainer.add_callback(GradientReleaseCallback(trainer))
            with self.assertRaisesRegex(
                ValueError, "an optimizer of flashoptim for gradient release, got MuonWithAdamW"
            ):
                said(trainer.train)


class ProcessesTest(unittest.TestCase):
    @parameterized.expand([("qwen3_next", "fsdp2"), ("qwen3_5", "fsdp2_resharded")])
    def test_fsdp2_equals_ddp(self, family, kind):
        """With experts that are not cut, other weights that are, and states that are saved and loaded."""
        expected = run_once(train_two_processes, 2, "ddp", family)
        for found in (expected[1], *run_once(train_two_processes, 2, kind, family)):
            for name, x in found.items():
                torch.testing.assert_close(x, expected[0][name], rtol=0, atol=3e-4, msg=name)
