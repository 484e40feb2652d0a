import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import pyarrow
from parameterized import parameterized

from transformers_packed.data.records import files
from transformers_packed.data.records.samples import read_records


ROWS = [{"text": "Tür"}, {"text": "b", "tags": ["x"]}]
LINES = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in ROWS)


class FilesTest(unittest.TestCase):
    def setUp(self):
        self.directory = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def read(self, name, content=None):
        path = self.directory / name
        if content is not None:
            with pyarrow.output_stream(path, compression="detect") as file:
                file.write(content.encode())
        return [(place.removeprefix(f"{path}, "), record) for place, record in read_records(str(path))]

    @parameterized.expand(
        [
            (ending, form)
            for ending in ("", ".gz", ".zst", ".bz2")
            for form in ("lines", "array", "indented", "with a byte order mark")
        ]
    )
    def test_json(self, ending, form):
        content = {
            "lines": f"\n{LINES}",
            "array": json.dumps(ROWS),
            "indented": "\n " + json.dumps(ROWS, indent=2, ensure_ascii=False),
            "with a byte order mark": f"\ufeff{json.dumps(ROWS)}",
        }[form]
        places = ["line 2", "line 3"] if form == "lines" else ["record 1", "record 2"]
        got = self.read(f"data.json{ending}", content)
        self.assertEqual(got, list(zip(places, ROWS, strict=True)))

    @parameterized.expand([(".csv", ","), (".tsv", "\t")])
    def test_tables(self, ending, separator):
        lines = ["\ufeffprompt", "completion"], ["Tür", '"two\nlines"'], ["b", ""]
        content = "".join(separator.join(line) + "\r\n" for line in lines)
        got = self.read(f"data{ending}", content)
        rows = [{"prompt": "Tür", "completion": "two\nlines"}, {"prompt": "b", "completion": ""}]
        self.assertEqual(got, list(zip(["line 3", "line 4"], rows, strict=True)))
        for line in ("a", separator.join("abc")):
            with self.assertRaisesRegex(ValueError, f"data{ending}, line 5: expected 2 values, .*, got another"):
                self.read(f"data{ending}", f"{content}{line}\n")
        with self.assertRaisesRegex(ValueError, f"data{ending}: expected CSV in UTF-8, got unexpected end"):
            self.read(f"data{ending}", content + '"a')
        long = "x" * 200_000
        self.assertEqual(self.read(f"long{ending}", f"text\n{long}\n"), [("line 2", {"text": long})])
        (self.directory / "data.csv").write_bytes("a\nü\n".encode("latin-1"))
        with self.assertRaisesRegex(ValueError, "data.csv: expected CSV in UTF-8, got 'utf-8' codec"):
            self.read("data.csv")

    def test_a_file_of_another_kind(self):
        expected = (
            "notes.txt, line 1: expected one JSON object per line, a JSON array, CSV or parquet, got invalid JSON"
        )
        with self.assertRaisesRegex(ValueError, expected):
            self.read("notes.txt", "Hello\n")

    @parameterized.expand([".gz", ".zst", ".bz2"])
    def test_errors_of_compressed_files(self, ending):
        name = f"data.jsonl{ending}"
        with self.assertRaisesRegex(FileNotFoundError, f"--data: file .*{name} not found"):
            self.read(name)
        self.read(name, LINES * 99)
        whole = (self.directory / name).read_bytes()
        for content in (whole[: len(whole) // 2], LINES.encode()):
            (self.directory / name).write_bytes(content)
            with self.assertRaisesRegex(ValueError, rf"{name}: expected a complete \{ending} file, got .*\."):
                self.read(name)
        with (
            mock.patch.object(files, "find_spec", return_value=None),
            self.assertRaisesRegex(ImportError, "needs pyarrow: pip"),
        ):
            self.read(name)

    @parameterized.expand(
        [
            ('[{"text": "a"}', "data.json: expected a JSON array, got invalid JSON"),
            ('[{"text": "a"}]\n{}', "data.json: expected a JSON array, got invalid JSON"),
            ('{"text": "a"}\n[1', "data.json, line 2: expected one JSON object per line, got invalid JSON"),
            ('{"text": "a"', "data.json, line 1: expected one JSON object per line, got invalid JSON"),
            # The brace that is missing belongs to the line, and not to the next one.
            (
                '{"text": "a"}\n{"text": "a"\n{}\n',
                r"line 2: .*got invalid JSON \(Expecting ',' delimiter: column 13\)\.",
            ),
            (
                '[{"text": "a"},\n{"text"}]',
                r"data.json: .*got invalid JSON \(Expecting ':' delimiter: line 2, column 8\)\.",
            ),
        ]
    )
    def test_errors_of_json(self, content, message):
        with self.assertRaisesRegex(ValueError, message):
            self.read("data.json", content)
