"""The codecs of this release: what is sent instead of gradients, one idea a file."""
