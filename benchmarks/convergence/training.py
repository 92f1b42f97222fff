"""Runs a training run with a codec."""

from __future__ import annotations

import dataclasses
import importlib

import keras

import tfdist
from benchmarks.convergence.job import Job, Outcome
from benchmarks.convergence.recipes import codec_of, recipe_of
from benchmarks.convergence.tasks import TASKS
from tfdist.compression import Policy


def train(job: Job) -> Outcome:
    """Runs a training run. All workers must call this function at the same time."""
    task, recipe = TASKS[job.task], recipe_of(job.task, job.codec)
    codec = codec_of(job.codec, recipe)
    policy = None if codec is None else Policy(codec, smallest=task.smallest)
    strategy = tfdist.MultiWorkerMirroredStrategy(compression=policy)
    keras.backend.clear_session()
    # The module of a task is imported when the task is trained, because the module of `char_lm`
    # imports an example that defines absl flags.
    module = importlib.import_module(task.module)
    before = tfdist.collective.statistics().sent_bytes
    outcome: Outcome = module.train(strategy, codec, recipe.rate, job.steps, job.seed)
    sent = tfdist.collective.statistics().sent_bytes - before
    return dataclasses.replace(outcome, sent_bytes=sent)
