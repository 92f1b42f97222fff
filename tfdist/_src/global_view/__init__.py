"""A global view of a step: a program for the whole batch, partitioned along the rows.

`analyze` chooses, for each operation of a traced graph, the layouts of its operands and results.
`partition` copies the graph accordingly, for the rows of one worker. The method follows GSPMD (Xu
et al., arXiv 2105.04663), with the rows of the batch as the only mesh axis.
"""
