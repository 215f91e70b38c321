"""Creates the schedules of deployments. A schedule that would never start a run is an error."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import available_timezones

from prefect._vendor.croniter.croniter import CroniterBadDateError, croniter  # Prefect's own cron parser
from prefect.schedules import Schedule

LONGEST = 366 * 86400.0  # seconds between two runs of a schedule


def schedule_of(every: float | None, cron: str, timezone: str) -> Schedule:
    """Returns the schedule. Raises ValueError when Prefect would reject the schedule or never start a run."""
    if timezone not in available_timezones():
        raise ValueError(f"timezone {timezone!r} is unknown: give a name such as Europe/Berlin or UTC")
    if every is not None and not 1 <= every <= LONGEST:
        raise ValueError(f"an interval of {every:g} s is not allowed: give 1 to {LONGEST:.0f} s (a year)")
    if every is not None:
        return Schedule(interval=timedelta(seconds=every))
    try:
        schedule = Schedule(cron=cron, timezone=timezone)
    except ValueError:
        raise ValueError(
            f"cron {cron!r} is not a valid schedule: give minute, hour, day, month and weekday, such as '0 2"
            " * * *'"
        ) from None
    try:
        croniter(cron, datetime.now(UTC)).get_next()
    except CroniterBadDateError:
        day, month = cron.split()[2:4]
        raise ValueError(
            f"cron {cron!r} never fires: month {month} has no day {day}; correct the day or the month"
        ) from None
    return schedule
