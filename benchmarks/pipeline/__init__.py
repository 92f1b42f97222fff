"""What `pipeline.py` is made of: processes that train in stages, and the figures of their steps."""
