"""Every family with `Mixers` or `Unpacked`. The oracle is the stock class."""

import contextlib
import copy
import importlib
import inspect
import itertools
import pickle
import tempfile
import types
import unittest
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import transformers
from common.families import LENGTHS, documents, tiny_config, tiny_model
from mixins.model import (
    alone,
    block_mask,
    gradients,
    other_masks,
    packed_batch,
    padded_batch,
    relative_error,
    total_relative_error,
)
from mixins.patch import ours, snapshot
from parameterized import parameterized
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
)
from transformers.integrations import hub_kernels
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import transformers_packed
from transformers_packed import SequenceBoundaries, audit_model, patch_model, unpatch_model
from transformers_packed.models import families, generic, inputs
from transformers_packed.models.families import family_of
from transformers_packed.models.family import Isolated, Mixers, Refused, Unpacked
from transformers_packed.models.inputs import check_config
from transformers_packed.models.registry import check_patch
from transformers_packed.models.verdict import measurements


# Transformers 5.20 lacks some families.
RECORDS = {name: family for name, family in families.FAMILIES.items() if find_spec(f"transformers.models.{name}")}
MIXERS = {name: family.mixers for name, family in RECORDS.items() if isinstance(family.apart, Mixers)}
UNPACKED = {name: family.apart for name, family in RECORDS.items() if isinstance(family.apart, Unpacked)}
FAMILIES = [*MIXERS, *UNPACKED]
# Some of each kind, for tests of code that families share.
SOME = [family for family in ("bamba", "glm5_next", "inkling", "lfm2", "jamba", "recurrent_gemma") if family in MIXERS]
SOME += ["rwkv", "bart", "gpt_oss", "opt"]
MASKED = [family for family, table in MIXERS.items() if any(mixer.masked for mixer in table.values())]
SOURCES = ("seq_idx", "cu_seq_lens", "cu_seqlens", "all")
SHORT = (9, 1, 20, 5)


# Types without a tiny model: the manual decision, and its justification without a measurement.
NOT_MEASURED = {
    "gemma3n": "ISOLATED: the text model of gemma3n_text, which is measured",
    "gemma4_assistant": "REFUSED: it reads the cache of another model",
    "musicgen": "REFUSED: its loss is over several audio codes per step",
    "musicgen_melody": "REFUSED: its loss is over several audio codes per step",
}
# Families with `Unpacked` whose stock class keeps documents apart from a release on.
ISOLATED_SINCE = {"falcon": "5.24"}
BOUNDARIES = ("seq_idx", "cu_seqlens")


def has_all_mixers(model: torch.nn.Module, family: str) -> bool:
    """Check that each class of the table is in the model. Missing classes would go untested."""
    return {type(module).__name__ for module in model.modules()} >= set(MIXERS.get(family, ()))


