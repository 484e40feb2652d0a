"""`outputs.logits` of a forward without logits equal those of the same forward with `skip_logits=False`."""

import copy
import dataclasses
import pickle
import unittest
from contextlib import nullcontext
from functools import partial

import torch
from accelerate.utils.operations import convert_to_fp32
from mixins.model import gradients, packed_batch, padded_batch, relative_error, total_relative_error
from mixins.patch import COMPOSITE, builtin_model, documents
from parameterized import parameterized
from torch import distributed
from torch.nn.parallel.distributed import _find_tensors
from torch.utils._pytree import tree_map

from transformers_packed import patch_model
from transformers_packed.models.losses import CrossEntropyLoss, RouterLoss, own_with


MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
AUTOCAST = {None: nullcontext} | {
    dtype: lambda dtype=dtype: torch.autocast("cpu", dtype) for dtype in (torch.bfloat16, torch.float16)
}

QWEN3_5_CLASSIFIERS = ("Qwen3_5TextForSequenceClassification", "Qwen3_5ForSequenceClassification")
COMPOSITE_CLASS = "Qwen3_5ForConditionalGeneration"


def our_model(family="qwen3_5"):
    return patch_model(builtin_model(family))


class WritesData:
    """Some optimizers write a step through `.data`."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def step(self):
        for parameter in self.parameters:
            parameter.data.add_(0.1)


class ListTest(unittest.TestCase):
    @parameterized.expand(
        [((),), ((CrossEntropyLoss(0.5), RouterLoss()),), ((CrossEntropyLoss(),),), (own_with(0.5),)]
    )
    def test_a_list_that_forwards_with_logits_would_not_train(self, losses):
        model = patch_model(builtin_model())
        model.losses = losses
        ids = torch.arange(1, 13)[None]
        for skips in (True, False):
            with self.assertRaisesRegex(ValueError, "model.losses with all of OWN and weight 1"):
                model(input_ids=ids, labels=ids, skip_logits=skips)


class KeptLogitsTest(unittest.TestCase):
    """With `logits_to_keep`, labels are cut like the logits. ms-swift does this in every step."""

    def setUp(self):
        self.batch = packed_batch(documents())
        self.length = self.batch["input_ids"].shape[1]
        starts = torch.zeros(self.length, dtype=torch.bool)
        starts[self.batch["cu_seqlens"][:-1].long()] = True
        # The first tokens of documents have labels, which must not be targets.
        is_target = starts | (torch.arange(self.length) % 3 == 1)
        self.batch["labels"] = self.batch["input_ids"].where(is_target, -100)

    @parameterized.expand([("qwen3_5", True), ("qwen3_next", False)])
    def test_loss_of_a_mask(self, family, skip):
        model = our_model(family)
        output = model(**self.batch)
        loss, expected = output.loss, gradients(model, output.loss)
        keep = torch.nn.functional.pad(self.batch["labels"][0, 1:] != -100, (0, 1), value=True)
        cut = torch.nn.functional.pad(self.batch["labels"][:, 1:], (0, 1), value=-100)[:, keep].roll(1, dims=1)
        output = model(**self.batch | {"labels": cut}, logits_to_keep=keep, skip_logits=skip)
        self.assertEqual("logits" not in output, skip)
        self.assertEqual(output.logits.shape[1], int(keep.sum()))
        self.assertLess(relative_error(output.loss, loss), 1e-6)
        self.assertLess(total_relative_error(gradients(model, output.loss), expected), 1e-5)

    def test_loss_of_a_suffix(self):
        model, kept = our_model(), self.length - 5
        labels = self.batch["labels"].clone()
        labels[:, :6] = -100
        expected = model(**self.batch | {"labels": labels}).loss
        output = model(**self.batch | {"labels": labels[:, -kept:]}, logits_to_keep=kept)
        self.assertLess(relative_error(output.loss, expected), 1e-6)

    def test_labels_of_all_tokens_are_refused(self):
        with self.assertRaisesRegex(
            ValueError, r"labels of shape \(1, 3\), one for each token that logits_to_keep keeps"
        ):
            our_model()(**self.batch, logits_to_keep=3)

    def test_one_document_with_a_mask_is_a_padded_batch(self):
        model, mask = our_model(), torch.ones(1, self.length, dtype=torch.long)
        mask[:, -3:] = 0
        batch = {"input_ids": self.batch["input_ids"], "attention_mask": mask}
        expected = model(**batch).logits
        self.assertTrue(torch.equal(model(**batch, cu_seq_lens_q=torch.tensor([0, self.length])).logits, expected))


class PooledTokensTest(unittest.TestCase):
    """Classifiers pool the last token of a document that is not the pad token, as the stock class does for it alone."""

    @parameterized.expand(
        [
            (head, pad, embedded, padded)
            for head in ("Qwen3NextForSequenceClassification", *QWEN3_5_CLASSIFIERS)
            for pad, embedded, padded in ((0, False, False), (0, False, True), (0, True, False), (None, False, False))
            if head == "Qwen3NextForSequenceClassification" or not (embedded or pad is None)
        ]
    )
    def test_a_pad_token_that_ends_documents(self, head, pad, embedded, padded):
        family = "qwen3_next" if head.startswith("Qwen3Next") else "qwen3_5"
        composite = head == "Qwen3_5ForSequenceClassification"
        model = builtin_model(family, head, COMPOSITE[family] if composite else None).eval()
        model.config.get_text_config().pad_token_id = pad
        # In the middle, at the end, at the start, alone, and in all tokens.
        rows = [torch.tensor(x) for x in ([5, 6, 0], [3, 0, 4, 0, 0], [0, 0, 7], [8], [0], [0, 0], [9, 2], [6, 0])]
        labels = torch.arange(len(rows)) % 2
        embed = model.get_input_embeddings()
        batches = [{"inputs_embeds": embed(x)[None]} if embedded else {"input_ids": x[None]} for x in rows]
        alone = [model(**x, labels=y[None]) for x, y in zip(batches, labels, strict=True)]
        patch_model(model)
        name = "inputs_embeds" if embedded else "input_ids"
        row = {
            name: torch.cat([x[name] for x in batches], 1),
            "cu_seqlens": torch.tensor([0, 3, 8, 11, 12, 13, 15, 17, 19]),
        }
        if padded:
            row = {x: y for x, y in padded_batch(rows, "right").items() if x != "labels"} | {"use_cache": False}
        output = model(**row, labels=labels)
        self.assertLess(relative_error(output.logits, torch.cat([x.logits for x in alone])), 1e-5)
        self.assertLess(relative_error(output.loss, sum(x.loss for x in alone) / len(rows)), 1e-5)

    @parameterized.expand(
        [
            ("another pad token", QWEN3_5_CLASSIFIERS[0], "input_ids", [0, 1]),
            ("embeddings", QWEN3_5_CLASSIFIERS[1], "inputs_embeds", [0, 1]),
            ("labels at padding", "Qwen3_5ForTokenClassification", "input_ids", [[1] * 5] * 2),
        ]
    )
    def test_padding_that_is_read(self, _, head, name, labels):
        """Then it is computed as in the stock model, because a packed row has none."""
        composite = head in (QWEN3_5_CLASSIFIERS[1], "Qwen3_5ForTokenClassification")
        model = builtin_model("qwen3_5", head, COMPOSITE["qwen3_5"] if composite else None).eval()
        model.config.get_text_config().pad_token_id = 0
        ids, labels = torch.arange(1, 11).view(2, 5), torch.tensor(labels)
        tokens = {name: ids if name == "input_ids" else model.get_input_embeddings()(ids)}
        batch = {**tokens, "labels": labels, "attention_mask": torch.tensor([[1] * 5, [1] * 3 + [0] * 2])}
        expected, found = (convert(model)(**batch, use_cache=False) for convert in (lambda x: x, patch_model))
        self.assertLess(relative_error(found.logits, expected.logits), 1e-5)
        self.assertLess(relative_error(found.loss, expected.loss), 1e-5)


class LogitsOnDemandTest(unittest.TestCase):
    def setUp(self):
        self.batch = packed_batch(documents())

    def check(self, got, expected):
        self.assertEqual((got.dtype, got.requires_grad), (expected.dtype, expected.requires_grad))
        self.assertEqual(got.is_inference(), expected.is_inference())
        self.assertTrue(torch.equal(got, expected))

    @parameterized.expand(
        [
            *((f"{made}_grad", MODES[made], MODES["grad"]) for made in MODES),
            ("grad_inference", MODES["grad"], MODES["inference"]),
            ("inference_no_grad", MODES["inference"], MODES["no_grad"]),
            ("bfloat16_float16", AUTOCAST[torch.bfloat16], AUTOCAST[torch.float16]),
            ("float32_float16", AUTOCAST[None], AUTOCAST[torch.float16]),
            ("float16_float32", AUTOCAST[torch.float16], AUTOCAST[None]),
        ]
    )
    def test_they_are_those_of_the_forward(self, _, made, read):
        """Its gradients and its autocast, whatever those are where logits are read."""
        model = our_model()
        with made():
            expected, output = model(**self.batch, skip_logits=False).logits, model(**self.batch)
        with read():
            enabled = torch.is_grad_enabled()
            self.check(output.logits, expected)
            self.assertEqual(torch.is_grad_enabled(), enabled)

    def test_read_without_gradients_they_can_be_trained(self):
        def gradients(model, output):
            with torch.no_grad():
                logits = output.logits
            model.zero_grad()
            (output.loss + logits.square().mean()).backward()
            return [x.grad for x in model.parameters()]

        model = our_model()
        expected = gradients(model, model(**self.batch, skip_logits=False))
        for got, want in zip(gradients(model, model(**self.batch)), expected, strict=True):
            self.assertLess(relative_error(got, want), 1e-4)

    @parameterized.expand(
        [
            ("qwen3_next", partial(torch.optim.SGD, lr=0.1)),
            # These do not increment the version counters of the tensors they change. The first is Trainer's default.
            ("qwen3_5", partial(torch.optim.AdamW, lr=0.1, fused=True)),
            ("qwen3_5", partial(torch.optim.AdamW, lr=0.1, foreach=True)),
            ("qwen3_5", WritesData),
        ]
    )
    def test_after_a_step_they_are_refused(self, family, optimizer):
        model = our_model(family)
        output, read = model(**self.batch), model(**self.batch)
        logits = read.logits
        output.loss.backward()
        optimizer(model.parameters()).step()
        for _ in range(2):
            with self.assertRaisesRegex(ValueError, "changed in place since.*Read logits before .*skip_logits=False"):
                output.logits  # noqa: B018
            with self.assertRaisesRegex(ValueError, "changed in place"):
                output["logits"]
        self.assertNotIn("logits", output)
        # Computed logits stay.
        self.assertIs(read.logits, logits)

    @parameterized.expand([("qwen3_next", None, None), ("qwen3_5", COMPOSITE_CLASS, COMPOSITE["qwen3_5"])])
    def test_the_switch_of_a_model(self, *model):
        """A loss of the user's own reads the logits of a copy, so the model computes them in training."""
        model = builtin_model(*model)
        batch = {"input_ids": torch.arange(1, 9)[None], "labels": torch.arange(1, 9)[None]}
        expected = convert_to_fp32(model(**batch)).logits
        self.assertTrue(patch_model(model).skips_logits)
        model.skips_logits = False
        self.assertLess(relative_error(convert_to_fp32(model(**batch)).logits, expected), 1e-5)
        self.assertNotIn("logits", model(**batch, skip_logits=True))
        model.skips_logits = True
        self.assertNotIn("logits", model(**batch))
        self.assertIn("logits", model(**batch, skip_logits=False))

    def test_what_else_may_have_changed(self):
        model = our_model()
        model.lm_head.bias = torch.nn.Parameter(torch.randn(model.lm_head.out_features))
        expected = model(**self.batch, skip_logits=False).logits
        for name, changed in {
            "bias": lambda output: model.lm_head.bias.add_(0),
            "weight": lambda output: model.lm_head.load_state_dict(model.lm_head.state_dict()),
            "hidden states": lambda output: output.hidden_states[-1].mul_(2),
        }.items():
            output = model(**self.batch, output_hidden_states=True)
            with self.subTest(name), torch.no_grad():
                changed(output)
                with self.assertRaisesRegex(ValueError, "changed in place"):
                    output.logits  # noqa: B018
        # A replaced head, or a hook on this one, comes too late.
        output, hooked = model(**self.batch), model(**self.batch)
        model.lm_head.register_forward_hook(lambda *_: self.fail("it was not there in the forward"))
        self.check(hooked.logits, expected)
        model.lm_head = torch.nn.Linear(model.lm_head.in_features, 3)
        self.check(output.logits, expected)

    def test_a_frozen_head_outlives_a_step(self):
        model = our_model()
        model.requires_grad_(False).model.layers[0].requires_grad_(True)
        expected, output = model(**self.batch, skip_logits=False).logits, model(**self.batch)
        output.loss.backward()
        torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.1).step()
        self.check(output.logits, expected)

    def test_weights_for_one_call(self):
        model = our_model()
        doubled = {name: 2 * x.detach() for name, x in model.named_parameters()}
        expected = torch.func.functional_call(model, doubled, (), {**self.batch, "skip_logits": False}).logits
        self.check(torch.func.functional_call(model, doubled, (), self.batch).logits, expected)

    @parameterized.expand(
        [
            ("qwen3_5", lambda output: output.logits),
            ("qwen3_5_moe", lambda output: output["logits"]),
            ("qwen3_5_moe", lambda output: output.get("logits")),
        ]
    )
    def test_nobody_makes_them_unasked(self, family, ask):
        model = our_model(family)
        options = {"output_router_logits": True} if family == "qwen3_5_moe" else {}
        with torch.no_grad():
            output = model(**self.batch, **options, output_hidden_states=True)
            expected = model(**self.batch, skip_logits=False).logits
        copies = {
            "copy": copy.copy,
            "deepcopy": copy.deepcopy,
            "pickle": lambda output: pickle.loads(pickle.dumps(output)),
            "accelerate": convert_to_fp32,
            "tree": lambda output: tree_map(lambda x: x, output),
        }
        keys = [x for x in output.keys() if x != "logits"]
        for name, walk in {
            "to_tuple": lambda output: output.to_tuple(),
            "slice": lambda output: output[1:],
            "iteration": lambda output: [*output, *output.items(), *output.values()],
            "repr": repr,
            "DDP": lambda output: list(_find_tensors(output)),
            "fields": lambda output: [getattr(output, field.name) for field in dataclasses.fields(output)],
            **copies,
        }.items():
            with self.subTest(name):
                found = walk(output)
                self.assertNotIn("logits", output)
                if name in copies:
                    self.assertIs(type(found), type(output))
                    self.assertEqual(list(found.keys()), keys)
                    with self.assertRaisesRegex(AttributeError, "got a copy.*skip_logits=False"):
                        found.logits  # noqa: B018
                    with self.assertRaisesRegex(AttributeError, "got a copy.*skip_logits=False"):
                        found.get("logits")
                    for key in ("loss", "aux_loss", "hidden_states", "other"):
                        torch.testing.assert_close(found.get(key), output.get(key))
        with self.subTest("asked"):
            got = ask(output)
            self.check(got, expected)
            self.assertTrue(got is output.logits is output["logits"] is output.get("logits"))
            self.assertIn("logits", output)
            self.assertIs(dict(output)["logits"], got)
            self.assertIs(output.to_tuple()[-1], output.logits)
            for name, copied in copies.items():
                self.assertTrue(torch.equal(copied(output).logits, expected), name)
            output.logits = None
            self.assertIsNone(output.logits)
            self.assertEqual(output.get("logits", 3), 3)


@unittest.skipUnless(distributed.is_available(), "needs torch.distributed")
class ShardedTest(unittest.TestCase):
    def setUp(self):
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        self.addCleanup(distributed.destroy_process_group)

    def test_fsdp2(self):
        """FSDP2 with an output dtype traverses the outputs without computing logits."""
        model, batch = our_model(), packed_batch(documents())
        expected = model(**batch, skip_logits=False).logits
        mesh = distributed.init_device_mesh("cpu", (1,))
        policy = distributed.fsdp.MixedPrecisionPolicy(output_dtype=torch.float32)
        for module in (model.lm_head, *model.model.layers, model):
            distributed.fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
        output, late = model(**batch), model(**batch)
        self.assertNotIn("logits", output)
        self.assertLess(relative_error(output.logits, expected), 1e-6)
        late.loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with self.assertRaisesRegex(ValueError, "changed in place"):
            late.logits  # noqa: B018
