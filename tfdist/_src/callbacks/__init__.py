"""Keras callbacks for distributed training."""
