"""The codecs for gradients, and their base classes."""
