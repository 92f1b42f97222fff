"""Partitions a step that is written for the whole batch: each worker computes some of the rows.

`analysis` chooses, for each operation of a traced graph, the layouts of its operands and results.
`partition` then copies the graph, with operations that compute only the rows of one worker. In this
package, "worker" means anything that holds rows: a replica, or a microbatch of a pipeline. The
method follows GSPMD (Xu et al., arXiv 2105.04663), with the rows of the batch as the only mesh
axis.
"""
