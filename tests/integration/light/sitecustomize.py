"""For processes that a test starts: less is loaded, so that they start in half the time.

torch loads nothing that only compilers, sharded tensors and nested tensors need; who wants more of it gets it. Garbage
is seldom looked for, because imports leave none, and not at all at the end, when the system frees everything. A
launcher draws no ``curve.png`` at the end of a run, unless there is a variable ``DRAWS``: matplotlib takes as long as
a worker's part in a short run.
"""

import atexit
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

META = "torch._meta_registrations"
NEED_META = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor")


class StandIn(ModuleType):
    """Stands in for a module of torch until more is asked of it than torch asks itself."""

    def __getattr__(self, name: str) -> object:
        if name == "__path__":  # a module in it is to be imported, such as its settings
            folder = self.__name__.removeprefix("torch.")
            return [os.path.join(path, folder) for path in sys.modules["torch"].__path__]
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        module = importlib.import_module(self.__name__)
        for known, part in vars(self).items():
            if isinstance(part, ModuleType):  # loaded as a part of this one
                module.__dict__.setdefault(known, part)
        return getattr(module, name)


class Compiler(StandIn):
    """Stands in for torch._dynamo: an optimizer and a process group ask for no more than this."""

    disable = staticmethod(lambda function, *_, **__: function)
    graph_break = staticmethod(lambda *_, **__: None)
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)


class MetaLater(MetaPathFinder, Loader):
    """Loads the shapes that operations have, a fifth of torch, just before what computes with shapes only."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if name == META:
            return ModuleSpec(name, self)
        if name in NEED_META and sys.modules.pop(META, None):
            sys.meta_path.remove(self)
            importlib.import_module(META)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Do the one thing in there that others need: until then, no torch.Generator can be made."""
        opaque = importlib.import_module("torch._opaque_base")
        sys.modules["torch._C"]._set_generator_metaclass(opaque.OpaqueBaseMeta)


gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)  # the first to be registered is the last to be called
sys.modules["torch._dynamo"] = Compiler("torch._dynamo")
sys.modules["torch.nested"] = StandIn("torch.nested")
sys.meta_path.insert(0, MetaLater())
if "DRAWS" not in os.environ:
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
