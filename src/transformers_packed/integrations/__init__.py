"""Plugins for training frameworks, which load them by name. Each module imports its framework."""
