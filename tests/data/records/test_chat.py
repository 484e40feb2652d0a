"""Conversations are read one way from every file format, and no key that changes their meaning is ignored."""

import json
import tempfile
import unittest
from pathlib import Path

import datasets
from common.records import CHATML, MARKED, THINKING, assistant, make_tokenizer, records, user
from parameterized import parameterized

from transformers_packed.data.records.samples import make_samples, read_records


# As in Qwen3.5: arguments are a mapping, and each is rendered by its name.
TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<call=' + call.function.name + '>' }}"
    "{% for name, value in call.function.arguments | items %}"
    "{{ '<parameter=' + name + '>' + (value if value is string else value | tojson) }}"
    "{% endfor %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As in Qwen3: an answer has an empty reasoning block, which the generation prompt contains if the model must not think.
THINK = CHATML.replace(
    "assistant\n' }}", "assistant\n<think>' + ('' if think | default(true) else '</think>') }}"
).replace("'\n' + m.content", "'\n' + ('<think></think>' if m.role == 'assistant' else '') + m.content")
MARKED_THINK = MARKED.replace(
    "{% generation %}{{ m", "{% if not think | default(true) %}{{ '<no>' }}{% endif %}{% generation %}{{ m"
)


def call(arguments, name="look", **more):
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
        **more,
    }


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CALLS = [
    {
        "messages": [user("a"), call({"query": "x"}), {"role": "tool", "content": "1"}, assistant("b")],
        "tools": [tool("look", query={"type": "string"})],
    },
    {
        "messages": [user("c"), call({"city": "y", "deep": {"unit": 3}}, name="weather"), assistant("d", weight=0)],
        "tools": [tool("weather", city={"type": "string", "enum": ["y", "z"]}, deep={"type": "object"})],
    },
    {"messages": [user("e"), assistant("f")]},
]


def decoded(samples, tokenizer):
    """The text of each sample, with its targets in brackets."""
    texts = []
    for sample in samples.data:
        text, inside = "", False
        for token, label in zip(sample["input_ids"].tolist(), sample["labels"].tolist(), strict=True):
            if inside != (label != -100):
                text += "]" if inside else "["
                inside = not inside
            text += tokenizer.decode([token])
        texts.append(text + "]" * inside)
    return texts


class FileFormatTest(unittest.TestCase):
    def read(self, rows, tokenizer, ending, max_length=4096):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, f"data.{ending}")
            if ending == "jsonl":
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            elif ending == "parquet":
                datasets.Dataset.from_list(rows).to_parquet(path)
            else:
                path.mkdir()
                datasets.Dataset.from_list(rows).to_parquet(path / "train.parquet")
            return make_samples(read_records(str(path)), tokenizer, max_length)

    @parameterized.expand(["jsonl", "parquet", "dataset"])
    def test_values_that_a_format_fills_in_are_not_there(self, ending):
        tokenizer = make_tokenizer(TOOLS)
        texts = decoded(self.read(CALLS, tokenizer, ending), tokenizer)
        start, end = "<|im_start|>", "<|im_end|>\n"
        look, weather = (json.dumps(row["tools"][0]) for row in CALLS[:2])
        self.assertEqual(
            texts,
            [
                f"{look}\n{start}user\na{end}{start}assistant\n[<call=look><parameter=query>x{end}]"
                f"{start}tool\n1{end}{start}assistant\n[b{end}]",
                f"{weather}\n{start}user\nc{end}{start}assistant\n[<call=weather><parameter=city>y"
                f'<parameter=deep>{{"unit": 3}}{end}]{start}assistant\nd{end}',
                f"{start}user\ne{end}{start}assistant\n[f{end}]",
            ],
        )

    @parameterized.expand(["jsonl", "parquet", "dataset"])
    def test_objects_as_strings_keep_what_they_hold(self, ending):
        """OpenAI's format. A null in a string was written by the user, not by the file format."""
        rows = [{**row, "tools": json.dumps(row["tools"])} if "tools" in row else row for row in CALLS[:2]]
        for row, arguments in zip(rows, ({"query": None}, {"city": "y"}), strict=True):
            row["messages"] = [user("a"), call(json.dumps(arguments)), assistant("b")]
        tokenizer = make_tokenizer(TOOLS)
        texts = decoded(self.read(rows, tokenizer, ending), tokenizer)
        self.assertIn("[<call=look><parameter=query>null<|im_end|>", texts[0])
        self.assertIn("[<call=look><parameter=city>y<|im_end|>", texts[1])
        self.assertTrue(texts[0].startswith(json.dumps(CALLS[0]["tools"][0])))

    @parameterized.expand(["jsonl", "parquet", "dataset"])
    def test_columns_that_some_records_lack(self, ending):
        rows = [
            {"messages": MESSAGES, "chat_template_kwargs": {"think": False}},
            {"messages": MESSAGES, "text": None, "images": []},
        ]
        self.assertEqual(len(self.read(rows, make_tokenizer(), ending).data), 2)


