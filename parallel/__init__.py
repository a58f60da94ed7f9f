"""Everything that knows a rank: who holds which part, and how ranks talk. Knows no model."""
