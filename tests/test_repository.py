"""Files for visitors of the repository: the citation and the chats in `examples/`."""

import json
import unittest

import yaml
from common import pages

import transformers_packed
from transformers_packed.data.records.samples import make_samples, read_records


class CitationTest(unittest.TestCase):
    def test_version_and_licence(self):
        citation = yaml.safe_load((pages.ROOT / "CITATION.cff").read_text(encoding="utf-8"))
        self.assertEqual(citation["version"], transformers_packed.__version__)
        self.assertEqual(citation["license"], "Apache-2.0")


class ChatsTest(unittest.TestCase):
    def test_the_command_line_trains_on_every_chat(self):
        """Byte tokens are the longest that any tokenizer makes of these chats."""
        tokenizer = pages.examples_module().tiny_tokenizer()
        samples = make_samples(read_records(str(pages.CHATS)), tokenizer, max_length=2048)
        self.assertEqual((len(samples.data), samples.truncated, samples.dropped), (100, 0, 0))

    def test_chats_have_several_turns_and_system_messages(self):
        chats = [json.loads(line)["messages"] for line in pages.CHATS.read_text(encoding="utf-8").splitlines()]
        self.assertTrue(any(len(chat) > 4 for chat in chats))
        self.assertTrue(any(chat[0]["role"] == "system" for chat in chats))
        self.assertEqual(len({str(chat) for chat in chats}), len(chats))
