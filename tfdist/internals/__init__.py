"""The private TensorFlow and Keras APIs that tfdist stands on, gathered in one place.

No other package imports `tensorflow.python` or `keras.src`. The names here are tested against
the oldest and the newest supported versions.
"""
