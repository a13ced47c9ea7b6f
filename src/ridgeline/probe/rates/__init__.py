"""Rates of devices and links: ceilings, copies, collectives, codecs, dispatch."""
