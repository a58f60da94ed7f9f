"""Transformers over paged KV, one file per family. They know no rank, no request and no file."""
