import json
import os
import re
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
from common.processes import run_cli_module

from transformers_packed import cli
from transformers_packed.cli import arms, demo, demo_data
from transformers_packed.cli.demo_data import read_pairs, tokenize, train_tokenizer


SOURCE = '''
import os


class Reader:
    @property
    def name(self):
        """The name.

        In full.
        """
        # from the path
        return "x"

    def only_documented(self):
        """Nothing else."""


async def wait(seconds):
    "Wait."
    def inner():
        return seconds
    return inner


def one_line(): "Doc."; return 1


def undocumented():
    return 2
'''
RESULT = {
    "samples": 2,
    "real_tokens": 10,
    "computed_tokens": 16,
    "seconds": 1.0,
    "memory_before": 2**20,
    "peak_memory": 2**21,
    "losses": [2.0, 1.0],
    "implementations": {"op": ["reference"]},
}


def write_sources(root: Path) -> None:
    files = {
        "b.py": SOURCE,
        "a.py": 'def first():\n    """First."""\n    return 1\n',
        "broken.py": "def (:\n",
        "latin.py": "# caf\xe9\n",
        "notes.txt": SOURCE,
        "test/c.py": 'def unseen():\n    """Unseen."""\n    return 1\n',
        "site-packages/d.py": 'def unseen():\n    """Unseen."""\n    return 1\n',
        "package/copy.py": 'def first():\n    """First."""\n    return 1\n',
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode("latin-1"))


def test_read_pairs(tmp_path):
    write_sources(tmp_path)
    pairs, broken = read_pairs(tmp_path)
    assert broken == 2
    assert pairs == [
        ("First.", "def first():\n    return 1\n"),
        ("The name.\n\nIn full.", 'def name(self):\n    # from the path\n    return "x"\n'),
        ("Wait.", "async def wait(seconds):\n    def inner():\n        return seconds\n    return inner\n"),
    ]


def test_tokenize(tmp_path):
    pairs = [("Add one.", "def f(x):\n    return x + 1\n"), ("long " * 50, "def g():\n    pass\n")]
    tokenizer = train_tokenizer(pairs, tmp_path, 300)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)

    samples, truncated = tokenize(pairs, tokenizer, 2000)
    assert truncated == 0
    for (docstring, source), sample in zip(pairs, samples, strict=True):
        targets = [label for label in sample["labels"] if label != -100]
        assert sample["labels"][0] == -100
        assert tokenizer.decode(sample["input_ids"][: -len(targets)]) == f'"""{docstring}"""\n'
        assert tokenizer.decode(targets) == source + "<|eos|>"
        assert sample["input_ids"][-len(targets) :] == targets

    length = len(samples[0]["input_ids"]) - 3
    cut, truncated = tokenize(pairs, tokenizer, length)
    assert truncated == 1 and len(cut) == 1  # the second prompt alone is longer
    assert cut[0] == {name: column[:length] for name, column in samples[0].items()}

    with pytest.raises(ValueError, match="expected functions with docstrings"):
        tokenize([], tokenizer, 10)


def test_demo(tmp_path, monkeypatch, capfd):
    some_sources = Path(sysconfig.get_paths()["stdlib"]) / "email"
    monkeypatch.setattr(demo_data, "read_pairs", lambda: read_pairs(some_sources))
    monkeypatch.setattr(arms, "run_module", run_cli_module)
    status = cli.main(["demo", "--output", str(tmp_path / "new"), "--samples=24", "--steps=3", "--batch-size=4"])
    output = capfd.readouterr().out
    print(output)
    assert status == 0
    picture = tmp_path / "new" / "demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert os.listdir(tmp_path / "new") == ["demo.png"] and f"Wrote {picture}" in output

    lines = output.splitlines()
    assert re.search(
        r"; \d+ samples, \d+ of them truncated to 512 tokens; \d+ with longer docstrings dropped\.", output
    )
    header, padded, packed = (
        next(line for line in lines if line.startswith(word)) for word in ("arm ", "padded ", "packed ")
    )
    columns = ["arm", "samples", "real tokens", "padding", "seconds", "real tokens/s", "peak memory", "final loss"]
    assert re.split(r"\s{2,}", header) == columns
    padded, packed = padded.split(), packed.split()
    assert padded[1:3] == packed[1:3] and padded[1] == "12"
    assert float(padded[3].rstrip("%")) > 5 and packed[3] == "0.0%"
    assert padded[-1] == packed[-1]

    difference = next(line for line in lines if line.startswith("Largest relative loss difference"))
    assert 0 <= float(difference.split(":")[1].split()[0]) < 1e-3
    for op in ("causal_conv1d", "gated_delta_rule", "attention"):
        assert any(line.split()[:1] == [op] for line in lines)


def test_different_losses_fail(tmp_path, monkeypatch, capsys):
    results = {"padded": RESULT, "packed": {**RESULT, "losses": [2.0, 1.01]}}
    assert demo.loss_difference(results) == pytest.approx(0.01)
    assert demo.loss_difference({"padded": RESULT, "packed": {**RESULT, "losses": [2.0]}}) == float("inf")
    nan = {"padded": RESULT, "packed": {**RESULT, "losses": [2.0, float("nan")]}}
    assert not demo.loss_difference(nan) < demo.LOSS_TOLERANCE

    def write_result(module, arm, work, limit):
        assert module == "demo_arms"
        (Path(work) / f"{arm}.json").write_text(json.dumps(results[arm]))

    monkeypatch.setattr(demo, "prepare_samples", lambda *args: None)
    monkeypatch.setattr(arms, "run_module", write_result)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 1
    assert "FAILED: the losses of the two arms differ" in capsys.readouterr().err


def test_no_picture_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    monkeypatch.setattr(demo, "prepare_samples", lambda *args: None)
    monkeypatch.setattr(demo, "run_arms", lambda *args: {"padded": RESULT, "packed": RESULT})
    assert cli.main(["demo", "--output", str(tmp_path)]) == 0
    assert "draws no picture: pip install matplotlib" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []


def test_too_few_samples(tmp_path, monkeypatch, capsys):
    write_sources(tmp_path)
    monkeypatch.setattr(demo_data, "read_pairs", lambda: read_pairs(tmp_path))
    assert cli.main(["demo", "--output", str(tmp_path)]) == 1
    assert "expected a batch of 8 samples, got 3" in capsys.readouterr().err
