"""Content hashes of KV blocks: the one function router and workers share.

Two processes that hash the same prefix must agree for ever, so: BLAKE2b (RFC 7693) keyed by nothing
random, tagged and length-prefixed fields, little-endian fixed-width integers. Golden vectors in
tests/unit/test_prefix.py pin the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""16 bytes that name the content of one full block and of all blocks before it."""

HASH_SIZE = 16


def _digest(*fields: tuple[bytes, bytes]) -> bytes:
    digest = blake2b(digest_size=HASH_SIZE)
    for tag, value in fields:
        digest.update(struct.pack("<4sI", tag, len(value)))
        digest.update(value)
    return digest.digest()


def hash_root(*, model: str, adapter: str = "", salt: str = "") -> BlockHash:
    """Parent of the first block. Different models, adapters or tenants never share a chain."""
    return BlockHash(
        _digest((b"modl", model.encode()), (b"adpt", adapter.encode()), (b"salt", salt.encode()))
    )


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash of the block that holds `token_ids` after `parent`."""
    return BlockHash(
        _digest((b"prnt", parent), (b"tids", struct.pack(f"<{len(token_ids)}I", *token_ids)))
    )


def hash_blocks(token_ids: Sequence[int], block_size: int, root: BlockHash) -> list[BlockHash]:
    """Hashes of all full blocks of `token_ids`, in order. A partial last block has none."""
    hashes: list[BlockHash] = []
    parent = root
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = hash_block(parent, token_ids[end - block_size : end])
        hashes.append(parent)
    return hashes