class IsolationTest(unittest.TestCase):
    @parameterized.expand([(family, None) for family in FAMILIES] + [(family, "eager") for family in MASKED])
    def test_a_row_equals_its_documents(self, family, attention):
        """This includes targets: `labels` at a document's first token are no targets of the document before."""
        model, rows = tiny_model(family, attention), documents(SHORT)
        self.assertTrue(has_all_mixers(model, family))
        config, before = model.config.get_text_config(), inspect.signature(model.forward).parameters
        # A packed row has no cache. The default of having one must not matter.
        with mock.patch.object(config, "use_cache", False, create=True):
            logits, loss = alone_of(model, rows, family)
            expected = gradients(model, loss)
        with torch.no_grad():
            stock = model(**packed_batch(rows, "position_ids")).logits
        patch_model(model)
        # Trainer drops columns that a signature does not name, and requires `**kwargs`.
        after = inspect.signature(model.forward).parameters
        extra = {"position_ids", "seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k"}
        self.assertEqual(set(after), set(before) | extra | {"max_length_q", "max_length_k"})
        self.assertEqual({name: after[name] for name in before}, dict(before))
        self.assertEqual([n for n in after if n in before], list(before))
        if family in SOME:
            report = audit_model(model, lengths=LENGTHS[:3], inputs=("position_ids",))
            self.assertTrue(report.ok, report.table())
        batch = packed_batch(rows)
        output = model(**{**batch, "labels": batch["input_ids"]})
        self.assertLess(relative_error(output.logits[0], torch.cat(logits)), 1e-5)
        self.assertLess(abs(output.loss.item() - loss.item()), 1e-5 * loss.item())
        actual = gradients(model, output.loss)
        self.assertEqual(set(actual), set(expected))
        self.assertLess(total_relative_error(actual, expected), 1e-4)
        # The stock model leaks, so this test can fail.
        self.assertGreater(relative_error(stock, output.logits), 1e-3)

    @parameterized.expand(SOME[::2])
    def test_sources_of_boundaries(self, family):
        model = patch_model(tiny_model(family))
        batch = packed_batch(documents(), "position_ids")
        with torch.no_grad():
            logits = model(**batch).logits
            for source in SOURCES:
                self.assertTrue(torch.equal(model(**packed_batch(documents(), source)).logits, logits), source)
            # Positions may count over the whole row.
            row = {"input_ids": batch["input_ids"]}
            counting = {"position_ids": torch.arange(row["input_ids"].shape[1])[None]}
            for mask, positions in ((block_mask(LENGTHS), {}), (block_mask(LENGTHS, 0, torch.float32), counting)):
                self.assertTrue(torch.equal(model(**row, attention_mask=mask, **positions).logits, logits))

    @parameterized.expand(SOME)
    def test_masks(self, family):
        """A padding mask that numbers documents, and a mask that only attention would apply, are errors."""
        model, (row,) = patch_model(tiny_model(family)), documents((12,))
        two = torch.stack([row, row])
        causal = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
        with torch.no_grad():
            expected = model(row[None], use_cache=False).logits
            self.assertLess(relative_error(model(row[None], attention_mask=causal).logits, expected), 1e-5)
        for training in (True, False):
            with self.assertRaisesRegex(ValueError, "expected attention_mask of 0 and 1, got 2"):
                model.train(training)(row[None], attention_mask=torch.tensor([[1] * 5 + [2] * 7]))
            with self.assertRaisesRegex(ValueError, "expected one row if a mask separates documents in it, got 2"):
                model(two, attention_mask=block_mask((5, 7)))
        if MIXERS.get(family):
            for name, mask in other_masks(12).items():
                with self.subTest(name), self.assertRaisesRegex(ValueError, "another pattern"):
                    model(row[None], attention_mask=mask)

    def test_masks_that_are_not_read(self):
        """Those that an enclosing model has made by kind of layer, and those of an encoder."""
        model, (row,) = patch_model(tiny_model("inkling")).eval(), documents((12,))
        causal = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
        masks = dict.fromkeys(("full_attention", "sliding_attention", "hybrid", "hybrid_sliding"), causal)
        base = model.model
        with torch.no_grad():
            base(row[None], attention_mask=masks | {"linear_attention": None}, use_cache=False)
        with self.assertRaisesRegex(ValueError, "without attention_mask"):
            base(row[None], attention_mask=masks, cu_seqlens=torch.tensor([0, 5, 12]))
        with self.assertRaisesRegex(ValueError, "another pattern"):
            model(row[None], attention_mask=masks)
        model = AutoModelForSeq2SeqLM.from_config(tiny_config("bart", is_encoder_decoder=True)).eval()
        inputs = {"input_ids": row[None], "decoder_input_ids": row[None], "attention_mask": causal}
        with torch.no_grad():
            want = model(**inputs).logits
            self.assertTrue(torch.equal(patch_model(model)(**inputs).logits, want))

    def test_masks_of_families_without_mixers(self):
        """The stock attention applies any mask."""
        model, (row,), outputs = tiny_model("gpt_oss"), documents((12,)), []
        mask = other_masks(12)["sliding"]
        for change in (lambda model: model, patch_model):
            with torch.no_grad():
                outputs.append(change(model)(row[None], attention_mask=mask).logits)
        self.assertTrue(torch.equal(*outputs))

    @parameterized.expand(SOME[1::2])
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

    @parameterized.expand([(family, number % 2 > 0) for number, family in enumerate(SOME[::2])])
    def test_gradient_checkpointing_of_two_rows(self, family, use_reentrant):
        """Both forwards run before the first backward, which has to use the boundaries of its own row."""
        model = patch_model(tiny_model(family))
        if not model.supports_gradient_checkpointing:
            self.skipTest("the built-in has no gradient checkpointing")
        rows = [packed_batch(documents(SHORT)), packed_batch(documents((3, 17, 15), seed=1))]

        def run():
            first, second = (model(**row).loss for row in rows)
            return [gradients(model, loss) for loss in (first, second)]

        expected = run()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        checkpoints = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
        self.assertTrue(any(checkpoints))
        for got, want in zip(run(), expected, strict=True):
            self.assertEqual(set(got), set(want))
            self.assertLess(total_relative_error(got, want), 1e-6)
        self.assertEqual([vars(module).get("_gradient_checkpointing_func") for module in model.modules()], checkpoints)

    @parameterized.expand([family for family in SOME if family in ("bamba", "lfm2", "rwkv", "gpt_oss")])
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
            # Loaded weights have another alignment in memory, with which products may round differently.
            want = builtin(rows[2][None]).logits
            self.assertLess(relative_error(model.eval()(rows[2][None]).logits, want), 1e-6)
            want = torch.cat([builtin(row[None]).logits[0] for row in rows])
            self.assertLess(relative_error(model(**packed_batch(rows)).logits[0], want), 1e-5)
            model.save_pretrained(f"{directory}/ours")
            back, report = type(builtin).from_pretrained(f"{directory}/ours", output_loading_info=True)
            self.assertFalse(report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"])
            self.assertEqual(back.config.architectures, builtin.config.architectures)
            self.assertLess(relative_error(back.eval()(rows[2][None]).logits, builtin(rows[2][None]).logits), 1e-6)


def alone_of(model: torch.nn.Module, rows: list[torch.Tensor], family: str):
    """Return the logits of each document and the mean loss over all targets, by the stock model."""
    if family not in UNPACKED or UNPACKED[family].shifts_labels:
        return alone(model, rows)
    outputs = [model(input_ids=row[None], labels=row[None]) for row in rows]
    total = sum(len(row) for row in rows)
    return [x.logits[0] for x in outputs], sum(x.loss * len(r) / total for x, r in zip(outputs, rows, strict=True))


LARA_MINI = {"causal_conv1d_fn": "seq_idx", "torch_chunk_gated_delta_rule": "cu_seqlens"}


class KernelsTest(unittest.TestCase):
    """Modules whose kernels accept boundaries run them once on the row. The kernels here are fakes."""

    @parameterized.expand(
        [
            ("inkling", {"causal_conv1d_fn": "seq_idx"}),
            *([("inkling2", {"causal_conv1d_fn": "seq_idx"})] if "inkling2" in MIXERS else []),
            ("glm5_next", {"causal_conv1d_fn": "seq_idx", "chunk_kimi_delta_attention": "cu_seqlens"}),
            *([("lara_mini", LARA_MINI)] if "lara_mini" in MIXERS else []),
        ]
    )
    def test_kernels_are_told(self, family, kernels):
        model, rows = patch_model(tiny_model(family)), documents()
        batch, calls = packed_batch(rows), []
        expected = model(**batch).logits
        module = inspect.getmodule(type(unpatch_model(model)))
        patch_model(model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(generic, "_on_gpu", lambda tensors: True))
            for name, keyword in kernels.items():
                # Without the others, a kernel must not be used alone: the rest would go to a reference.
                if calls:
                    self.fail("kernels ran before all were there")
                if name != next(iter(kernels)):
                    model(**batch)
                fake = fake_kernel(getattr(module, name), keyword, calls)
                stack.enter_context(mock.patch.object(module, name, fake))
            logits = model(**batch).logits
        self.assertLess(relative_error(logits, expected), 1e-5)
        self.assertEqual({name for name, _ in calls}, {getattr(module, name).__name__ for name in kernels})
        for name, lengths in calls:
            self.assertEqual(lengths, [len(row) for row in rows], name)

    @parameterized.expand(
        [(f, name) for f, table in MIXERS.items() for mixer in table.values() for name in mixer.kernels]
    )
    def test_a_reference_is_no_kernel(self, family, name):
        """This holds with and without the wrapper of Transformers."""
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        function = getattr(module, name)
        self.assertTrue(hasattr(function, "__wrapped__"), "not wrapped: it would ignore boundaries")
        self.assertFalse(generic._is_kernel(inspect.unwrap(function)))
        with mock.patch.dict("sys.modules", {"a_kernel_package": None}):
            make = hub_kernels.use_kernel_func_from_hub_with_fallback(name, "a_kernel_package")
        self.assertFalse(generic._is_kernel(make(inspect.unwrap(function))))
        self.assertFalse(generic._is_kernel(None))


def fake_kernel(function, keyword: str, calls: list):
    """Wrap a fake package kernel as Transformers does. It runs the reference on each document of the row."""
    name, reference = function.__name__, inspect.unwrap(function)
    signature = inspect.signature(reference)

    def kernel(*args, **kwargs):
        where = {name: kwargs.pop(name, None) for name in ("seq_idx", "cu_seqlens")}
        signature.bind(*args, **kwargs)
        if where[keyword] is None:
            return function(*args, **kwargs)
        if keyword == "seq_idx":
            boundaries = SequenceBoundaries.from_seq_idx(where["seq_idx"])
        else:
            boundaries = SequenceBoundaries.from_cu_seqlens(where["cu_seqlens"])
        calls.append((name, boundaries.lengths))
        total = boundaries.total_length

        def cut(value, start, end):
            if isinstance(value, torch.Tensor) and value.ndim > 2 and total in value.shape:
                return value.narrow(value.shape.index(total), start, end - start)
            return value

        pieces, ends = [], boundaries.cu_seqlens_cpu.tolist()
        for start, end in itertools.pairwise(ends):
            pieces.append(
                function(
                    *(cut(value, start, end) for value in args),
                    **{name: cut(value, start, end) for name, value in kwargs.items()},
                )
            )
        if pieces[0] is None:
            return None
        several = isinstance(pieces[0], tuple)
        outputs = [piece[0] if several else piece for piece in pieces]
        axis = 2 if name == "causal_conv1d_fn" else 1
        return (torch.cat(outputs, axis), None) if several else torch.cat(outputs, axis)

    told = inspect.Parameter("told", inspect.Parameter.KEYWORD_ONLY, default=None)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD and p.name not in BOUNDARIES]
    kernel.__signature__ = signature.replace(parameters=[*named, *(told.replace(name=name) for name in BOUNDARIES)])
    package = types.SimpleNamespace(**{name: kernel})
    with mock.patch.dict("sys.modules", {"a_kernel_package": package}):
        with mock.patch.dict(hub_kernels._KERNELS_INTERNAL_PATH_MAPPINGS, clear=True):
            wrapped = hub_kernels.use_kernel_func_from_hub_with_fallback(name, "a_kernel_package")(reference)
    return wrapped


