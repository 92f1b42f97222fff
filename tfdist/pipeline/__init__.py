"""Pipeline parallelism: each rank holds a part of the model, and microbatches go through them all.

A *rank* is a process of the pipeline. A *stage* is a contiguous part of the model; with virtual
stages a rank holds several. A *schedule* is pure data: what each rank computes, in which order. It
is made, checked, lowered to transfers, simulated and drawn here without TensorFlow.
"""
