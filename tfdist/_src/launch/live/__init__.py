"""The live view of a running job, as its rank 0 tells an observer."""
