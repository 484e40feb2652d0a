"""Plugins for training frameworks, which load them by name or by path. Each plugin imports its framework.

`axolotl.py` is a plugin, and `ms_swift/packed_plugin.py` the file that ms-swift loads. `stock_methods.py` undoes what a
framework changes in Transformers' classes.
"""
