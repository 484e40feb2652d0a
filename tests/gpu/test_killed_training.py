"""Training with checkpoints and experts in host memory, killed and resumed, against the GPU alone: `make test-gpu`."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import torch
from common.gpu import needs_gpu
from common.real_heads import EXPERTS, REAL_HEADS
from common.records import make_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, set_seed


# Kernels that add in any order would give other losses in two runs of one command.
MAIN = """
import sys, torch
from transformers_packed.cli import main
torch.use_deterministic_algorithms(True)
sys.exit(main())
"""
STEPS, SAVED, KILLED, TOKENS = 50, 25, 35, 4096
# Checkpoints of 2 MiB, and experts of 12 MiB a layer.
SIZES = {"vocab_size": 512, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
SETTINGS = {
    "--row-length": TOKENS,
    "--learning-rate": 0.01,
    "--max-steps": STEPS,
    "--save-steps": SAVED,
    "--logging-steps": 1,
    "--dtype": "bfloat16",
}
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
LORA = ["--lora", "--experts", "--gradient-checkpointing"]
ON_HOST = ["--offload", "--experts-in-host-memory"]


def write_data(file: Path) -> None:
    """Write documents of few distinct tokens, so that there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 33, (TOKENS // 4,), generator=generator).tolist() for _ in range(4 * STEPS)]
    file.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))


@needs_gpu
class KilledTrainingTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        cls.addClassCleanup(directory.cleanup)
        cls.root = Path(directory.name)
        set_seed(0)
        config = Qwen3_5MoeTextConfig(**REAL_HEADS | EXPERTS | SIZES)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(cls.root / "model")
        make_tokenizer().save_pretrained(cls.root / "model")
        write_data(cls.root / "data.jsonl")

    def train(self, name: str, *options: str, kill: bool = False) -> Path:
        """Run `train`, up to its end or some steps after the first checkpoint. Return its directory."""
        output = self.root / name
        arguments = [f"{option}={value}" for option, value in SETTINGS.items()]
        where = [f"--model={self.root / 'model'}", f"--data={self.root / 'data.jsonl'}", f"--output={output}"]
        command = [sys.executable, "-c", MAIN, "train", *where, *arguments, *LORA, *options]
        log = self.root / f"{name}.log"
        with log.open("a") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | ENVIRONMENT)
        while kill and process.poll() is None and f"step {KILLED}/" not in log.read_text():
            time.sleep(0.01)
        if kill:
            process.send_signal(signal.SIGKILL)
        self.assertEqual(process.wait(), -signal.SIGKILL if kill else 0, log.read_text()[-3000:])
        return output

    def test_same_losses(self):
        """All 50 losses and the adapters are the same to the last bit."""
        gpu = self.train("gpu", "--no-offload")
        killed = self.train("killed", *ON_HOST, kill=True)
        self.assertFalse((killed / "adapter_model.safetensors").exists())
        self.train("killed", *ON_HOST, "--resume")
        text = (self.root / "killed.log").read_text()
        self.assertIn("in host memory", text)
        self.assertGreater(text.count(f"step {SAVED + 1}/"), 1)
        losses = [losses_of(path) for path in (gpu, killed)]
        self.assertEqual(len(losses[0]), STEPS)
        self.assertLess(losses[0][-1], losses[0][0] - 0.1)
        self.assertEqual(*losses)
        adapters = [load_file(path / "adapter_model.safetensors") for path in (gpu, killed)]
        self.assertEqual(*(adapter.keys() for adapter in adapters))
        self.assertEqual([name for name, x in adapters[0].items() if not torch.equal(x, adapters[1][name])], [])


def losses_of(output: Path) -> list[float]:
    """Return the loss of each step from the last checkpoint's state."""
    history = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]
