import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

STANDINS = Path(__file__).parent / "standins"


@pytest.fixture(scope="module")
def standins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The stand-in ops, in this process and in the workers of sweeps that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STANDINS))
        patch.setenv("PYTHONPATH", str(STANDINS), prepend=os.pathsep)
        patch.setenv("PYTEST_PLUGINS", "standin_plugin")
        patch.setenv("STANDIN_MARKER", str(tmp_path_factory.mktemp("marker") / "killed"))
        module = importlib.import_module("standin_ops")
        module.put_in_place()
        yield module
        module.take_away()
