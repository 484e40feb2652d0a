"""The printed output on the pages is that of the commands above it, but for figures."""

import io
import re
import unittest
from contextlib import redirect_stderr, redirect_stdout

import transformers
from common import pages

from transformers_packed import cli
from transformers_packed.models.releases import TESTED


AUDIT = pages.ROOT / "docs" / "how_to" / "check_your_setup.md"


def lines(text: str) -> list[str]:
    """The lines of a report before its notes, without the widths of columns and the figures that depend on a machine."""
    report = text.partition("\nnotes\n")[0]
    report = re.sub(r"\d(\.\d+)?e[+-]\d+", "FIGURE", re.sub(r"torch [^,]+", "torch", report))
    return [" ".join(line.split()) for line in report.strip().splitlines()]


def printed(*command: str) -> str:
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()):
        cli.main(list(command))
    return stdout.getvalue()


class AuditTest(unittest.TestCase):
    def setUp(self):
        page = AUDIT.read_text(encoding="utf-8")
        shown = [block.code for block in pages.blocks(page) if "\ndocuments 0 to" in block.code]
        # The bits of the last one depend on the CPU.
        self.ours, self.stock, self.bits = shown

    def test_is_of_the_newest_tested_release(self):
        for shown in (self.ours, self.stock, self.bits):
            self.assertIn(f"transformers {TESTED['transformers']}.", shown)

    def test_reports(self):
        version = re.search(r"transformers (\d[\d.]+)", self.ours)[1]
        if transformers.__version__ != version:
            self.skipTest(f"the page shows the output with Transformers {version}")
        self.assertEqual(lines(self.ours), lines(printed("audit", "qwen3_5_text")))
        self.assertEqual(lines(self.stock), lines(printed("audit", "qwen3_5_text", "--stock")))
