"""`GroupInfo`, which describes the group of workers to callbacks when workers are lost or join."""

from tfdist._src.keras.fit.callback import GroupInfo

__all__ = ["GroupInfo"]
