"""What `launches.py` reads from a finished launch, and how it judges it."""

import json
import math
import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer


# Relative: two processes add the same gradients in another order, in bfloat16.
LOSS_BAR, NORM_BAR = 0.01, 0.1
_STEP_OF_TRAIN = re.compile(r"^step (\d+)/\d+, epoch [\d.]+: loss ([\w.+-]+)(?:, .*)?$", re.MULTILINE)
_CAUSE = re.compile(r"Signal 9 \(SIGKILL\) received by PID|failed \(exitcode: *-9\) local_rank: \d+")
_DECORATION = re.compile(r"^(?:\[?W?\d|=+|-+|\s*$|.*(?:Warning|warnings\.warn))")


def printed_losses(text: str) -> dict[int, float]:
    """The loss of each step that `transformers-packed train` printed."""
    return {int(step): float(loss) for step, loss in _STEP_OF_TRAIN.findall(text)}


def logged(folder: Path, name: str) -> dict[int, float]:
    """A figure of each logged step, from the newest checkpoint of a Trainer."""
    states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name[11:]))
    history = json.loads(states[-1].read_text(encoding="utf-8"))["log_history"] if states else []
    return {entry["step"]: float(entry[name]) for entry in history if name in entry}


def recorded(folder: Path, name: str) -> dict[str, dict]:
    """Losses, gradient norms and rows of each step, from the records of `launch_worker.py`.

    Rows come in the order of the plan: those of all processes, one micro-step after the other.
    """
    found: dict[str, dict] = {"loss": {}, "grad_norm": {}, "rows": {}}
    ranks: list[dict[int, list[str]]] = []
    for path in sorted(folder.glob(f"{name}.rank*.jsonl")):
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        ranks.append({entry["step"]: entry["rows"] for entry in entries if "rows" in entry})
        for entry in entries if len(ranks) == 1 else ():
            for figure in {"loss", "grad_norm"} & entry.keys():
                found[figure][entry["step"]] = entry[figure]
    for step in ranks[0] if ranks else ():
        micro_steps = zip(*(rank.get(step, []) for rank in ranks), strict=False)
        found["rows"][step] = [row for rows in micro_steps for row in rows]
    return found


def agreement(found: dict[int, float], expected: dict[int, float], bar: float) -> dict:
    """Whether the figures of the same steps differ by at most `bar`, relative to the expected ones."""
    steps = sorted(found.keys() & expected.keys())
    if not steps or max(steps) != max(expected):
        return {"passed": False, "reason": f"steps {sorted(found)} instead of {sorted(expected)}"}
    differences = [abs(found[step] - expected[step]) / max(abs(expected[step]), 1e-12) for step in steps]
    largest = math.nan if any(map(math.isnan, differences)) else max(differences)
    return {"passed": largest <= bar, "largest": largest, "bar": bar, "steps": steps}


def same_rows(found: dict[int, list], expected: dict[int, list]) -> dict:
    """Whether each step that both ran has the same rows in the same order."""
    steps = sorted(found.keys() & expected.keys())
    wrong = [step for step in steps if found[step] != expected[step]]
    passed = bool(steps) and max(steps) == max(expected) and not wrong
    return {"passed": passed, "steps": steps} | ({"differing": wrong} if wrong else {})


def finite(losses: dict[int, float]) -> dict:
    return {"passed": bool(losses) and all(map(math.isfinite, losses.values()))}


def last_lines(text: str, number: int = 6) -> str:
    """The error of a failed launch: the lines up to the last exception of a process, or the last lines."""
    lines = [line.rstrip() for line in text.replace("\r", "\n").splitlines()]
    errors = [i for i, line in enumerate(lines) if re.search(r"\b\w*(?:Error|Exception|Interrupt)\b: ", line)]
    # The launcher's own error says only which process failed.
    own = [i for i in errors if "ChildFailedError" not in lines[i]]
    if own:
        return lines[own[-1]][:600]
    return "\n".join([line for line in lines if not _DECORATION.match(line)][-number:])[-900:]


def cause_of_kill(text: str) -> str:
    """What the launcher says of a process that SIGKILL ended, or an empty string."""
    found = _CAUSE.search(text)
    return found.group() if found else ""


class Loader:
    """Loads saved models with the stock classes, and computes their loss on one fixed batch."""

    def __init__(self, checkpoint: Path, device: str):
        self.checkpoint, self.device = checkpoint, device
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        # Chats that the launches train on: a few steps lower the loss of others by less than it varies.
        lines = (checkpoint.parent / "chats.jsonl").read_text(encoding="utf-8").splitlines()
        chats = [json.loads(line)["messages"] for line in lines[:64]]
        batch = tokenizer.apply_chat_template(chats, return_dict=True, padding=True, return_tensors="pt").to(device)
        self.batch = dict(batch, labels=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100))
        self.models: dict[Path, torch.nn.Module] = {}
        self.losses: dict[Path, float] = {}

    def initial_loss(self, initial: Path) -> float:
        """The loss before training. Keeps the model."""
        if initial not in self.losses:
            self.models[initial], _ = self._stock(initial)
            self.losses[initial] = self._loss(self.models[initial])
        return self.losses[initial]

    def check(self, folder: Path, initial: Path, lower: bool = True) -> dict:
        """Whether stock classes load the model without missing or new weights, and its loss is below the initial one."""
        before = self.initial_loss(initial)
        adapted = (folder / "adapter_config.json").is_file()
        model, wrong = self._adapted(folder, initial) if adapted else self._stock(folder)
        loss = self._loss(model)
        changed = self._changed(model, adapted, initial)
        passed = not wrong and math.isfinite(loss) and changed and (loss < before or not lower)
        found = {"passed": passed, "loss": loss, "before": before, "changed": changed}
        return found | ({"wrong_keys": wrong[:5]} if wrong else {})

    def _stock(self, folder: Path) -> tuple[torch.nn.Module, list[str]]:
        # A vision-language checkpoint is one that has a vision tower.
        vision = "vision_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        model, loading = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
        assert type(model).__module__.startswith("transformers.models."), type(model)
        return model.to(self.device), [f"{name}: {key}" for name, keys in loading.items() for key in keys]

    def _adapted(self, folder: Path, initial: Path) -> tuple[torch.nn.Module, list[str]]:
        from peft import PeftModel, get_peft_model_state_dict, load_peft_weights

        model = PeftModel.from_pretrained(self._stock(initial)[0], folder)
        saved, expected = load_peft_weights(folder, device="cpu"), get_peft_model_state_dict(model)
        return model, sorted(saved.keys() ^ expected.keys())

    @torch.no_grad()
    def _changed(self, model: torch.nn.Module, adapted: bool, initial: Path) -> bool:
        """Whether training changed any weight."""
        if adapted:
            return any(bool(x.any()) for name, x in model.named_parameters() if "lora_B" in name)
        before = dict(self.models[initial].named_parameters())
        return any(not x.equal(before[name]) for name, x in model.named_parameters())

    @torch.no_grad()
    def _loss(self, model: torch.nn.Module) -> float:
        return model.eval()(**self.batch, use_cache=False).loss.item()
