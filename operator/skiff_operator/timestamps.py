"""Arithmetic on the timestamps of Kubernetes objects, which are RFC 3339 texts."""

import datetime


def seconds_between(since: str, now: str) -> float:
    """Return the seconds from one moment (RFC 3339) to a later one."""
    return (datetime.datetime.fromisoformat(now) - datetime.datetime.fromisoformat(since)).total_seconds()
