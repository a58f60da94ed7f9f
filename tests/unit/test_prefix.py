"""Block hashes: golden vectors pin the bytes, properties pin the meaning."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from core.prefix import HASH_SIZE, hash_block, hash_blocks, hash_root

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_golden_vectors():
    """These bytes are a contract between processes and releases: never edit them to pass."""
    root = hash_root(model="m")
    assert root.hex() == "b8397bad93f0c5588686e66b83b09878"
    assert hash_root(model="m", adapter="a", salt="s").hex() == "d06df9b7431831d20fb3f25c1c13b155"
    assert [h.hex() for h in hash_blocks(range(40), 16, root)] == [
        "44fcd69c32ce161b3b55c4bebb8b6576",
        "c893657335649a755592a892a872404f",
    ]


def test_another_process_agrees():
    """No process seed: PYTHONHASHSEED must not matter."""
    code = (
        "from core.prefix import *; print(hash_blocks([1,2,3,4],2,hash_root(model='x'))[-1].hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert seen == {hash_blocks([1, 2, 3, 4], 2, hash_root(model="x"))[-1].hex() + "\n"}


def test_roots_differ_by_field_and_fields_do_not_run_together():
    roots = {
        hash_root(model=model, adapter=adapter, salt=salt)
        for model in ("a", "ab")
        for adapter in ("", "b")
        for salt in ("", "b", "c")
    }
    assert len(roots) == 12


@given(tokens=TOKENS, block_size=st.integers(1, 8))
def test_chain(tokens, block_size):
    root = hash_root(model="m")
    hashes = hash_blocks(tokens, block_size, root)
    assert len(hashes) == len(tokens) // block_size
    assert all(len(block_hash) == HASH_SIZE for block_hash in hashes)
    assert len(set(hashes)) == len(hashes), "equal blocks at other positions hash otherwise"
    parent = root
    for i, block_hash in enumerate(hashes):
        parent = hash_block(parent, tokens[i * block_size : (i + 1) * block_size])
        assert parent == block_hash


@given(tokens=st.lists(st.integers(0, 9), min_size=4, max_size=20), data=st.data())
def test_any_changed_token_changes_its_block_and_all_later_ones(tokens, data):
    root = hash_root(model="m")
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:position], tokens[position] + 10, *tokens[position + 1 :]]
    before, after = hash_blocks(tokens, 4, root), hash_blocks(changed, 4, root)
    block = position // 4
    assert before[:block] == after[:block]
    assert all(a != b for a, b in zip(before[block:], after[block:], strict=True))
