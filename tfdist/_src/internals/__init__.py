"""The private TensorFlow and Keras APIs that tfdist depends on.

No other package imports `tensorflow.python` or `keras.src`. The names here are tested against the
oldest and newest supported versions.
"""
