"""Programs generated from Keras's public API, each compared with one process."""
