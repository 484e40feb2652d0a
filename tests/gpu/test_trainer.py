"""Trainer does not wait for the GPU, and TRL's head has our products: `make test-gpu`."""

import io
import tempfile
import unittest
import warnings
from contextlib import redirect_stdout
from importlib.util import find_spec
from unittest import mock

import torch
from common.gpu import needs_gpu, report
from common.real_heads import model_on_gpu, random_documents
from parameterized import parameterized
from transformers import Trainer, TrainerCallback, TrainingArguments

from transformers_packed import configure_packing, patch_model
from transformers_packed.models.cuda_graphs import records_graphs
from transformers_packed.ops import implementations_used, linear_logps


FIRST, LAST = 3, 6


class Waits(TrainerCallback):
    """Turns torch's warnings of waits on, from one step to another."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == FIRST:
            torch.cuda.set_sync_debug_mode("warn")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == LAST:
            torch.cuda.set_sync_debug_mode("default")


class Recorded(TrainerCallback):
    """Whether graphs are recorded at the end of the last step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.graphs = records_graphs(model.model)


@needs_gpu
class CudaTrainerTest(unittest.TestCase):
    def trainer(self, **options):
        documents = [document.tolist() for document in random_documents(range(20, 120))]
        samples = [{"input_ids": ids, "labels": ids} for ids in documents]
        args = TrainingArguments(
            self.enterContext(tempfile.TemporaryDirectory()),
            per_device_train_batch_size=8,
            max_steps=LAST + 1,
            bf16=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        return Trainer(model_on_gpu(dtype=torch.float32), args, train_dataset=samples)

    @parameterized.expand([(None,), (True,)])
    def test_graphs(self, choice):
        """Losses are those without graphs, in batches of other lengths too."""
        losses, printed = [], io.StringIO()
        for graphs in (choice, False):
            trainer, recorded = self.trainer(logging_steps=1), Recorded()
            trainer.add_callback(recorded)
            with redirect_stdout(printed):
                configure_packing(trainer, "padding_free", cuda_graphs=graphs)
                trainer.train()
            losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
            if graphs is not False:
                self.assertTrue(recorded.graphs, printed.getvalue())
        errors = [abs(a - b) / b for a, b in zip(*losses, strict=True)]
        report(f"losses with cuda_graphs={choice}", largest_error=max(errors))
        self.assertLess(max(errors), 2e-3)

    def test_waits_of_a_step(self):
        """None, apart from the event after which the host knows the number of targets."""
        self.addCleanup(torch.cuda.set_sync_debug_mode, "default")
        trainer = self.trainer(logging_steps=100)
        trainer.add_callback(Waits())
        configure_packing(trainer, "padding_free")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        waits = [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]
        report("waits of a training step", waits=len(waits) / (LAST - FIRST))
        self.assertEqual(waits, [])

    @parameterized.expand([("full", False), ("frozen_head", True)])
    @unittest.skipUnless(find_spec("trl"), "needs trl")
    def test_trl_head(self, _, frozen):
        """The scores and gradients of TRL's own head, for its loss and for another one."""
        from trl.trainer.utils import add_fused_lm_head

        ids = torch.randint(1, 97, (1, 300), generator=torch.Generator().manual_seed(0)).cuda()
        labels = ids.masked_fill(ids < 20, -100)
        found = []
        for ours in (False, True):
            model = model_on_gpu(dtype=torch.float32)
            model.lm_head.weight.requires_grad_(not frozen)
            add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
            model = patch_model(model) if ours else model
            leaves = [x for x in model.parameters() if x.requires_grad]
            for factor in (1.0, torch.arange(299.0, device="cuda")):
                with mock.patch("transformers_packed.ops.linear_logps", wraps=linear_logps) as op:
                    output = model(input_ids=ids, labels=labels, fused_lm_head=True)
                self.assertEqual(op.call_count, ours)
                gradients = torch.autograd.grad((output.log_probs * factor).sum(), leaves, allow_unused=True)
                scores = output.log_probs.detach(), output.entropy.detach(), output.is_top1.float()
                found.append([*scores, *(x for x in gradients if x is not None)])
        self.assertIn("linear_logps", implementations_used())
        for theirs, ours in zip(found[:2], found[2:], strict=True):
            self.assertEqual(len(theirs), len(ours))
            errors = [float((a - b).norm() / a.norm().clamp_min(1e-30)) for a, b in zip(theirs, ours, strict=True)]
            report("TRL's head", frozen=frozen, largest_error=max(errors))
            self.assertLess(max(errors), 2e-3)
