"""For processes that a test starts: torch's first optimizer loads no compiler, which takes as long as all of torch."""

import sys
from types import ModuleType

stub = ModuleType("torch._dynamo")
stub.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
stub.graph_break = lambda *_, **__: None  # type: ignore[attr-defined]
sys.modules["torch._dynamo"] = stub
