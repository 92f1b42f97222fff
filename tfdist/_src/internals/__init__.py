"""Access to the private APIs of TensorFlow and Keras that tfdist needs.

Only this package imports `tensorflow.python` and `keras.src`. Tests check it with the oldest and
the newest supported versions of TensorFlow and Keras.
"""
