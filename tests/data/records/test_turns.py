"""Conversations that train each turn as it is rendered up to there."""

import logging
import unittest

from common.records import CHATML, MARKED, PLAIN, THINKING, assistant, make_tokenizer, records, user
from mixins.model import total_relative_error
from mixins.patch import builtin_model
from parameterized import parameterized

from transformers_packed import DataCollatorWithFlattening, patch_model
from transformers_packed.data.records.samples import make_samples
from transformers_packed.data.trees import nodes_of, tokens_in


logger = logging.getLogger("transformers_packed.data.records.samples")
# Reasoning is left out of the history, but stays between the steps of one turn.
MESSAGES = [
    user("q" * 70),
    assistant("a1", reasoning_content="one"),
    user("b" * 70),
    assistant("a2", reasoning_content="two"),
    {"role": "tool", "content": "7"},
    assistant("a3", reasoning_content="three"),
    user("last"),
    assistant("a4"),
]
TURNS = (1, 3, 5, 7)


def up_to(turn):
    """The conversation up to a turn, which is its only target."""
    earlier = [m | {"weight": 0} if m["role"] == "assistant" else m for m in MESSAGES[:turn]]
    return {"messages": [*earlier, MESSAGES[turn]]}


def paths_of(samples):
    """The tokens of each node after those of its ancestors."""
    nodes, parents = nodes_of(samples)
    paths = []
    for node, parent in zip(nodes, parents, strict=True):
        paths.append([*(paths[parent] if parent is not None else ()), *node["input_ids"].tolist()])
    return paths


class RecordsTest(unittest.TestCase):
    @parameterized.expand([("thinking", THINKING), ("plain", PLAIN), ("marks", MARKED), ("chatml", CHATML)])
    def test_each_turn_has_its_own_rendering(self, _, template):
        tokenizer = make_tokenizer(template)
        samples = make_samples(records({"messages": MESSAGES}), tokenizer, 4096, every_turn=True)
        alone = make_samples(records(*map(up_to, TURNS)), tokenizer, 4096)
        paths = paths_of(samples.data)
        for sample in alone.data:
            tokens = sample["input_ids"].tolist()
            self.assertTrue(any(path[: len(tokens)] == tokens for path in paths))
        self.assertEqual(samples.targets, alone.targets)
        self.assertLess(samples.tokens, alone.tokens)
        self.assertEqual((samples.truncated, samples.dropped), (0, 0))

    @parameterized.expand([("marks", MARKED), ("chatml", CHATML)])
    def test_a_template_that_renders_all_turns_alike(self, _, template):
        messages = [{name: x for name, x in m.items() if name != "reasoning_content"} for m in MESSAGES]
        tokenizer = make_tokenizer(template)
        with self.assertNoLogs(logger, "WARNING"):
            whole = make_samples(records({"messages": messages}), tokenizer, 4096)
        samples = make_samples(records({"messages": messages}), tokenizer, 4096, every_turn=True)
        self.assertEqual(samples.fingerprint(), whole.fingerprint())
        self.assertNotIn("turns", samples.data[0])

    def test_the_layout(self):
        tokenizer = make_tokenizer(THINKING)
        (sample,) = make_samples(records({"messages": MESSAGES}), tokenizer, 4096, every_turn=True).data
        nodes, _ = nodes_of([sample])
        self.assertEqual(
            sorted(tokenizer.decode(node["input_ids"][node["labels"] != -100]) for node in nodes),
            [
                "",
                "",
                "\n</think>\n\na4<|im_end|>\n",
                "one\n</think>\n\na1<|im_end|>\n",
                "two\n</think>\n\na2<|im_end|>\nthree\n</think>\n\na3<|im_end|>\n",
            ],
        )

    def test_long_conversations(self):
        """Each rendering is truncated, and those without a target are left out."""
        tokenizer = make_tokenizer(THINKING)
        alone = [make_samples(records(up_to(turn)), tokenizer, 4096).data[0] for turn in TURNS]
        length = len(alone[0]["input_ids"])
        samples = make_samples(records({"messages": MESSAGES}), tokenizer, length, every_turn=True)
        self.assertEqual((len(samples.data), samples.truncated, samples.dropped), (1, 1, 0))
        self.assertEqual(samples.data[0]["input_ids"].tolist(), alone[0]["input_ids"].tolist())
        short = {"messages": [user("q"), assistant("a")]}
        samples = make_samples(records(short, {"messages": MESSAGES}), tokenizer, length - 40, every_turn=True)
        self.assertEqual((len(samples.data), samples.truncated, samples.dropped), (1, 1, 1))

    def test_trees_that_fit_into_a_row(self):
        """Each half of the turns of a larger one is a tree of its own. No target is lost or repeated."""
        tokenizer = make_tokenizer(THINKING)
        (whole,) = make_samples(records({"messages": MESSAGES}), tokenizer, 4096, every_turn=True).data
        alone = make_samples(records(*map(up_to, TURNS)), tokenizer, 4096)
        longest = max(len(sample["input_ids"]) for sample in alone.data)
        numbers = []
        for length in (tokens_in(whole), tokens_in(whole) - 1, longest):
            samples = make_samples(records({"messages": MESSAGES}), tokenizer, longest, None, True, length)
            self.assertLessEqual(max(map(tokens_in, samples.data)), length)
            self.assertEqual((samples.targets, samples.truncated), (alone.targets, 0))
            numbers.append(len(samples.data))
        self.assertEqual(numbers, [1, 2, 3])

    def test_the_log_names_the_option(self):
        for rows in ([MESSAGES], [MESSAGES, MESSAGES]):
            with self.assertLogs(logger, "WARNING") as logs:
                make_samples(records(*({"messages": x} for x in rows)), make_tokenizer(THINKING), 4096)
            self.assertEqual(len(logs.output), 1)
            self.assertIn("--every-turn", logs.output[0])
        with self.assertNoLogs(logger, "WARNING"):
            make_samples(records({"messages": MESSAGES[:2]}), make_tokenizer(THINKING), 4096)
            make_samples(records({"messages": MESSAGES}), make_tokenizer(THINKING), 4096, every_turn=True)


class TrainingTest(unittest.TestCase):
    def test_equals_separate_samples(self):
        """The loss and its gradients are those of a row with each rendering."""
        model = patch_model(builtin_model("qwen3_5")).double()
        model.resize_token_embeddings(300)
        collator, tokenizer = DataCollatorWithFlattening(model=model, return_cu_seqlens=True), make_tokenizer(THINKING)
        tree = make_samples(records({"messages": MESSAGES}), tokenizer, 4096, every_turn=True)
        alone = make_samples(records(*map(up_to, TURNS)), tokenizer, 4096)
        results = []
        for samples in (tree, alone):
            model.zero_grad()
            loss = model(**collator(samples.data)).loss
            loss.backward()
            results.append((loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        (loss, gradients), (expected, want) = results
        self.assertAlmostEqual(loss, expected, places=10)
        self.assertLess(total_relative_error(gradients, want), 1e-10)
