"""The patches, each with the test that goes with it."""
