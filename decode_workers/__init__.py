"""Decode workers: admit a handed-over request when its blocks fit, pull its KV, decode."""
