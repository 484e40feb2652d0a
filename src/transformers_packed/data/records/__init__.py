"""Samples and label masks from conversations, prompts with completions, and texts."""
