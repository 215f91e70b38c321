"""Runs `alignflow serve`: Prefect's server and worker, deployments, schedules, and the supervision of
runs."""
