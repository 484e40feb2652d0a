"""Callbacks of Trainer."""