class CompileTest(unittest.TestCase):
    def tearDown(self):
        torch._dynamo.reset()

    @parameterized.expand(["lfm2", "opt"])
    @pytest.mark.slow
    def test_compiled(self, family):
        """Unpacked inputs keep a single graph if they had one. A packed row gives the same as without compiling."""
        torch._dynamo.reset()
        model, rows = patch_model(tiny_model(family)).eval(), documents(SHORT)
        inputs = {"input_ids": rows[2][None], "use_cache": False}
        batch, restarting = packed_batch(rows, "all"), packed_batch(rows, "position_ids")
        with torch.no_grad():
            want, packed = model(**inputs).logits, model(**batch).logits
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            self.assertTrue(torch.equal(compiled(**inputs).logits, want))
            torch._dynamo.reset()
            compiled = torch.compile(model, backend="eager")
            self.assertTrue(torch.equal(compiled(**inputs).logits, want))
            self.assertTrue(torch.equal(compiled(**batch).logits, packed))
            self.assertTrue(torch.equal(compiled(**restarting).logits, packed))
            masked = {"input_ids": restarting["input_ids"], "attention_mask": block_mask(SHORT)}
            self.assertTrue(torch.equal(compiled(**masked).logits, packed))
            self.assertTrue(torch.equal(compiled(**inputs).logits, want))


