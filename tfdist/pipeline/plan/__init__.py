"""What the ranks of a pipeline do, as data: schedules, their validation and lowering."""
