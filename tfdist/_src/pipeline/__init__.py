"""Pipeline parallelism: schedules, the partition of models, stages, and the steps that run them."""
