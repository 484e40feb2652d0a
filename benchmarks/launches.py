"""Run every launch line of the documentation on two GPUs, and check what it computes, saves and resumes.

Each launch runs as users start it. The losses of two GPUs are compared with those of one GPU that trains on the same samples
in each step. Stock classes load each saved model. Runs are saved, resumed on two GPUs and on one, and killed. Several
launches run at the same time, each with its own port and output folder. The report is written after each launch.

    python benchmarks/launches.py --output benchmarks/results/launches.json
    python benchmarks/launches.py --only trainer resume-ddp
    python benchmarks/launches.py --shape tiny --device cpu --only trainer    # FSDP2 and DeepSpeed need GPUs
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path

import launch_checks as checks
import psutil
import torch
from launch_lines import Launch, launches
from shapes import MODELS
from step import versions


ROOT = Path(__file__).resolve().parents[1]
_WORKER = [sys.executable, "benchmarks/launch_worker.py"]
# Of the GPU's memory, for a process that trains all weights of the 0.8B shape in float32.
_GIB_OF_LAUNCH = 22
_SECONDS_TO_NOTICE = 60


def free_port() -> int:
    """A port below those that the system hands out by itself."""
    while True:
        port = next(_PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


_PORTS = itertools.count(20000 + os.getpid() % 8000)


class Runner:
    """Runs launches in threads, and keeps their results in the order of `wanted`."""

    def __init__(self, options: argparse.Namespace, wanted: list[Launch], report: dict):
        self.options, self.wanted, self.report = options, wanted, report
        self.earlier = report.get("launches", [])
        self.lock, self.loading = threading.RLock(), threading.Lock()
        self.entries: dict[str, dict] = {}
        self.done = {launch.name: threading.Event() for launch in wanted}
        self.gpus = visible_gpus() if options.device == "cuda" else []
        self.turns = itertools.cycle(self.gpus[:2] or [""])
        self.places = {"CHECKPOINT": options.folder / "text", "VISION": options.folder / "vision"}
        self.places["DATA"] = options.folder / "chats.jsonl"
        self.loader: checks.Loader | None = None

    def run_all(self) -> None:
        ready = concurrent.futures.ThreadPoolExecutor(self.options.jobs)
        # A launch that continues another one takes no place of a launch that can start.
        waiting, running = list(self.wanted), {}
        warm = threading.Thread(target=self.warm_up)
        warm.start()
        while waiting or running:
            free = self.options.jobs - len(running)
            startable = [x for x in waiting if not x.after or self.done[x.after].is_set()]
            for launch in startable[: max(free, 0)]:
                waiting.remove(launch)
                running[ready.submit(self.run, launch)] = launch
            finished, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in finished:
                launch = running.pop(future)
                if error := future.exception():
                    self.entries[launch.name] |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
                self.done[launch.name].set()
                self.compare()
                self.write()
                print(row(self.entries[launch.name]), flush=True)
                self.clean(launch, [*waiting, *running.values()])
        warm.join()

    def warm_up(self) -> None:
        """Load the stock classes and their kernels while the first launches start."""
        try:
            self.stock()
        except Exception as error:
            self.report["stock_classes"] = f"{type(error).__name__}: {error}"[:600]

    def stock(self) -> checks.Loader:
        with self.loading:
            if self.loader is None:
                loader = checks.Loader(self.places["CHECKPOINT"], self.options.device)
                loader.initial_loss(self.places["CHECKPOINT"])
                self.loader = loader
        return self.loader

    def run(self, launch: Launch) -> None:
        command = " ".join(launch.command.split())
        entry = self.entries[launch.name] = {"name": launch.name, "command": command, "processes": launch.processes}
        if launch.after and self.entries[launch.after]["status"] != "ok":
            entry |= {"status": "failed", "error": f"needs {launch.after}"}
            return
        if launch.sharded and self.options.device == "cpu":
            entry |= {"status": "skipped", "reason": "accelerate shards on GPUs only"}
            return
        output = self.options.folder / "runs" / (launch.group if launch.after or launch.record else launch.name)
        if launch.after.startswith("train/"):
            output = self.options.folder / "runs" / launch.after
            interrupt(output)
        log = self.options.folder / "logs" / f"{launch.name.replace('/', '-')}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        begin = time.time()
        status = self.start(launch, output, log)
        entry["seconds"] = round(time.time() - begin, 1)
        text = log.read_text(encoding="utf-8", errors="replace")
        for path, name in (
            (output, "OUTPUT"),
            (self.options.folder, "FOLDER"),
            (ROOT, "."),
            (sys.prefix, "ENVIRONMENT"),
        ):
            text = text.replace(str(path), name)
        self.judge(launch, entry, output, status, text)

    def start(self, launch: Launch, output: Path, log: Path) -> int | None:
        """The exit status, or None after the time limit."""
        devices = next(self.turns) if launch.processes == 1 else ",".join(self.gpus[:2])
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment["CUDA_VISIBLE_DEVICES"] = devices
        environment["OMP_NUM_THREADS"] = "2" if self.options.device == "cuda" else "1"
        if self.options.device == "cpu":
            environment |= {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
        command = self.argv(launch, output)
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
            )
            try:
                return process.wait(self.options.limit)
            except subprocess.TimeoutExpired:
                end(process)
                return None

    def argv(self, launch: Launch, output: Path) -> list[str]:
        """The command with its paths, a port of its own, and modules in place of the scripts that a machine may lack."""
        places, python, port = self.places | {"OUTPUT": output}, sys.executable, str(free_port())
        words = [str(places.get(word, word)) for word in shlex.split(launch.command)]
        torchrun = [python, "-m", "torch.distributed.run", "--master_port", port]
        ours = [python, "-m", "transformers_packed.cli"]
        if words[0] == "accelerate" and self.options.device == "cpu":
            script = next(i for i, word in enumerate(words) if word.endswith(".py"))
            return [*torchrun, "--nproc_per_node", str(launch.processes), *words[script:]]
        if words[0] == "accelerate":
            return [python, "-m", "accelerate.commands.launch", "--main_process_port", port, *words[2:]]
        if words[0] == "torchrun":
            words = [*torchrun, *words[1:]]
        elif words[0] == "python":
            words[0] = python
        if "transformers-packed" in words:
            at = words.index("transformers-packed")
            words[at : at + 1] = ours
        return words

    def judge(self, launch: Launch, entry: dict, output: Path, status: int | None, text: str) -> None:
        found = entry.setdefault("checks", {})
        if launch.killed:
            self.judge_kill(launch, entry, output, status, text)
            return
        if status != 0:
            error = f"no end after {self.options.limit} s" if status is None else checks.last_lines(text)
            entry |= {"status": "not possible" if launch.may_fail and status is not None else "failed"}
            entry["error"] = error if status is not None else f"{error}\n{checks.last_lines(text)}"
            return
        entry["status"] = "ok"
        if launch.record:
            record = checks.recorded(output, launch.record)
            entry |= {"losses": record["loss"], "grad_norms": record["grad_norm"], "rows": record["rows"]}
        else:
            entry["losses"] = checks.printed_losses(text) or checks.logged(output, "loss")
            entry["grad_norms"] = checks.logged(output, "grad_norm")
        found["losses are finite"] = checks.finite(entry["losses"])
        if launch.saved:
            folder = self.merged(entry, output) if launch.merged else output
            initial, stock = self.places[launch.saved], self.stock()
            with self.loading:
                found["stock class loads it"] = stock.check(folder, initial, launch.lower)

    def judge_kill(self, launch: Launch, entry: dict, output: Path, status: int | None, text: str) -> None:
        time_of_kill = output / f"{launch.record}.rank1.killed"
        if not time_of_kill.is_file():
            entry |= {"status": "failed", "error": f"ended before the kill\n{checks.last_lines(text)}"}
            return
        seconds, cause = round(time.time() - float(time_of_kill.read_text()), 1), checks.cause_of_kill(text)
        notices = {"passed": status not in (0, None) and seconds <= _SECONDS_TO_NOTICE and bool(cause)}
        notices |= {"exit_status": status, "seconds": seconds, "cause": cause}
        entry |= {"status": "ok", "checks": {"the launcher ends with a cause": notices}}

    def merged(self, entry: dict, output: Path) -> Path:
        """What users do after SHARDED_STATE_DICT: `save_model` writes no weights, so they merge those of a checkpoint."""
        (shards,) = output.glob("checkpoint-*/pytorch_model_fsdp_0")
        folder = output / "merged"
        weights = sorted(path.name for path in output.iterdir() if path.suffix in (".safetensors", ".bin"))
        entry["weights_of_save_model"] = weights
        entry["then"] = f"accelerate merge-weights OUTPUT/{shards.relative_to(output)} OUTPUT/merged"
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.accelerate_cli",
            "merge-weights",
            str(shards),
            str(folder),
        ]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=self.options.limit)
        if ran.returncode:
            raise RuntimeError(f"merge-weights: {checks.last_lines(ran.stderr)}")
        for path in self.places["CHECKPOINT"].glob("*.json"):
            if "safetensors" not in path.name:
                shutil.copy(path, folder)
        return folder

    def compare(self) -> None:
        """Compare finished launches with those that they must agree with."""
        for launch in self.wanted:
            entry = self.entries.get(launch.name, {})
            if entry.get("status") != "ok" or not self.done[launch.name].is_set():
                continue
            against = self.entries.get(launch.like, {})
            if launch.like and self.done[launch.like].is_set() and against.get("status") == "ok":
                entry["checks"] |= compared(entry, against)

    def write(self) -> None:
        if self.options.output:
            new = [self.entries[x.name] for x in self.wanted if self.done[x.name].is_set()]
            names = {entry["name"] for entry in new}
            self.report["launches"] = [x for x in self.earlier if x["name"] not in names] + new
            self.options.output.write_text(json.dumps(self.report, indent=1) + "\n")

    def clean(self, launch: Launch, others: list[Launch]) -> None:
        """Delete outputs that no other launch continues: a checkpoint with its optimizer takes 10 GB."""
        runs = self.options.folder / "runs"
        if launch.group not in {other.group for other in others}:
            shutil.rmtree(runs / launch.group, ignore_errors=True)
        elif not launch.record and launch.name not in {other.after for other in others}:
            shutil.rmtree(runs / launch.name, ignore_errors=True)


def compared(entry: dict, against: dict) -> dict:
    """The checks of a launch against another one, by the names that the report shows."""
    name = against["name"]
    found = {f"losses of {name}": checks.agreement(entry["losses"], against["losses"], checks.LOSS_BAR)}
    if entry.get("grad_norms") and against.get("grad_norms"):
        norms = checks.agreement(entry["grad_norms"], against["grad_norms"], checks.NORM_BAR)
        found[f"gradient norms of {name}"] = norms
    saved = [x.get("checks", {}).get("stock class loads it") for x in (entry, against)]
    if all(saved):
        end, expected = ({"saved": check["loss"]} for check in saved)
        found[f"loss of the model that {name} saved"] = checks.agreement(end, expected, checks.LOSS_BAR)
    if entry.get("rows") and against.get("rows"):
        found[f"rows of {name}"] = checks.same_rows(entry["rows"], against["rows"])
    return found


def interrupt(output: Path) -> None:
    """Leave of a finished run what it had after its first checkpoint."""
    first = min(output.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    for path in output.iterdir():
        if path.is_dir() and path != first:
            shutil.rmtree(path)
        elif path.is_file() and path.name != "transformers_packed_train.json":
            path.unlink()


def end(process: subprocess.Popen) -> None:
    """Kill a launcher and its processes, which are in sessions of their own."""
    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def passed(entry: dict) -> bool:
    return entry["status"] != "failed" and all(x["passed"] for x in entry.get("checks", {}).values())


def row(entry: dict) -> str:
    """A line of the table."""
    wrong = [name for name, check in entry.get("checks", {}).items() if not check["passed"]]
    right = [name for name, check in entry.get("checks", {}).items() if check["passed"]]
    verdict = entry["status"] if not wrong else f"FAILED {', '.join(wrong)};"
    note = entry.get("reason") or entry.get("error", "").splitlines()[:1]
    note = note if isinstance(note, str) else " ".join(note)
    return f"{entry['name']:27} {entry.get('seconds', 0):6.1f} s  {verdict} {', '.join(right)} {note}".rstrip()[:240]


def choose_folder() -> Path:
    """The first place with room for the checkpoints of several launches."""
    for place in ("/dev/shm", tempfile.gettempdir()):
        if os.path.isdir(place) and shutil.disk_usage(place).free > 90 * 2**30:
            return Path(place, "launches")
    return Path(tempfile.gettempdir(), "launches")


def visible_gpus() -> list[str]:
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return [name for name in names.split(",") if name]


def jobs_by_memory() -> int:
    if not torch.cuda.is_available():
        return 1
    return max(1, min(5, torch.cuda.get_device_properties(0).total_memory // (_GIB_OF_LAUNCH * 2**30)))


def make(options: argparse.Namespace) -> None:
    """The checkpoints, unless the folder has them. The first launch also compiles most kernels."""
    if not (options.folder / "complete").is_file():
        command = [*_WORKER, "make", "--shape", options.shape, "--folder", str(options.folder)]
        # On several GPUs, Trainer would split each row.
        devices = visible_gpus()[:1] if options.device == "cuda" else []
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ",".join(devices)}
        subprocess.run(command, check=True, cwd=ROOT, env=environment)


def select(everything: list[Launch], names: list[str] | None) -> list[Launch]:
    """The launches of these groups or names, with those that they continue or are compared with."""
    if not names:
        return everything
    by_name = {launch.name: launch for launch in everything}
    wanted = [x for x in everything if x.name in names or x.group in names]
    for launch in wanted:
        needed = [by_name[name] for name in (launch.after, launch.like) if name]
        wanted += [x for x in needed if x not in wanted]
    return [launch for launch in everything if launch in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=MODELS, default="0.8B")
    parser.add_argument("--folder", type=Path, help="checkpoints, outputs and logs (default: in memory if it fits)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="groups or launches, such as trainer or trainer/ddp")
    parser.add_argument("--jobs", type=int, default=jobs_by_memory(), help="launches at the same time")
    parser.add_argument("--limit", type=int, default=180, help="seconds of each launch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="write the report to this JSON file")
    options = parser.parse_args()
    options.folder = (options.folder or choose_folder()).resolve()
    options.output = options.output and options.output.resolve()
    begin = time.perf_counter()
    machine = "2 processes on a CPU" if options.device == "cpu" else f"2 x {torch.cuda.get_device_name()}"
    packages = {name: metadata.version(name) for name in ("accelerate", "trl", "peft")}
    report = {"machine": machine, "versions": versions() | packages, "model": options.shape, "commands": []}
    if options.output and options.output.exists():
        earlier = json.loads(options.output.read_text())
        if any(earlier[key] != report[key] for key in ("machine", "versions", "model")):
            parser.error(f"{options.output} holds launches of another machine, versions or model; name another file")
        # The machine of a run tells whether images can be used, and a note concerns one run.
        report = {name: x for name, x in earlier.items() if name not in ("note", "vision", "stock_classes", "seconds")}
    words = ["python", "benchmarks/launches.py", *sys.argv[1:]]
    if options.output:
        words[words.index("--output") + 1] = f"benchmarks/results/{options.output.name}"
    report["commands"].append(shlex.join(words))
    make(options)
    report["bars"] = {"loss": checks.LOSS_BAR, "gradient norm": checks.NORM_BAR}
    why = options.folder / "vision.txt"
    if why.is_file():
        report["vision"] = f"the example's own tiny model, because a larger one cannot be made: {why.read_text()}"
    runner = Runner(options, select(launches(vision=not why.is_file()), options.only), report)
    runner.run_all()
    report["seconds"] = round(time.perf_counter() - begin, 1)
    runner.write()
    entries = [runner.entries[launch.name] for launch in runner.wanted]
    print("\nAll launches:", *map(row, entries), sep="\n")
    good = sum(map(passed, entries))
    print(f"{good} of {len(entries)} as expected, in {report['seconds']:.0f} s; logs in {options.folder / 'logs'}")
    return 0 if good == len(entries) else 1


if __name__ == "__main__":
    sys.exit(main())
