"""For processes that a test starts: less is loaded, so that they start in half the time.

torch's first optimizer loads no compiler, which takes as long as all of torch. A launcher draws no ``curve.png`` at the
end of a run, unless there is a variable ``DRAWS``: matplotlib takes as long as a worker's part in a short run.
"""

import os
import sys
from types import ModuleType

stub = ModuleType("torch._dynamo")
stub.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
stub.graph_break = lambda *_, **__: None  # type: ignore[attr-defined]
sys.modules["torch._dynamo"] = stub
if "DRAWS" not in os.environ:
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
