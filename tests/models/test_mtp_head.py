"""The head of multi-token prediction in packed rows: equal to each document alone, and to Transformers' own `MtpModel`."""

import tempfile
import unittest
from pathlib import Path

import torch
from common.families import tiny_model
from common.processes import ROWS, run_once
from mixins.kept_head import stock_models
from mixins.model import VOCAB_SIZE, gradients, padded_batch, relative_error, total_relative_error
from mixins.vision import TEXT, alone_batch, document
from parameterized import parameterized
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    modeling_layers,
    set_seed,
)

from transformers_packed import DataCollatorWithFlattening, add_mtp, patch_model, registered
from transformers_packed.models.losses import OWN, MtpLoss
from transformers_packed.models.mtp import to_module_names
from transformers_packed.models.mtp_head import head_of
from transformers_packed.models.trunk_row import TrunkRow
from transformers_packed.parallel import SequenceParallel, shard_batch


# Older releases have none.
MtpModel = getattr(modeling_layers, "MtpModel", None)
FAMILIES = {name: found for name, found in stock_models(TEXT).items() if name != "composite experts"}
LENGTHS = (7, 1, 2, 66, 3, 20)


def make_model(family):
    """A model with a head whose norms are not those of a new model."""
    set_seed(0)
    cls, config = FAMILIES[family]
    model = patch_model(cls(config()))
    head = add_mtp(model)
    with torch.no_grad():
        # That of the trunk too, so that its input is another hidden state than its output.
        for parameter in (*head.parameters(), model.get_decoder().norm.weight):
            parameter.normal_(std=0.3)
    model.losses = (*OWN, MtpLoss(0.5))
    return model.train()


def make_samples(lengths=LENGTHS):
    set_seed(1)
    samples = [{"input_ids": torch.randint(1, VOCAB_SIZE - 10, (length,)).tolist()} for length in lengths]
    for at, sample in enumerate(samples):
        # Some prompts, which are no targets.
        sample["labels"] = [-100 if i < 2 * (at % 3) else x for i, x in enumerate(sample["input_ids"])]
    return samples


def packed(samples):
    return DataCollatorWithFlattening(return_cu_seqlens=True, on_leak="ignore")(samples)


def padded(samples, side):
    batch = padded_batch([torch.tensor(sample["input_ids"]) for sample in samples], side)
    # Otherwise the padding before the first token would predict it.
    labels = [torch.tensor([-100, *sample["labels"][1:]]) for sample in samples]
    return batch | {"labels": pad_sequence(labels, batch_first=True, padding_value=-100, padding_side=side)}


def targets_of(samples):
    """The targets of the trunk and of the head."""
    return tuple(sum(x != -100 for sample in samples for x in sample["labels"][ahead:]) for ahead in (1, 2))


def alone(model, samples):
    """The loss of each document alone, summed as a row is."""
    trunk, head = targets_of(samples)
    loss = 0
    for sample in samples:
        batch = {name: torch.tensor([value]) for name, value in sample.items()}
        loss = loss + model(**batch, num_items_in_batch=trunk, num_mtp_items_in_batch=head).loss
    return loss


