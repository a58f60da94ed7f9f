"""The nouns every process agrees on. Standard library only; imports nothing of ours."""
