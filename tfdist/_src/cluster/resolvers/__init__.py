"""Resolvers: each one reads the job of this process from the environment variables of an engine.

An engine is a program that starts the workers of a job, such as Slurm, mpirun or torchrun.
"""
