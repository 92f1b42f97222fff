"""Plans the work of pipeline ranks as plain data: makes, checks and lowers schedules."""
