import unittest

from common.records import CHATML, MARKED, assistant, make_tokenizer, records, user
from parameterized import parameterized

from transformers_packed.data.records.columns import FORMATS
from transformers_packed.data.records.samples import make_samples


CHAT = [user("a"), assistant("b")]
# A record of each format. A chat has two.
FORMS = {
    "messages": {"messages": CHAT},
    "prompt as messages": {"prompt": CHAT[:1], "completion": CHAT[1:]},
    "prompt-completion": {"prompt": "a", "completion": "b"},
    "text": {"text": "ab"},
    "tokens": {"input_ids": [5, 6, 7]},
}
CHATS, TOKENS = ("messages", "prompt as messages"), ("tokens",)
# Columns that change what is trained, with a value, and the forms that read them.
MEANT = {
    "system": ("Be brief.", CHATS),
    "history": ([["c", "d"]], CHATS),
    "tools": ([{"name": "look"}], CHATS),
    "chat_template_kwargs": ({"loud": True}, CHATS),
    "labels": ([-100, 6, 7], TOKENS),
    "attention_mask": ([1, 1, 0], TOKENS),
    "loss_mask": ([0, 1, 0], TOKENS),
    "completion_mask": ([0, 1, 0], TOKENS),
    "assistant_masks": ([0, 1, 0], TOKENS),
    "weight": (0.5, ()),
    "loss_weight": (0, ()),
    "sample_weight": (2, ()),
    "images": (["a.png"], ()),
    "videos": (["a.mp4"], ()),
    "audios": (["a.wav"], ()),
    "functions": ([{"name": "look"}], ()),
    "seq_lengths": ([1, 2], ()),
}
TEMPLATE = "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}{% if loud %}{{ 'LOUD' }}{% endif %}" + CHATML


class ColumnsTest(unittest.TestCase):
    def samples(self, *rows, template=TEMPLATE, **options):
        return make_samples(records(*rows), make_tokenizer(template), 4096, **options)

    @parameterized.expand([(column, form) for column in MEANT for form in FORMS])
    def test_a_column_that_changes_what_is_trained(self, column, form):
        """It changes the sample, or is refused by name. Without a value it does nothing."""
        value, forms = MEANT[column]
        plain = self.samples(FORMS[form])
        # A column of tokens may not be empty.
        empty = [] if form in forms and forms is TOKENS else [1 if "weight" in column else type(value)()]
        for nothing in (None, *empty):
            self.assertEqual(self.samples(FORMS[form] | {column: nothing}).fingerprint(), plain.fingerprint())
        record = FORMS[form] | {column: value}
        if form in forms:
            self.assertNotEqual(self.samples(record).fingerprint(), plain.fingerprint())
        else:
            with self.assertRaisesRegex(
                ValueError, f"record 1: expected no column {column} beside .*, got .*\\. [A-Z]"
            ):
                self.samples(record)

    def test_every_format_has_a_form(self):
        self.assertEqual({name for name in FORMATS if name in FORMS}, set(FORMATS))

    @parameterized.expand(FORMS)
    def test_other_columns_are_named_once(self, form):
        rows = [FORMS[form] | {"id": n, "source": "web", "url": None} for n in (1, 2)]
        with self.assertLogs("transformers_packed.data.records.samples", "WARNING") as logs:
            self.samples(*rows, FORMS[form] | {"id": 3, "score": 1})
        lines = [line.partition("read: ")[2] for line in logs.output]
        self.assertEqual(lines, ["id, source.", "score."])

    def test_columns_of_another_format_that_the_record_has(self):
        """With a format chosen, those of the other one are left out."""
        record = {"text": "ab", "input_ids": [5, 6], "labels": [-100, 6], "messages": CHAT, "system": "Be brief."}
        with self.assertRaisesRegex(ValueError, "Choose one with --format messages or text or tokens"):
            self.samples(record)
        for form in ("text", "tokens", "messages"):
            samples = self.samples(record, format=form)
            own = FORMS[form] if form != "tokens" else {}
            names = {"messages": ["system"], "tokens": ["input_ids", "labels"]}.get(form, [])
            want = self.samples(own | {name: record[name] for name in names})
            self.assertEqual((samples.format, samples.fingerprint()), (form, want.fingerprint()))


class FirstTurnsTest(unittest.TestCase):
    """`system` and `history` are the first messages."""

    HISTORY = [["c", "d"], ["e", "f"]]
    TURNS = [user("c"), assistant("d"), user("e"), assistant("f")]
    SYSTEM = {"role": "system", "content": "Be brief."}

    @parameterized.expand(
        [
            ({"system": "Be brief."}, [], [SYSTEM]),
            ({"history": HISTORY}, [], TURNS),
            ({"system": "Be brief.", "history": HISTORY}, [], [SYSTEM, *TURNS]),
            ({"system": "Be brief.", "history": HISTORY}, [SYSTEM], [SYSTEM, *TURNS]),
            ({"history": HISTORY}, [SYSTEM], [SYSTEM, *TURNS]),
        ]
    )
    def test_messages_and_prompts(self, columns, own, first):
        for template in (CHATML, MARKED):
            for form in ("messages", "prompt"):
                more = {"completion": CHAT[1:]} if form == "prompt" else {}
                rest = CHAT[: 1 if more else 2]
                given, whole = ({form: [*turns, *rest]} | more for turns in (own, first))
                got, want = (make_samples(records(x), make_tokenizer(template), 999) for x in (given | columns, whole))
                self.assertEqual(got.fingerprint(), want.fingerprint())

    @parameterized.expand(
        [
            ({"system": "Be long."}, "the system turn of messages in the column system, got another one"),
            ({"system": ["Be brief."]}, "system as a string, got a list"),
            ({"history": "a"}, "history as a list of pairs, a question and its answer, got a string"),
            ({"history": [["a"]]}, "history as a list of pairs"),
            ({"history": [["a", ""]]}, "content in history, message 2"),
            ({"history": [["a", 3]]}, "content as a string .* in history, message 2"),
        ]
    )
    def test_errors(self, columns, message):
        with self.assertRaisesRegex(ValueError, f"record 1: expected {message}"):
            make_samples(records({"messages": [self.SYSTEM, *CHAT]} | columns), make_tokenizer(), 999)
