"""Every family of `families.MIXERS` and `families.UNPACKED`; the oracle is the built-in class."""

import copy
import inspect
import pickle
import tempfile
import unittest
from unittest import mock

import torch
from families_tester import documents, tiny_model
from packed_model_tester import alone, packed_batch, padded_batch, relative_error, total_relative_error
from packed_patch_tester import ours, snapshot
from parameterized import parameterized
from transformers import AutoModelForCausalLM

import transformers_packed
from transformers_packed import audit_model, patch_model, unpatch_model
from transformers_packed.models.families import MIXERS, UNPACKED


FAMILIES = [*MIXERS, *UNPACKED]
MASKED = [family for family, table in MIXERS.items() if any(mixer.masked for mixer in table.values())]
SOURCES = ("seq_idx", "cu_seq_lens", "cu_seqlens", "all")
SHORT = (9, 1, 20, 5)


def has_all_mixers(model: torch.nn.Module, family: str) -> bool:
    """Whether each class of the table is in the model: what is not there is not tested."""
    return {type(module).__name__ for module in model.modules()} >= set(MIXERS.get(family, ()))


class IsolationTest(unittest.TestCase):
    @parameterized.expand([(family, None) for family in FAMILIES] + [(family, "eager") for family in MASKED])
    def test_documents_are_isolated(self, family, attention):
        model = tiny_model(family, attention)
        self.assertTrue(has_all_mixers(model, family))
        batch = packed_batch(documents(), "position_ids")
        stock = model(**batch).logits
        patch_model(model)
        report = audit_model(model, lengths=[len(d) for d in documents()], inputs=("position_ids",))
        self.assertTrue(report.ok, report.table())
        with torch.no_grad():
            logits = model(**batch).logits
            # The built-in leaks, so that this test can fail.
            self.assertGreater(relative_error(stock, logits), 1e-2)
            for source in SOURCES:
                self.assertTrue(torch.equal(model(**packed_batch(documents(), source)).logits, logits), source)

    @parameterized.expand(FAMILIES)
    def test_loss_and_gradients_are_those_of_documents_alone(self, family):
        """Also for the targets: `labels` that name a document's first token are no target of the document before."""
        model, rows = tiny_model(family), documents(SHORT)
        config = model.config.get_text_config()
        # A packed row has no cache; that there is one by default must not matter.
        with mock.patch.object(config, "use_cache", False, create=True):
            logits, loss = alone(model, rows)
            expected = gradients_of(model, loss)
        patch_model(model)
        batch = packed_batch(rows)
        output = model(**{**batch, "labels": batch["input_ids"]})
        self.assertLess(relative_error(output.logits[0], torch.cat(logits)), 1e-5)
        self.assertLess(abs(output.loss.item() - loss.item()), 1e-5 * loss.item())
        actual = gradients_of(model, output.loss)
        self.assertEqual(set(actual), set(expected))
        self.assertLess(total_relative_error(actual, expected), 1e-4)

    @parameterized.expand(FAMILIES)
    def test_other_input_is_the_builtins_and_unpatching_restores_it(self, family):
        model, rows = tiny_model(family).eval(), documents(SHORT)
        inputs = [{"input_ids": torch.stack([rows[2], rows[2].flip(0)])}, {"input_ids": rows[0][None]}]
        inputs += [padded_batch(rows, side) for side in ("left", "right")]
        prompt = {name: padded_batch(rows, "left")[name] for name in ("input_ids", "attention_mask")}

        @torch.no_grad()
        def run():
            torch.manual_seed(0)
            tokens = model.generate(**prompt, max_new_tokens=3, do_sample=False)
            return [model(**batch).logits for batch in inputs] + [tokens]

        before, outputs = snapshot(model), run()
        patch_model(model)
        self.assertTrue(set(ours(model)))
        for got, want in zip(run(), outputs, strict=True):
            self.assertTrue(torch.equal(got, want))
        with torch.no_grad():
            packed = model(**packed_batch(rows)).logits
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model, protocol=2))):
                self.assertEqual(ours(other), ours(model))
                self.assertTrue(torch.equal(other(**packed_batch(rows)).logits, packed))
        unpatch_model(model)
        after = snapshot(model)
        for same in ("tensors", "modules", "attributes", "classes"):
            self.assertEqual(after[same], before[same])
        for got, want in zip(run(), outputs, strict=True):
            self.assertTrue(torch.equal(got, want))

    @parameterized.expand([(f, reentrant) for f in FAMILIES for reentrant in (False, True)])
    def test_gradient_checkpointing_of_two_rows(self, family, use_reentrant):
        """Both forwards run before the first backward, which has to find the boundaries of its own row."""
        model = patch_model(tiny_model(family))
        if not model.supports_gradient_checkpointing:
            self.skipTest("the built-in has no gradient checkpointing")
        rows = [packed_batch(documents(SHORT)), packed_batch(documents((3, 17, 15), seed=1))]

        def run():
            first, second = (model(**row).loss for row in rows)
            return [gradients_of(model, loss) for loss in (first, second)]

        expected = run()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        checkpoints = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
        self.assertTrue(any(checkpoints))
        for got, want in zip(run(), expected, strict=True):
            self.assertEqual(set(got), set(want))
            self.assertLess(total_relative_error(got, want), 1e-6)
        self.assertEqual([vars(module).get("_gradient_checkpointing_func") for module in model.modules()], checkpoints)

    @parameterized.expand([family for family in FAMILIES if family != "glm5_next"])
    def test_registered_checkpoints_go_both_ways(self, family):
        builtin = tiny_model(family).eval()
        with tempfile.TemporaryDirectory() as directory, torch.no_grad():
            builtin.save_pretrained(directory)
            with transformers_packed.registered():
                model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
                self.assertFalse(report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"])
                self.assertEqual(ours(model), ours(patch_model(copy.deepcopy(builtin))))
                self.assertIn("", ours(model))
            self.assertIs(type(AutoModelForCausalLM.from_config(builtin.config)), type(builtin))
            rows = documents(SHORT)
            self.assertTrue(torch.equal(model.eval()(rows[2][None]).logits, builtin(rows[2][None]).logits))
            want = torch.cat([builtin(row[None]).logits[0] for row in rows])
            self.assertLess(relative_error(model(**packed_batch(rows)).logits[0], want), 1e-5)
            model.save_pretrained(f"{directory}/ours")
            back, report = type(builtin).from_pretrained(f"{directory}/ours", output_loading_info=True)
            self.assertFalse(report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"])
            self.assertEqual(back.config.architectures, builtin.config.architectures)
            self.assertTrue(torch.equal(back.eval()(rows[2][None]).logits, builtin(rows[2][None]).logits))

    @parameterized.expand(FAMILIES)
    def test_signature_has_the_builtins_arguments_and_the_boundaries(self, family):
        """Trainer drops the columns that a signature does not name, and asks it for `**kwargs`."""
        model = tiny_model(family)
        before = inspect.signature(model.forward).parameters
        after = inspect.signature(patch_model(model).forward).parameters
        extra = {"position_ids", "seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k"}
        self.assertEqual(set(after), set(before) | extra | {"max_length_q", "max_length_k"})
        self.assertEqual({name: after[name] for name in before}, dict(before))
        self.assertEqual([n for n in after if n in before], list(before))


def gradients_of(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