class WeightTest(unittest.TestCase):
    @parameterized.expand([("marked", MARKED, ""), ("found", CHATML, "\n")])
    def test_turns_with_weight_0_are_no_targets(self, _, template, rest):
        tokenizer = make_tokenizer(template)
        messages = [
            user("a", weight=0),
            assistant("b", weight=0),
            user("c"),
            assistant("d", weight=1),
            assistant("d", weight=0.0),
        ]
        start, end = "<|im_start|>", "<|im_end|>"
        target = f"[d{end}{rest}]" + ("" if rest else "\n")
        want = f"{start}user\na{end}\n{start}assistant\nb{end}\n{start}user\nc{end}\n{start}assistant\n{target}"
        want += f"{start}assistant\nd{end}\n"
        rows = [{"messages": messages}, {"prompt": messages[:1], "completion": messages[1:]}]
        for row in rows:
            samples = make_samples(records(row), tokenizer, 4096)
            # A completion is not found by the marks of the template.
            expected = want if "messages" in row else want.replace(f"[d{end}]\n", f"[d{end}\n]")
            self.assertEqual(decoded(samples, tokenizer), [expected])
        silent = [{"messages": [user("a"), assistant("b", weight=0)]}, {"messages": [user("a"), assistant("b")]}]
        samples = make_samples(records(*silent), tokenizer, 4096)
        self.assertEqual((len(samples.data), samples.dropped), (1, 1))


class TemplateArgumentsTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("found", THINK, ("<think>[</think>b<|im_end|>\n]", "<think></think>[b<|im_end|>\n]")),
            ("marked", MARKED_THINK, ("[b<|im_end|>]\n", "<no>[b<|im_end|>]\n")),
        ]
    )
    def test_reach_the_template(self, name, template, answers):
        """Each record gets its own, also after one with others."""
        tokenizer, messages = make_tokenizer(template), [user("a"), assistant("b")]
        start = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        rows = [{"messages": messages, "chat_template_kwargs": {"think": think}} for think in (True, False, True)]
        texts = decoded(make_samples(records(*rows), tokenizer, 4096), tokenizer)
        self.assertEqual(texts, [start + answers[0], start + answers[1], start + answers[0]])
        if name == "found":
            rows = [{"prompt": messages[:1], "completion": messages[1:], "chat_template_kwargs": {"think": False}}]
            self.assertEqual(decoded(make_samples(records(*rows), tokenizer, 4096), tokenizer), [start + answers[1]])


MESSAGES = [user("a"), assistant("b")]
BAD = [
    ("weight", {"messages": [user("a"), assistant("b", weight=2)]}, "weight 0 or 1 in messages, message 2, got 2"),
    ("weight_type", {"messages": [user("a"), assistant("b", weight="0")]}, "weight 0 or 1 in .*, got '0'"),
    (
        "weight_of_user",
        {"messages": [user("a", weight=1), assistant("b")]},
        "weight 0 or none in messages, message 1, .*",
    ),
    (
        "kwargs",
        {"messages": MESSAGES, "chat_template_kwargs": "think"},
        "chat_template_kwargs as an object, got a string",
    ),
    (
        "own_kwargs",
        {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}},
        "variables of the chat template in chat_template_kwargs, got the argument tokenize",
    ),
    (
        "no_json",
        {"messages": [user("a"), call("query=x"), assistant("b")]},
        "arguments as an object .* in messages, message 2, tool call 1, got 'query=x'. Write .*[{][}].* without",
    ),
    ("list", {"messages": [user("a"), call([1])]}, "arguments as an object .* message 2, tool call 1, got .1."),
    (
        "calls",
        {"messages": [user("a"), assistant("", tool_calls="look")]},
        "tool_calls as a list .* message 2, got a string",
    ),
    (
        "a_call",
        {"messages": [user("a"), assistant("", tool_calls=["look"])]},
        "an object in .* tool call 1, got a string",
    ),
    ("tools", {"messages": MESSAGES, "tools": '{"a": 1}'}, "tools as a list of JSON schemas, got an object"),
]


class ErrorTest(unittest.TestCase):
    @parameterized.expand(BAD)
    def test_names_the_record_and_the_place(self, _, record, message):
        with self.assertRaisesRegex(ValueError, f"^record 2: expected {message}"):
            make_samples(records({"messages": MESSAGES}, record), make_tokenizer(TOOLS), 4096)

    def test_keys_that_the_template_does_not_read_are_named(self):
        rows = [user("a", id="1"), assistant("b", loss=False, reasoning_content="c", tool_calls=[])]
        logger = "transformers_packed.data.records.samples"
        with self.assertLogs(logger, "WARNING") as logs:
            make_samples(records(*[{"messages": rows}] * 3), make_tokenizer(), 4096)
        self.assertEqual(len(logs.output), 1)
        self.assertRegex(logs.output[0], "does not read these keys of messages: loss, reasoning_content[.]")
        with self.assertNoLogs(logger, "WARNING"):
            read = [
                user("a"),
                assistant("b", reasoning_content="c", tool_calls=[{"function": {"name": "look"}}], weight=1),
            ]
            make_samples(records({"messages": read}), make_tokenizer(THINKING), 4096)
