"""Print the path of the plugin for ms-swift's option `--external_plugins`, without importing ms-swift."""

from pathlib import Path


print(Path(__file__).with_name("packed_plugin.py"))