class EqualityTest(unittest.TestCase):
    def check(self, model, loss, expected, bar=4e-6):
        got, want = gradients(model, loss), gradients(model, expected)
        # A loss of some units has roundings of their size.
        self.assertLess(abs(loss.item() / expected.item() - 1), bar)
        self.assertLess(total_relative_error(got, want), bar)
        self.assertGreater(got["mtp.fc.weight"].abs().max(), 0)

    @parameterized.expand(FAMILIES)
    def test_a_row_equals_its_documents(self, family):
        model, samples = make_model(family), make_samples()
        self.check(model, model(**packed(samples)).loss, alone(model, samples))

    @parameterized.expand([("right", False), ("left", True)])
    def test_a_padded_batch_equals_its_documents(self, side, packs):
        model, samples = make_model("dense"), make_samples()
        batch = padded(samples, side)
        if packs:
            batch["use_cache"] = False
        self.check(model, model(**batch, packs_padding=packs).loss, alone(model, samples))

    @parameterized.expand(
        [("dense", "groups"), ("dense", "tokens"), ("experts", "conversation"), ("qwen3_next", "tokens")]
    )
    def test_a_tree_equals_its_paths(self, family, tree):
        """A target counts once, in the path to its document."""
        parent_of = {
            "groups": [-1, -1, 0, 0, 0, 1],
            "tokens": [-1, 0, 0, 1, -1, 4],
            "conversation": [-1, 0, 1, 2, 0, 1],
        }
        lengths = [1, 2, 1, 66, 1, 3] if tree == "tokens" else [7, 2, 66, 5, 3, 20]
        model, samples, paths = make_model(family), make_samples(lengths), []
        batch = packed(samples) | {"parent_of": torch.tensor(parent_of[tree])}
        # The model continues those of parents.
        del batch["position_ids"]
        for sample, parent in zip(samples, parent_of[tree], strict=True):
            ids = paths[parent]["input_ids"] if parent >= 0 else []
            own = [-100, *sample["labels"][1:]]
            paths.append({"input_ids": ids + sample["input_ids"], "labels": [-100] * len(ids) + own})
        model.losses[-1].record = []
        loss = model(**batch).loss
        self.assertEqual(model.losses[-1].record.pop()[1], targets_of(paths)[1])
        self.assertEqual(int((MtpLoss.targets_of(batch) != -100).sum()), targets_of(paths)[1])
        self.check(model, loss, alone(model, paths))

    def test_with_logits_and_with_another_head(self):
        model, samples = make_model("dense"), make_samples()
        self.check(model, model(**packed(samples), skip_logits=False).loss, alone(model, samples))
        # A hook makes the language modeling head one that has to be called.
        model.lm_head.register_forward_hook(lambda *args: None)
        self.check(model, model(**packed(samples)).loss, alone(model, samples))

    def test_under_checkpointing(self):
        model, samples = make_model("dense"), make_samples()
        expected = gradients(model, model(**packed(samples)).loss)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        self.assertTrue(model.mtp.layers[0].gradient_checkpointing)
        self.assertLess(total_relative_error(gradients(model, model(**packed(samples)).loss), expected), 1e-7)
        again = add_mtp(model)
        self.assertTrue(again.layers[0].gradient_checkpointing)

    def test_isolation(self):
        """The hidden states of the head have a gradient of exactly 0 at the embeddings of other documents."""
        model, samples = make_model("dense"), make_samples()
        batch, row = packed(samples), TrunkRow()
        ids = batch.pop("input_ids")
        embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
        batch.pop("labels")
        model.model(inputs_embeds=embeddings, trunk_row=row, **batch)
        hidden, ends = model.mtp(row), torch.tensor(LENGTHS).cumsum(0)
        for start, end in zip((ends - torch.tensor(LENGTHS)).tolist(), ends.tolist(), strict=True):
            weights = torch.randn(hidden.shape[-1])
            (gradient,) = torch.autograd.grad((hidden[0, start:end] @ weights).sum(), embeddings, retain_graph=True)
            self.assertGreater(gradient[0, start:end].abs().max(), 0)
            gradient[0, start:end] = 0
            self.assertEqual(gradient.abs().max(), 0)

    def test_images(self):
        """The embeddings of images are those that the head reads, at their own positions."""
        model = make_model("composite")
        features = [
            document(9, 1, images=((1, 4, 4),)),
            document(3, 2),
            document(30, 3, images=((1, 4, 8), (1, 8, 4))),
        ]
        for feature in features:
            feature["labels"] = [x if x < 90 else -100 for x in feature["input_ids"]]
        collator = DataCollatorWithFlattening(return_cu_seqlens=True, model=model)
        trunk, head = targets_of(features)
        loss = 0
        for feature in features:
            batch = alone_batch(feature) | {"labels": torch.tensor([feature["labels"]])}
            loss = loss + model(**batch, num_items_in_batch=trunk, num_mtp_items_in_batch=head).loss
        self.check(model, model(**collator(features)).loss, loss)
        changed = [dict(feature) for feature in features]
        changed[0]["pixel_values"] = changed[0]["pixel_values"] + 1
        rows = []
        for some in (features, changed):
            batch, row = collator(some), TrunkRow()
            model.model(**{n: x for n, x in batch.items() if n != "labels"}, trunk_row=row)
            rows.append(model.mtp(row)[0])
        same = (rows[0] == rows[1]).all(-1)
        first = len(features[0]["input_ids"])
        self.assertTrue(same[first:].all() and not same[:first].all())

    @parameterized.expand(["dense", "experts"])
    @unittest.skipUnless(hasattr(MtpModel, "forward_layer"), "needs a release that runs one layer of its own head")
    def test_equals_mtp_model_of_transformers(self, family):
        model, ids = make_model(family).eval(), torch.tensor([make_samples((40,))[0]["input_ids"]])
        row = TrunkRow()
        model.model(input_ids=ids, trunk_row=row, use_cache=False)
        got = model.mtp(row)[0, :-1]
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            stock = AutoModelForCausalLM.from_pretrained(folder)
            stock.config.num_mtp_layers, stock.config.mtp_layer_types = 1, ["full_attention"]
            theirs = MtpModel.from_pretrained(stock).eval()
        hidden = stock.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        positions = torch.arange(1, ids.shape[1])[None]
        with torch.no_grad():
            want = theirs.forward_layer(0, hidden, positions, None, input_ids=ids[:, 1:])
        self.assertLess(relative_error(got, want[0]), 1e-6)


