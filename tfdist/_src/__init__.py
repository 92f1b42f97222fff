"""The implementation; `tfdist` itself holds the public modules only."""
