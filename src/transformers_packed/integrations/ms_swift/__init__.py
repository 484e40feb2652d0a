"""Plugin for ms-swift: `--external_plugins "$(python -m transformers_packed.integrations.ms_swift)"`.

ms-swift loads a plugin from the path of a file, adds the folder of this file to `sys.path`, and imports it again in
worker processes. Therefore `packed_plugin.py` has a folder without common names, and only imports `packed_hooks.py`.
"""