def _shares(size):
    """Losses and gradients of a rank, for each row."""
    found, parallel = {}, SequenceParallel(size)
    for name, lengths in ROWS.items():
        model, samples = make_model("dense").double(), make_samples(lengths)
        trunk, head = targets_of(samples)
        inputs = shard_batch(packed(samples), parallel.rank, size, parallel=parallel, minimum=3)
        counted = int((MtpLoss.targets_of(inputs) != -100).sum())
        loss = model(**inputs, num_items_in_batch=max(trunk, 1), num_mtp_items_in_batch=head).loss
        found[name] = counted, loss.item(), gradients(model, loss)
    return found


class SequenceParallelTest(unittest.TestCase):
    @parameterized.expand([(2 + 2 * (number % 2), name) for number, name in enumerate(ROWS)])
    def test_equals_the_whole_row(self, size, name):
        """The next rank's first tokens are what a rank's last tokens are followed by."""
        model, samples = make_model("dense").double(), make_samples(ROWS[name])
        trunk, head = targets_of(samples)
        shares = [found[name] for found in run_once(_shares, size, size)]
        self.assertEqual(sum(counted for counted, _, _ in shares), head)
        loss = model(**packed(samples), num_items_in_batch=max(trunk, 1), num_mtp_items_in_batch=head).loss
        expected = gradients(model, loss)
        # The loss is in float32.
        self.assertLess(abs(sum(x for _, x, _ in shares) - loss.item()), 5e-6)
        got = {key: sum(share[key] for _, _, share in shares) for key in expected}
        self.assertLess(total_relative_error(got, expected), 1e-6)


class TargetsTest(unittest.TestCase):
    @parameterized.expand(["row", "right", "left"])
    def test_the_count_of_a_batch_is_that_of_the_loss(self, form):
        model, samples = make_model("dense"), make_samples()
        model.losses[-1].record = []
        batch = packed(samples) if form == "row" else padded(samples, form)
        self.assertEqual(int((MtpLoss.targets_of(batch) != -100).sum()), targets_of(samples)[1])
        model(**batch, use_cache=False)
        self.assertEqual(model.losses[-1].record[0][1], targets_of(samples)[1])

    def test_a_row_without_targets(self):
        model = make_model("dense")
        loss = model(**packed([{"input_ids": [1, 2], "labels": [-100, 2]}]), num_items_in_batch=1).loss
        self.assertTrue(torch.isfinite(loss))
        self.assertEqual(gradients(model, loss)["mtp.fc.weight"].abs().max(), 0)

    def test_only_in_training(self):
        model, samples = make_model("dense"), make_samples()
        loss = model.eval()(**packed(samples)).loss
        self.assertEqual(loss, patch_model(model.eval())(**packed(samples), num_mtp_items_in_batch=3).loss)
        model.train().losses = OWN
        self.assertLess((model(**packed(samples)).loss - loss).abs(), 1e-5)

    def test_the_head_alone(self):
        model, samples = make_model("dense"), make_samples()
        with_trunk, model.losses = model(**packed(samples)), OWN
        main = model(**packed(samples))
        model.losses = (MtpLoss(),)
        outputs = model(**packed(samples))
        expected = (with_trunk.loss - main.loss) / 0.5
        self.assertLess((outputs.loss - expected).abs(), 1e-5)
        self.assertLess((outputs.logits - main.logits).abs().max(), 1e-6)
        outputs.loss.backward()
        self.assertEqual(
            {n.split(".")[0] for n, x in model.named_parameters() if x.grad is not None}, {"mtp", "lm_head"}
        )

    def test_detached(self):
        model, samples = make_model("dense"), make_samples()
        model.losses = OWN
        main = gradients(model, model(**packed(samples)).loss)
        model.losses, model.mtp.detached = (*OWN, MtpLoss(0.5)), True
        model.lm_head.requires_grad_(False)
        both = gradients(model, model(**packed(samples)).loss)
        trunk = {name: x for name, x in both.items() if name.startswith("model.")}
        self.assertLess(total_relative_error(trunk, {name: main[name] for name in trunk}), 1e-6)


class CheckpointTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    @parameterized.expand(FAMILIES)
    def test_saved_and_loaded(self, family):
        """`save_pretrained`, `add_mtp` and `load_state_dict` know the names of a checkpoint."""
        model = make_model(family)
        model.save_pretrained(self.folder)
        saved = load_file(self.folder / "model.safetensors")
        names = {name for name in saved if name.startswith("mtp.")}
        self.assertEqual(len(names), 15 if family in ("dense", "composite") else 17 + 3 * 4)
        with registered():
            auto = AutoModelForCausalLM if family != "composite" else type(model)
            loaded, info = auto.from_pretrained(self.folder, output_loading_info=True)
        self.assertFalse(any(info.values()))
        add_mtp(patch_model(loaded))
        other = make_model(family)
        with torch.no_grad():
            other.mtp.fc.weight.zero_()
        other.load_state_dict(saved, strict=False)
        for one in (loaded, other):
            for (name, got), want in zip(one.state_dict().items(), model.state_dict().values(), strict=True):
                self.assertTrue(torch.equal(got, want), name)

    def test_a_head_that_is_not_declared(self):
        """As in released Qwen3-Next checkpoints."""
        model = make_model("qwen3_next")
        del model.config.num_nextn_predict_layers
        model.save_pretrained(self.folder)
        self.assertNotIn("num_nextn", (self.folder / "config.json").read_text())
        with registered():
            head = add_mtp(AutoModelForCausalLM.from_pretrained(self.folder))
        self.assertTrue(torch.equal(head.fc.weight, model.mtp.fc.weight))

    def test_gates_come_first_in_stacked_experts(self):
        saved = {
            f"mtp.experts.{number}.{part}_proj.weight": torch.full((1, 2), 10 * number + place)
            for number in range(2)
            for place, part in enumerate(("up", "gate", "down"))
        }
        found = {name: x[..., 0].tolist() for name, x in to_module_names(saved).items()}
        expected = {"mtp.experts.gate_up_proj": [[1, 0], [11, 10]], "mtp.experts.down_proj": [[2], [12]]}
        self.assertEqual(found, expected)

    def test_stacked_experts(self):
        model = make_model("experts")
        state = {f"mtp.{name}": x for name, x in model.mtp.state_dict().items()}
        save_file(state, self.folder / "mtp.safetensors")
        head = add_mtp(make_model("experts"), self.folder)
        self.assertTrue(all(torch.equal(x, model.mtp.state_dict()[name]) for name, x in head.state_dict().items()))

    def changed(self, **changes):
        """A checkpoint of which some tensors are others, or are left out."""
        model = make_model("dense")
        model.save_pretrained(self.folder)
        tensors = load_file(self.folder / "model.safetensors")
        for name, tensor in changes.items():
            del tensors[f"mtp.{name.replace('__', '.')}"]
            if tensor is not None:
                tensors[f"mtp.{name.replace('__', '.')}"] = tensor
        save_file(tensors, self.folder / "model.safetensors", metadata={"format": "pt"})
        with registered():
            return AutoModelForCausalLM.from_pretrained(self.folder)

    @parameterized.expand(
        [
            ({"fc__weight": None}, "expected mtp.fc.weight of shape .*, got none"),
            ({"fc__weight": torch.zeros(3)}, "got one of shape \\(3,\\)"),
            (
                {"fc__weight": torch.zeros(32, 64, dtype=torch.float8_e4m3fn)},
                "in floating point, got mtp.fc.weight in",
            ),
        ]
    )
    def test_other_heads_are_refused(self, changes, words):
        model = self.changed(**changes)
        self.assertRaisesRegex(ValueError, words, add_mtp, model)
        self.assertIsNone(head_of(model))

    @parameterized.expand(
        [
            ({}, "mtp_num_hidden_layers=1.*got none"),
            ({"mtp_num_hidden_layers": 2}, "got 2"),
            ({"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ]
    )
    def test_other_configurations_are_refused(self, options, words):
        model = patch_model(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT, **options)))
        self.assertRaisesRegex(ValueError, words, add_mtp, model)

    def test_other_models_are_refused(self):
        stock = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT, mtp_num_hidden_layers=1))
        self.assertRaisesRegex(ValueError, "Call register\\(\\)", add_mtp, stock)
        # Its heads read several streams of hidden states.
        other = patch_model(tiny_model("qwen4_exp"))
        self.assertRaisesRegex(ValueError, "a model of Qwen3-Next", add_mtp, other)
        model = patch_model(stock).train()
        model.losses = (*OWN, MtpLoss(0.1))
        batch = packed(make_samples())
        self.assertRaisesRegex(ValueError, "a head of multi-token prediction, got one without", model, **batch)

    def test_a_padded_batch_with_shared_prompts(self):
        model, prompt = make_model("dense"), [*range(1, 80)]
        model.share_prompts = True
        samples = [{"input_ids": [*prompt, x], "labels": [*prompt, x]} for x in (3, 4)]
        batch = padded(samples, "right") | {"use_cache": False}
        self.assertRaisesRegex(ValueError, "got a padded batch with shared prompts", model, **batch)
