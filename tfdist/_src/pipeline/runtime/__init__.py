"""Runs training, evaluation and prediction steps on a rank."""
