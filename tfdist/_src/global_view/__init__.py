"""A global view of a step: a program for the whole batch, partitioned along the rows.

`analysis` chooses, for each operation of a traced graph, the layouts of its operands and results.
`partition` copies the graph accordingly, for the rows of one worker. In this package, a worker is
any holder of rows: a replica, or a microbatch of a pipeline. The method follows GSPMD (Xu et al.,
arXiv 2105.04663), with the rows of the batch as the only mesh axis.
"""
