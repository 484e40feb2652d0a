"""The notebook in `examples/` runs from top to bottom on a CPU, as in a fresh kernel."""

import json
import shutil
import tempfile
import unittest
from pathlib import Path

from common import pages
from common.processes import run_script


EXAMPLES = pages.ROOT / "examples"
NOTEBOOK = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


class QuickstartTest(unittest.TestCase):
    def test_runs_on_a_cpu(self):
        with tempfile.TemporaryDirectory() as name:
            for file in ("common.py", "chats.jsonl"):
                shutil.copy(EXAMPLES / file, name)
            script = Path(name) / "quickstart.py"
            script.write_text("\n\n".join([*CODE, "print('losses:', losses[-1] < losses[0])"]), encoding="utf-8")
            (done,) = run_script(script, folder=name, CUDA_VISIBLE_DEVICES="")
        self.assertEqual(done.status, 0, done.stderr[-4000:])
        self.assertIn("100 samples, ", done.stdout)
        self.assertRegex(done.stdout, r"Padding-free: 1\d\d documents")
        # The stock class mixes documents, the patched one does not.
        self.assertRegex(done.stdout, r"Transformers: 0\.0*[1-9]\d*\ntransformers_packed: 0\.0\n")
        self.assertIn("losses: True", done.stdout)

    def test_is_stored_without_results(self):
        self.assertEqual((NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]), (4, 5))
        for cell in NOTEBOOK["cells"]:
            self.assertFalse(cell.get("outputs") or cell.get("execution_count"))
        self.assertEqual(len({cell["id"] for cell in NOTEBOOK["cells"]}), len(NOTEBOOK["cells"]))

    def test_links_exist(self):
        text = "\n".join("".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown")
        links = [part.partition(")")[0] for part in text.split("](")[1:]]
        self.assertTrue(links)
        self.assertEqual([link for link in links if not (EXAMPLES / link).is_file()], [])
