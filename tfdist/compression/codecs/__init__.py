"""The codecs, one file each, and the bases that they share."""
