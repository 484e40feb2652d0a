"""Run a module of the commands: `python cli_module.py MODULE ARGUMENT...`."""

import runpy
import sys


del sys.argv[0]
runpy.run_module(f"transformers_packed.cli.{sys.argv[0]}", run_name="__main__")