class PositionsTest(unittest.TestCase):
    @parameterized.expand(["bamba", "moss_transcribe_diarize"])
    def test_positions_of_one_document_reach_the_builtin(self, family):
        """This includes models that pass the keywords on to an inner model without naming them."""
        model, row = tiny_model(family).eval(), documents(SHORT)[2][None]
        # Rotary embeddings encode distances only, so these are wider.
        inputs = {"input_ids": row, "attention_mask": torch.ones_like(row), "position_ids": torch.arange(20)[None] * 3}
        with torch.no_grad():
            want, plain = model(**inputs).logits, model(row).logits
            self.assertTrue(torch.equal(patch_model(model)(**inputs).logits, want))
        self.assertGreater(relative_error(want, plain), 1e-4)

    @parameterized.expand([("lfm2", "dynamic"), ("lfm2", "default"), ("qwen3_5_text", "longrope")])
    def test_frequencies_that_depend_on_the_row(self, model_type, kind):
        config = CONFIG_MAPPING[model_type](
            vocab_size=97, hidden_size=32, num_hidden_layers=1, layer_types=["full_attention"], intermediate_size=32
        )
        config.rope_parameters = {**config.rope_parameters, "rope_type": kind}
        with mock.patch.object(inputs.logger, "warning_once") as warned:
            check_config(config, {})
        self.assertEqual([kind in call.args[0] for call in warned.call_args_list], [True] * (kind != "default"))


