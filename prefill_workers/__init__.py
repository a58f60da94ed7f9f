"""Prefill workers: read prompts, sample the first token, keep the KV under a lease."""
