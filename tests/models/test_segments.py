"""Layers that compute a row in segments: losses and gradients of the whole row, and the memory of a segment."""

import unittest
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from unittest import mock

import torch
from common.late_copies import on_a_cpu
from common.memory import Memory
from common.pieces import on_a_cpu as pieces_on_a_cpu
from mixins.lora import all_linear, builtin_model
from mixins.model import gradients, packed_batch, padded_batch, relative_error, total_relative_error
from mixins.patch import COMPOSITE
from mixins.vision import TEXT, document
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from transformers_packed import SequenceBoundaries, add_mtp, batch_invariant, patch_model
from transformers_packed.models import padding, segments
from transformers_packed.models.inspections import reason_against_checkpointing
from transformers_packed.models.losses import OWN, MtpLoss
from transformers_packed.models.versions import can_cut_rows
from transformers_packed.ops import causal_conv1d_qkv, earlier_keys, implementations_used, offload
from transformers_packed.ops.attention import attention_after_pieces
from transformers_packed.parallel import RowShard
from transformers_packed.training.callbacks.expert_load import ExpertLoad


SEGMENT = 64
ROWS = {
    "one document": (300,),
    "a last segment shorter than the window": (100, 93),
    "documents that end at cuts": (64, 64, 128, 10),
    "short and long documents": (30, 1, 33, 70, 150, 64, 1, 2),
    "one token on each side of a cut": (63, 1, 1, 62, 66),
}
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
OTHERS = ("kimi_linear", "olmo_hybrid", "bailing_hybrid")


def make_documents(lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 90, (length,), generator=generator) for length in lengths]


def make_batch(lengths):
    return packed_batch(make_documents(lengths)) | {"use_cache": False}


def segmented(model, size=SEGMENT, **options):
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    more = {name: options.pop(name) for name in ("offload", "every_n_layers") if name in options}
    inner.activation_checkpointing_enable({"segment_tokens": size} | options, **more)
    return model


def whole(model):
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.activation_checkpointing_enable({"use_reentrant": False})
    return model


def step(model, batch, **options):
    output = model(**batch, **options)
    return output, gradients(model, output.loss)


class ConvolutionTest(unittest.TestCase):
    @unittest.skipIf(find_spec("triton") is None or torch.cuda.is_available(), "needs Triton's interpreter")
    @mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: True)
    @mock.patch("transformers_packed.ops.backends.triton.convolution._TOKENS", 5)
    def test_kernel_takes_the_tokens_before_a_segment(self):
        generator, row = torch.Generator().manual_seed(0), SequenceBoundaries.from_lengths([7, 1, 20, 2, 8])
        x, weight = torch.randn(1, 38, 64, generator=generator), torch.randn(64, 4, generator=generator)
        upstream, heads = torch.randn(1, 38, 64, generator=generator), {"key_heads": 1, "key_dim": 16, "value_dim": 16}
        found = []
        for cuts in ([(slice(None), row)], segments._segments_of(row, 9)):
            leaves, outputs, handed = [x.clone().requires_grad_() for x in (x, weight)], [], ()
            for tokens, own in cuts:
                if isinstance(own, segments.RowSegment):
                    own = replace(own, handed=segments.Handed(handed))
                qkv = causal_conv1d_qkv(leaves[0][:, tokens], leaves[1], boundaries=own, **heads)
                handed = own.handed.later if isinstance(own, segments.RowSegment) else ()
                outputs.append(torch.cat([part.flatten(2) for part in qkv], dim=-1))
            output = torch.cat(outputs, dim=1)
            found.append([output, *torch.autograd.grad(output, leaves, upstream)])
        self.assertIn("triton", implementations_used()["causal_conv1d_qkv"])
        for actual, expected in zip(found[1], found[0], strict=True):
            self.assertLess(relative_error(actual, expected), 1e-5)


