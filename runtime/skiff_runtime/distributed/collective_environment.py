"""Environment variables of gloo, of torch's NCCL process group, and the reason for each value.

The service has its own detection of dead, silent and hung ranks (the supervisor's pidfds, heartbeats, the step
watchdog), which ends every request with the reason before any process ends. The watchdogs inside torch know no
requests: they would abort a rank from another thread, and write debug files into the user's home directory. So they
are left with what only they can see, an error that NCCL itself reports.
"""

import os
from typing import Final

_VARIABLES: Final = {
    # By default gloo resolves the host's name to find an interface, which fails in a container without a resolver.
    "GLOO_SOCKET_IFNAME": "lo",
    # 3: an error that NCCL reports, or a collective beyond the group's timeout, ends the process at once, and the
    # supervisor ends the others. 1 and 2 would first abort the communicator, which can wait for a peer that is dead; 0
    # would leave the rank in a collective that can never end.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    # wait() on a collective must not block the host: the engine's thread launches the next kernels meanwhile.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # The monitor aborts a process whose NCCL watchdog thread made no progress for eight minutes, and polls the
    # rendezvous file every second for requests to dump. Stopped and hung ranks are noticed earlier than that.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # No dumps of the flight recorder, which go into the home directory: nothing is left behind by a rank that fails.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def set_collective_environment() -> None:
    """Set the variables that are not set yet. Must be called before the process group is made, which reads them."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
