"""Which sequences run in the next step. Pure: no clock, no I/O, no model.

Both schedulers return shares of a step; a worker runs one of them, the colocated engine joins both
into one batch. They share a BlockPool and nothing else.
"""

from engine.scheduler.decode import DecodeScheduler
from engine.scheduler.prefill import PrefillScheduler, Reserved

__all__ = ["DecodeScheduler", "PrefillScheduler", "Reserved"]