@unittest.skipUnless(can_cut_rows(), "needs Transformers 5.24")
class SegmentsTest(unittest.TestCase):
    def check(self, model, batch, bar, segment_options=None, **options):
        """Compare with the whole row. Returns the two outputs."""
        expected, of_row = step(whole(model), batch, **options)
        actual, of_segments = step(segmented(model, **(segment_options or {})), batch, **options)
        self.assertEqual(of_segments.keys(), of_row.keys())
        self.assertLess(relative_error(actual.loss, expected.loss), bar)
        self.assertLess(total_relative_error(of_segments, of_row), bar)
        return actual, expected

    @parameterized.expand(
        [(family, row) for family in FAMILIES for row in ROWS] + [(f, "one document") for f in OTHERS]
    )
    def test_equals_the_whole_row(self, family, row):
        # The gates of the other families compute in float32.
        bar = 1e-12 if family in FAMILIES else 1e-8
        model = patch_model(builtin_model(family)).double()
        actual, expected = self.check(model, make_batch(ROWS[row]), bar)
        self.assertLess(relative_error(actual.logits, expected.logits), bar)

    @parameterized.expand([(family,) for family in (*FAMILIES, *OTHERS)])
    def test_in_float32(self, family):
        self.check(patch_model(builtin_model(family)), make_batch(ROWS["short and long documents"]), 4e-6)

    @parameterized.expand([(row,) for row in ROWS])
    def test_attention_piece_by_piece(self, row):
        """As cuDNN computes it on Hopper."""
        for patch in pieces_on_a_cpu():
            self.enterContext(patch)
        calls = self.enterContext(mock.patch.object(segments, "attention_after_pieces", wraps=attention_after_pieces))
        model = patch_model(builtin_model("qwen3_5")).double()
        self.check(model, make_batch(ROWS[row]), 1e-12)
        # Each row has a document in two segments.
        self.assertTrue(calls.called)

    def test_few_segments_are_for_models_that_cut_rows(self):
        """Others compute a batch without padding as it is, also in the check before the first step."""
        model = patch_model(builtin_model("qwen3_5")).train()
        for cut, enable in ((False, whole), (True, segmented)):
            enable(model)
            for context in (nullcontext, segments.few_segments):
                with context():
                    self.assertEqual(segments.cuts_rows(model.model, SEGMENT + 1), cut)

    def test_attention_piece_by_piece_is_kept(self):
        """`keep_attention` keeps the averages, and the backward attends to no piece again."""
        for patch in pieces_on_a_cpu():
            self.enterContext(patch)
        attend = self.enterContext(mock.patch.object(earlier_keys, "_attend", wraps=earlier_keys._attend))
        model, batch = patch_model(builtin_model("qwen3_5")).double(), make_batch(ROWS["one document"])
        expected = step(segmented(model), batch)[1]
        again = attend.call_count
        actual = step(segmented(model, keep_attention=True), batch)[1]
        self.assertEqual(attend.call_count - again, again / 2)
        self.assertLess(total_relative_error(actual, expected), 1e-12)

    @parameterized.expand([(300,), (301,)])
    def test_attention_of_long_documents_is_kept(self, long_document):
        """A document is long by all of its tokens, also those in earlier segments."""
        model, batch = patch_model(builtin_model("qwen3_5")).double(), make_batch((300,))
        found = []
        for keep in (False, "auto"):
            with on_a_cpu(64), mock.patch.multiple(offload, LONG_DOCUMENT=long_document, _inputs_first=False):
                found.append(step(segmented(model, keep_attention=keep, offload=True), batch)[1])
            (copies,) = model.host_checkpoints._copies.values()
            found.append(copies.allocated)
        self.assertLess(total_relative_error(found[2], found[0]), 1e-12)
        self.assertEqual(found[3] > found[1], long_document <= 300)

    @parameterized.expand([("sdpa",), ("eager",)])
    def test_gradients_cross_each_cut(self, attention):
        """The last token of a document depends on the first one, in each kind of layer, and no other document does."""
        model = patch_model(builtin_model("qwen3_5")).double()
        model.set_attn_implementation(attention)
        batch = make_batch((5, 200, 60))
        for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
            found = []
            for enable in (whole, segmented):
                enable(model)
                x = torch.randn(1, 265, 32, dtype=torch.double, generator=torch.Generator().manual_seed(0))
                x.requires_grad_()
                with mock.patch.object(model.model, "layers", torch.nn.ModuleList([layer])):
                    with mock.patch.multiple(model.config, num_hidden_layers=1, layer_types=[kind]):
                        out = model.model(**batch | {"input_ids": None, "labels": None, "inputs_embeds": x})
                out[0][0, 204].square().sum().backward()
                found.append(x.grad[0])
            self.assertLess(relative_error(found[1], found[0]), 1e-12)
            self.assertGreater(found[1][5].norm(), 0)
            self.assertEqual(float(found[1][:5].norm() + found[1][205:].norm()), 0)

    def test_adapters(self):
        model = patch_model(all_linear("qwen3_5")).double()
        self.check(model, make_batch(ROWS["short and long documents"]), 1e-12)

    @parameterized.expand(
        [
            ({"keep_attention": True},),
            ({"every_n_layers": 2},),
            ({"offload": True},),
            ({"offload": True, "keep_attention": True},),
        ]
    )
    def test_beside_other_options(self, options):
        model = patch_model(builtin_model("qwen3_5")).double()
        with on_a_cpu(64):
            self.check(model, make_batch((300,)), 1e-12, dict(options))

    def test_dropout_is_drawn_again(self):
        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "gate_proj", "in_proj_qkv"])
        config.lora_dropout, config.init_lora_weights = 0.5, False
        model, batch = patch_model(get_peft_model(builtin_model("qwen3_5"), config)).train(), make_batch((300,))
        segmented(model)
        found, once = [], lambda function, *args, **kwargs: function(*args)
        for checkpoint in (None, once):
            for layer in model.get_decoder().layers if checkpoint else ():
                layer._gradient_checkpointing_func = lambda *args: segments.in_segments(SEGMENT, once, *args)
            torch.manual_seed(0)
            found.append(step(model, batch)[1])
        self.assertEqual([name for name in found[0] if not torch.equal(found[0][name], found[1][name])], [])

    def test_multi_token_prediction(self):
        config = Qwen3_5TextConfig(**TEXT, mtp_num_hidden_layers=1)
        model = patch_model(Qwen3_5ForCausalLM(config)).double()
        add_mtp(model)
        model.losses = (*OWN, MtpLoss(0.5))
        with mock.patch.object(segments, "_segments_of", wraps=segments._segments_of) as cut:
            self.check(model.train(), make_batch((30, 1, 150)), 1e-12)
        self.assertEqual(cut.call_count, config.num_hidden_layers + 1)

    def test_images(self):
        model = patch_model(builtin_model("qwen3_5", "Qwen3_5ForConditionalGeneration", COMPOSITE["qwen3_5"]))
        documents = [document(50, 1, images=((1, 4, 8),)), document(1, 2), document(150, 3, videos=((2, 4, 4),))]
        batch = packed_batch(documents, model=model) | {"use_cache": False}
        self.check(model.double(), {name: x.double() if "pixel" in name else x for name, x in batch.items()}, 1e-10)

    @parameterized.expand([("qwen3_5_moe",), ("qwen3_next",)])
    def test_loss_of_routers(self, family):
        model = patch_model(builtin_model(family)).double()
        batch = packed_batch(make_documents((100, 93)), pad_to_multiple_of=100, pad_token_id=0) | {"use_cache": False}
        actual, expected = self.check(model, batch, 1e-12, output_router_logits=True)
        self.assertEqual(*([x.shape for x in output.router_logits] for output in (actual, expected)))
        self.assertEqual({len(x) for x in actual.router_logits}, {193})
        self.assertLess(relative_error(torch.cat(actual.router_logits), torch.cat(expected.router_logits)), 1e-12)
        self.assertGreater(actual.aux_loss, 0)

    def test_load_of_experts(self):
        """Each token counts once, and padding does not."""
        model, found = patch_model(builtin_model("qwen3_5_moe")), []
        batch = packed_batch(make_documents((100, 93)), pad_to_multiple_of=300, pad_token_id=0) | {"use_cache": False}
        for enable in (whole, segmented):
            load = ExpertLoad(enable(model), torch.device("cpu"))
            for _ in range(2):
                load.start(193)
                loss = model(**batch).loss
                load.add()
                loss.backward()
            found.append([total[:, :-1].clone() for total in load._totals])
            load.close()
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(*found, strict=True)))
        layers, chosen = model.config.num_hidden_layers, model.config.num_experts_per_tok
        self.assertEqual(int(sum(x.sum() for x in found[1])), 2 * 193 * layers * chosen)

    @parameterized.expand([("left",), ("right",)])
    def test_padded_batch(self, side):
        batch = padded_batch(make_documents((70, 100, 3)), side) | {"use_cache": False}
        self.check(patch_model(builtin_model("qwen3_5")).double(), batch, 1e-12)

    def test_batch_that_stays_padded(self):
        model = patch_model(builtin_model("qwen3_5")).double()
        batch = padded_batch(make_documents((70, 100, 3)), "right") | {"use_cache": False, "packs_padding": False}
        with self.assertLogs("transformers_packed.models.segments", "WARNING") as log:
            segments.logger.warning_once.cache_clear()
            self.check(model, batch, 1e-12)
        self.assertIn("segment_tokens has no effect on a batch that stays padded", log.output[0])
        # The check before the first step computes such batches on purpose.
        with self.assertNoLogs("transformers_packed.models.segments", "WARNING"), segments.few_segments():
            segments.logger.warning_once.cache_clear()
            self.check(model, batch, 1e-12)

    @parameterized.expand(
        [({},), ({"attention_mask": torch.ones(2, 150)},), ({"position_ids": torch.arange(150)[None]},)]
    )
    def test_batch_without_padding(self, arguments):
        tokens = torch.stack(make_documents((150, 150)))
        model = patch_model(builtin_model("qwen3_5")).double()
        with mock.patch.object(segments, "_segments_of", wraps=segments._segments_of) as cut:
            actual, expected = self.check(model, {"input_ids": tokens, "labels": tokens, **arguments}, 1e-12)
        self.assertEqual(cut.call_count, model.config.num_hidden_layers)
        self.assertLess(relative_error(actual.logits, expected.logits), 1e-12)

    def test_batch_of_short_documents_without_padding(self):
        """Together they are longer than a segment."""
        tokens = torch.stack(make_documents((60, 60, 60, 60)))
        model = patch_model(builtin_model("qwen3_5")).double()
        with mock.patch.object(segments, "_segments_of", wraps=segments._segments_of) as cut:
            self.check(model, {"input_ids": tokens, "labels": tokens}, 1e-12)
        self.assertEqual(cut.call_count, model.config.num_hidden_layers)

    def test_hidden_states_and_hooks_of_layers_are_those_of_rows(self):
        model, lengths = patch_model(builtin_model("qwen3_5")).double(), []
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, args, output: lengths.append(output.shape[1]))
        actual, expected = self.check(model, make_batch((300,)), 1e-12, output_hidden_states=True)
        self.assertEqual(set(lengths), {300})
        for a, b in zip(actual.hidden_states, expected.hidden_states, strict=True):
            self.assertLess(relative_error(a, b), 1e-12)

    def test_hooks_inside_of_layers_run_for_each_segment(self):
        model, lengths = patch_model(builtin_model("qwen3_5")), []
        model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: lengths.append(output.shape[1]))
        segmented(model)(**make_batch((150,)))
        self.assertEqual(lengths, [64, 64, 22])

    def test_rows_of_one_segment_and_evaluation_run_as_they_are(self):
        for training, lengths in ((True, (40, 24)), (False, (300,))):
            model, batch = patch_model(builtin_model("qwen3_5")).train(training), make_batch(lengths)
            expected = step(whole(model), batch)
            with mock.patch.object(segments, "_segments_of", side_effect=AssertionError):
                actual = step(segmented(model), batch)
            self.assertTrue(all(torch.equal(actual[1][name], expected[1][name]) for name in expected[1]))

    def test_memory_is_that_of_a_segment(self):
        config = Qwen3_5TextConfig(**TEXT | {"intermediate_size": 512})
        model, figures = patch_model(Qwen3_5ForCausalLM(config)).train(), {}
        for name, enable in (("row", whole), ("segments", lambda model: segmented(model, 128))):
            for length in (1024, 2048):
                batch = make_batch((length,)) | {"labels": None}
                with Memory() as memory:
                    output = enable(model).model(**batch)[0].sum()
                    kept = memory.now
                    output.backward()
                figures[name, length] = torch.tensor([kept, memory.peak])
        self.assertLess(figures["segments", 2048][1], figures["row", 2048][1] / 3)
        # Twice the tokens add inputs of layers, keys and values, but no activations.
        (kept, peak), (kept_row, peak_row) = (figures[x, 2048] - figures[x, 1024] for x in ("segments", "row"))
        self.assertLess(peak, peak_row / 4)
        attention = config.layer_types.count("full_attention")
        keys_and_values = 1024 * attention * 2 * config.num_key_value_heads * config.head_dim * 4
        self.assertGreater(kept - kept_row, keys_and_values)
        self.assertLess(kept - kept_row, 1.3 * keys_and_values)

    def test_packed_rows_do_not_ask_layers(self):
        """Only batches without padding become rows if layers cut these."""
        model = segmented(patch_model(builtin_model("qwen3_5")))
        with mock.patch.object(padding, "cuts_rows", side_effect=AssertionError):
            model(**make_batch((100, 30)))
            with self.assertRaises(AssertionError):
                model(input_ids=torch.ones(2, 100, dtype=torch.long))

    def test_refuses(self):
        model, long = segmented(patch_model(builtin_model("qwen3_5"))), torch.arange(1, 81)[None]
        row = {"input_ids": long, "cu_seqlens": torch.tensor([0, 80]), "use_cache": False}
        shared = {"cu_seqlens": torch.tensor([0, 70, 75, 80]), "parent_of": torch.tensor([-1, 0, 0])}
        part = RowShard.cut(SequenceBoundaries.from_lengths([160]), 0, 2)
        rows = {
            "segment_tokens does not support a row with shared prompts": row | shared,
            "segment_tokens does not support a part of a row": row | {"boundaries": part},
        }
        for message, batch in rows.items():
            with self.assertRaisesRegex(ValueError, message):
                model(**{"input_ids": long, "use_cache": False} | batch)
        with batch_invariant(), self.assertRaisesRegex(ValueError, "segment_tokens does not support batch_invariant"):
            model(**row)
        model.set_attn_implementation("eager")
        with self.assertRaisesRegex(ValueError, "output_attentions does not support a segment of a row"):
            model(**row, output_attentions=True)

    @parameterized.expand(
        [
            ({"segment_tokens": 63}, "segment_tokens of at least 64, got 63"),
            ({"segment_tokens": "8k"}, "segment_tokens of at least 64, got '8k'"),
            ({"segment_tokens": 64, "use_reentrant": True}, "use_reentrant=False with segment_tokens, got"),
        ]
    )
    def test_refuses_options(self, options, message):
        model = patch_model(builtin_model("qwen3_5"))
        with self.assertRaisesRegex(ValueError, message):
            model.activation_checkpointing_enable(options)
        self.assertFalse(model.is_gradient_checkpointing)

    def test_refuses_other_arguments_of_layers(self):
        model = segmented(patch_model(builtin_model("qwen4_exp")))
        with self.assertRaisesRegex(
            ValueError, "segment_tokens does not support layers with ple_input_ids, a tensor. Leave out segment_tokens"
        ):
            model(**make_batch((100,)))

    def test_graphs_are_not_recorded(self):
        model = segmented(patch_model(builtin_model("qwen3_5")))
        self.assertIn("cuts rows", reason_against_checkpointing(model.model.layers))
