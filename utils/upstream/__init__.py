"""Patches for Transformers: the edits, the written output, and the proof by tests."""
