"""Weights in host memory: the models, rows and comparisons that tests of experts and of decoder layers share."""

import copy
import unittest
from contextlib import nullcontext
from unittest import mock

import torch
from common.late_experts import copied_on_a_cpu
from common.processes import run_processes
from common.sharded import batch, wrapped_by
from mixins.model import packed_batch
from mixins.patch import CONFIGS, builtin_model

from transformers_packed import patch_model
from transformers_packed.models import host_parameters
from transformers_packed.models.host_experts import bytes_in_host_memory, names_in_host_memory, shared_bytes
from transformers_packed.models.releases import IGNORED_BY_DDP


ROWS = [[torch.arange(1 + i, n + i) for n in lengths] for i, lengths in enumerate(((9, 30, 2), (17,), (3, 4, 5, 6)))]


def four_layers(family):
    """A tiny model to train. Two layers can be on their way while two others wait."""
    config = None
    if family in CONFIGS:
        given = CONFIGS[family].to_dict()
        config = type(CONFIGS[family])(**given | {"num_hidden_layers": 4, "layer_types": 2 * given["layer_types"]})
    return patch_model(builtin_model(family, config=config)).train()


def loss_of(model, row):
    return model(**packed_batch(row, "cu_seqlens"), use_cache=False).loss


def gradients(model, *rows):
    model.zero_grad()
    loss = sum(loss_of(model, row) for row in rows)
    loss.backward()
    return {"loss": loss.detach()} | {
        name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None
    }


def run(model):
    """The losses and gradients of several rows, and what evaluation between them finds."""
    found = {}
    for number, row in enumerate(ROWS):
        found |= {(number, name): x for name, x in gradients(model, row).items()}
        with torch.no_grad():
            found[number] = model.eval()(**packed_batch(row, "cu_seqlens"), use_cache=False).logits
        model.train()
        if number == 1:
            # Two forwards before their backward, between single ones.
            found |= {("both", name): x for name, x in gradients(model, *ROWS[:2]).items()}
    return found


def ddp_steps(model, keep=None):
    """The losses of steps in DDP and the weights after them, and if `keep` moves weights, the names that DDP ignores.

    Weights in host memory are on shared pages, and the products read copies of these.
    """
    ignored, losses = [], []
    with copied_on_a_cpu() if keep is not None else nullcontext() as copies:
        if keep is not None:
            ignored = names_in_host_memory(keep(model))
            assert shared_bytes(model) == bytes_in_host_memory(model) > 0
            setattr(model, IGNORED_BY_DDP, ignored)
        wrapped = wrapped_by("ddp", model)
        optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = wrapped(**batch(torch.distributed.get_rank())).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert copies is None or copies.copies.copies > 0
        # Nothing has made the weights leave the shared pages.
        assert keep is None or shared_bytes(model) == bytes_in_host_memory(model)
    trained = {name: x.detach() for name, x in model.named_parameters() if x.requires_grad}
    return {"losses": torch.stack(losses)}, trained, ignored


def merges(model, keep):
    """What each of several processes finds that merges adapters into weights on shared pages, and takes them out."""
    plain, row = copy.deepcopy(model), packed_batch(ROWS[0], "cu_seqlens")
    keep(model)
    with copied_on_a_cpu():
        model(**row)
        shared = [shared_bytes(model)]
        before = model(**row).logits
        # One process after the other.
        for rank in range(torch.distributed.get_world_size()):
            if rank == torch.distributed.get_rank():
                model.merge_adapter()
            torch.distributed.barrier()
        merged = model(**row).logits
        shared.append(shared_bytes(model))
        plain.merge_adapter()
        with mock.patch.object(host_parameters, "is_apart", lambda device: False):
            same = torch.equal(merged, plain(**row).logits)
        return same, (merged - before).abs().max() < 1e-4, shared


class OnHostTestCase(unittest.TestCase):
    def assert_same(self, actual, expected):
        self.assertEqual(actual.keys(), expected.keys())
        self.assertEqual([name for name, x in expected.items() if not torch.equal(actual[name], x)], [])

    def check_two_processes(self, ddp):
        """Two processes train as with weights on the device. `ddp(on_host)` is [`ddp_steps`]. Return what DDP ignores."""
        found, others = run_processes(ddp, 2, True), run_processes(ddp, 2, False)
        for (losses, weights, _), (expected, trained, _) in zip(found, others, strict=True):
            self.assert_same(losses, expected)
            self.assert_same(weights, trained)
            self.assert_same(weights, found[0][1])
        return found[0][2]

    def check_replaced(self, model, module, name, copies):
        """Whoever changes a weight in host memory changes what the next forward reads on the device."""
        row = packed_batch(ROWS[0], "cu_seqlens")

        def weight():
            return getattr(module, name)

        for change in (
            lambda: weight().data.mul_(2),
            lambda: setattr(weight(), "data", weight().detach() * 2),
            lambda: module.load_state_dict({key: 2 * x for key, x in module.state_dict().items()}),
            lambda: setattr(module, name, torch.nn.Parameter(weight().detach() * 2, False)),
        ):
            before = model(**row).logits
            for event in list(copies.copies.queue):
                event.wait()
            change()
            after = model(**row).logits
            self.assertFalse(torch.equal(after, before))
            with mock.patch.object(host_parameters, "is_apart", lambda device: False):
                self.assertTrue(torch.equal(model(**row).logits, after))

    def check_moved_to_meta(self, model, names, before):
        """Only what is in host memory stays, as it was. The meta device stands for a GPU."""
        model.to("meta")
        for name, x in model.named_parameters():
            self.assertEqual(x.device.type, "cpu" if name in names else "meta", name)
            self.assertFalse(name in names and x.requires_grad)
            if name in names:
                self.assertTrue(torch.equal(x.detach().float(), before[name].float()))

    def check_kept_dtype(self, model):
        for change in (model.half, model.double):
            with self.assertRaisesRegex(ValueError, "in the dtype in which they were loaded, got torch.float"):
                change()
