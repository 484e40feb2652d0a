"""Run the process of an arm: `python cli_module.py MODULE ARM FOLDER`."""

import runpy


runpy.run_module("transformers_packed.cli.arms", run_name="__main__", alter_sys=False)
