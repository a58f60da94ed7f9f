"""Checkpoints on disk into parameters in memory. Knows file formats, no model and no rank."""
