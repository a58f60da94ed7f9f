"""Colocated workers: both strokes in one engine, for small machines and as the baseline."""
