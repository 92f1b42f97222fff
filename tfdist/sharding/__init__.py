"""An optimizer's state shared out among the workers: each keeps and updates a part (ZeRO-1)."""
