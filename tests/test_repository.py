"""Files for visitors of the repository: the citation and the data in `examples/`."""

import json
import unittest

import yaml
from common import pages

import transformers_packed
from transformers_packed.data.records.samples import make_samples, read_records


EXAMPLES = pages.ROOT / "examples"
CHATS = EXAMPLES / "chats.jsonl"
TOKENIZER = pages.examples_module().tiny_tokenizer()


class CitationTest(unittest.TestCase):
    def test_version_and_licence(self):
        citation = yaml.safe_load((pages.ROOT / "CITATION.cff").read_text(encoding="utf-8"))
        self.assertEqual(citation["version"], transformers_packed.__version__)
        self.assertEqual(citation["license"], "Apache-2.0")


class ChatsTest(unittest.TestCase):
    def test_the_command_line_trains_on_every_chat(self):
        """Byte tokens are the longest that any tokenizer makes of these chats."""
        samples = make_samples(read_records(str(CHATS)), TOKENIZER, max_length=1024)
        self.assertEqual((len(samples.data), samples.truncated, samples.dropped), (100, 0, 0))

    def test_chats_have_several_turns_and_system_messages(self):
        chats = [json.loads(line)["messages"] for line in CHATS.read_text(encoding="utf-8").splitlines()]
        self.assertTrue(any(len(chat) > 4 for chat in chats))
        self.assertTrue(any(chat[0]["role"] == "system" for chat in chats))
        self.assertEqual(len({str(chat) for chat in chats}), len(chats))


class OtherDataTest(unittest.TestCase):
    def test_texts_are_read(self):
        samples = make_samples(read_records(str(EXAMPLES / "documents.jsonl")), TOKENIZER, max_length=1024)
        self.assertEqual((samples.format, len(samples.data), samples.truncated, samples.dropped), ("text", 25, 0, 0))

    def test_preferences_have_two_different_answers(self):
        lines = (EXAMPLES / "preferences.jsonl").read_text(encoding="utf-8").splitlines()
        for record in map(json.loads, lines):
            self.assertEqual(list(record), ["prompt", "chosen", "rejected"])
            self.assertEqual(record["prompt"][-1]["role"], "user")
            self.assertEqual({record[name][0]["role"] for name in ("chosen", "rejected")}, {"assistant"})
            self.assertNotEqual(record["chosen"], record["rejected"])
        self.assertEqual(len({str(json.loads(line)["prompt"]) for line in lines}), 24)
