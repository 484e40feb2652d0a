"""How a Trainer gets the optimizers of other packages, and what two processes do with them."""

import unittest
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from common.optimizers import flashoptim
from common.processes import run_once
from common.sharded import batch, wrapped_by
from parameterized import parameterized
from scripts.trainer_arms import CONFIGS
from torch import distributed
from transformers import AutoModelForCausalLM, TrainingArguments, set_seed

from transformers_packed import patch_model
from transformers_packed.models.optimizers import OPTIMIZERS
from transformers_packed.training.muon import muon_for
from transformers_packed.training.optimizers import arguments_for, class_and_kwargs, unwrapped


# Weights with quantized moments, also of half of a weight.
LARGE = {"hidden_size": 128, "intermediate_size": 512}


def model_in_bfloat16(**options):
    set_seed(0)
    config = CONFIGS["qwen3_5"]()
    for name, value in options.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    return patch_model(model).train()


def steps(kind, dropout=0.0, cls="torchao.optim.AdamW8bit", **options) -> torch.nn.Module:
    """The model after three steps in two processes."""
    model = wrapped_by(kind, model_in_bfloat16(attention_dropout=dropout, **LARGE))
    module, _, name = cls.rpartition(".")
    optimizer = getattr(import_module(module), name)(model.parameters(), lr=1e-2, **options)
    for _ in range(3):
        model(**batch(distributed.get_rank())).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def apart(dropout: float) -> float:
    """The largest difference between the weights of two processes that round at random."""
    with mock.patch.object(torch, "compile", lambda function, **kwargs: function):
        model = steps("ddp", dropout, bf16_stochastic_round=True)
    largest = 0.0
    for parameter in model.parameters():
        both = [torch.empty_like(parameter) for _ in range(2)]
        distributed.all_gather(both, parameter.detach())
        largest = max(largest, (both[0].float() - both[1].float()).abs().max().item())
    return largest


class ArgumentsTest(unittest.TestCase):
    @parameterized.expand(OPTIMIZERS)
    def test_what_a_trainer_gets(self, name):
        arguments = arguments_for(name)
        self.assertEqual(arguments.pop("max_grad_norm", None), 0 if OPTIMIZERS[name].releases else None)
        rates = SimpleNamespace(learning_rate=1e-4, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6)
        with mock.patch.dict("sys.modules", {"flashoptim": flashoptim()}):
            given = class_and_kwargs(name, rates)
        if given is None:
            self.assertEqual(TrainingArguments("out", use_cpu=True, **arguments).optim, name)
            return
        self.assertEqual(arguments, {})
        if OPTIMIZERS[name].orthogonalizes:
            self.assertEqual((given[0](), given[1]), (muon_for, {"args": rates}))
            return
        self.assertEqual((given[0].__name__, given[1]["betas"]), ("FlashAdamW", (0.8, 0.9)))

    def test_the_optimizer_inside_of_accelerate(self):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
        self.assertIs(unwrapped(Accelerator(cpu=True).prepare_optimizer(optimizer)), optimizer)
        self.assertIs(unwrapped(optimizer), optimizer)


class ProcessesTest(unittest.TestCase):
    @pytest.mark.slow
    @unittest.skipUnless(find_spec("torchao"), "needs torchao")
    def test_random_rounding_with_ddp(self):
        """Weights stay equal while both processes draw the same random numbers, so not with dropout."""
        self.assertEqual(run_once(apart, 2, 0.0), [0.0, 0.0])
        self.assertGreater(run_once(apart, 2, 0.5)[0], 0)
