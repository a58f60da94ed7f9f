"""Decoder-only transformers over paged KV. They know no rank, no request and no file."""
