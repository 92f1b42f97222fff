"""tf.distribute strategies that carry Keras's `fit`."""
