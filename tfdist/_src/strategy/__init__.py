"""`tf.distribute` strategies for Keras's `fit`."""
