import contextlib
import io
import json
import shutil
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import libcst as cst
import pytest
import upstream_patch
from parameterized import parameterized
from upstream import edits, prove, source, write
from upstream.patch import NAMES, Patch


def made_up(folder: Path, code: str = "x = 1\n") -> source.Source:
    """A copy of Transformers with one file, in the layout of a repository."""
    package = folder / source.PREFIX
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "9.8.7"\n')
    (package / "file.py").write_text(code)
    return source.Source(folder)


class SourceTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def test_diff_is_for_git(self):
        made = made_up(self.folder, "x = 1\n" * 20)
        tree = source.Edited(made)
        tree.edit("file.py", lambda module: module.with_changes(body=[*module.body[:9], *module.body[10:]]))
        self.assertEqual(source.changed_lines(tree.diff()), ["-x = 1"])
        self.assertEqual(prove.apply_diff(made, tree.diff(), ["file.py"]), tree.texts)
        with self.assertRaisesRegex(RuntimeError, "refused"):
            prove.apply_diff(made, tree.diff().replace(" x = 1", " x = 2"), ["file.py"])
        with self.assertRaisesRegex(edits.TargetChanged, "file.py: nothing to change"):
            tree.edit("file.py", lambda module: module)
        with self.assertRaisesRegex(edits.TargetChanged, "a file other.py"):
            tree.edit("other.py", lambda module: module)


@pytest.mark.slow
class InstalledTest(unittest.TestCase):
    """The patches for the installed Transformers. On releases other than that of the page, some may fail."""

    @classmethod
    def setUpClass(cls):
        cls.source = source.Source()
        cls.results = {name: write.make(cls.source, name) for name in NAMES}
        cls.known = f"to {cls.source.version} |" in upstream_patch.PAGE.read_text(encoding="utf-8")

    @parameterized.expand(NAMES)
    def test_patch(self, name):
        """`write.make` already checks that git applies the patch and that no line is too long."""
        result = self.results[name]
        if not self.known and result.reason:
            self.skipTest(result.reason)
        self.assertEqual(result.reason, "")
        self.assertTrue(0 < result.lines <= write.MOST_LINES)
        # Generated files change together with their sources.
        for path in result.texts:
            compile(result.texts[path], path, "exec")
            if "/modular_" in path:
                generated = {path.replace("/modular_", f"/{kind}_") for kind in ("modeling", "configuration")}
                self.assertTrue(generated & set(result.texts), path)

    @parameterized.expand(NAMES)
    def test_second_time_is_fixed_already(self, name):
        if not self.known and self.results[name].reason:
            self.skipTest(self.results[name].reason)
        with tempfile.TemporaryDirectory() as folder:
            self.source.copy_to(Path(folder), self.results[name].texts)
            again = write.make(source.Source(folder), name)
        self.assertIsNone(again.texts)
        self.assertRegex(again.reason, f"^fixed in {self.source.version}: ")

    def test_page_is_up_to_date(self):
        if not self.known:
            self.skipTest(f"the page is not about {self.source.version}: run `make upstream-patches`")
        table = write.table(self.source, list(self.results.values()))
        page = upstream_patch.PAGE.read_text(encoding="utf-8")
        self.assertEqual(page[page.index("| patch |") :], table, "run `make upstream-patches`")


BROKEN = Patch(
    title="Title", summary="Summary.", problem="Problem.", change="Change.", families="all", issues=("#1",),
    reproduction="print(1)", beside="tests", apply=lambda tree: tree.edit("file.py", lambda m: edits.find(m, "f")),
)  # fmt: skip


