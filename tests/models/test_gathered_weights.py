"""Modules whose calls gather weights from all processes, as DeepSpeed's ZeRO-3 and FSDP2 do.

Such weights are empty outside of the module, and all processes have to make the same calls. A stand-in takes DeepSpeed's
place. `tests/training/test_deepspeed.py` trains with DeepSpeed itself.
"""

import copy
import faulthandler
import unittest

import torch
from common.families import tiny_model
from common.processes import run_processes
from common.zero_3 import Zero3
from mixins.lora import all_linear
from mixins.model import alone, packed_batch, relative_error, total_relative_error
from mixins.patch import CONFIGS, OTHERS, builtin_model, on_a_gpu
from parameterized import parameterized
from torch import distributed
from torch.distributed.fsdp import FSDPModule, fully_shard

from transformers_packed import patch_model, per_document_logps, verify_packing
from transformers_packed.models.mtp_head import first_choices
from transformers_packed.models.outputs import CausalLMOutputWithoutLogits
from transformers_packed.models.untouched import gathers_weights, is_sharded_linear


INDEXED = "qwen4_exp"
OWN = [name for name in (*CONFIGS, *OTHERS) if name != INDEXED]
# Families with modules that run on each document, and one whose model does.
ON_DOCUMENTS = ("recurrent_gemma", "zaya", "falcon")
# Their documents form one and several batches.
ROWS = ([70, 3, 65], [300, 4, 2, 5], [9])


def documents(lengths) -> list[torch.Tensor]:
    return [torch.arange(1, n + 1) % 60 + 1 for n in lengths]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


class Zero3Test(unittest.TestCase):
    def check(self, ours, builtin, lengths=(9, 1, 30), leaves=(), bar=1e-5) -> Zero3:
        """Compare loss and gradients of a row with those of the stock model on each document alone."""
        logits, loss = alone(builtin, documents(lengths))
        loss.backward()
        expected = gradients(builtin)
        zero = Zero3(ours, leaves)
        output = ours(**packed_batch(documents(lengths)), use_cache=False)
        output.loss.backward()
        self.assertLess(relative_error(output.loss, loss), 1e-5)
        got = gradients(ours)
        self.assertEqual(got.keys(), expected.keys())
        self.assertLess(total_relative_error(got, expected), bar)
        return zero

    @parameterized.expand([*((name, "each_module") for name in OWN), ("qwen3_5", "whole_layers")])
    def test_equals_the_builtin(self, name, kind):
        builtin = builtin_model(name)
        with on_a_gpu():
            ours = patch_model(copy.deepcopy(builtin))
            leaves = (type(ours.model.layers[0]),) if kind == "whole_layers" else ()
            zero = self.check(ours, builtin, leaves=leaves)
        self.assertEqual(any("layers.0." in module for module in zero.gathers), not leaves)

    @parameterized.expand(["qwen3_5", "experts"])
    def test_adapters(self, name):
        builtin = builtin_model("qwen3_5_moe") if name == "experts" else all_linear(name)
        with on_a_gpu():
            self.check(patch_model(copy.deepcopy(builtin)), builtin)

    def test_a_model_that_is_patched_after_partitioning(self):
        builtin = builtin_model()
        logits, _ = alone(builtin, documents((9, 30)))
        zero = Zero3(builtin)
        output = patch_model(builtin)(**packed_batch(documents((9, 30))), use_cache=False)
        self.assertLess(relative_error(output.logits[0], torch.cat(logits)), 1e-5)
        self.assertTrue(zero.gathers)

    @parameterized.expand(ON_DOCUMENTS)
    def test_rows_make_the_same_calls(self, name):
        """Otherwise, processes with different rows wait for each other, or take parts of different weights."""
        builtin = tiny_model(name)
        # Some modules keep states of their last forward, which cannot be copied.
        models, gathers = [patch_model(copy.deepcopy(builtin)) for _ in ROWS], []
        for ours, lengths in zip(models, ROWS, strict=True):
            builtin.zero_grad()
            gathers.append(self.check(ours, builtin, lengths, bar=1e-4).gathers)
        self.assertEqual(gathers[0], gathers[1])
        self.assertEqual(gathers[0], gathers[2])

    @unittest.skipUnless(INDEXED in OTHERS, "needs a newer release of Transformers")
    def test_an_indexer_is_refused(self):
        """Only long documents need it."""
        ours = patch_model(builtin_model(INDEXED))
        Zero3(ours)
        with self.assertRaisesRegex(ValueError, "expected layers that all rows run.*got an indexer"):
            ours(**packed_batch(documents((9, 30))), use_cache=False)

    def test_the_head_computes_the_loss_without_logits(self):
        ours = patch_model(builtin_model())
        batch = packed_batch(documents((9, 30)))
        expected = ours(**batch, use_cache=False, skip_logits=False)
        zero = Zero3(ours)
        output = ours(**batch, use_cache=False)
        self.assertIsInstance(output, CausalLMOutputWithoutLogits)
        self.assertLess(relative_error(output.loss, expected.loss), 1e-6)
        # The head has gathered its weight, and not the model around it.
        self.assertNotIn(ours.lm_head.weight, zero.external[ours])
        self.assertLess(relative_error(output.logits, expected.logits), 1e-5)
        # A user's hook on the head requires logits.
        ours.lm_head.register_forward_hook(lambda *_: None)
        self.assertNotIsInstance(ours(**batch, use_cache=False), CausalLMOutputWithoutLogits)

    def test_logits_after_an_update(self):
        ours = patch_model(builtin_model())
        zero = Zero3(ours)
        output = ours(**packed_batch(documents((9, 30))), use_cache=False)
        zero.change(ours.lm_head.weight)
        with self.assertRaisesRegex(ValueError, "changed in place"):
            output.logits  # noqa: B018

    def test_heads_are_called_once_for_each_row(self):
        ours = patch_model(builtin_model())
        zero, width = Zero3(ours), ours.config.hidden_size
        for tokens in (3000, 40):
            rows, labels = torch.randn(1, tokens, width), torch.ones(1, tokens, dtype=torch.long)
            for compute in (
                lambda: per_document_logps(rows, labels, torch.tensor([0, tokens]), head=ours.lm_head),  # noqa: B023
                lambda: first_choices(ours.lm_head, rows[0]),  # noqa: B023
                lambda: first_choices(ours.lm_head, rows[0, :0]),  # noqa: B023
            ):
                zero.gathers.clear()
                with torch.no_grad():
                    compute()
                self.assertEqual(zero.gathers, ["lm_head"])

    def test_other_hooks_of_deepspeed_gather_nothing(self):
        """Its profiler and its engine register hooks in each stage of ZeRO."""

        def hook(*_):
            pass

        for module in ("deepspeed.profiling.flops_profiler.profiler", "deepspeed.runtime.engine"):
            hook.__module__, layer = module, torch.nn.Linear(2, 2)
            layer.register_forward_pre_hook(hook)
            self.assertFalse(gathers_weights(layer) or is_sharded_linear(layer))
            sharded = torch.nn.Linear(2, 2)
            Zero3(sharded)
            self.assertTrue(gathers_weights(sharded) and is_sharded_linear(sharded))
            sharded.register_forward_hook(hook)
            self.assertTrue(gathers_weights(sharded))
            self.assertFalse(is_sharded_linear(sharded))

    def test_verification_is_refused(self):
        ours = patch_model(builtin_model())
        Zero3(ours)
        with self.assertRaisesRegex(ValueError, "expected a model without FSDP and ZeRO-3"):
            verify_packing(ours, packed_batch(documents((9, 30))))


