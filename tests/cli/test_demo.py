import json
import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from common.processes import CliModule

from transformers_packed import cli
from transformers_packed.cli import arms, demo, demo_arms, demo_data
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
    monkeypatch.setattr(arms, "start_module", CliModule)
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


def test_turns(tmp_path, monkeypatch):
    """One arm trains at a time, and its seconds are those of its own turns."""
    found, seconds, steps, clock = [], {}, 5, {"padded": 0, "packed": 0}
    monkeypatch.setattr(demo_arms, "time", SimpleNamespace(perf_counter=lambda: sum(clock.values())))

    def train(arm):
        turns = demo_arms.Turns(arm, tmp_path)
        turns.on_train_begin(None, None, None)
        for step in range(1, steps + 1):
            found.append((arm, "begins"))
            clock[arm] += 3 if arm == "padded" else 1
            time.sleep(0.02)  # long enough for another arm to do something out of turn
            found.append((arm, "ends"))
            turns.on_step_end(None, SimpleNamespace(global_step=step, max_steps=steps), None)
        turns.on_train_end(None, None, None)
        found.append((arm, "is done"))
        seconds[arm] = turns.seconds

    for arm in arms.ARMS:
        os.mkfifo(arms.pipe_of(tmp_path, arm))
    threads = [threading.Thread(target=train, args=[arm], daemon=True) for arm in arms.ARMS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    turn = {arm: [(arm, "begins"), (arm, "ends")] * demo_arms.STEPS_PER_TURN for arm in arms.ARMS}
    last = [*turn["padded"][:2], *turn["packed"][:2]]
    assert found[:-2] == [*turn["padded"], *turn["packed"]] * 2 + last
    assert sorted(found[-2:]) == [("packed", "is done"), ("padded", "is done")]
    assert seconds == clock == {"padded": 15, "packed": 5}


def start_processes(monkeypatch, **codes):
    """Let the arms be processes that run these programs. Returns where they are added."""
    started = []

    def start(module, arm, work):
        started.append(subprocess.Popen([sys.executable, "-c", codes[arm]]))
        return started[-1]

    monkeypatch.setattr(arms, "start_module", start)
    return started


FOREVER = "import time; time.sleep(600)"


@pytest.mark.parametrize("failing", ["padded", "packed"])
def test_an_arm_that_fails(tmp_path, monkeypatch, failing):
    """The other one would wait for its turn."""
    started = start_processes(monkeypatch, **dict.fromkeys(arms.ARMS, FOREVER) | {failing: "exit(3)"})
    with pytest.raises(ChildProcessError, match=f"the process for '{failing}' ended with status 3"):
        arms.run_in_turns("demo_arms", tmp_path, {})
    assert None not in [process.returncode for process in started]


def test_an_interrupt(tmp_path, monkeypatch):
    started = start_processes(monkeypatch, **dict.fromkeys(arms.ARMS, FOREVER))
    monkeypatch.setattr(arms, "time", SimpleNamespace(sleep=mock.Mock(side_effect=KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        arms.run_in_turns("demo_arms", tmp_path, {})
    assert None not in [process.returncode for process in started]


def test_different_losses_fail(tmp_path, monkeypatch, capsys):
    results = {"padded": RESULT, "packed": {**RESULT, "losses": [2.0, 1.01]}}
    assert demo.loss_difference(results) == pytest.approx(0.01)
    assert demo.loss_difference({"padded": RESULT, "packed": {**RESULT, "losses": [2.0]}}) == float("inf")
    nan = {"padded": RESULT, "packed": {**RESULT, "losses": [2.0, float("nan")]}}
    assert not demo.loss_difference(nan) < demo.LOSS_TOLERANCE

    def write_result(module, arm, work):
        assert module == "demo_arms"
        (Path(work) / f"{arm}.json").write_text(json.dumps(results[arm]))
        return mock.Mock(poll=lambda: 0)

    monkeypatch.setattr(demo, "prepare_samples", lambda *args: None)
    monkeypatch.setattr(arms, "start_module", write_result)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 1
    assert "FAILED: the losses of the two arms differ" in capsys.readouterr().err


def test_no_picture_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    monkeypatch.setattr(demo, "prepare_samples", lambda *args: None)
    monkeypatch.setattr(demo, "run_in_turns", lambda *args: {"padded": RESULT, "packed": RESULT})
    assert cli.main(["demo", "--output", str(tmp_path)]) == 0
    assert "draws no picture: pip install matplotlib" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []


def test_too_few_samples(tmp_path, monkeypatch, capsys):
    write_sources(tmp_path)
    monkeypatch.setattr(demo_data, "read_pairs", lambda: read_pairs(tmp_path))
    assert cli.main(["demo", "--output", str(tmp_path)]) == 1
    assert "expected a batch of 8 samples, got 3" in capsys.readouterr().err
