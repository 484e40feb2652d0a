"""The wheel has everything that an installed package needs, and one version."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import unittest
import zipfile
from pathlib import Path
from unittest import mock

import pytest

import transformers_packed


ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "transformers_packed"


def arguments_of_setup() -> dict:
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    return setup.call_args.kwargs


def data_files() -> set[str]:
    files = (path for path in SRC.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(SRC.parent).as_posix() for path in files if path.suffix != ".py"}


def run(*command, **arguments) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, **arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


class MetadataTest(unittest.TestCase):
    def test_the_version_is_that_of_the_package(self):
        self.assertEqual(arguments_of_setup()["version"], transformers_packed.__version__)

    def test_every_folder_and_data_file_is_declared(self):
        declared = {
            f"{package.replace('.', '/')}/{name}"
            for package, names in arguments_of_setup()["package_data"].items()
            for name in names
        }
        self.assertEqual(declared, data_files())
        for path in SRC.rglob("*.py"):
            self.assertTrue(path.with_name("__init__.py").exists(), f"setup.py leaves out {path}")

    def test_the_description_refers_to_no_file_of_the_repository(self):
        text = arguments_of_setup()["long_description"]
        self.assertNotIn("<img", text)
        self.assertEqual([link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https:")], [])
        self.assertIn("| Trainer, examples/trainer.py |", text)


@pytest.mark.slow
class WheelTest(unittest.TestCase):
    def test_an_installed_wheel_runs_without_the_source_tree(self):
        with tempfile.TemporaryDirectory() as folder:
            source, elsewhere = Path(folder, "source"), Path(folder, "elsewhere")
            elsewhere.mkdir()
            # In a copy, because a build leaves files beside setup.py.
            shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
                shutil.copy(ROOT / name, source)
            pip = (sys.executable, "-m", "pip", "-q")
            run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source)
            (wheel,) = Path(folder).glob("*.whl")
            names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
            code = {path.relative_to(SRC.parent).as_posix() for path in SRC.rglob("*.py")}
            self.assertEqual(names, code | data_files())

            run(sys.executable, "-m", "venv", "--without-pip", Path(folder, "venv"))
            scripts = Path(folder, "venv", "Scripts" if os.name == "nt" else "bin")
            run(*pip, "--python", scripts / "python", "install", "--no-deps", wheel)
            # Of the folders in a .pth file, Python runs no .pth files, so the editable install stays out.
            site = run(scripts / "python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
            Path(site, "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")

            code = "import transformers_packed as t; print(t.__version__, t.__file__); t.register()"
            version, place = run(scripts / "python", "-c", code, cwd=elsewhere).split(maxsplit=1)
            self.assertEqual(version, transformers_packed.__version__)
            self.assertTrue(Path(place.strip()).is_relative_to(site), place)
            command = scripts / "transformers-packed"
            self.assertRegex(run(command, "env", cwd=elsewhere), rf"transformers_packed +{re.escape(version)}")
            run(command, "demo", "--samples=24", "--steps=3", "--batch-size=4", cwd=elsewhere)
            self.assertTrue((elsewhere / "demo.png").exists())
