"""Pipeline schedules as data: built, checked, timed and drawn, for planner, simulator and running job alike."""
