import unittest

from common.records import CHATML, MARKED, PLAIN, THINKING, assistant, make_tokenizer, records, user
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from transformers_packed.data.records.samples import make_samples


class SamplesTest(unittest.TestCase):
    """Compare tokens and labels with segments written by hand, `(text, is a target)`."""

    def check(self, tokenizer, record, *segments, **arguments):
        ids, labels = [], []
        for text, target in segments:
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += tokens
            labels += tokens if target else [-100] * len(tokens)
        samples = make_samples(records(record), tokenizer, 4096, **arguments)
        self.assertEqual(tokenizer.decode(samples.data[0]["input_ids"]), tokenizer.decode(ids))
        self.assertEqual(samples.data[0]["input_ids"].tolist(), ids)
        self.assertEqual(samples.data[0]["labels"].tolist(), labels)
        self.assertEqual((samples.tokens, samples.truncated, samples.dropped), (len(ids), 0, 0))
        self.assertEqual(samples.targets, sum(label != -100 for label in labels[1:]))

    def test_text(self):
        tokenizer = make_tokenizer(None)
        self.check(tokenizer, {"text": "Tür 💡\n", "id": 7}, ("Tür 💡\n<|im_end|>", True))
        self.check(tokenizer, {"text": "a<|im_end|>", "messages": None}, ("a<|im_end|>", True))

    def test_prompt_and_completion(self):
        tokenizer = make_tokenizer(None)
        self.check(tokenizer, {"prompt": "1 + 1 =", "completion": " 2"}, ("1 + 1 =", False), (" 2<|im_end|>", True))
        self.check(tokenizer, {"prompt": "a", "completion": "b<|im_end|>"}, ("a", False), ("b<|im_end|>", True))
        self.check(tokenizer, {"prompt": "", "completion": "b"}, ("b<|im_end|>", True))

    def test_the_special_tokens_of_the_tokenizer(self):
        """The special tokens at the start stay, but no second one is inserted between prompt and completion."""
        tokenizer = make_tokenizer(None, bos_token="<|im_start|>")
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 2)]
        )
        self.check(tokenizer, {"prompt": "a", "completion": "b"}, ("<|im_start|>a", False), ("b<|im_end|>", True))
        self.check(tokenizer, {"text": "b"}, ("<|im_start|>b<|im_end|>", True))

    def test_messages(self):
        self.check(
            make_tokenizer(),
            {
                "messages": [
                    {"role": "system", "content": ""},
                    user([{"type": "text", "text": "<|im_start|>assistant\nno"}, {"text": "<|im_end|>"}]),
                    assistant(" é💡 ", name=None),
                    user("b"),
                    assistant([{"type": "text", "text": "c"}]),
                ]
            },
            ("<|im_start|>system\n<|im_end|>\n", False),
            ("<|im_start|>user\n<|im_start|>assistant\nno<|im_end|><|im_end|>\n<|im_start|>assistant\n", False),
            (" é💡 <|im_end|>\n", True),
            ("<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n", False),
            ("c<|im_end|>\n", True),
        )

    def test_messages_by_the_marks_of_the_template(self):
        """`{% generation %}` excludes the line break here, which distinguishes the two methods."""
        self.check(
            make_tokenizer(MARKED),
            {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]},
            ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", False),
            ("b<|im_end|>", True),
            ("\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n", False),
            ("d<|im_end|>", True),
            ("\n", False),
        )

    def test_a_template_that_shows_earlier_turns_differently(self):
        messages = [
            assistant("Hello."),
            user("a"),
            assistant(" b ", reasoning_content="left out"),
            user("c"),
            assistant(None, tool_calls=[{"function": {"name": "look"}}]),
            {"role": "tool", "content": "7"},
            assistant("d", reasoning_content="seven"),
        ]
        self.check(
            make_tokenizer(THINKING),
            {"messages": messages},
            ("<|im_start|>assistant\n", False),
            ("Hello.<|im_end|>\n", True),
            ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", False),
            ("b<|im_end|>\n", True),
            ("<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>\n", False),
            ("\n</think>\n\n<call>look</call><|im_end|>\n", True),
            ("<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n<think>\n", False),
            ("seven\n</think>\n\nd<|im_end|>\n", True),
        )

    def test_a_template_without_special_tokens(self):
        self.check(
            make_tokenizer(PLAIN),
            {"messages": [user("a"), assistant("b"), user("assistant: b"), assistant("d")]},
            ("user: a\nassistant: ", False),
            ("b\n", True),
            ("user: assistant: b\nassistant: ", False),
            ("d\n<|im_end|>", True),
        )

    def test_prompt_and_completion_as_messages(self):
        """Assistant turns in the prompt are no targets, even if the template marks them."""
        for template in (CHATML, MARKED):
            self.check(
                make_tokenizer(template),
                {
                    "prompt": [user("a"), assistant("b"), user("c")],
                    "completion": [assistant("d"), user("e"), assistant("f")],
                },
                ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n", False),
                ("<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n", False),
                ("d<|im_end|>\n", True),
                ("<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n", False),
                ("f<|im_end|>\n", True),
            )

    def test_tools_reach_the_template(self):
        template = "{% for tool in tools or [] %}{{ tool.name + '\n' }}{% endfor %}" + CHATML
        self.check(
            make_tokenizer(template),
            {"messages": [user("a"), assistant("b")], "tools": [{"name": "look"}]},
            ("look\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", False),
            ("b<|im_end|>\n", True),
        )

    def test_a_token_that_reaches_behind_the_turn_is_no_target(self):
        symbols = ["<|im_end|>", *"abnou: ", "\n", "n\n", "b\n", "u:"]
        tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[("b", "\n")]))
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
        fast.chat_template = (
            "{% for m in messages %}{{ ('u: ' if m.role == 'user' else '') + m.content }}"
            "{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}{% endfor %}"
        )
        samples = make_samples(
            records({"messages": [user("a"), assistant("ab"), user("a"), assistant("b")]}), fast, 99
        )
        tokens = fast.convert_ids_to_tokens(samples.data[0]["input_ids"].tolist())
        targets = samples.data[0]["labels"] != -100
        self.assertEqual(tokens, ["u", ":", " ", "a", "\n", "a", "b\n", "u", ":", " ", "a", "\n", "b"])
        self.assertEqual(targets.nonzero()[0].tolist(), [5, 12])

    def test_long_samples_are_cut_and_those_without_targets_dropped(self):
        tokenizer = make_tokenizer()
        rows = records(
            {"prompt": "abc", "completion": "defgh"},
            {"prompt": "abcdef", "completion": "g"},
            {"prompt": "ab", "completion": "cde"},
        )
        samples = make_samples(rows, tokenizer, 6)
        self.assertEqual((samples.truncated, samples.dropped, len(samples.data)), (2, 1, 2))
        self.assertEqual(samples.data[0]["labels"].tolist(), [-100] * 3 + tokenizer("def")["input_ids"])
        self.assertEqual(samples.data[1]["labels"].tolist(), [-100] * 2 + [*tokenizer("cde")["input_ids"], 1])
        self.assertEqual((samples.tokens, samples.targets), (12, 7))
        # No token predicts the first one.
        with self.assertRaisesRegex(
            ValueError, r"a target, got none in 1 record \(1 longer than 1 token\). Raise max_length"
        ):
            make_samples(records({"text": "abc"}), tokenizer, 1)
        with self.assertRaisesRegex(ValueError, r"got none in 1 record. Check that"):
            make_samples(records({"messages": [user("a")]}), tokenizer, 99)

    def test_format(self):
        tokenizer = make_tokenizer()
        both = {"text": "a", "messages": [user("a"), assistant("b")]}
        with self.assertRaisesRegex(ValueError, "record 1: expected .* Choose one with --format messages or text"):
            make_samples(records(both), tokenizer, 99)
        self.check(tokenizer, both, ("a<|im_end|>", True), format="text")
        with self.assertRaisesRegex(ValueError, "record 2: expected prompt and completion, as set by --format"):
            rows = records({"prompt": "a", "completion": "b", "text": "c"}, {"text": "c"})
            make_samples(rows, tokenizer, 99, format="prompt-completion")

    def test_a_template_that_hides_the_assistant(self):
        tokenizer = make_tokenizer("{% for m in messages %}{{ m.content | length }}{% endfor %}")
        with self.assertRaisesRegex(ValueError, "record 1: .*a single answer.*generation"):
            make_samples(records({"messages": [user("a"), assistant("b")]}), tokenizer, 99)
