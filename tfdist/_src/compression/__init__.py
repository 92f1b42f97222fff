"""Codecs for gradients, and the compressor that applies a codec to an optimizer's gradients."""
