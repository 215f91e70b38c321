"""Runs `alignflow serve`: Prefect's server and worker, deployments, schedules, and what watches over runs."""
