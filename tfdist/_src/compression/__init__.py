"""Gradient codecs, and the compressor that applies them."""
