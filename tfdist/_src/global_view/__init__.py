"""A global view of a step: a program for the whole batch, partitioned along the rows.

`analyze` decides for each operation of a traced graph which layout its operands need and its
results have. `partition` copies the graph accordingly, for the rows of one worker. The method is
that of GSPMD (Xu et al., arXiv 2105.04663), with the rows of the batch as the only mesh axis.
"""
