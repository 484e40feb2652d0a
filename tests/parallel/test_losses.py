import unittest

import torch
from common.processes import run_processes

from transformers_packed import DataCollatorWithFlattening, per_document_loss
from transformers_packed.parallel import SequenceParallel, gather_loss_tensors, shard_batch


LENGTHS = [5, 9, 1, 7]


def make_inputs():
    """Samples, and the logits of their row and of its padding."""
    generator = torch.Generator().manual_seed(0)
    samples = [{"input_ids": torch.randint(0, 11, (length,), generator=generator).tolist()} for length in LENGTHS]
    return samples, torch.randn(1, 24, 11, dtype=torch.float64, generator=generator)


def compute(size):
    parallel = SequenceParallel(size)
    samples, logits = make_inputs()
    batch = DataCollatorWithFlattening(return_cu_seqlens=True, on_leak="ignore")(samples)
    batch = shard_batch(batch, parallel.rank, size, parallel=parallel)
    shard, targets = batch["boundaries"], batch["shift_labels"]
    length = shard.total_length
    logits = logits[:, shard.start : shard.start + length].requires_grad_()
    logps = logits.log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    logps, targets = gather_loss_tensors(logps, targets, boundaries=shard)
    documents = shard.row.seq_idx[0, : logps.shape[1]].long()
    counted = (targets[0] != -100).double()
    sums = torch.zeros(len(LENGTHS), dtype=torch.float64).index_add(0, documents, -logps[0] * counted)
    counts = torch.zeros(len(LENGTHS), dtype=torch.float64).index_add(0, documents, counted)
    loss = (sums / counts.clamp(min=1)).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    try:
        gather_loss_tensors(logps, boundaries=shard)
    except ValueError as error:
        return loss.item(), gradient, logps.shape, str(error)


class GatherLossTensorsTest(unittest.TestCase):
    def test_a_loss_by_document(self):
        samples, logits = make_inputs()
        batch = DataCollatorWithFlattening(return_cu_seqlens=True, on_leak="ignore")(samples)
        row = logits[:, :22].clone().requires_grad_()
        loss = per_document_loss(row, batch["input_ids"], batch["cu_seqlens"]).losses.sum()
        (expected,) = torch.autograd.grad(loss, row)
        for size in (2, 4):
            results = run_processes(compute, size, size)
            # DDP and FSDP average the gradients of parameters over processes.
            found = torch.cat([gradient for _, gradient, _, _ in results], dim=1) / size
            for value, _, shape, message in results:
                self.assertAlmostEqual(value, loss.item(), places=5)
                self.assertEqual(tuple(shape), (1, 22))
                self.assertIn("of a shard", message)
            torch.testing.assert_close(found[:, :22], expected, rtol=1e-5, atol=1e-6)
            self.assertEqual(found[:, 22:].abs().sum().item(), 0)
