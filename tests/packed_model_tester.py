"""What every family of packed models has to satisfy, run by `tests/models/<family>/test_modeling_<family>.py`.

The oracle is always the built-in class of Transformers on each document alone.
"""

import copy
import tempfile

import torch
from parameterized import parameterized
from torch.nn.utils.rnn import pad_sequence
from transformers import set_seed

from transformers_packed import DataCollatorWithFlattening, SequenceBoundaries


VOCAB_SIZE = 97
PAD_TOKEN = 0
SOURCES = ("position_ids", "seq_idx", "cu_seq_lens", "cu_seqlens", "all")
ATTENTION = ("eager", "sdpa")
CHECKPOINTING = ("no_checkpointing", "reentrant", "non_reentrant")


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def total_relative_error(actual: dict, expected: dict) -> float:
    difference = sum((actual[name] - expected[name]).square().sum() for name in expected)
    return (difference / sum(grad.square().sum() for grad in expected.values())).sqrt().item()


def packed_batch(documents: list[torch.Tensor], source: str = "all") -> dict:
    """The collator's row with only the given kind of boundaries."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_cu_seqlens=True)
    batch = collator([{"input_ids": document} for document in documents])
    keep = {
        "position_ids": {"position_ids"},
        "seq_idx": {"seq_idx"},
        "cu_seq_lens": {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"},
        "cu_seqlens": {"cu_seqlens"},
        "all": set(batch),
    }[source] | {"input_ids", "labels"}
    return {name: value for name, value in batch.items() if name in keep}


def padded_batch(documents: list[torch.Tensor], side: str) -> dict:
    """A padded batch; the first token of each document is no target, as it is not one in the document alone."""
    input_ids = pad_sequence(documents, batch_first=True, padding_value=PAD_TOKEN, padding_side=side)
    mask = pad_sequence([torch.ones_like(d) for d in documents], batch_first=True, padding_side=side)
    labels = [torch.cat([torch.tensor([-100]), document[1:]]) for document in documents]
    labels = pad_sequence(labels, batch_first=True, padding_value=-100, padding_side=side)
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def alone(model: torch.nn.Module, documents: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each document's logits `[n, vocab]`, and the mean loss over all targets."""
    logits, loss, targets = [], 0.0, sum(len(document) - 1 for document in documents)
    for document in documents:
        output = model(input_ids=document[None], labels=document[None])
        logits.append(output.logits[0])
        if len(document) > 1:
            loss = loss + output.loss * (len(document) - 1) / targets
    return logits, loss


