"""Accepted drafts: counts of choices in packed rows, and later steps equal to a step-by-step use of the head."""

import unittest

import torch
from mixins.vision import TEXT
from parameterized import parameterized
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, set_seed

from transformers_packed import add_mtp, mtp_acceptance, patch_model
from transformers_packed.boundaries import SequenceBoundaries
from transformers_packed.models.losses import MtpLoss
from transformers_packed.models.trunk_row import TrunkRow


LENGTHS = (3, 30, 1, 2, 17)


def make_model(vocabulary=5, seed=2):
    """A model of few words, so that choices agree often."""
    set_seed(seed)
    config = Qwen3_5TextConfig(**{**TEXT, "vocab_size": vocabulary}, mtp_num_hidden_layers=1)
    model = patch_model(Qwen3_5ForCausalLM(config)).eval()
    with torch.no_grad():
        for parameter in add_mtp(model).parameters():
            parameter.normal_(std=0.3)
    return model


def greedy(model, length):
    """A text that is the model's own choice from its third token on."""
    ids = torch.tensor([[1, 2]])
    while ids.shape[1] < length:
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, :length].tolist()


def drafted_one_by_one(model, ids, at, steps):
    """The tokens that row `at` drafts: a row of the true pairs up to it, then a pair for each earlier draft."""
    row = TrunkRow()
    tokens = torch.tensor([ids])
    model.model(input_ids=tokens, use_cache=False, trunk_row=row)
    embeddings, hidden = model.get_input_embeddings()(tokens[:, 1 : at + 2]), row.hidden_states[:, : at + 1]
    found = []
    for _ in range(steps):
        boundaries = SequenceBoundaries.from_lengths([embeddings.shape[1]])
        rotary = model.model.rotary_emb(hidden, boundaries.position_ids)
        states = model.mtp.layers[0](
            model.mtp.join(embeddings, hidden), position_embeddings=rotary, boundaries=boundaries
        )
        output = model.mtp.norm(states)[:, -1:]
        found.append(int(model.lm_head(output).argmax()))
        drafted = model.get_input_embeddings()(torch.tensor([found[-1:]]))
        embeddings, hidden = torch.cat([embeddings, drafted], dim=1), torch.cat([hidden, output], dim=1)
    return found


class AcceptanceTest(unittest.TestCase):
    def samples(self, model):
        samples = [{"input_ids": greedy(model, length)} for length in LENGTHS]
        for sample in samples[::2]:
            sample["labels"] = [-100 if at < 3 else x for at, x in enumerate(sample["input_ids"])]
        return samples

    # Drafts that are accepted and others, in the first, the second and the third step.
    @parameterized.expand([(4, 5, 2), (7, 4, 1)])
    @torch.no_grad()
    def test_equals_drafts_one_by_one(self, vocabulary, seed, mixed):
        model = make_model(vocabulary, seed)
        samples, steps = self.samples(model), 3
        found = mtp_acceptance(model, samples, steps=steps, max_tokens=40)
        for number, sample in enumerate(samples):
            ids = sample["input_ids"]
            labels = sample.get("labels", ids)
            choices = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].argmax(-1).tolist()
            accepted, drafted = [0] * steps, [0] * steps
            for at in range(len(ids) - 2):
                for step, draft in enumerate(drafted_one_by_one(model, ids, at, steps)):
                    target = at + 2 + step
                    if target >= len(ids):
                        break
                    if labels[target] != -100:
                        drafted[step] += 1
                        accepted[step] += draft == choices[target - 1]
                    if not draft == choices[target - 1] == ids[target]:
                        break
            self.assertEqual(found.accepted[number].tolist(), accepted, number)
            self.assertEqual(found.drafted[number].tolist(), drafted, number)
        accepted, drafted = found.accepted.sum(0), found.drafted.sum(0)
        self.assertTrue(0 < accepted[0] < drafted[0] and 0 < accepted[mixed] < drafted[mixed])
        first, second, third = (0 if rate != rate else rate for rate in found.rates)
        self.assertAlmostEqual(found.tokens_per_forward, 1 + first + first * second + first * second * third)

    def test_loss_is_that_of_training(self):
        model = make_model()
        samples = self.samples(model)
        found = mtp_acceptance(model, samples)
        model.train().losses = (MtpLoss(),)
        losses = [
            model(**{name: torch.tensor([x]) for name, x in ({"labels": s["input_ids"]} | s).items()}).loss.item()
            for s in samples
        ]
        for got, want, count in zip(found.losses.tolist(), losses, found.drafted[:, 0].tolist(), strict=True):
            self.assertAlmostEqual(got, want, places=5) if count else self.assertNotEqual(got, got)
        self.assertTrue(model.training)
        self.assertGreater(found.loss, 0)

    def test_a_head_that_is_not_there_is_added(self):
        config = Qwen3_5TextConfig(**TEXT, mtp_num_hidden_layers=1)
        model = patch_model(Qwen3_5ForCausalLM(config))
        self.assertEqual(mtp_acceptance(model, [{"input_ids": [1, 2, 3]}]).drafted.tolist(), [[1]])

    @parameterized.expand([(0, 1, "0 samples"), (1, 0, "steps=0")])
    def test_nothing_to_measure(self, samples, steps, words):
        with self.assertRaisesRegex(ValueError, words):
            mtp_acceptance(make_model(), [{"input_ids": [1, 2, 3]}] * samples, steps=steps)

    def test_several_steps_need_a_mask(self):
        model = make_model()
        model.set_attn_implementation("flex_attention")
        self.assertRaisesRegex(ValueError, "takes a mask", mtp_acceptance, model, [{"input_ids": [1, 2]}], steps=2)
