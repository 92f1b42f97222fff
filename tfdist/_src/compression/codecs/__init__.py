"""The codecs, one per file, and their base classes."""
