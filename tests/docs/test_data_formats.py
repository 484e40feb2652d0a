"""Every sample line of `docs/how_to/data_formats.md` is read, in the format that its section says."""

import json
import unittest

from common import pages
from parameterized import parameterized
from trl import chat_template_utils

from transformers_packed.data.records.columns import FORMATS
from transformers_packed.data.records.samples import make_samples


TEXT = (pages.ROOT / "docs" / "how_to" / "data_formats.md").read_text(encoding="utf-8")
TOKENIZER = pages.examples_module().tiny_tokenizer()
TOKENIZER.chat_template = chat_template_utils.qwen3_5_nothink_chat_template


def sections() -> dict[str, list[str]]:
    """The lines of each JSON block, under the name of its section."""
    found = {}
    for part in TEXT.split("\n## ")[1:]:
        name = part.partition("\n")[0]
        found |= {
            (name if number == 0 else f"{name} {number}"): block.code.splitlines()
            for number, block in enumerate(block for block in pages.blocks(part) if block.language == "json")
        }
    return found


SECTIONS = sections()
READ = {name: lines for name, lines in SECTIONS.items() if not name.startswith("Preferences")}


class DataFormatsTest(unittest.TestCase):
    @parameterized.expand(READ)
    def test_train_reads_the_lines(self, name):
        samples = make_samples([(name, json.loads(line)) for line in READ[name]], TOKENIZER, max_length=4096)
        self.assertEqual((len(samples.data), samples.dropped), (len(READ[name]), 0))

    def test_every_format_is_shown(self):
        columns = {frozenset(json.loads(line)) for lines in READ.values() for line in lines}
        shown = {name for name, needed in FORMATS.items() if any(set(needed) <= found for found in columns)}
        self.assertEqual(shown, set(FORMATS))

    def test_preferences_are_those_of_trl(self):
        columns = [set(json.loads(line)) for name in ("Preferences", "Preferences 1") for line in SECTIONS[name]]
        self.assertEqual(columns, [{"prompt", "chosen", "rejected"}, {"prompt", "completion", "label"}])
