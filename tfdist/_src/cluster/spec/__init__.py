"""Descriptions of the cluster (TF_CONFIG, a ClusterResolver), read into a `Topology`."""