def run_rows() -> list[float]:
    """The losses of rows that differ between processes, of a model that FSDP2 shards by layer."""
    # A process that waits for the other one would wait for long.
    faulthandler.dump_traceback_later(30, exit=True)
    model, mesh = patch_model(tiny_model("falcon")), distributed.init_device_mesh("cpu", (2,))
    for module in (*model.transformer.h, model):
        fully_shard(module, mesh=mesh)
    assert gathers_weights(model.transformer) and not gathers_weights(model.lm_head)
    losses = []
    for row in (ROWS, ROWS[::-1]):
        loss = model(**packed_batch(documents(row[distributed.get_rank()])), use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    faulthandler.cancel_dump_traceback_later()
    return losses


class FSDP2Test(unittest.TestCase):
    @parameterized.expand([(1, 1), (2, 0), (0, 2), (2, 1), (1, 2)])
    def test_a_sharded_linear_layer_has_a_hook_of_each_kind(self, before, after):
        layer = torch.nn.Linear(2, 2)
        # As `fully_shard` does it.
        layer.__class__ = type("FSDPLinear", (FSDPModule, torch.nn.Linear), {})
        for _ in range(before):
            layer.register_forward_pre_hook(lambda *_: None)
        for _ in range(after):
            layer.register_forward_hook(lambda *_: None)
        self.assertEqual(is_sharded_linear(layer), before == after == 1)

    def test_rows_of_processes_may_differ(self):
        losses = run_processes(run_rows, 2)
        builtin = tiny_model("falcon")
        for rank, found in enumerate(losses):
            for row, loss in zip((ROWS, ROWS[::-1]), found, strict=True):
                self.assertLess(abs(alone(builtin, documents(row[rank]))[1].item() - loss), 1e-5)
