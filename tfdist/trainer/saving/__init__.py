"""Files of models and optimizers that several workers hold."""
