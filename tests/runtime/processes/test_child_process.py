"""Child processes."""

import gc
from pathlib import Path

from skiff_runtime.config import Config
from skiff_runtime.messages import Heartbeat, Ready, ToSupervisor
from skiff_runtime.messages.transport import Endpoints, Receiver
from skiff_runtime.processes.child_process import Child
from skiff_runtime.processes.launch import Launch, Role
from skiff_runtime.processes.resolve import resolve


def test_ready_child_freezes_its_objects_and_turns_garbage_collection_on(tmp_path: Path) -> None:
    config, model = resolve(Config(model="shape://qwen3-0.6b", load_format="dummy", device="cpu"))
    supervisor: Receiver[ToSupervisor] = Receiver(Endpoints(tmp_path).supervisor, ToSupervisor)
    child = Child(Role.RANK, 0, Launch(config=config, model=model, run_dir=tmp_path))
    gc.disable()
    try:
        child.report_ready(kv_tokens=16)
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.enable()
        gc.unfreeze()
    assert supervisor.receive(5.0) == Ready(process="rank0", kv_tokens=16)
    assert isinstance(supervisor.receive(5.0), Heartbeat)
