"""Plugins for training frameworks, which load them by name or by path. Each plugin imports its framework."""