class CommandTest(unittest.TestCase):
    """The command on a fake copy of Transformers that contains only `file.py`."""

    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.output = self.folder / "output"
        made_up(self.folder)

    def main(self, *arguments):
        printed, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            code = upstream_patch.main(["--transformers", str(self.folder), "--output", str(self.output), *arguments])
        return code, printed.getvalue(), errors.getvalue()

    def patched(self, **patches):
        """Replace the command's patches by these, by name."""
        for module in (write, upstream_patch):
            for name, value in (("load", patches.__getitem__), ("NAMES", tuple(patches))):
                if hasattr(module, name):
                    self.enterContext(mock.patch.object(module, name, value))
        patch = mock.patch.object(write, "file_of_tests", lambda name: self.folder / f"test_{name}.py")
        patch.start()
        self.addCleanup(patch.stop)
        for name in patches:
            (self.folder / f"test_{name}.py").write_text("")

    def test_targets_that_changed(self):
        code, printed, errors = self.main()
        self.assertEqual(code, 1)
        self.assertEqual(printed, "")
        for name in NAMES:
            self.assertIn(f"error: {name}: target changed in 9.8.7: ", errors)
        self.assertFalse(self.output.exists())

    def test_one_failure_leaves_the_others(self):
        def change(tree):
            tree.edit("file.py", lambda module: cst.parse_module("x = 2\n"))

        def fixed(tree):
            raise edits.AlreadyFixed("there is nothing to do")

        self.patched(
            good=Patch(**{**vars(BROKEN), "apply": change}),
            broken=BROKEN,
            fixed=Patch(**{**vars(BROKEN), "apply": fixed}),
        )
        stale = self.output / "broken"
        stale.mkdir(parents=True)
        (stale / "broken.patch").write_text("of an earlier release")
        code, printed, errors = self.main()
        self.assertEqual(code, 1)
        self.assertEqual(printed, "good: 2 changed lines\n")
        self.assertIn("error: broken: target changed in 9.8.7: file.py: expected one `f`, found 0\n", errors)
        self.assertIn("error: fixed: fixed in 9.8.7: there is nothing to do\n", errors)
        self.assertEqual([path.name for path in self.output.iterdir()], ["good"])
        self.assertEqual(
            {p.name for p in (self.output / "good").iterdir()}, {"good.patch", "test_good.py", "README.md"}
        )
        self.assertIn("+x = 2", (self.output / "good" / "good.patch").read_text())
        self.assertEqual(self.main("good")[0], 0)
        self.assertEqual(self.main("broken")[0], 1)

    def test_page_is_about_the_installed_release(self):
        with mock.patch.object(upstream_patch, "PAGE", self.folder / "page.md"):
            self.main()
            self.assertFalse(upstream_patch.PAGE.exists())


class ProofTest(unittest.TestCase):
    def problems(self, before, after):
        names = [f"module.Class.{name}" for name in ("test_fixed", "test_unchanged_default")]
        runs = [prove.Run(dict(zip(names, outcomes, strict=True)), "") for outcomes in (before, after)]
        return prove.problems(*runs)

    def test_problems(self):
        self.assertEqual(self.problems(["failed: x", "passed"], ["passed", "passed"]), [])
        for before, after, name in (
            (["passed", "passed"], ["passed", "passed"], "test_fixed"),
            (["failed: x", "passed"], ["failed: y", "passed"], "test_fixed"),
            (["failed: x", "passed"], ["skipped: y", "passed"], "test_fixed"),
            (["failed: x", "failed: x"], ["passed", "passed"], "test_unchanged"),
            (["failed: x", "passed"], ["passed", "failed: y"], "test_unchanged"),
        ):
            found = self.problems(before, after)
            self.assertEqual(len(found), 1, (before, after))
            self.assertIn(name, found[0])
        self.assertIn("not the same tests", prove.problems(prove.Run({}, ""), prove.Run({}, ""))[0])

    @pytest.mark.slow
    def test_all(self):
        """Run the command of `make test-upstream`."""
        with tempfile.TemporaryDirectory() as folder:
            # The command keeps the introduction of the page.
            page = Path(shutil.copy(upstream_patch.PAGE, folder))
            self.enterContext(mock.patch.object(upstream_patch, "PAGE", page))
            self.assertEqual(upstream_patch.main(["--prove", "--together", "--output", folder]), 0)
            for name in NAMES:
                self.assertIn("all", Path(folder, name, "README.md").read_text())
                self.assertEqual(
                    set(json.loads(Path(folder, name, "proof.json").read_text())), {"of", "before", "after"}
                )
