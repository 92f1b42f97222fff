"""The work of pipeline ranks as data: schedules, their validation and lowering."""
