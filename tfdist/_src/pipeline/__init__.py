"""Pipeline parallelism: cuts models into stages, makes schedules, and runs training steps."""
