"""Training that is killed at random and resumed processes every document exactly once per pass."""

import collections
import json
import random
import shutil
import tempfile
import time
import unittest
from pathlib import Path

import torch
from common.processes import run_script, start_process
from parameterized import parameterized
from scripts import resume_run
from scripts.resume_run import MAX_LENGTH, build_trainer, documents, newest_checkpoint, run, trajectory

import transformers_packed as packed


# dataset, source, resume, workers, sampling
CASES = [
    ("stream", "hf_shuffled", "state", 0),
    ("stream", "iterable", "state", 2),
    ("map", "hf", "replay", 0, "random"),
]


class RunTestCase(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(directory.cleanup)
        self.directory = directory.name

    def spec(self, dataset, source, resume, workers, sampling="random", **more) -> dict:
        return {
            "dataset": dataset,
            "source": source,
            "resume": resume,
            "workers": workers,
            "sampling": sampling,
            "output": f"{self.directory}/run",
            "log": f"{self.directory}/log",
            **more,
        }


class ResumeTest(RunTestCase):
    def run_in_process(self, spec: dict) -> None:
        process = start_process(run, spec)
        process.join()
        self.assertEqual(process.exitcode, 0)

    def passes(self, spec: dict) -> int:
        """Set the number of steps of `spec`, and return the number of passes over the data."""
        if spec["dataset"] == "map":
            spec["epochs"] = 2
            return 2
        # Trainer skips only within the first pass.
        spec["passes"] = [self.batches(spec, epoch) for epoch in range(2 if spec["resume"] == "state" else 1)]
        spec["steps"] = sum(spec["passes"])
        return len(spec["passes"])

    def batches(self, spec: dict, epoch: int) -> int:
        loader = build_trainer({**spec, "steps": 1, "output": f"{self.directory}/count"}).get_train_dataloader()
        loader.set_epoch(epoch)
        return sum(1 for _ in loader)

    def check_trajectory(self, spec: dict, passes: int):
        steps = trajectory(spec)
        self.assertEqual(list(steps), list(range(1, len(steps) + 1)))
        seen = collections.Counter((number, length) for step in steps.values() for number, length in step)
        expected = {(i, len(row["input_ids"])): passes for i, row in enumerate(documents())}
        self.assertEqual(dict(seen), expected)

    def crash_test(self, case, kills: int, seed: int):
        chance = random.Random(seed)
        spec = self.spec(*case, pause=0.004)
        passes = self.passes(spec)
        killed = resumed = 0
        while killed < kills:
            shutil.rmtree(spec["output"], ignore_errors=True)
            for path in Path(self.directory).glob("log*"):
                path.unlink()
            while not Path(f"{spec['log']}.done").exists():
                resumed += newest_checkpoint(spec["output"]) is not None
                process = start_process(run, spec)
                if killed < kills:
                    self.kill_at_random(process, spec, chance)
                process.join()
                self.assertIn(process.exitcode, (0, -9), "the run failed by itself")
                killed += process.exitcode == -9
            self.check_trajectory(spec, passes)
        self.assertGreater(resumed, 0)

    def kill_at_random(self, process, spec: dict, chance: random.Random) -> None:
        """Send SIGKILL after some more steps: within a step, within a checkpoint, or between."""

        def steps():
            return len(log.read_text().splitlines()) if log.exists() else 0

        log, done = Path(f"{spec['log']}.0"), Path(f"{spec['log']}.done")
        until = steps() + chance.randint(1, 14)
        limit = time.monotonic() + 60
        while steps() < until and not done.exists() and time.monotonic() < limit:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.03)
        process.kill()

    @parameterized.expand(CASES)
    def test_killed_runs_lose_and_repeat_nothing(self, *case):
        # Elsewhere: a second resume of a stream starts at zero, or loses a sample in flight.
        self.crash_test(case, kills=2, seed=len(str(case)))

    @parameterized.expand([("state", 2)])
    def test_a_resumed_run_takes_the_same_steps(self, resume, workers):
        """The weights are also the same, after several resumes, at any worker's turn, and from the end of a pass."""
        spec = self.spec("stream", "hf_stream", resume, workers)
        passes = self.passes(spec)
        self.run_in_process({**spec, "output": f"{self.directory}/whole", "log": f"{self.directory}/whole"})
        whole = trajectory({"log": f"{self.directory}/whole"})
        for stop in sorted({5, *range(6, 5 + workers), spec["passes"][0]} - {spec["steps"]}):
            self.run_in_process({**spec, "stop": stop})
        self.run_in_process(spec)
        self.check_trajectory(spec, passes)
        self.assertEqual(trajectory(spec), whole)
        weights, expected = (torch.load(f"{self.directory}/{name}.weights") for name in ("log", "whole"))
        self.assertTrue(torch.equal(weights["embedding.weight"], expected["embedding.weight"]))

    def test_two_processes_with_two_workers(self):
        """Stopped and resumed. accelerate completes a worker's last step only with its first rows since resuming."""
        rows = [
            sum(1 for _ in packed.IterablePackingDataset(documents(), MAX_LENGTH, buffer_size=5, rank=i, world_size=2))
            for i in (0, 1)
        ]
        steps = sum(-(-number // 2) for number in rows)
        spec = self.spec("stream", "list", "state", 2, batch=1, steps=steps, stop=7, processes=2)
        self.launch(spec)
        ranks = [trajectory(spec, rank) for rank in (0, 1)]
        self.assertEqual(ranks[0].keys(), ranks[1].keys())
        seen = collections.Counter(n for steps in ranks for step in steps.values() for n, _ in step)
        self.assertEqual(set(seen), set(range(len(documents()))))
        first = {n for steps in ranks for step in (8, 9) for n, _ in steps[step]}
        self.assertLessEqual({n for n, times in seen.items() if times > 1}, first)
        self.assertLessEqual(max(seen.values()), 2)

    def test_two_processes_read_a_plan(self):
        """Resumed within the second epoch. Both ranks take rows of the same step of the plan."""
        spec = self.spec("map", "list", "replay", 2, "sequential", batch=1, epochs=2, stop=22, processes=2)
        self.launch(spec)
        ranks = [trajectory(spec, rank) for rank in (0, 1)]
        seen = collections.Counter(n for steps in ranks for step in steps.values() for n, _ in step)
        self.assertEqual(seen, collections.Counter(dict.fromkeys(range(len(documents())), 2)))
        rows = packed.PackingDataset(documents(), MAX_LENGTH, world_size=2)
        for epoch in (0, 1):
            rows.set_epoch(epoch)
            for index in range(0, len(rows), 2):
                for rank in (0, 1):
                    step = ranks[rank][epoch * len(rows) // 2 + index // 2 + 1]
                    self.assertEqual(step, [[s["input_ids"][0] - 1, len(s["input_ids"])] for s in rows[index + rank]])

    def launch(self, spec: dict):
        arguments = [resume_run.__file__, json.dumps(spec)]
        for process in run_script(*arguments, processes=2, ACCELERATE_USE_CPU="true"):
            self.assertEqual(process.status, 0, process.stderr[-3000:])


class CallbackTest(RunTestCase):
    def refuses(self, message: str, trainer, **arguments):
        with self.assertRaisesRegex(ValueError, message):
            trainer.train(**arguments)

    def test_refuses_what_it_cannot_resume(self):
        for message, spec in (
            ("ignore_data_skip=True", self.spec("stream", "list", "replay", 0, steps=3)),
            ("got PackingDataset", self.spec("map", "list", "state", 0, epochs=1)),
            ("dispatch_batches", self.spec("stream", "list", "state", 0, steps=3)),
        ):
            trainer = build_trainer(spec)
            if spec["resume"] == "replay":
                trainer.add_callback(packed.PackingStateCallback())
            trainer.accelerator.dataloader_config.dispatch_batches = message == "dispatch_batches"
            self.refuses(message, trainer)

    def test_refuses_checkpoints_without_its_state_or_of_other_workers(self):
        spec = self.spec("stream", "list", "state", 0, steps=6)
        for first, message, workers in (
            ({"resume": "replay"}, "checkpoint saved with this callback", 0),
            ({}, "dataloader_num_workers=0", 2),
        ):
            shutil.rmtree(spec["output"], ignore_errors=True)
            build_trainer({**spec, **first, "steps": 3}).train()
            trainer = build_trainer({**spec, "workers": workers})
            self.refuses(message, trainer, resume_from_checkpoint=newest_checkpoint(spec["output"]))

    def test_the_state_is_json_beside_the_model(self):
        spec = self.spec("stream", "hf_stream", "state", 0, steps=3)
        build_trainer(spec).train()
        state = json.loads(Path(newest_checkpoint(spec["output"]), "trainer_state.json").read_text())
        saved = state["stateful_callbacks"]["PackingStateCallback"]["attributes"]["saved"]
        self.assertEqual((saved["epoch"], saved["workers"], list(saved["readers"])), (0, 0, ["0"]))
        reader = saved["readers"]["0"]
        self.assertGreater(reader["position"], 10)
        self.assertTrue(reader["open"])
