"""For processes that a test starts: less is loaded, so that they start in half the time.

torch's first optimizer and its process groups load no compiler, which takes as long as all of torch; who wants more of
it gets it. Garbage is seldom looked for, because imports leave none. A launcher draws no ``curve.png`` at the end of a
run, unless there is a variable ``DRAWS``: matplotlib takes as long as a worker's part in a short run.
"""

import gc
import importlib
import os
import sys
from types import ModuleType, SimpleNamespace


class Compiler(ModuleType):
    """Stands in for torch._dynamo until more is asked of it than torch asks without compiling anything."""

    disable = staticmethod(lambda function, *_, **__: function)
    graph_break = staticmethod(lambda *_, **__: None)
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    def __getattr__(self, name: str) -> object:
        if name == "__path__":  # a module in it is to be imported, such as its settings
            return [os.path.join(path, "_dynamo") for path in sys.modules["torch"].__path__]
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


gc.set_threshold(100_000, 50, 100)
sys.modules["torch._dynamo"] = Compiler("torch._dynamo")
if "DRAWS" not in os.environ:
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
