"""The experiment `overlap`: copies that run while the device computes, out of it and into it.

The seeds compute 50 products and copy each to the host: one after the other, and so that one result is
copied while the next is computed. Exercise of the other direction: batches that are loaded and copied in.
"""

from ridgeline.experiments.overlap.experiment import run as run

__all__ = ("run",)
