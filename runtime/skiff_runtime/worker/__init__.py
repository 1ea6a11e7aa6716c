"""The worker process of one rank: main loop, step watchdog, step profiler, grammar gate."""