class PackedModelTesterMixin:
    """Set `builtin_class`, `packed_class`, `get_config()`, and for mixtures of experts `is_moe`."""

    builtin_class: type
    packed_class: type
    is_moe = False
    lengths = (1, 2, 3, 63, 64, 65, 130, 300)
    logits_bar = 1e-5

    @property
    def gradient_bar(self) -> float:
        return 1e-4 if self.is_moe else 1e-6

    def get_config(self):
        raise NotImplementedError

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        generator = torch.Generator().manual_seed(0)
        cls.documents = [torch.randint(1, VOCAB_SIZE, (n,), generator=generator) for n in cls.lengths]
        cls.oracles = {}

    def models(self, attn_implementation: str = "sdpa", **kwargs):
        """The built-in model and ours with the same weights, in train mode."""
        set_seed(0)
        builtin = self.builtin_class._from_config(
            self.get_config(), attn_implementation=attn_implementation, dtype=torch.float32, **kwargs
        )
        # Norm weights and biases start as constants; random ones make every gradient count. Large output weights make
        # the loss depend on what the layers compute.
        with torch.no_grad():
            for name, parameter in builtin.named_parameters():
                if "norm" in name or "dt_bias" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            builtin.lm_head.weight.mul_(20)
        packed = self.packed_class._from_config(
            copy.deepcopy(builtin.config), attn_implementation=attn_implementation, dtype=torch.float32, **kwargs
        )
        packed.load_state_dict(builtin.state_dict())
        return builtin.train(), packed.train()

    def oracle(self, attn_implementation: str):
        """The built-in's logits, loss and gradients on documents alone, and the bar of each parameter."""
        if attn_implementation not in self.oracles:
            builtin, _ = self.models(attn_implementation)
            logits, loss = alone(builtin, self.documents)
            expected = gradients(builtin, loss)
            padded = gradients(builtin, builtin(**padded_batch(self.documents, "right")).loss)
            bars = {name: max(1e-5, 3 * relative_error(padded[name], expected[name])) for name in expected}
            self.oracles[attn_implementation] = [x.detach() for x in logits], loss.detach(), expected, bars
        return self.oracles[attn_implementation]

    # Alone = together

    @parameterized.expand(
        [
            (f"{source}_{attention}_{checkpointing}", source, attention, checkpointing)
            for source in SOURCES
            for attention in ATTENTION
            for checkpointing in CHECKPOINTING
            if checkpointing == "no_checkpointing" or source in ("position_ids", "all")
        ]
    )
    def test_alone_equals_together(self, _, source, attention, checkpointing):
        logits, loss, expected, bars = self.oracle(attention)
        _, model = self.models(attention)
        if checkpointing != "no_checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        output = model(**packed_batch(self.documents, source))
        self.assertIsNone(output.past_key_values)
        for got, want in zip(output.logits[0].split(self.lengths), logits, strict=True):
            self.assertLess(relative_error(got, want), self.logits_bar)
        self.assertLess(relative_error(output.loss, loss), self.logits_bar)
        actual = gradients(model, output.loss)
        self.assertEqual(set(actual), set(expected))
        self.assertLess(total_relative_error(actual, expected), self.gradient_bar)
        for name, bar in bars.items():
            self.assertLess(relative_error(actual[name], expected[name]), bar, name)

    @parameterized.expand(ATTENTION)
    def test_without_boundaries_every_bar_is_broken(self, attention):
        """The comparison above can fail: a hundredfold, for the same row without its boundaries."""
        logits, loss, expected, bars = self.oracle(attention)
        _, model = self.models(attention)
        batch = packed_batch(self.documents, "position_ids")
        batch["position_ids"] = torch.arange(sum(self.lengths))[None]
        output = model(**batch)
        self.assertGreater(relative_error(output.logits[0], torch.cat(logits)), 100 * self.logits_bar)
        self.assertGreater(relative_error(output.loss, loss), 100 * self.logits_bar)
        actual = gradients(model, output.loss)
        self.assertGreater(total_relative_error(actual, expected), 100 * self.gradient_bar)
        for name, bar in bars.items():
            self.assertGreater(relative_error(actual[name], expected[name]), 100 * bar, name)

    def test_labels_with_targets_at_document_starts(self):
        """`labels=input_ids` on a packed row has no target across documents, as the documents alone have none."""
        _, loss, *_ = self.oracle("sdpa")
        _, model = self.models()
        batch = packed_batch(self.documents)
        unmasked = model(**{**batch, "labels": batch["input_ids"]})
        self.assertLess(relative_error(unmasked.loss, loss), self.logits_bar)
        shifted = torch.nn.functional.pad(batch["input_ids"][:, 1:], (0, 1), value=5)
        given = model(**batch, shift_labels=shifted)
        self.assertLess(relative_error(given.loss, loss), self.logits_bar)

    # Exactly zero leak

    @parameterized.expand(ATTENTION)
    def test_no_leak_forward(self, attention):
        """Bit for bit; experts in groups see matrices of other shapes, so there it is a small difference."""
        experts = {"experts_implementation": "batched_mm"} if self.is_moe else {}
        _, model = self.models(attention, **experts)
        model.eval()
        with torch.no_grad():
            before = model(**packed_batch(self.documents)).logits[0].split(self.lengths)
            for changed in range(len(self.documents)):
                documents = [d.clone() for d in self.documents]
                place = len(documents[changed]) // 2
                documents[changed][place] = documents[changed][place] % (VOCAB_SIZE - 1) + 1
                after = model(**packed_batch(documents)).logits[0].split(self.lengths)
                self.assertFalse(torch.equal(before[changed], after[changed]))
                for i in set(range(len(documents))) - {changed}:
                    self.assertTrue(torch.equal(before[i], after[i]), f"document {changed} changed document {i}")

    @parameterized.expand(ATTENTION)
    def test_no_leak_backward(self, attention):
        _, model = self.models(attention)
        batch = packed_batch(self.documents)
        embeds = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
        logits = model(inputs_embeds=embeds, **batch).logits[0].split(self.lengths)
        for i, rows in enumerate(logits):
            (grad,) = torch.autograd.grad(rows.square().sum(), embeds, retain_graph=True)
            for j, block in enumerate(grad[0].split(self.lengths)):
                self.assertEqual(bool(block.any()), i == j, f"loss of document {i}, embeddings of document {j}")

    @parameterized.expand(ATTENTION)
    def test_nan_stays_in_its_document(self, attention):
        _, model = self.models(attention)
        batch = packed_batch(self.documents)
        embeds = model.get_input_embeddings()(batch.pop("input_ids")).detach()
        bounds = SequenceBoundaries.from_cu_seqlens(batch["cu_seqlens"]).cu_seqlens.tolist()
        for poisoned in (0, 4, len(self.lengths) - 1):
            planted = embeds.clone()
            planted[0, bounds[poisoned]] = float("nan")
            logits = model(inputs_embeds=planted, **batch).logits[0].split(self.lengths)
            for i, rows in enumerate(logits):
                self.assertEqual(bool(rows.isfinite().all()), i != poisoned)

    # Padded = packed

    @parameterized.expand(
        [(f"{side}_{attention}", side, attention) for side in ("left", "right") for attention in ATTENTION]
    )
    def test_padded_equals_builtin_and_packed(self, _, side, attention):
        builtin, model = self.models(attention)
        batch = padded_batch(self.documents, side)
        expected, padded = builtin(**batch), model(**batch)
        real = batch["attention_mask"].bool()
        self.assertLess(relative_error(padded.logits[real], expected.logits[real]), self.logits_bar)
        self.assertLess(relative_error(padded.loss, expected.loss), self.logits_bar)
        packed = model(**packed_batch(self.documents))
        self.assertLess(relative_error(packed.logits[0], padded.logits[real]), self.logits_bar)
        self.assertLess(relative_error(packed.loss, padded.loss), self.logits_bar)
        got, want = (gradients(model, output.loss) for output in (packed, padded))
        self.assertLess(total_relative_error(got, want), self.gradient_bar)

    # Nothing else changed

    @parameterized.expand(ATTENTION)
    def test_unpacked_forward_is_the_builtin(self, attention):
        builtin, model = self.models(attention)
        input_ids = torch.stack([self.documents[-1][:130], self.documents[-2]])
        expected, actual = builtin(input_ids, labels=input_ids), model(input_ids, labels=input_ids)
        self.assertLess(relative_error(actual.logits, expected.logits), self.logits_bar)
        self.assertIsNotNone(actual.past_key_values)
        want, got = gradients(builtin, expected.loss), gradients(model, actual.loss)
        self.assertLess(total_relative_error(got, want), self.gradient_bar)
        # A cache filled in two steps of several tokens, then token by token.
        want = got = None
        for start, end in ((0, 70), (70, 128), (128, 129), (129, 130)):
            with torch.no_grad():
                want = builtin(input_ids[:, start:end], past_key_values=want and want.past_key_values, use_cache=True)
                got = model(input_ids[:, start:end], past_key_values=got and got.past_key_values, use_cache=True)
            self.assertLess(relative_error(got.logits, want.logits), self.logits_bar)

    @parameterized.expand(
        [
            ("greedy", {"do_sample": False}),
            ("beam", {"num_beams": 3, "do_sample": False}),
            ("no_cache", {"do_sample": False, "use_cache": False}),
        ]
    )
    def test_generate_is_the_builtin(self, _, arguments):
        builtin, model = (m.eval() for m in self.models())
        batch = padded_batch(self.documents[1:6], "left")
        batch.pop("labels")
        arguments = {"max_new_tokens": 12, "pad_token_id": PAD_TOKEN, "output_scores": True, **arguments}
        arguments["return_dict_in_generate"] = True
        expected, actual = builtin.generate(**batch, **arguments), model.generate(**batch, **arguments)
        self.assertEqual(actual.sequences.tolist(), expected.sequences.tolist())
        finite = torch.isfinite(torch.stack(expected.scores))
        self.assertLess(
            relative_error(torch.stack(actual.scores)[finite], torch.stack(expected.scores)[finite]), self.logits_bar
        )

    def test_save_and_reload(self):
        builtin, model = (m.eval() for m in self.models())
        batch = packed_batch(self.documents)
        with tempfile.TemporaryDirectory() as directory, torch.no_grad():
            model.save_pretrained(directory)
            ours, report = self.packed_class.from_pretrained(directory, output_loading_info=True)
            self.assertFalse(report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"])
            self.assertTrue(torch.equal(ours(**batch).logits, model(**batch).logits))
            self.assertEqual(ours.config.architectures, [self.builtin_class.__name__])
            back, report = self.builtin_class.from_pretrained(directory, output_loading_info=True)
            self.assertFalse(report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"])
            input_ids = self.documents[-1][None]
            self.assertTrue(torch.equal(back(input_ids).logits, builtin(input_ids).logits))

    def test_resize_token_embeddings(self):
        builtin, model = self.models()
        for each in (builtin, model):
            set_seed(1)
            each.resize_token_embeddings(VOCAB_SIZE + 7, mean_resizing=False)
        logits, _ = alone(builtin, self.documents)
        packed = model(**packed_batch(self.documents))
        self.assertEqual(packed.logits.shape[-1], VOCAB_SIZE + 7)
        self.assertLess(relative_error(packed.logits[0], torch.cat(logits)), self.logits_bar)

    def test_peft_lora(self):
        from peft import LoraConfig, get_peft_model

        wrapped = []
        for each in self.models():
            set_seed(2)
            config = LoraConfig(
                r=4, target_modules=["q_proj", "v_proj", "out_proj"], init_lora_weights=False, lora_dropout=0.0
            )
            wrapped.append(get_peft_model(each, config))
        builtin, model = wrapped
        logits, loss = alone(builtin, self.documents)
        packed = model(**packed_batch(self.documents))
        self.assertLess(relative_error(packed.logits[0], torch.cat(logits)), self.logits_bar)
        loss.backward()
        packed.loss.backward()
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        want = {name: p.grad for name, p in builtin.named_parameters() if name in trained}
        got = {name: p.grad for name, p in model.named_parameters() if name in trained}
        self.assertGreater(len(trained), 0)
        self.assertLess(total_relative_error(got, want), self.gradient_bar)

    # Requested outputs

    @parameterized.expand(ATTENTION)
    def test_output_hidden_states(self, attention):
        builtin, model = self.models(attention)
        input_ids = self.documents[-1][None]
        expected = builtin(input_ids, output_hidden_states=True).hidden_states
        actual = model(input_ids, output_hidden_states=True).hidden_states
        self.assertEqual(len(actual), len(expected))
        packed = model(**packed_batch(self.documents), output_hidden_states=True).hidden_states
        self.assertEqual(len(packed), len(expected))
        for got, row, want in zip(actual, packed, expected, strict=True):
            self.assertLess(relative_error(got, want), self.logits_bar)
            self.assertLess(relative_error(row[:, -self.lengths[-1] :], want), self.logits_bar)

    def test_output_attentions(self):
        builtin, model = self.models("eager")
        packed = model(**packed_batch(self.documents), output_attentions=True).attentions
        for i, document in enumerate(self.documents):
            start = sum(self.lengths[:i])
            block = slice(start, start + len(document))
            expected = builtin(document[None], output_attentions=True).attentions
            unpacked = model(document[None], output_attentions=True).attentions
            self.assertEqual(len(packed), len(expected))
            for got, row, want in zip(unpacked, packed, expected, strict=True):
                self.assertLess(relative_error(got, want), self.logits_bar)
                self.assertLess(relative_error(row[:, :, block, block], want), self.logits_bar)
                outside = row[:, :, block].clone()
                outside[..., block] = 0
                self.assertFalse(outside.any())
        _, model = self.models("sdpa")
        with self.assertRaisesRegex(ValueError, "eager"):
            model(**packed_batch(self.documents), output_attentions=True)

    def test_sdpa_builds_no_mask_over_the_row(self):
        """No op of a packed forward returns a tensor of T x T elements in its last two dimensions."""
        from torch.utils._python_dispatch import TorchDispatchMode

        total, shapes = sum(self.lengths), []

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor):
                    shapes.append(tuple(result.shape))
                return result

        builtin, model = self.models("sdpa")
        batch = packed_batch(self.documents)
        for each, expected in ((model, False), (builtin, True)):
            shapes.clear()
            with Recorder(), torch.no_grad():
                row = batch if each is model else {name: batch[name] for name in ("input_ids", "position_ids")}
                each(**row, use_cache=False)
            self.assertEqual(any(shape[-2:] == (total, total) for shape in shapes), expected)

    # Bad input

    def assert_rejected(self, pattern: str, **changes):
        _, model = self.models()
        batch = {**packed_batch(self.documents), **changes}
        batch = {name: value for name, value in batch.items() if value is not None}
        with self.assertRaisesRegex(ValueError, f"(?s){self.packed_class.__name__}|SequenceBoundaries") as caught:
            model(**batch)
        self.assertRegex(str(caught.exception), pattern)

    def test_flex_attention_is_refused_without_a_gpu(self):
        _, model = self.models("sdpa")
        model.set_attn_implementation("flex_attention")
        with self.assertRaisesRegex(ValueError, "flex_attention: needs CUDA tensors"):
            model(**packed_batch(self.documents))

    def test_bad_input(self):
        total = sum(self.lengths)
        batch = packed_batch(self.documents)
        bounds = batch["cu_seqlens"]
        none = dict.fromkeys(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
        one = {**none, "position_ids": None}
        self.assert_rejected("starts at 0", **one, cu_seqlens=bounds + 1)
        self.assert_rejected("dispatch_batches=False.*DataParallel", **one, cu_seqlens=bounds[:-1])
        self.assert_rejected("dispatch_batches=False", **one, cu_seqlens=bounds[:1])
        self.assert_rejected("increasing", **one, cu_seqlens=torch.cat([bounds[:2], bounds[1:]]))
        self.assert_rejected("int32 or int64", **one, cu_seqlens=bounds.float())
        self.assert_rejected("int32 or int64", **one, cu_seqlens=bounds[None])
        only_idx = {**one, "cu_seqlens": None}
        self.assert_rejected("never goes back", **{**only_idx, "seq_idx": batch["seq_idx"].flip(1)})
        self.assert_rejected("seq_idx of shape", **{**only_idx, "seq_idx": batch["seq_idx"][:, :-1]})
        moved = bounds.clone()
        moved[3] += 1
        self.assert_rejected("same documents", **{**none, "cu_seq_lens_q": moved})
        self.assert_rejected("cu_seqlens and cu_seq_lens_k", cu_seq_lens_k=moved)
        self.assert_rejected("seq_idx", **{**one, "seq_idx": batch["seq_idx"] * 0})
        self.assert_rejected("position_ids", position_ids=torch.arange(total)[None])
        self.assert_rejected("max_length_q of at least 300", max_length_q=299)
        self.assert_rejected(
            "no document boundaries", **{**none, "cu_seqlens": None, "position_ids": None, "max_length_q": 300}
        )
        self.assert_rejected("without attention_mask", attention_mask=torch.ones(1, total, dtype=torch.long))
        self.assert_rejected("without past_key_values", past_key_values=self.filled_cache())
        self.assert_rejected("use_cache", use_cache=True)
        two = torch.stack([self.documents[-1][:65], self.documents[-3]])
        restarting = torch.arange(65).remainder(40).expand(2, -1)
        blank = dict.fromkeys((*none, "cu_seqlens", "labels"))
        self.assert_rejected("batch size 2", **{**blank, "input_ids": two, "position_ids": restarting})
        self.assert_rejected(
            "batch size 2", **{**blank, "input_ids": two, "position_ids": None, "cu_seqlens": torch.tensor([0, 65])}
        )
        self.assert_rejected(
            "use_cache", **dict.fromkeys((*none, "cu_seqlens")), use_cache=True, position_ids=batch["position_ids"]
        )

    def filled_cache(self):
        builtin, _ = self.models()
        return builtin(self.documents[2][None], use_cache=True).past_key_values
