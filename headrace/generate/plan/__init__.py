"""The plan of a generation: shapes, caches, schedules, seconds, memory."""
