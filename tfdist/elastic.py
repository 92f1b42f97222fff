"""The group of workers as callbacks see it, when workers are lost or join."""

from tfdist._src.keras.fit.callback import GroupInfo

__all__ = ["GroupInfo"]
