"""Measuring this machine: ceilings, dispatch, collectives, links, overlap and single operators."""
