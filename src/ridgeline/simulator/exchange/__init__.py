"""What exchanging gradients costs: collectives, codecs, links between hosts."""
