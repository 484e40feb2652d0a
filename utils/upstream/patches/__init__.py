"""The patches, each with its test."""