class RefusalTest(unittest.TestCase):
    def check(self, model, *refused):
        for pattern, given in refused:
            with self.subTest(pattern), self.assertRaisesRegex(ValueError, pattern):
                model(**given)

    def test_what_a_packed_row_cannot_have(self):
        model, batch = patch_model(tiny_model("mamba")), packed_batch(documents(SHORT))
        ids = batch["input_ids"]
        cache = model(ids, use_cache=True).cache_params
        given = {"input_ids": ids, "boundaries": SequenceBoundaries.from_lengths([5, 30])}
        other = {"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 35]), "cu_seq_lens_k": torch.tensor([0, 5, 35])}
        short, row = SequenceBoundaries.from_lengths([30]), torch.arange(35)[None]
        self.assertIsNotNone(model(**given).logits)
        self.check(
            model,
            ("without cache_params", {**batch, "cache_params": cache}),
            ("describe the same documents", other),
            ("ends at the row's 35 tokens, got 30", {"input_ids": ids, "boundaries": short}),
            ("cu_seqlens with the 2 documents", {**given, "cu_seqlens": torch.tensor([0, 6, 35])}),
            ("position_ids with the 2", {**given, "cu_seqlens": torch.tensor([0, 5, 35]), "position_ids": row}),
        )
        for packed in (batch, given):
            self.check(
                model,
                ("without attention_mask", {**packed, "attention_mask": torch.ones_like(ids)}),
                ("without use_cache=True", {**packed, "use_cache": True}),
                ("one packed row", {**packed, "input_ids": ids.repeat(2, 1)}),
            )
        # As on a GPU, whose values are not read.
        with mock.patch("transformers_packed.models.inputs.may_read", return_value=False):
            wrong = {**given, "cu_seqlens": torch.tensor([0, 5, 6, 35])}
            self.check(model, ("cu_seqlens with the 2 documents", wrong))

    def test_padding_beside_boundaries(self):
        model = patch_model(tiny_model("mamba")).eval()
        options = {"pad_to_multiple_of": 8, "pad_token_id": 0, "on_leak": "ignore"}
        samples, found = [{"input_ids": [1 + n % 9] * n} for n in (3, 10)], []
        for given in (True, False):
            batch = transformers_packed.DataCollatorWithFlattening(return_boundaries=given, **options)(samples)
            found.append(model(**batch).logits)
        self.assertTrue(torch.equal(*found))

    def test_heads_and_outputs(self):
        batch = packed_batch(documents(SHORT))
        batch.pop("labels")
        config = tiny_config("jamba", num_labels=2)
        model = patch_model(AutoModelForSequenceClassification.from_config(config, dtype=torch.float32))
        self.check(model, ("one document per row for this model", batch))
        self.assertEqual(model(batch["input_ids"]).logits.shape, (1, 2))
        model = patch_model(tiny_model("granitemoehybrid", "eager"))
        self.check(model, ("without output_attentions", {**batch, "output_attentions": True}))
        self.assertEqual(len(model(batch["input_ids"], output_attentions=True).attentions), 1)
        model.config.is_causal = False
        self.check(model, ("causal attention for a packed row", batch))
        model = patch_model(tiny_model("glm5_next"))
        self.check(model, ("a packed row with text only", {**batch, "pixel_values": torch.zeros(1)}))

    def test_families(self):
        tiny = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 16}
        bert = AutoModelForCausalLM.from_config(CONFIG_MAPPING["bert"](**tiny, num_attention_heads=2))
        t5 = AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING["t5"](vocab_size=50, d_model=16, num_layers=1, d_ff=8))
        for model, pattern in ((bert, "BertLMHeadModel: .*padded batches"), (t5, "audit_model")):
            with self.assertRaisesRegex(ValueError, f"expected .*{pattern}"):
                patch_model(model)
        config = LlamaConfig(**tiny, num_attention_heads=4)
        model = AutoModelForCausalLM.from_config(config)
        self.assertFalse(check_patch(model))
        self.assertIs(patch_model(model), model)
        self.assertEqual(ours(model), set())
        self.assertIs(unpatch_model(model), model)

    def test_decisions_agree_with_the_measurement(self):
        """The tables are maintained by hand, the matrix is written by `make support-matrix`."""
        measured = {name: entry for name, entry in measurements().items() if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
        for name, entry in measured.items():
            family = family_of(getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]))
            with self.subTest(name, family=family.name):
                self.assertEqual("not_built" in entry, name in NOT_MEASURED)
                if name in NOT_MEASURED:
                    continue
                builtin = {found["verdict"] for found in entry["builtin"].values()}
                ours = {found["verdict"] for found in entry["ours"].values()}
                if isinstance(family.apart, Isolated):
                    self.assertEqual((builtin, ours), ({"isolated"}, {"isolated"}))
                elif isinstance(family.apart, Refused):
                    self.assertNotIn("isolated", builtin)
                    self.assertEqual(ours, {"refused"})
                elif family.name in ISOLATED_SINCE:
                    self.assertEqual((builtin, ours), ({"isolated"}, {"isolated by unpacking"}))
                else:
                    # With metadata, position ids leak or are refused.
                    self.assertIn("leaks", builtin)
                    self.assertNotIn("isolated", builtin)
                    self.assertEqual(ours, {"isolated by unpacking" if family.name in UNPACKED else "isolated"})

    def test_a_family_has_one_place(self):
        names = [family.name for family in families.OWN] + [name for table in families._TABLES for name in table]
        self.assertEqual(sorted(names), sorted(families.FAMILIES))
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            self.assertIsNotNone(family_of(getattr(transformers, name)).apart, f"{name} in no table")
