"""The scheduler: request queue, admission, step planning, results. Host code only; imports no torch."""
