"""Recovery: training continues in the same processes when workers are lost or join."""
